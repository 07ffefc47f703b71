"""MIN and MAX of floats: NaN wins, and -0.0 is less than 0.0, in whatever order they come.

numpy's own give either zero, by position, and MPI says nothing about NaN. So between ranks integers
travel that are ordered like the floats: `to_keys` and `from_keys`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..core.array_ways import Array
from ..core.dtypes import is_narrow_float
from ..core.options import ReduceOp
from ..core.ufuncs import EXTREMES, UFUNCS


def are_keyed(dtype: np.dtype[Any], op: ReduceOp) -> bool:
    """Returns whether integers travel in the place of these numbers."""
    return op in EXTREMES and (dtype.kind == "f" or is_narrow_float(dtype))


def extreme(
    op: ReduceOp, left: Array, right: Array, total: Array, values: Array, signs: Array
) -> None:
    """Combines floats into `total`, which may be `left`; `values` and `signs` are spare ones."""
    if left is not total:
        np.copyto(total, left, casting="unsafe")
    key = np.dtype(f"i{total.dtype.itemsize}")
    sign = np.iinfo(key).min
    bits, sign_bits = total.view(key), signs.view(key)
    np.copyto(values, right, casting="unsafe")
    # The least of two numbers is negative where one of them is, the greatest where both are.
    join = np.bitwise_or if op is ReduceOp.MIN else np.bitwise_and
    join(bits, values.view(key), out=sign_bits)
    np.bitwise_and(sign_bits, sign, out=sign_bits)
    UFUNCS[op](total, values, out=total)
    np.bitwise_and(bits, ~sign, out=bits)
    np.bitwise_or(bits, sign_bits, out=bits)


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
