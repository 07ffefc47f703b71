"""The end of a reduction: what is left to do where all contributions are combined."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..core.array_libraries import Array
from ..core.dtypes import is_narrow_float
from .scratch import Scratch

# Up to so many items a dot product tells of NaN sooner than the greatest item does.
_FEW = 4096


def settle(total: Array, scale: int, scratch: Scratch) -> None:
    """Divides `total` by `scale`, and makes every NaN in it numpy's own.

    Which NaN a sum gives, of several or of inf - inf, depends on the order of its operands, and
    on the processor.
    """
    if scale != 1:
        divide(total, scale)
    kind = total.dtype.kind
    if kind == "c":
        total = total.view(f"f{total.dtype.itemsize // 2}")
    elif kind != "f" and not is_narrow_float(total.dtype):
        return
    if kind in "fc" and (not total.size or not np.isnan(_with_any_nan(total))):
        return
    is_nan = scratch.take(np.dtype(np.bool_), total.size)
    np.isnan(total, out=is_nan)
    np.copyto(total, np.nan, where=is_nan)


def divide(total: Array, number: int) -> None:
    """Divides in place; floats by powers of two with a product: the same bits, in half the time."""
    if number & (number - 1) == 0 and total.dtype.kind == "f":
        np.multiply(total, 1 / number, out=total)
    else:
        np.divide(total, number, out=total)


def _with_any_nan(items: Array) -> Any:
    """Returns a number that is NaN where one of the items is."""
    if items.size <= _FEW:
        return items.dot(items)
    return np.maximum.reduce(items)
