"""Batches of any source as arrays, and the rows of them that a replica gets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from .. import nest
from ..array_libraries import copied, dtype_of, values_of
from .elements import rows_of

__all__ = ["arrays_of", "cut", "empty_like"]


def arrays_of(batch: Any) -> Any:
    """Return the nest `batch` with arrays as leaves; those of any library stay theirs.

    Raises
    ------
    ValueError
        A leaf has no rows, or another number of them.
    """
    leaves, structure = nest.flatten(batch)
    arrays = [np.asarray(leaf) if dtype_of(leaf) is None else values_of(leaf) for leaf in leaves]
    for array, path in zip(arrays, nest.leaf_paths(structure), strict=True):
        if array.ndim == 0:
            raise ValueError(
                f"a batch of a distributed dataset has a scalar for value{path}: it has no rows. "
                "Give batches: arrays whose first dimension are the rows."
            )
        if array.shape[0] != arrays[0].shape[0]:
            raise ValueError(
                f"a batch of a distributed dataset has {arrays[0].shape[0]} rows and"
                f" {array.shape[0]} for value{path}. All leaves must have the same rows."
            )
    return nest.unflatten(structure, arrays)


def cut(batch: Any, wanted: Callable[[int], slice]) -> tuple[int, Any]:
    """Return the number of rows of a batch, and those that are wanted."""
    arrays = arrays_of(batch)
    leaves, _ = nest.flatten(arrays)
    rows = leaves[0].shape[0] if leaves else 0
    return rows, rows_of(arrays, wanted(rows))


def empty_like(batch: Any) -> Any:
    """Return a batch without rows."""
    return nest.map_structure(copied, rows_of(arrays_of(batch), slice(0, 0)))
