"""What combines two contributions: a ufunc, or what has the same bits wherever the two lie.

numpy's least of two zeros is either, by position, and its product of complex numbers has a rounding
less where the processor multiplies and adds at once, which it does for arrays, but not for one
number in place, nor for numbers that lie between others.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from ..core.array_ways import Array
from ..core.options import ReduceOp
from ..core.ufuncs import UFUNCS
from .extremes import are_keyed
from .plan import pieces

#: Combines two arrays into its argument ``out``, which may be the first one, as a ufunc does.
Combine = Callable[..., Any]

# So much is combined at once: what lies between the steps of it stays in the caches.
_BLOCK_BYTES = 1 << 16


def combine_of(op: ReduceOp, dtype: np.dtype[Any]) -> Combine:
    """Returns what combines two contributions that accumulate in `dtype`."""
    if are_keyed(dtype, op):
        return least if op is ReduceOp.MIN else greatest
    return product if op is ReduceOp.PROD and dtype.kind == "c" else UFUNCS[op]


def _in_blocks(combine: Callable[[Array, Array, Array], None]) -> Combine:
    """Makes a `Combine` of what needs memory of the size of its arguments."""

    @functools.wraps(combine)
    def combined(left: Array, right: Array, *, out: Array, **as_ufunc: Any) -> None:
        if out.nbytes <= _BLOCK_BYTES:
            combine(left, right, out)
            return
        for _, _, where in pieces(out.shape, _BLOCK_BYTES // out.itemsize):
            combine(left[where], right[where], out[where])

    return combined


@_in_blocks
def product(left: Array, right: Array, out: Array) -> None:
    """Combines complex numbers as PROD does, with a rounding of each step."""
    real, imag = left.real * right.real, left.real * right.imag
    real -= left.imag * right.imag
    imag += left.imag * right.real
    out.real, out.imag = real, imag


@_in_blocks
def least(left: Array, right: Array, out: Array) -> None:
    """Combines floats as MIN does: the least of two is negative where one of them is."""
    sign = _sign_of(out.dtype)
    signs = (_bits(left, out.dtype) | _bits(right, out.dtype)) & sign
    np.minimum(left, right, out=out)
    bits = _bits(out, out.dtype)
    bits |= signs


@_in_blocks
def greatest(left: Array, right: Array, out: Array) -> None:
    """Combines floats as MAX does: the greatest of two is negative where both are."""
    sign = _sign_of(out.dtype)
    kept = (_bits(left, out.dtype) & _bits(right, out.dtype)) | ~sign
    np.maximum(left, right, out=out)
    bits = _bits(out, out.dtype)
    bits &= kept


def _bits(floats: Array, dtype: np.dtype[Any]) -> Array:
    """Returns the bits of floats in this byte order, as integers: a view where they have it."""
    return np.asarray(floats, dtype).view(_sign_of(dtype).dtype)


@functools.cache
def _sign_of(dtype: np.dtype[Any]) -> np.signedinteger[Any]:
    """Returns the bit of floats of `dtype` that is their sign."""
    key = np.dtype(f"i{dtype.itemsize}")
    sign: np.signedinteger[Any] = key.type(np.iinfo(key).min)
    return sign
