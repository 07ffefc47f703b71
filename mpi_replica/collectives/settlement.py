"""The end of a reduction: what is left to do where all contributions are combined."""

from __future__ import annotations

import numpy as np

from ..core.array_libraries import Array
from ..core.dtypes import is_narrow_float
from .scratch import Scratch

# Of so many items it takes no longer to replace all NaN than to look for one.
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
    if total.size <= _FEW:
        total[np.isnan(total)] = np.nan
        return
    # The greatest item is NaN where one of them is.
    if kind in "fc" and not np.isnan(np.maximum.reduce(total)):
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
