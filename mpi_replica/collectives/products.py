"""PROD: complex numbers have the same bits wherever they lie.

numpy leaves out a rounding where the processor multiplies and adds at once, which it does for
arrays, but not for one number in place, nor for numbers that lie between others.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..core.array_ways import Array
from ..core.options import ReduceOp
from ..core.ufuncs import UFUNCS
from .agreement.group import Group
from .parts import Combine

# So many are multiplied at once: what is spare for them stays in the caches.
_BLOCK_ITEMS = 1024


def combine_of(op: ReduceOp, group: Group) -> Combine:
    """Returns what combines two contributions, but for floats of which MIN or MAX is asked."""
    return group.kept[Product] if op is ReduceOp.PROD else UFUNCS[op]


class Product:
    """Combines two arrays as PROD does; it is a `Combine`. Kept for a group, as its memory is."""

    def __init__(self, group: Group) -> None:
        self._spare = np.empty((2, _BLOCK_ITEMS), np.clongdouble).view(np.uint8)

    def __call__(self, left: Array, right: Array, *, out: Array, **as_ufunc: Any) -> None:
        """Combines them into `out`, which may be `left`."""
        if out.dtype.kind != "c":
            np.multiply(left, right, out=out, **as_ufunc)
        elif out.size <= _BLOCK_ITEMS:
            self._multiply(left, right, out)
        else:
            axis = int(np.argmax(out.shape))
            length = out.shape[axis]
            step = max(1, _BLOCK_ITEMS * length // out.size)
            for start in range(0, length, step):
                place = (slice(None),) * axis + (slice(start, start + step),)
                self(left[place], right[place], out=out[place])

    def _multiply(self, left: Array, right: Array, out: Array) -> None:
        """Multiplies complex numbers with a rounding of each step."""
        one, other = (
            spare[: out.nbytes].view(out.dtype).reshape(out.shape) for spare in self._spare
        )
        np.multiply(left.real, right.real, out=one.real)
        np.multiply(left.real, right.imag, out=one.imag)
        np.multiply(left.imag, right.imag, out=other.real)
        np.multiply(left.imag, right.real, out=other.imag)
        np.subtract(one.real, other.real, out=out.real)
        np.add(one.imag, other.imag, out=out.imag)
