"""MIN and MAX of floats between ranks: NaN wins, and -0.0 is less than 0.0, in whatever order.

MPI says nothing about NaN, so integers travel that are ordered like the floats.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..core.array_ways import Array
from ..core.dtypes import is_narrow_float
from ..core.options import ReduceOp
from ..core.ufuncs import EXTREMES


def are_keyed(dtype: np.dtype[Any], op: ReduceOp) -> bool:
    """Returns whether integers travel in the place of these numbers."""
    return op in EXTREMES and (dtype.kind == "f" or is_narrow_float(dtype))


def to_keys(op: ReduceOp, values: Array, keys: Array, spare: Array, is_nan: Array) -> None:
    """Puts integers into `keys` that are ordered like `values`, with NaN beyond all others."""
    key = keys.dtype
    bits = values.view(key)
    _flip_negative(bits, keys, spare)
    # np.isnan takes ten times as long for float16.
    np.bitwise_and(bits, np.iinfo(key).max, out=spare)
    infinity = np.array(np.inf, values.dtype)
    is_beyond = np.greater_equal if np.isnan(infinity) else np.greater  # float8_e4m3fn has none
    is_beyond(spare, infinity.view(key), out=is_nan)
    np.copyto(keys, _beyond(op, key), where=is_nan)


def from_keys(op: ReduceOp, keys: Array, values: Array, spare: Array, is_nan: Array) -> None:
    """Undoes `to_keys`."""
    np.equal(keys, _beyond(op, keys.dtype), out=is_nan)
    _flip_negative(keys, values.view(keys.dtype), spare)
    np.copyto(values, np.nan, where=is_nan)


def _beyond(op: ReduceOp, key: np.dtype[Any]) -> int:
    bounds = np.iinfo(key)
    return int(bounds.min if op is ReduceOp.MIN else bounds.max)


def _flip_negative(bits: Array, flipped: Array, spare: Array) -> None:
    """Turns float bits into integers of the same order, or back: negative ones count downwards."""
    np.right_shift(bits, bits.dtype.itemsize * 8 - 1, out=spare)
    np.bitwise_and(spare, np.iinfo(bits.dtype).max, out=spare)
    np.bitwise_xor(bits, spare, out=flipped)
