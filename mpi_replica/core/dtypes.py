"""Which dtype a reduction accumulates in, and which it returns.

The rules (they never depend on how many replicas there are):

====================  ==================  ================
leaf                  accumulates in      result
====================  ==================  ================
narrow floats         float32             as the leaf
float, complex        as the leaf         as the leaf
int, MEAN             float64             float64
bool, MEAN            float64             float64
int, other ops        as the leaf         as the leaf
bool, MIN and MAX     as the leaf         as the leaf
====================  ==================  ================

Narrow floats are float16, bfloat16, float8_e4m3fn and float8_e5m2. Integers wrap around, as those
of numpy. Everything else is a `TypeError`.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator, MappingView, Sequence
from typing import Any

import numpy as np

from .array_libraries import GiveBack, to_numpy, way_back
from .array_ways import COMMON_TYPES
from .gpu_tensors import on_host
from .more_than_numbers import require_only_numbers
from .nest import ARRAYS, OTHERS
from .options import ReduceOp
from .torch_tensors import arrays_of_tensors, in_this_mode, tensors_of
from .ufuncs import EXTREMES

_NARROW_FLOATS = ("float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")


def is_narrow_float(dtype: np.dtype[Any]) -> bool:
    """Returns whether these are floats of 2 bytes or less, which add up in 4 bytes."""
    return dtype.name in _NARROW_FLOATS


def common(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Returns the one dtype of numbers that all those have which equal it; others as they are.

    It is native, has no metadata, and is int64 for longlong: what a cache gives for one of them is
    given for all, and pickle makes none but this one.
    """
    if dtype.kind in "iu":
        return np.dtype(f"{dtype.kind}{dtype.itemsize}")
    return np.dtype(dtype.type) if dtype.kind in "bfc" else dtype


# To numpy most dtypes of ml_dtypes are no numbers, and hold whatever any other dtype holds. Which
# of them are differs by version: complex32 is since 0.7.0, and adds up in 2 bytes each.
_LIKE: dict[str, np.dtype[Any]] = {
    "uint": np.dtype(np.uint8),
    "int": np.dtype(np.int8),
    "float": np.dtype(np.float16),
    "complex": np.dtype(np.complex64),
}


def is_of_another_library(dtype: np.dtype[Any]) -> bool:
    """Returns whether a package other than numpy has registered `dtype`, as ml_dtypes its own."""
    return dtype.isbuiltin == 2


def like_numpys(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Returns one of numpy with the same kind of numbers for a dtype of ml_dtypes; others as is."""
    if not is_of_another_library(dtype):
        return dtype
    return _LIKE.get(dtype.name.removeprefix("b").partition("_")[0].rstrip("0123456789"), dtype)


def integer_limits(dtype: np.dtype[Any]) -> tuple[int, int]:
    """Returns the least and the greatest number of a dtype of integers."""
    library: Any = np if dtype.kind in "iu" else sys.modules["ml_dtypes"]
    limits = library.iinfo(dtype)
    return int(limits.min), int(limits.max)


@functools.lru_cache(maxsize=1024)
def accumulation(dtype: np.dtype[Any], op: ReduceOp) -> tuple[np.dtype[Any], np.dtype[Any]]:
    """Returns the dtype that `op` accumulates `dtype` in, and the dtype of its result.

    Raises
    ------
    TypeError
        `op` has no meaning for `dtype`; the text says what to do.
    """
    dtype = common(dtype)
    if dtype.name in _NARROW_FLOATS:
        return np.dtype(np.float32), dtype
    if dtype.kind not in "biufc" or is_of_another_library(dtype):
        like = like_numpys(dtype)
        if like.kind in "iufc":
            wide = "float32" if like.kind == "f" else like.name
            raise TypeError(
                f"{op.name} of {dtype.name} is not supported. Convert the leaf first,"
                f" .astype({wide!r}) say."
            )
        raise TypeError(
            f"{op.name} of {dtype.name} has no meaning: only numbers can be reduced. Above the"
            " replicas use strategy.gather or strategy.gather_objects for other values, and in a"
            " step all_gather or merge_call."
        )
    if dtype.kind in "biu" and op is ReduceOp.MEAN:
        return np.dtype(np.float64), np.dtype(np.float64)
    if dtype.kind == "b" and op not in EXTREMES:
        raise TypeError(
            f"{op.name} of bool has no meaning. Convert the leaf to an integer to count, or use"
            " MIN (all) or MAX (any)."
        )
    if dtype.kind == "c" and op in EXTREMES:
        raise TypeError(
            f"{op.name} of {dtype.name} has no meaning: complex numbers have no order. Reduce"
            " the absolute values, or real and imaginary parts apart."
        )
    if dtype.kind == "f" and dtype.itemsize > 8 and op in EXTREMES:
        raise TypeError(
            f"{op.name} of {dtype.name} is not supported, since MPI does not say what becomes"
            " of NaN there. Convert the leaf to float64."
        )
    return dtype, dtype


def as_array(value: Any) -> np.ndarray[Any, Any]:
    """Returns `value` as an array, in whatever order it is.

    Raises
    ------
    TypeError
        It is more than its numbers, an array of another library that numpy can't hold, or an
        iterator.
    """
    if type(value) in COMMON_TYPES:  # of which nothing is lost
        return np.asarray(value)
    require_only_numbers(value)
    array = np.asarray(to_numpy(value))
    if array.dtype.hasobject and isinstance(value, (Iterator, MappingView)):
        raise TypeError(
            f"a {type(value).__name__} gives its values one by one, and is no array. Pass"
            " list(value)."
        )
    return array


def as_arrays(
    leaves: Sequence[Any], plain: int = OTHERS
) -> tuple[Sequence[np.ndarray[Any, Any]], GiveBack | None]:
    """Returns leaves as arrays, in whatever order these are, and how results are given back.

    Parameters
    ----------
    leaves : sequence
    plain : int
        What `nest.flatten_plain` has told of them, so that nothing is asked again.

    Returns
    -------
    arrays : sequence of numpy.ndarray
        Perhaps `leaves` itself.
    way : callable or None
        As `way_back` gives it.

    Raises
    ------
    TypeError
        As for `as_array`.
    """
    if plain == ARRAYS:
        return leaves, None
    if plain:
        return list(map(np.asarray, leaves)), None
    here = on_host(leaves)
    if (arrays := arrays_of_tensors(here)) is not None:
        return arrays, in_this_mode(tensors_of) if here is leaves else way_back(leaves)
    return [as_array(leaf) for leaf in here], way_back(leaves)  # `map` ends at a StopIteration


def as_plain_array(value: Any) -> np.ndarray[Any, Any]:
    """Returns `value` as an array of native byte order, aligned and in C order.

    It is copied only where it must be. Read-only, 0-d and empty arrays are kept as they are.

    Raises
    ------
    TypeError
        As for `as_array`.
    """
    array = as_array(value)
    dtype = array.dtype
    if dtype.names or not dtype.isnative:  # which says nothing of fields that are arrays
        array = array.astype(dtype.newbyteorder("="), copy=False)
    if not (array.flags.c_contiguous and array.flags.aligned):  # mpi4py takes aligned ones only
        # not ascontiguousarray: it turns 0-d arrays into 1-d ones
        array = array.copy(order="C")
    return array


def is_text(dtype: np.dtype[Any]) -> bool:
    """Returns whether arrays of `dtype` may differ in item size between replicas (strings)."""
    return dtype.kind in "SU"


@functools.lru_cache(maxsize=1024)
def wire_name(dtype: np.dtype[Any]) -> str:
    """Returns a name that tells `dtype` from every other one, the same in every process.

    ``dtype.str`` alone does not: ml_dtypes' bfloat16 and every void of two bytes are ``<V2``.
    """
    if dtype.fields is not None:  # not dtype.descr: it knows no fields that are out of order
        fields = (
            f"{name!r}: {wire_name(field)} at {at}"
            for name, (field, at, *_) in dtype.fields.items()
        )
        return f"{dtype.itemsize} bytes {{{', '.join(fields)}}}"
    if dtype.subdtype is not None:
        base, shape = dtype.subdtype
        return f"{wire_name(base)}{shape}"
    return dtype.name
