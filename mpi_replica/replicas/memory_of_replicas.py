"""Whose memory an array is in, among the replicas of a rank, which share one process."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from ..collectives.outputs import are_owners, bounds_of
from ..core.array_libraries import library_of
from ..core.array_ways import COMMON_TYPES
from ..core.indexed_slices import IndexedSlices

#: The addresses between which an array lies.
Extent = tuple[int, int]


class MemoryOfReplicas:
    """The memory that replicas hold arrays in: of each its parts, apart from each other, in order.

    Attributes
    ----------
    begins, ends : dict of list of int
        Addresses, by replica.
    """

    def __init__(self) -> None:
        self.begins: dict[int, list[int]] = {}
        self.ends: dict[int, list[int]] = {}

    def add(self, extents: Sequence[Extent], replica_id: int) -> None:
        """Notes that a replica holds a value, which lies there."""
        for begin, end in extents:
            begins = self.begins.setdefault(replica_id, [])
            ends = self.ends.setdefault(replica_id, [])
            first, last = bisect.bisect_left(ends, begin), bisect.bisect_right(begins, end)
            if first < last:
                begin, end = min(begin, begins[first]), max(end, ends[last - 1])
            begins[first:last], ends[first:last] = [begin], [end]

    def is_of_another(self, extents: Sequence[Extent], replica_id: int | None) -> bool:
        """Returns whether a value that lies there may be in memory of another replica than this.

        Of any one, where that is None.
        """
        for begin, end in extents:
            for holder, ends in self.ends.items():
                if holder != replica_id:
                    place = bisect.bisect_right(ends, begin)
                    if place < len(ends) and self.begins[holder][place] < end:
                        return True
        return False


def are_apart(values: Iterable[Any]) -> bool:
    """Returns whether values that are two objects share no memory."""
    by_id = {id(value): value for value in values}
    arrays = [value for value in by_id.values() if type(value) is np.ndarray]
    kinds = set(map(type, by_id.values()))
    if kinds <= COMMON_TYPES and are_owners(arrays):
        return True
    extents = sorted(itertools.chain.from_iterable(map(extents_of, by_id.values())))
    return all([end <= begin for (_, end), (begin, _) in itertools.pairwise(extents)])


def extents_of(value: Any) -> Sequence[Extent]:
    """Returns where a value lies, which may be no array; nothing of what nobody can write into."""
    if type(value) in COMMON_TYPES and not isinstance(value, np.ndarray):
        return ()
    if isinstance(value, IndexedSlices):
        return (*extents_of(value.values), *extents_of(value.indices))
    if isinstance(value, np.void):  # an item of an array, which may be written through it
        value = np.frombuffer(value, np.uint8)
    if isinstance(value, np.ndarray):
        return (bounds_of(value),) if value.size else ()
    library = library_of(value)
    if library is None or library == "jax":
        return ()
    if library == "torch":
        try:
            storage = value.untyped_storage()
            begin = storage.data_ptr()
        except (NotImplementedError, RuntimeError):  # a sparse tensor, say
            begin = 0
        if begin:
            return ((begin, begin + storage.nbytes()),)
    return ((id(value), id(value) + 1),)  # it is known by itself alone
