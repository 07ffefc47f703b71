"""What the headers tell of a gathering, and the data in them: all of it, where it is small.

A flag whether the data is there, extent and item size of each leaf of each replica, and the data.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ..core.array_ways import Array
from .agreement.group import Group
from .agreement.header import PAYLOAD_START
from .blocks import Gathering, GatheringPlan

# Programs whose extents or calls change all the time must not grow.
_MOST_TOLD, _MOST_PLANS = 64, 1024

# What tells whether the data is there; the data of numbers behind it is aligned.
_NO_DATA, _HAS_DATA = bytes(8), b"\1".ljust(8, b"\0")


class Column(NamedTuple):
    """What all replicas give of one leaf, as it lies in the headers, and how it becomes one."""

    blocks: list[Array]
    axis: int
    dtype: np.dtype[np.generic]


class Told(NamedTuple):
    """What all ranks have told."""

    gathering: Gathering
    #: For each leaf; None where the headers don't have the data.
    columns: list[Column] | None
    #: Of the header in which what each rank gives would travel.
    header_bytes: int


class GatherHeaders:
    """The headers of some size, of calls with one plan."""

    def __init__(self, plan: GatheringPlan, group: Group) -> None:
        self._plan, self._counts, self._sizes = plan, group.layout.counts, group.sizes
        # Alike on all ranks, so that one look gets all of it.
        self._told_bytes = plan.told_bytes * max(self._counts)
        size_bytes = group.sizes.next_bytes
        memory = group.sizes.memory[size_bytes]
        self._headers = memory.reshape(-1, size_bytes)
        self._data_start = PAYLOAD_START + len(_NO_DATA) + self._told_bytes
        self._heads = self._headers[:, PAYLOAD_START : self._data_start]
        self._most_data_bytes = group.sizes.room_bytes + PAYLOAD_START - self._data_start
        #: Whether there is room for what is told.
        self.has_room = self._most_data_bytes >= 0
        self._known: dict[bytes, Told] = {}

    def payload(self, told: bytes, contributions: Sequence[Sequence[Array]]) -> bytes:
        """Returns what this rank sends with its header."""
        told = told.ljust(self._told_bytes, b"\0")
        size_bytes = sum([leaf.nbytes for leaves in contributions for leaf in leaves])
        if size_bytes > self._most_data_bytes:
            return _NO_DATA + told
        columns = zip(*contributions, strict=True)
        return b"".join([_HAS_DATA, told, *[leaf.tobytes() for row in columns for leaf in row]])

    def read(self) -> Told:
        """Returns what all ranks have told: the headers have come."""
        key = self._heads.tobytes()
        known = self._known.get(key)
        if known is None:
            if len(self._known) >= _MOST_TOLD:
                self._known.clear()
            known = self._known[key] = self._new()
        return known

    def _new(self) -> Told:
        flag_bytes, counts = len(_NO_DATA), self._counts
        rows = [row.tobytes() for row in self._heads]
        told = [
            row[flag_bytes : flag_bytes + self._plan.told_bytes * count]
            for row, count in zip(rows, counts, strict=True)
        ]
        gathering = self._plan.gathering(told, counts)
        columns = None
        if all(row.startswith(_HAS_DATA) for row in rows):
            columns = self._columns(gathering)
        payload_bytes = flag_bytes + self._told_bytes + gathering.most_rank_bytes
        return Told(gathering, columns, self._sizes.size_of(payload_bytes))

    def _columns(self, gathering: Gathering) -> list[Column]:
        columns = [Column([], leaf.axis, leaf.dtype) for leaf in gathering.leaves]
        ends = itertools.accumulate(self._counts, initial=0)
        for header, (first, end) in zip(self._headers, itertools.pairwise(ends), strict=True):
            start = self._data_start
            for leaf, column in zip(gathering.leaves, columns, strict=True):
                for replica in range(first, end):
                    dtype, shape = leaf.given[replica]
                    stop = start + math.prod(shape) * dtype.itemsize
                    column.blocks.append(header[start:stop].view(dtype).reshape(shape))
                    start = stop
        return columns


class AllGatherHeaders(dict[tuple[GatheringPlan, int], GatherHeaders]):
    """The `GatherHeaders` of each plan and size, that of the next ones; kept by a group."""

    def __init__(self, group: Group) -> None:
        super().__init__()
        self._group = group

    def __missing__(self, key: tuple[GatheringPlan, int]) -> GatherHeaders:
        if len(self) >= _MOST_PLANS:
            self.clear()
        made = self[key] = GatherHeaders(key[0], self._group)
        return made
