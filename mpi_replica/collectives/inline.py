"""Reductions that every rank does for itself: it has the contributions of all.

They travel in the header, and are combined in rank order or in that of the tree over the replicas.
In the latter what is too large for a header has a message of its own, up to some size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..core.array_libraries import Array
from ..core.options import ReduceOp
from ..core.tree import tree_of
from ..core.ufuncs import UFUNCS
from ..ranks.transport import Bytes, Payload
from .agreement.group import Group
from .agreement.header import INLINE_BYTES, PAYLOAD_START
from .extremes import are_keyed, extreme
from .plan import Plan, Slot, cut
from .scratch import Scratch
from .settlement import divide, settle

# A program that makes new shapes all the time must not grow.
_CACHE_SIZE = 1024

# What a rank is given of all others in a message of its own, at most: adding it up costs more then.
_MOST_MESSAGE_BYTES = 1 << 16


class InlineReduction:
    """A plan without streams, and where its packs stand in the headers.

    Made once for each plan.

    Attributes
    ----------
    message : array of bytes, optional
        Where the contributions of all ranks are put that don't travel in headers.
    rank_bytes : sequence of int
        How many bytes there are from each rank.
    header_bytes : int
        Of the header in which what a rank contributes would travel.

    Parameters
    ----------
    memory : array of bytes
        Where the contributions of all ranks are put.
    places : sequence of int
        Where each contribution begins there.
    group : Group
    """

    message: Bytes | None = None
    rank_bytes: Sequence[int] = ()
    header_bytes: int

    def __init__(self, plan: Plan, memory: Bytes, places: Sequence[int], group: Group) -> None:
        layout = group.layout
        self._quietly = group.quietly
        self._op = plan.op
        self._ufunc = UFUNCS[plan.op]
        has_keys = any(are_keyed(pack.dtype, plan.op) for pack in plan.packs)
        self._plan = plan
        self._scale = layout.num_replicas if plan.op is ReduceOp.MEAN else 1
        # As it is mostly: nothing is to be done but one call of the ufunc, or two.
        self._is_of_two = len(places) == 2 and not has_keys
        self._leaves = len(plan.results)
        self._order = plan.plain_order
        chunks = [chunk for pack in plan.packs for chunk in pack.chunks]
        slots = [slot for chunk in chunks for slot in chunk.slots]
        # Where results are rounded, numpy would warn of overflow, too.
        self._is_rounded = any(slot.dtype is not None for slot in slots)
        self._buffers = [(pack.length, pack.dtype) for pack in plan.packs]
        #: Of each pack, what the ranks contribute, and its slots.
        self._parts: list[tuple[list[Array], tuple[Slot, ...]]] = []
        start = 0
        for pack in plan.packs:
            stop = start + pack.size_bytes
            rows = [memory[place + start : place + stop].view(pack.dtype) for place in places]
            (chunk,) = pack.chunks  # what is so small fits into one
            self._parts.append((rows, chunk.slots))
            start = stop

    def prepare(self, contributions: Sequence[Sequence[Array]]) -> tuple[Payload, list[Array]]:
        """Returns what this rank sends, its replicas combined, and memory for `results`.

        Before the ranks agree: it may fail.
        """
        totals = []
        for length, dtype in self._buffers:
            totals.append(np.empty(length, dtype))
        order = self._order
        if order is None or len(contributions) > 1:
            return self._quietly(self._combined_here, contributions), totals
        leaves = contributions[0]
        if len(order) == 1:
            leaf = leaves[order[0]]
            if leaf.nbytes > INLINE_BYTES and leaf.flags.c_contiguous:  # without a copy of it
                return leaf.reshape(-1).view(np.uint8).data, totals
            return leaf.tobytes(), totals
        return b"".join([leaves[leaf].tobytes() for leaf in order]), totals

    def _combined_here(self, contributions: Sequence[Sequence[Array]]) -> bytes:
        parts = []
        for pack in self._plan.packs:
            dtype = pack.dtype
            for leaf in pack.leaves:
                total = contributions[0][leaf].astype(dtype)
                for leaves in contributions[1:]:
                    self._add(total, leaves[leaf])
                parts.append(total.tobytes())
        return b"".join(parts)

    def results(self, totals: Sequence[Array]) -> list[Any]:
        """Returns the leaves, combined over the ranks in their order.

        They are views of `totals` that share no item, and numpy scalars.
        """
        quietly = self._quietly
        results: list[Any] = [None] * self._leaves
        place = 0
        for rows, slots in self._parts:
            total = totals[place]
            if self._is_of_two:
                quietly(self._ufunc, *rows, out=total)  # without a frame of Python's
                if self._scale != 1:
                    quietly(divide, total, self._scale)
            else:
                quietly(self._reduce, place, rows, total)
            if self._is_rounded:
                quietly(cut, slots, total, results)
            else:
                cut(slots, total, results)
            place += 1
        return results

    def _reduce(self, place: int, rows: Sequence[Array], total: Array) -> None:
        """Combines the contributions to the pack at `place`."""
        total[...] = rows[0]
        for row in rows[1:]:
            self._add(total, row)
        if are_keyed(total.dtype, self._op):
            total[np.isnan(total)] = np.nan
        if self._scale != 1:
            divide(total, self._scale)

    def _add(self, total: Array, array: Array) -> None:
        """Combines `array` into `total`."""
        if are_keyed(total.dtype, self._op):
            extreme(self._op, total, array, np.empty_like(total), np.empty_like(total))
        else:
            self._ufunc(total, array, out=total, dtype=total.dtype, casting="unsafe")


class OrderedInlineReduction(InlineReduction):
    """One in the order of the tree over the replicas.

    Parameters
    ----------
    group : Group
    scratch : Scratch
        Memory that is used while the call lasts.
    is_inline : bool
        Whether the contributions of every rank fit into its header.
    """

    def __init__(self, plan: Plan, group: Group, scratch: Scratch, *, is_inline: bool) -> None:
        layout = group.layout
        tree = tree_of(layout.counts)
        size_bytes = int(plan.small_bytes)
        counts = [len(partials) for partials in tree.partials]
        scratch.clear()
        if is_inline:
            memory, starts = _memory_of_headers(group)
            places = [
                start + size_bytes * index
                for start, count in zip(starts, counts, strict=True)
                for index in range(count)
            ]
        else:
            self.rank_bytes = [count * size_bytes for count in counts]
            self.message = memory = scratch.take(np.dtype(np.uint8), sum(self.rank_bytes))
            places = [size_bytes * index for index in range(sum(counts))]
        super().__init__(plan, memory, places, group)
        self._partials = tree.partials[layout.rank]
        self._tree_order = tree.order
        #: For each pack.
        self._temporaries = [
            [scratch.take(dtype, length) for _ in range(tree.order.temporaries)]
            for length, dtype in self._buffers
        ]
        self._is_of_two = False
        self._mask = Scratch(scratch.take(np.dtype(np.uint8), size_bytes))

    def _combined_here(self, contributions: Sequence[Sequence[Array]]) -> bytes:
        parts = []
        for local, order in self._partials:
            for pack in self._plan.packs:
                for leaf in pack.leaves:
                    column = [leaves[leaf] for leaves in contributions[local]]
                    total, *temporaries = [
                        np.empty(column[0].shape, pack.dtype) for _ in range(1 + order.temporaries)
                    ]
                    order.combine(self._ufunc, column, total, temporaries)
                    parts.append(total.tobytes())
        return b"".join(parts)

    def _reduce(self, place: int, rows: Sequence[Array], total: Array) -> None:
        self._tree_order.combine(self._ufunc, rows, total, self._temporaries[place])
        self._mask.clear()
        settle(total, self._scale, self._mask)


def _memory_of_headers(group: Group) -> tuple[Bytes, Sequence[int]]:
    """Returns where the next headers of all ranks will lie, and where their payloads begin."""
    size_bytes = group.sizes.next_bytes
    memory = group.sizes.memory[size_bytes]
    return memory, range(PAYLOAD_START, memory.size, size_bytes)


class InlineReductions(dict[tuple[Plan, int], InlineReduction | None]):
    """The `InlineReduction` of each plan by headers of each size; None where it has no place there.

    They are made when they are asked for, of the size that the next headers have.
    """

    def __init__(self, group: Group) -> None:
        super().__init__()
        self._group = group
        self._scratch: Scratch | None = None
        tree = tree_of(group.layout.counts)
        self._most_partials = max(map(len, tree.partials))
        self._partials = tree.order.count

    def payload_bytes(self, plan: Plan) -> float:
        """Returns the most bytes that a rank contributes; infinite where there are streams."""
        return plan.small_bytes * (self._most_partials if plan.is_ordered else 1)

    def __missing__(self, key: tuple[Plan, int]) -> InlineReduction | None:
        if len(self) >= _CACHE_SIZE:
            self.clear()
        plan, _ = key
        sizes, payload_bytes = self._group.sizes, self.payload_bytes(plan)
        # Where headers carry nothing, an Allreduce costs no more than what would carry it.
        is_inline = sizes.carries_payload and payload_bytes <= sizes.room_bytes
        reduction = None
        if plan.is_ordered:
            # Every rank gets the contributions of all, where they have an order.
            if plan.small_bytes * self._partials <= _MOST_MESSAGE_BYTES:
                reduction = self._ordered(plan, is_inline=is_inline)
        elif is_inline:
            reduction = InlineReduction(plan, *_memory_of_headers(self._group), self._group)
        if reduction is not None:
            reduction.header_bytes = sizes.size_of(payload_bytes)
        self[key] = reduction
        return reduction

    def _ordered(self, plan: Plan, *, is_inline: bool) -> InlineReduction:
        if self._scratch is None:  # for a message, and for temporaries and a mask of its parts
            self._scratch = Scratch(np.empty(4 * _MOST_MESSAGE_BYTES, np.uint8))
        return OrderedInlineReduction(plan, self._group, self._scratch, is_inline=is_inline)
