"""Contributions whose sums depend on the order, and on every rounding: see contributions.py."""

import functools

import ml_dtypes
import numpy as np

from contributions import Leaf, values


def numbers(dtype, shape, number, replica):
    """Return what a replica has: fresh arrays."""
    return _numbers(np.dtype(dtype), shape, number, replica).copy()


@functools.lru_cache(maxsize=200)
def _numbers(dtype, shape, number, replica):
    """Floats of any size and kind: ordinary ones, some that cancel out, NaN, inf, -0.0, ..."""
    if dtype.kind in "biu":
        return values(dtype, shape, number, replica)
    if dtype.kind == "c":
        real = np.dtype(f"f{dtype.itemsize // 2}")
        return numbers(real, (*shape, 2), number, replica).view(dtype).reshape(shape)
    own, common = (np.random.default_rng([number, *more]) for more in ([replica], []))
    exponents = 8 if dtype.name == "float16" else 30
    found = own.standard_normal(shape) * 2.0 ** own.integers(-exponents, exponents, shape)
    found += np.where(common.random(shape) < 0.2, (-1) ** replica * 2.0**exponents, 0.0)
    array = np.asarray(found, dtype)
    zeros = common.random(shape) < 0.1
    array[zeros] = np.where(own.random(shape) < 0.7, -0.0, 0.0)[zeros]
    # Not many: what is NaN once stays so.
    is_special = ~zeros & (own.random(shape) < 0.1)
    array[is_special] = own.choice(specials(dtype), shape)[is_special]
    return with_payloads(array, own)


def specials(dtype):
    """NaN of either sign, infinities, zeros, denormals, and the largest numbers."""
    info = ml_dtypes.finfo(dtype) if dtype.name == "bfloat16" else np.finfo(dtype)
    tiny, largest = info.smallest_subnormal, info.max
    few = [np.nan, np.inf, -np.inf, 0.0]
    return np.array([*few, *few[2:], tiny, -tiny, largest, -largest, -0.0]).astype(dtype)


def with_payloads(array, random):
    """Give each NaN other bits: there are many that are NaN."""
    if array.dtype.itemsize > 8:
        return np.where(np.isnan(array), np.copysign(array, random.standard_normal()), array)
    words = array.view(f"u{array.dtype.itemsize}")
    mantissa = ml_dtypes.finfo(array.dtype).nmant
    others = random.integers(0, 1 << (mantissa - 1), array.shape, np.uint64)
    others |= random.integers(0, 2, array.shape, np.uint64) << (8 * array.dtype.itemsize - 1)
    words[...] |= np.where(np.isnan(array), others, 0).astype(words.dtype)
    return array


class Hard(Leaf):
    """A leaf with such numbers."""

    def values(self, *about):
        return numbers(*about)


class Scalar(Leaf):
    """A Python float, on each replica."""

    def of(self, replica):
        return float(numbers("f8", (), self.number, replica))


class Empty(Leaf):
    """A leaf without items."""

    def of(self, replica):
        return np.empty((*self.shape, 0, 2), self.dtype)
