"""``out=``: results go where the caller wants them.

Their memory must not overlap that of other leaves: a piece that was written must not be read as a
contribution afterwards.
"""

from __future__ import annotations

import bisect
import ctypes
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.lib.array_utils import byte_bounds

from ..core import nest
from ..core.array_libraries import memory_of, note_written
from ..core.array_ways import Array
from ..core.exceptions import StructureMismatchError

# From where to where a leaf lies, and its index.
_Span = tuple[int, int, int]


class Outputs:
    """The arrays of one replica that get the results of a call.

    Parameters
    ----------
    out : nest of numpy.ndarray or torch.Tensor
        As the caller gave it.
    structure : nest.Structure
        Of the value that is reduced.
    originals : sequence
        The leaves of that value, as the caller gave them.
    values : sequence of numpy.ndarray
        These as arrays.

    Raises
    ------
    StructureMismatchError
        `out` is another nest than the value.
    """

    def __init__(
        self,
        out: Any,
        structure: nest.Structure,
        originals: Sequence[Any],
        values: Sequence[Array],
    ) -> None:
        self.nest = out
        self.leaves, of_out, is_plain = nest.flatten_plain(out)
        if of_out is not structure and of_out != structure:
            raise StructureMismatchError(
                f"out must be the same nest as the value: it is {nest.structure_text(of_out)}, and"
                f" the value is {nest.structure_text(structure)}."
            )
        self._given: Sequence[Any] = ()
        if not is_plain:
            self._given = self.leaves
            paths = nest.leaf_paths(of_out)
            self.leaves = [
                _as_plain(leaf, path, array if leaf is original else None)
                for leaf, path, original, array in zip(
                    self.leaves, paths, originals, values, strict=True
                )
            ]
        self._values = values
        #: Whether each result takes the place of its value.
        self.are_values = all(map(_is_same_memory, self.leaves, values))

    @property
    def words(self) -> str:
        """What all replicas must do alike: MPI reduces in place on all ranks or on none."""
        return "out=value" if self.are_values else "out"

    def check(
        self, results: Sequence[tuple[np.dtype[Any], tuple[int, ...]]], paths: Sequence[str]
    ) -> None:
        """Raises where a leaf can't take its result, which has this dtype and shape.

        Raises
        ------
        TypeError
            It is no array, or one of another dtype.
        ValueError
            Its shape is another one, it is read-only or not C-contiguous, or it overlaps another
            leaf.
        """
        for leaf, (dtype, shape), path in zip(self.leaves, results, paths, strict=True):
            if (
                type(leaf) is not np.ndarray
                or leaf.dtype != dtype
                or leaf.shape != shape
                or not leaf.flags.carray  # writable, aligned and in C order
            ):
                _require_fitting(leaf, dtype, shape, path)
        if not _own_their_memory(self.leaves, self._values, self.are_values):
            self._check_overlaps(paths)

    def _check_overlaps(self, paths: Sequence[str]) -> None:
        spans = sorted(self.spans())
        _require_apart(spans, paths, "Each leaf needs memory of its own.")
        if self.are_values:  # which are apart, then
            return
        for (_, _, index), other in _overlaps(spans, self._values):
            if index != other or not _is_same_memory(self.leaves[index], self._values[other]):
                raise _overlap(paths[index], paths[other], "")

    def spans(self) -> Iterator[_Span]:
        """Yields from where to where each leaf lies, and its index."""
        for index, leaf in enumerate(self.leaves):
            if leaf.size:
                yield (*bounds_of(leaf), index)

    def filled(self) -> Any:
        """Returns the nest that the caller gave, which has the results now."""
        if self._given:
            note_written(self._given)
        return self.nest

    def take(self, results: Sequence[Any]) -> None:
        """Writes the results into the leaves."""
        for leaf, result in zip(self.leaves, results, strict=True):
            leaf[...] = result


def check_replicas(
    outputs: Sequence[Outputs], values: Sequence[Sequence[Array]], paths: Sequence[str]
) -> None:
    """Raises where one replica of this rank would write what another one still needs.

    All may have the same array for a leaf: it gets the same result of each.

    Raises
    ------
    ValueError
        `out` of one replica shares memory with a value of another one, or with another part of
        `out` there.
    """
    leaves = [leaf for mine in outputs for leaf in mine.leaves]
    all_values = [value for mine in values for value in mine]
    if _own_their_memory(leaves, all_values, all(mine.are_values for mine in outputs)):
        return
    owners: dict[_Span, set[int]] = {}
    for replica, mine in enumerate(outputs):
        for span in mine.spans():
            owners.setdefault(span, set()).add(replica)
    spans = sorted(owners)
    _require_apart(
        spans,
        paths,
        "They are of two replicas of the same rank: each replica needs arrays of its own, or all"
        " the same one for a leaf.",
    )
    for span, number in _overlaps(spans, all_values):
        replica, other = divmod(number, len(paths))
        if owners[span] != {replica}:
            raise _overlap(paths[span[2]], paths[other], " of another replica of the same rank")


def _own_their_memory(leaves: Sequence[Any], values: Sequence[Array], are_values: bool) -> bool:
    """Returns whether all are arrays that no other one here is a view of; quickly.

    `are_values` says that the leaves are the values.
    """
    if not are_owners(leaves):
        return False
    ids = set(map(id, leaves))
    if len(ids) < len(leaves):
        return False
    return are_values or (are_owners(values) and ids.isdisjoint(map(id, values)))


def are_owners(arrays: Sequence[Array]) -> bool:
    """Returns whether each array has memory of its own, so that two objects lie apart."""
    for array in arrays:
        if not array.flags.owndata:  # not `base is not None`: memory of C may have no base
            return False
    return True


def _require_apart(spans: Sequence[_Span], paths: Sequence[str], what: str) -> None:
    """Raises where spans, which are sorted, lie in each other."""
    for (_, stop, index), (start, _, other) in itertools.pairwise(spans):
        if start < stop:
            raise ValueError(f"out{paths[index]} and out{paths[other]} share memory. {what}")


def _overlaps(spans: Sequence[_Span], values: Sequence[Array]) -> Iterator[tuple[_Span, int]]:
    """Yields each span and the index of each value that lie in each other.

    The spans are sorted, and known to be apart: they end in the order of their ends.
    """
    starts, stops = [start for start, _, _ in spans], [stop for _, stop, _ in spans]
    for other, value in enumerate(values):
        if value.size:
            start, stop = bounds_of(value)
            behind, before = bisect.bisect_right(stops, start), bisect.bisect_left(starts, stop)
            for span in spans[behind:before]:
                yield span, other


def _as_plain(leaf: Any, path: str, array: Array | None) -> Any:
    """Returns the memory of an array of another class, as np.matrix, or of torch, as an array.

    `array` is the leaf as an array, where it is the value.
    """
    try:
        leaf = memory_of(leaf, array)
    except TypeError as error:
        raise TypeError(f"out{path} {error}") from None
    if type(leaf) is np.ndarray or not isinstance(leaf, np.ndarray):
        return leaf
    return leaf if isinstance(leaf, np.ma.MaskedArray) else leaf.view(np.ndarray)


def _is_same_memory(leaf: Any, value: Array) -> bool:
    if leaf is value:
        return True
    if type(leaf) is not np.ndarray or (leaf.flags.owndata and value.flags.owndata):
        return False
    same = leaf.dtype == value.dtype and leaf.shape == value.shape
    return same and value.flags.c_contiguous and bounds_of(leaf) == bounds_of(value)


def bounds_of(array: Array) -> tuple[int, int]:
    """Returns from where to where an array lies, as `byte_bounds`, in a fifth of its time."""
    try:
        start = ctypes.addressof(ctypes.c_char.from_buffer(array))  # type: ignore[arg-type]
    except (TypeError, ValueError):  # empty, read-only, in another order, or of a dtype of numpy's
        return byte_bounds(array)
    return start, start + array.nbytes


def _require_fitting(leaf: Any, dtype: np.dtype[Any], shape: tuple[int, ...], path: str) -> None:
    """Raises where `leaf` can't take a result of this dtype and shape."""
    if type(leaf) is not np.ndarray or leaf.dtype != dtype:
        what = f"an array of {leaf.dtype}" if type(leaf) is np.ndarray else repr(leaf)
        raise TypeError(
            f"out{path} must be an array of {dtype}, which is what the reduction gives; it is"
            f" {what}."
        )
    if leaf.shape != shape:
        raise ValueError(f"out{path} must have shape {shape}, it has {leaf.shape}.")
    needs = {"writeable": "writable", "c_contiguous": "C-contiguous", "aligned": "aligned"}
    for flag, word in needs.items():
        if not getattr(leaf.flags, flag):
            others = " (as is what another replica of the same rank has given to a call)"
            raise ValueError(
                f"out{path} must be a writable, aligned, C-contiguous array; it is not"
                f" {word}{others if word == 'writable' else ''}."
            )


def _overlap(path: str, own: str, whose: str) -> ValueError:
    return ValueError(
        f"out{path} shares memory with value{own}{whose}. It needs memory of its own, or exactly"
        " that of the value which it replaces."
    )
