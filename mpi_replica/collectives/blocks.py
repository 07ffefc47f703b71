"""Where the blocks of all replicas lie in what `all_gather` gives: a pure plan.

The result is seen as rows: what lies before the axis counts them. In each row the blocks of the
replicas follow each other. Along the first axis there is one row.
"""

from __future__ import annotations

import array
import functools
import itertools
import math
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from ..core.array_ways import Array
from ..core.dtypes import is_text
from .memory import Allocation

#: (extent along the axis, bytes of an item), for each replica of each rank.
Extents = tuple[tuple[tuple[int, ...], ...], ...]

# What a replica tells of a leaf.
_TOLD_BYTES = 16

# Leaves whose results have so many bytes at most share messages, which have so many at most.
_SHARED_BYTES = 1 << 16
_PACK_BYTES = 1 << 20
# Longer rows go straight to their place; shorter ones come in batches of so many bytes.
_LONG_ROW_BYTES = 1 << 18
_BATCH_BYTES = 1 << 20
# A program whose extents change all the time must not grow.
_CACHE_SIZE = 64


class LeafForm(NamedTuple):
    """What all replicas know of a leaf before they have told each other the extents."""

    dtype: np.dtype[Any]
    #: Not negative.
    axis: int
    #: With any extent along the axis.
    shape: tuple[int, ...]


class Blocks:
    """The blocks of one leaf."""

    def __init__(self, form: LeafForm, extents: Extents) -> None:
        every = [entry for of_rank in extents for entry in of_rank]
        sizes = [size for _, size in every]
        #: Where each replica's block begins along the axis.
        self.offsets = [0, *itertools.accumulate(extent for extent, _ in every)]
        self.axis = form.axis
        self.dtype = form.dtype
        dtypes = [form.dtype] * len(every)
        if is_text(form.dtype):
            dtypes = [_text(form.dtype, size) for size in sizes]
            self.dtype = _text(form.dtype, max(sizes))
        before, after = form.shape[: form.axis], form.shape[form.axis + 1 :]
        #: dtype and shape of what each replica gives: strings have its own item size.
        self.given = [
            (dtype, (*before, extent, *after))
            for dtype, (extent, _) in zip(dtypes, every, strict=True)
        ]
        self.rows = math.prod(before)
        inner = math.prod(after)
        #: Items of each replica's block, in one row; and where they begin there.
        self.lengths = [extent * inner for extent, _ in every]
        *self.starts, self.row_length = itertools.accumulate(self.lengths, initial=0)
        self.row_bytes = self.row_length * self.dtype.itemsize
        self.result = self.dtype, (*before, sum(extent for extent, _ in every), *after)
        self.result_bytes = self.rows * self.row_bytes
        #: Whether numpy has arrays of that shape: extents of 0 it leaves out of their size.
        self.is_possible = (
            math.prod(filter(None, self.result[1])) * self.dtype.itemsize <= sys.maxsize
        )
        #: Bytes of each rank's blocks, in one row.
        self.rank_row_bytes = [
            sum(extent for extent, _ in of_rank) * inner * self.dtype.itemsize
            for of_rank in extents
        ]

        #: Rows of a batch, and its bytes; 0 where rows go straight to their place.
        self.batch_rows = 0
        if self.rows > 1 and self.row_bytes < _LONG_ROW_BYTES:
            self.batch_rows = min(self.rows, max(1, _BATCH_BYTES // max(1, self.row_bytes)))
        self.batch_bytes = self.batch_rows * self.row_bytes

    def table(self, result: Array) -> Array:
        """Returns the result as rows of items."""
        return result.reshape(self.rows, self.row_length)

    def place(self, table: Array, replica: int, block: Array) -> Array:
        """Puts the bytes of a replica's block into its place; returns those that lie behind it.

        `table` may hold some of the rows only.
        """
        length, start = self.lengths[replica], self.starts[replica]
        size = len(table) * length * self.dtype.itemsize
        items = block[:size].view(self.dtype)
        table[:, start : start + length] = items.reshape(len(table), length)
        return block[size:]


def _text(dtype: np.dtype[Any], item_bytes: int) -> np.dtype[Any]:
    unit = 4 if dtype.kind == "U" else 1
    return np.dtype(f"{dtype.kind}{max(1, item_bytes // unit)}")


class SharedMessage(NamedTuple):
    """Small leaves that travel together."""

    leaves: list[int]
    #: Bytes that each rank sends, and where they begin.
    rank_bytes: list[int]
    starts: list[int]

    @property
    def size_bytes(self) -> int:
        """Bytes of all ranks."""
        return sum(self.rank_bytes)


class Gathering:
    """How the leaves of one call travel, where all extents are known."""

    def __init__(self, forms: Sequence[LeafForm], extents: Sequence[Extents]) -> None:
        about = list(zip(forms, extents, strict=True))
        alike = {key: Blocks(*key) for key in set(about)}  # of thousands of leaves, a few
        self.leaves = [alike[key] for key in about]
        self.allocation = Allocation([leaf.result for leaf in self.leaves])
        self.result_bytes = sum(leaf.result_bytes for leaf in self.leaves)
        #: The first leaf of whose result numpy has none.
        self.impossible = next(
            (i for i, leaf in enumerate(self.leaves) if not leaf.is_possible), None
        )
        packs: list[list[int]] = []
        used = 0
        for index, leaf in enumerate(self.leaves):
            if leaf.result_bytes <= _SHARED_BYTES:
                if not packs or used + leaf.result_bytes > _PACK_BYTES:
                    packs.append([])
                    used = 0
                packs[-1].append(index)
                used += leaf.result_bytes
        self.shared = [self._shared(pack) for pack in packs if len(pack) > 1]
        #: Leaves that have messages of their own.
        together = {index for message in self.shared for index in message.leaves}
        self.alone = [index for index in range(len(self.leaves)) if index not in together]
        #: Whether it is one leaf, whose blocks lie one behind the other as they come.
        self.is_one_row = len(self.leaves) == 1 and (
            self.leaves[0].rows == 1 and not is_text(self.leaves[0].dtype)
        )
        # For a message that leaves share: what a rank sends, and what all have sent.
        needs = [max(message.rank_bytes) + message.size_bytes for message in self.shared]
        needs += [self.leaves[index].batch_bytes for index in self.alone]
        self.scratch_bytes = max(needs, default=0)

    @functools.cached_property
    def most_rank_bytes(self) -> int:
        """The most bytes of the blocks of a rank."""
        of_leaves = [[leaf.rows * size for size in leaf.rank_row_bytes] for leaf in self.leaves]
        return max(map(sum, zip(*of_leaves, strict=True)), default=0)

    def _shared(self, pack: list[int]) -> SharedMessage:
        columns = [
            [self.leaves[index].rows * size for size in self.leaves[index].rank_row_bytes]
            for index in pack
        ]
        rank_bytes = [sum(of_rank) for of_rank in zip(*columns, strict=True)]
        *starts, _ = itertools.accumulate(rank_bytes, initial=0)
        return SharedMessage(pack, rank_bytes, starts)


class GatheringPlan:
    """What calls of one signature share."""

    def __init__(self, forms: Sequence[LeafForm]) -> None:
        self.forms = tuple(forms)
        self._axes = [form.axis for form in forms]
        self._known: dict[tuple[bytes, ...], Gathering] = {}
        #: Bytes of what is told of a replica: extent and item size of each leaf.
        self.told_bytes = _TOLD_BYTES * len(self.forms)

    def told(self, contributions: Sequence[Sequence[Array]]) -> bytes:
        """Returns what a rank tells of its replicas' leaves."""
        axes, numbers = self._axes, array.array("Q")
        for leaves in contributions:
            for leaf, axis in zip(leaves, axes, strict=True):
                numbers.append(leaf.shape[axis])
                numbers.append(leaf.dtype.itemsize)
        return numbers.tobytes()

    def gathering(self, told: Sequence[bytes], counts: Sequence[int]) -> Gathering:
        """Returns how the leaves travel, by what each rank has told of its replicas."""
        key = tuple(told)
        known = self._known.get(key)
        if known is None:
            if len(self._known) >= _CACHE_SIZE:
                self._known.clear()
            known = self._known[key] = Gathering(self.forms, self._extents(told, counts))
        return known

    def _extents(self, told: Sequence[bytes], counts: Sequence[int]) -> list[Extents]:
        number = len(self.forms)
        tables = [
            np.frombuffer(of_rank, np.uint64).reshape(count, number, 2).transpose(1, 0, 2)
            for of_rank, count in zip(told, counts, strict=True)
        ]
        alike: dict[bytes, Extents] = {}
        extents = []
        for of_leaf in zip(*tables, strict=True):
            key = b"".join([of_rank.tobytes() for of_rank in of_leaf])
            if key not in alike:
                of_ranks = [of_rank.tolist() for of_rank in of_leaf]
                alike[key] = tuple(tuple(map(tuple, of_rank)) for of_rank in of_ranks)
            extents.append(alike[key])
        return extents
