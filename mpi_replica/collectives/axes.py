"""Reducing along axes, before the ranks meet and after: pure arithmetic.

``reduce(MEAN, value, axis)`` weighs by element count: it is the sum over all replicas, divided by
the number of elements of all replicas along these axes.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ..core.argument_checks import integer
from ..core.array_ways import Array
from ..core.dtypes import accumulation, as_plain_array
from ..core.indexed_slices import IndexedSlices
from ..core.options import ReduceOp
from ..core.ufuncs import EXTREMES, UFUNCS

Axes = tuple[int, ...] | None


def normalized(axis: Any) -> Axes:
    """Returns `axis` as a tuple, or None.

    Raises
    ------
    TypeError
        It is no integer, and no tuple or list of integers.
    """
    if axis is None:
        return None
    entries = axis if isinstance(axis, (tuple, list)) else (axis,)
    return tuple(integer("axis", entry) for entry in entries)


def partial(op: ReduceOp, component: Any, axes: tuple[int, ...], path: str) -> tuple[Array, int]:
    """Reduces one replica's component along `axes`, wide; returns it and the number of elements.

    Raises
    ------
    ValueError
        An axis is out of range, or stands twice; the component is `IndexedSlices`.
    TypeError
        `op` has no meaning for the dtype.
    """
    if isinstance(component, IndexedSlices):
        raise ValueError(
            f"{op.name} of IndexedSlices (value{path}) along axis {axes}: only the rows of all"
            " replicas can be put together. Use axis=None, or reduce to_dense()."
        )
    try:
        array = as_plain_array(component)
    except TypeError as error:
        raise TypeError(f"{op.name} of value{path}: {error}") from error
    for axis in axes:
        if not -array.ndim <= axis < array.ndim:
            raise ValueError(
                f"axis {axis} is out of range for value{path} of shape {array.shape}."
                + (" Use axis=None for scalars." if array.ndim == 0 else "")
            )
    places = tuple(axis % array.ndim for axis in axes)
    if len(set(places)) < len(places):
        raise ValueError(f"axis {axes} names a dimension of value{path} twice.")
    try:
        wide, _ = accumulation(array.dtype, op)
    except TypeError as error:
        raise TypeError(f"reduce of value{path}: {error}") from None
    count = math.prod(array.shape[place] for place in places)
    with np.errstate(all="ignore"):
        if op in EXTREMES:
            whole = array.astype(wide, copy=False)
            result = UFUNCS[op].reduce(whole, axis=places, initial=_neutral(op, wide))
        else:
            result = UFUNCS[op].reduce(array, axis=places, dtype=wide)
    return np.asarray(result, dtype=wide), count


def _neutral(op: ReduceOp, dtype: np.dtype[Any]) -> Any:
    """Returns what MIN or MAX of nothing is, so that a replica without rows does not count."""
    if dtype.kind == "b":
        return op is ReduceOp.MIN
    if dtype.kind == "f":
        return np.inf if op is ReduceOp.MIN else -np.inf
    bounds = np.iinfo(dtype)
    return bounds.max if op is ReduceOp.MIN else bounds.min


def finished(op: ReduceOp, total: Any, count: int, dtype: np.dtype[Any], path: str) -> Any:
    """Returns the result for components of `dtype`, from what all replicas have together.

    Raises
    ------
    ValueError
        MIN or MAX of nothing at all.
    """
    _, result = accumulation(dtype, op)
    if count == 0:
        if op in EXTREMES:
            raise ValueError(
                f"{op.name} of value{path}: no replica has any element along the axis."
            )
        if op is ReduceOp.MEAN:
            total = np.divide(total, 0)  # warns once and is nan, as numpy's mean of nothing
    with np.errstate(all="ignore"):  # as all_reduce does: an overflow is no mistake of the program
        if op is ReduceOp.MEAN and count:
            total = np.divide(total, count)
        return np.asarray(total).astype(result, copy=False)[()]
