"""Reductions that every rank does for itself: it has the contributions of all.

They travel in the header, and are combined one after the other. Where an order is asked for it is
that of the tree over the replicas. What is too large for the next header has a message of its own,
up to some size.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..core.array_ways import Array
from ..core.bounded_cache import BoundedCache
from ..core.options import ReduceOp
from ..core.tree import in_a_row, tree_of
from ..ranks.transport import Bytes, Payload
from .agreement.group import Group
from .agreement.header import INLINE_BYTES, PAYLOAD_START
from .combine import Combine, combine_of
from .extremes import are_keyed
from .plan import Plan, Slot, cut
from .scratch import Scratch
from .settlement import divide, settle

# What a rank is given of all others in a message of its own, at most: adding it up costs more then.
_MOST_MESSAGE_BYTES = 1 << 16
# Between hosts it may be more where each rank gives this little. On its way over the network that
# takes less than an Alltoallv, which waits for each rank in turn: with 1 us at 2 GB/s, or more.
_LITTLE_BYTES = 1 << 11
_MOST_FAR_MESSAGE_BYTES = 1 << 22

#: Of a pack: what combines, what is combined, memory to do it in, and slots.
_Part = tuple[Combine, Array | list[Array], list[Array], tuple[Slot, ...]]


class InlineReduction:
    """A plan without streams, and where the contributions of all ranks to it lie.

    Made once for each plan, and size of the headers.

    Parameters
    ----------
    plan : Plan
    group : Group
    scratch : Scratch
        Memory that is used while the call lasts.
    is_inline : bool
        Whether the contributions of every rank fit into its header.

    Attributes
    ----------
    message : array of bytes, optional
        Where the contributions of all ranks are put that don't travel in headers.
    rank_bytes : sequence of int
        How many bytes there are from each rank.
    header_bytes : int
        Of the header in which what a rank contributes would travel.
    """

    message: Bytes | None = None
    rank_bytes: Sequence[int] = ()
    header_bytes: int

    def __init__(self, plan: Plan, group: Group, scratch: Scratch, *, is_inline: bool) -> None:
        layout = group.layout
        self._quietly = group.quietly
        self._plan = plan
        #: What combines the contributions to each pack.
        self._combines: list[Combine] = [combine_of(plan.op, pack.dtype) for pack in plan.packs]
        self._scale = layout.num_replicas if plan.op is ReduceOp.MEAN else 1
        # Otherwise a NaN is whichever the processor gives.
        are_floats = any(are_keyed(pack.dtype, plan.op) for pack in plan.packs)
        self._is_settled = plan.is_ordered or are_floats
        self._leaves = len(plan.results)
        self._plain_order = plan.plain_order
        if plan.is_ordered:
            tree = tree_of(layout.counts)
            self._partials, self._order = tree.partials[layout.rank], tree.order
            counts = [len(partials) for partials in tree.partials]
        else:
            self._partials = [in_a_row(len(layout.local_replica_ids))]
            self._order = in_a_row(layout.size).order
            counts = [1] * layout.size
        # As it is mostly: nothing is to be done but one call of the ufunc, or two.
        self._is_of_two = self._order.count == 2 and not self._is_settled
        chunks = [chunk for pack in plan.packs for chunk in pack.chunks]
        slots = [slot for chunk in chunks for slot in chunk.slots]
        # Where results are rounded, numpy would warn of overflow, too.
        self._is_rounded = any(slot.dtype is not None for slot in slots)
        self._buffers = [(pack.length, pack.dtype) for pack in plan.packs]

        size_bytes = int(plan.small_bytes)
        scratch.clear()
        if is_inline:
            header_bytes = group.sizes.next_bytes
            memory = group.sizes.memory[header_bytes]
            places = [
                PAYLOAD_START + header_bytes * rank + size_bytes * index
                for rank, count in enumerate(counts)
                for index in range(count)
            ]
        else:
            self.rank_bytes = [count * size_bytes for count in counts]
            self.message = memory = scratch.take(np.dtype(np.uint8), sum(self.rank_bytes))
            places = [size_bytes * index for index in range(sum(counts))]
        self._parts: list[_Part] = []
        # They lie at equal distances where each rank has as many.
        distances = {after - before for before, after in itertools.pairwise(places)}
        has_rows = self._order.has_levels and len(distances) == 1
        start = 0
        for pack, combine in zip(plan.packs, self._combines, strict=True):
            length, dtype = pack.length, pack.dtype
            (chunk,) = pack.chunks  # what is so small fits into one
            rows: Array | list[Array]
            temporaries: list[Array] = []
            if has_rows:
                place, (distance,) = places[0] + start, distances
                strides = distance, dtype.itemsize
                rows = np.ndarray((len(places), length), dtype, memory.data, place, strides)
            else:
                stop = start + pack.size_bytes
                rows = [memory[place + start : place + stop].view(dtype) for place in places]
                temporaries = [scratch.take(dtype, length) for _ in range(self._order.temporaries)]
            self._parts.append((combine, rows, temporaries, chunk.slots))
            start += pack.size_bytes
        self._mask = Scratch(scratch.take(np.dtype(np.uint8), size_bytes))

    def prepare(self, contributions: Sequence[Sequence[Array]]) -> tuple[Payload, list[Array]]:
        """Returns what this rank sends, its replicas combined, and memory for `results`.

        Before the ranks agree: it may fail.
        """
        totals = []
        for length, dtype in self._buffers:
            totals.append(np.empty(length, dtype))
        order = self._plain_order
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
        for local, order in self._partials:
            for pack, combine in zip(self._plan.packs, self._combines, strict=True):
                for leaf in pack.leaves:
                    column = [leaves[leaf] for leaves in contributions[local]]
                    parts.append(order.combined(combine, column, pack.dtype).tobytes())
        return b"".join(parts)

    def results(self, totals: Sequence[Array]) -> list[Any]:
        """Returns the leaves, combined over the ranks.

        They are views of `totals` that share no item, and numpy scalars.
        """
        quietly = self._quietly
        results: list[Any] = [None] * self._leaves
        place = 0
        for combine, rows, temporaries, slots in self._parts:
            total = totals[place]
            if self._is_of_two:
                quietly(combine, *rows, out=total)  # without a frame of Python's
                if self._scale != 1:
                    quietly(divide, total, self._scale)
            else:
                quietly(self._reduce, combine, rows, temporaries, total)
            if self._is_rounded:
                quietly(cut, slots, total, results)
            else:
                cut(slots, total, results)
            place += 1
        return results

    def _reduce(
        self,
        combine: Combine,
        rows: Array | list[Array],
        temporaries: Sequence[Array],
        total: Array,
    ) -> None:
        """Combines the contributions to a pack."""
        if isinstance(rows, list):
            self._order.combine(combine, rows, total, temporaries)
        else:
            self._order.combine_rows(combine, rows, total)
        if self._is_settled:
            self._mask.clear()
            settle(total, self._scale, self._mask)
        elif self._scale != 1:
            divide(total, self._scale)


class InlineReductions(BoundedCache[tuple[Plan, int], InlineReduction | None]):
    """The `InlineReduction` of each plan by headers of each size; None where it has no place there.

    They are made when they are asked for, of the size that the next headers have.
    """

    def __init__(self, group: Group) -> None:
        super().__init__(most_entries=1024)
        self._group = group
        is_far = group.is_between_hosts
        self._most_bytes_of_little = _MOST_FAR_MESSAGE_BYTES if is_far else _MOST_MESSAGE_BYTES
        # For a message, and for temporaries and a mask of its parts.
        self._scratch = Scratch(np.empty(4 * self._most_bytes_of_little, np.uint8))
        tree = tree_of(group.layout.counts)
        self._most_partials = max(map(len, tree.partials))
        self._partials = tree.order.count

    def __missing__(self, key: tuple[Plan, int]) -> InlineReduction | None:
        plan, _ = key
        sizes = self._group.sizes
        # What a rank contributes at most; infinite where there are streams.
        payload_bytes = plan.small_bytes * (self._most_partials if plan.is_ordered else 1)
        # Where headers carry nothing, an Allreduce costs no more than what would carry it.
        is_inline = sizes.carries_payload and payload_bytes <= sizes.room_bytes
        # What larger headers will carry is combined in the same way before they are foreseen: MPI
        # has orders of its own, and the same call would have other bits the next time.
        has_message = sizes.carries_payload and payload_bytes <= sizes.most_room_bytes
        if plan.is_ordered and not has_message:  # it costs less than another way to keep the order
            is_little = payload_bytes <= _LITTLE_BYTES
            most_bytes = self._most_bytes_of_little if is_little else _MOST_MESSAGE_BYTES
            has_message = plan.small_bytes * self._partials <= most_bytes
        reduction = None
        if is_inline or has_message:
            reduction = InlineReduction(plan, self._group, self._scratch, is_inline=is_inline)
            reduction.header_bytes = sizes.size_of(payload_bytes)
        return self.keep(key, reduction, len(plan.results))
