"""Rows of a larger array: what is sparse in a reduction."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from .argument_checks import integer
from .array_libraries import is_traced_by_jax, recorded_by_torch
from .array_ways import Array
from .dtypes import accumulation, as_array
from .options import ReduceOp
from .tree import middle


class IndexedSlices:
    """Rows of a larger array: a sparse leaf of ``all_reduce`` (`tf.IndexedSlices`).

    Parameters
    ----------
    values : array_like, shape (n, ...)
        The rows.
    indices : array_like of int, shape (n,)
        Where each row belongs; an index may stand more than once: such rows add up.
    dense_shape : sequence of int, optional
        Shape of the dense array.

    Raises
    ------
    ValueError
        There are not as many indices as rows, or `dense_shape` does not fit.
    TypeError
        `indices` or `dense_shape` are not integers; an array has a mask, which would be lost; torch
        would record what is computed with `values`, or JAX traces them.

    Examples
    --------
    >>> IndexedSlices([[1.0, 2.0]], [1], dense_shape=(3, 2)).to_dense()
    array([[0., 0.],
           [1., 2.],
           [0., 0.]])
    """

    __slots__ = ("_dense_shape", "_indices", "_rows_of_replicas", "_values", "_wide_values")

    def __init__(self, values: Any, indices: Any, dense_shape: Iterable[int] | None = None) -> None:
        if recorded_by_torch([values]):
            raise TypeError(
                "IndexedSlices got values that need gradients: it holds numpy arrays, and no"
                " gradient passes it. Give it values.detach(), or reduce a dense tensor."
            )
        if is_traced_by_jax([values, indices]):
            raise TypeError(
                "IndexedSlices got rows or indices that JAX traces: it holds numpy arrays. Make and"
                " reduce it outside of the traced function, or reduce a dense array."
            )
        self._values = as_array(values)
        self._indices = as_array(indices)
        self._dense_shape = None
        if dense_shape is not None:
            extents = [integer("an extent in dense_shape", n, 0) for n in dense_shape]
            self._dense_shape = tuple(extents)
        #: The rows before they were rounded to their dtype.
        self._wide_values = self._values
        #: How many rows each replica gave, where they are to be added in the order of the replicas.
        self._rows_of_replicas: tuple[int, ...] | None = None
        if self.indices.size == 0 and self.indices.dtype.kind == "f":
            self._indices = self.indices.astype(np.int64)  # what np.asarray([]) gives
        if self.indices.dtype.kind not in "iu":
            raise TypeError(f"indices must be integers, got dtype {self.indices.dtype}.")
        if self.values.ndim < 1 or self.indices.shape != self.values.shape[:1]:
            raise ValueError(
                f"values of shape {self.values.shape} and indices of shape {self.indices.shape} do"
                " not fit. Give one index for each row of values."
            )
        shape = self.dense_shape
        if shape is not None and (not shape or shape[1:] != self.values.shape[1:]):
            raise ValueError(
                f"dense_shape {shape} does not fit rows of shape {self.values.shape[1:]}. All but"
                " its first dimension must be theirs."
            )

    @property
    def values(self) -> Array:
        """The rows."""
        return self._values

    @values.setter
    def values(self, values: Array) -> None:
        if values is not self._values:  # which ``slices.values *= 2`` puts in its own place
            raise AttributeError(
                "slices keep their array of rows: write into it, or make new ones,"
                " mr.IndexedSlices(values, indices, dense_shape)."
            )

    @property
    def indices(self) -> Array:
        """Where each row belongs."""
        return self._indices

    @property
    def dense_shape(self) -> tuple[int, ...] | None:
        """Shape of the dense array, where it is known."""
        return self._dense_shape

    @property
    def wide_values(self) -> Array:
        """Return the rows as they are added up: those of a mean, before they were rounded."""
        values, wide = self._values, self._wide_values
        if wide is not values:
            with np.errstate(all="ignore"):
                rounded = wide.astype(values.dtype)
            if rounded.tobytes() != values.tobytes():
                self._wide_values = values  # the program has written into them since
        return self._wide_values

    def to_dense(self) -> np.ndarray[Any, Any]:
        """Return the dense array; rows with the same index are added.

        Returns
        -------
        numpy.ndarray, shape `dense_shape`
            A fresh array of the dtype of the rows; zeros where there is no row.

        Raises
        ------
        ValueError
            There is no `dense_shape`.
        IndexError
            An index lies outside of it.

        Notes
        -----
        Counterpart of ``tf.convert_to_tensor`` of ``tf.IndexedSlices``.

        Examples
        --------
        >>> mr.IndexedSlices([1.0, 2.0], [2, 2], dense_shape=(4,)).to_dense()
        array([0., 0., 3., 0.])
        """
        if self.dense_shape is None:
            raise ValueError("to_dense() needs a dense_shape. Give it to IndexedSlices.")
        rows = self.dense_shape[0]
        outside = self.indices[(self.indices < 0) | (self.indices >= rows)]
        if outside.size:
            raise IndexError(f"index {outside[0]} lies outside of the {rows} rows of dense_shape.")
        dense = np.zeros(self.dense_shape, self.values.dtype)
        if self._rows_of_replicas is None:
            np.add.at(dense, self.indices, self.values)
        else:
            indices, places = np.unique(self.indices, return_inverse=True)
            dense[indices] = self._sums_by_tree(len(indices), places)
        return dense

    @classmethod
    def of_replicas(
        cls,
        wide_values: Array,
        dtype: np.dtype[Any],
        indices: Array,
        dense_shape: Iterable[int] | None,
        rows: Sequence[int],
    ) -> IndexedSlices:
        """Return slices of this dtype of which the first `rows` are replica 0's, and so on.

        `to_dense` then adds up each replica's, and these sums in the order of the tree over the
        replicas: as a reproducible sum of each replica's dense array.
        """
        with np.errstate(all="ignore"):
            slices = cls(wide_values.astype(dtype, copy=False), indices, dense_shape)
        slices._wide_values = wide_values
        slices._rows_of_replicas = tuple(rows)
        return slices

    def changed(self, change: Callable[[Array], Array]) -> IndexedSlices:
        """Return the same slices, with what `change` makes of each of their arrays."""
        slices = copy.copy(self)
        values, wide = self._values, self.wide_values
        slices._values, slices._indices = change(values), change(self._indices)
        slices._wide_values = slices._values if wide is values else change(wide)
        return slices

    def divided(self, divide: Callable[[Array], Array]) -> IndexedSlices:
        """Return the same slices with other rows: of their dtype, where that holds fractions."""
        wide_values = divide(self.wide_values)
        holds_fractions = self._values.dtype.kind not in "biu"
        dtype = self._values.dtype if holds_fractions else wide_values.dtype
        rows = self._rows_of_replicas or (len(self._indices),)
        return self.of_replicas(wide_values, dtype, self._indices, self._dense_shape, rows)

    def _sums_by_tree(self, count: int, places: Array) -> Array:
        """Returns the sums of the rows that have the same place, of so many places."""
        values, rows = self.wide_values, self._rows_of_replicas or ()
        wide, _ = accumulation(values.dtype, ReduceOp.SUM)
        starts = [0, *itertools.accumulate(rows)]

        def total(first: int, last: int) -> Array:
            if last - first > 1:
                half = middle(first, last)
                left = total(first, half)
                return np.add(left, total(half, last), out=left)
            sums = np.zeros((count, *values.shape[1:]), wide)
            mine = slice(starts[first], starts[last])
            np.add.at(sums, places[mine], values[mine])
            return sums

        with np.errstate(all="ignore"):
            sums = total(0, len(rows))
            if wide.kind in "fc":
                for part in (sums.real, sums.imag) if wide.kind == "c" else (sums,):
                    part[np.isnan(part)] = np.nan
            return sums.astype(self._values.dtype, copy=False)

    def __repr__(self) -> str:
        return (
            f"IndexedSlices(values={self.values!r}, indices={self.indices!r},"
            f" dense_shape={self.dense_shape!r})"
        )
