"""The movement of a reduction that does not fit into the header: part by part, each its way."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from ..core.array_ways import Array
from ..core.options import ReduceOp
from ..ranks.transport import ALIGNMENT
from .agreement.group import Group
from .agreement.steps import Reduce, Steps
from .choice_of_way import ChoiceOfWay
from .delivery import PackDelivery
from .ordered_ways import OfTwo, OrderedWay
from .parts import ALL_CHUNKS, PackPart, Part, StreamPart, groups_of_chunks
from .plan import Pack, Plan, Stream
from .scratch import Scratch
from .settlement import divide, settle
from .ways import Work

# Where each rank has one replica numpy has nothing to do for these, and so nothing to warn of.
_BY_MPI_ALONE = (ReduceOp.SUM, ReduceOp.PROD)


class Task(NamedTuple):
    """One reduction's data, on this rank."""

    group: Group
    plan: Plan
    #: The leaves of each local replica, and where their results go.
    contributions: Sequence[Sequence[Array]]
    results: Sequence[list[Array]]
    #: Whether `results` are the user's, and have memory for the small leaves, too.
    has_outputs: bool
    #: Whether each large result is the memory of its leaf, on all ranks.
    is_in_place: bool

    def most_items(self, stream: Stream) -> int:
        """Returns the most items of a piece."""
        group = self.group
        has_one_each = group.layout.has_one_each
        return stream.most_items(
            large=has_one_each and (self.is_in_place or group.is_crowded),
            far=group.is_between_hosts,
            kept=has_one_each and (self.has_outputs or stream.is_lent),
        )


class OnePiece:
    """The movement of one leaf, of each rank's only replica, by one ``Allreduce``.

    It is what `Movement` does, without looking for parts and ways: half the Python of a call.
    """

    def __init__(self, task: Task, send: Array | None, total: Array) -> None:
        group, plan = task.group, task.plan
        self._reduce = Reduce(send, total, plan.op)
        self._scale = group.layout.num_replicas if plan.op is ReduceOp.MEAN else 1
        self._quietly = group.quietly
        #: Where it must be the same on all layouts: the result, flat, and memory for a mask.
        self._settled: tuple[Array, Scratch] | None = None
        if plan.is_ordered:
            mask_bytes = 2 * total.size  # a complex number is two
            self._settled = total.reshape(-1), Scratch(group.scratch(mask_bytes + ALIGNMENT))

    def steps(self) -> Steps[None]:
        """Moves everything."""
        yield self._reduce
        if self._settled is not None:
            flat, scratch = self._settled
            self._quietly(settle, flat, self._scale, scratch)
        elif self._scale != 1:
            self._quietly(divide, self._reduce.total, self._scale)


def one_piece(task: Task, ordered: OrderedWay | None) -> OnePiece | None:
    """Returns the movement of a leaf that MPI can take as it is; None for any other."""
    layout, plan = task.group.layout, task.plan
    stream = plan.plain_stream
    if stream is None or not layout.has_one_each or layout.size == 1:
        return None
    most = task.most_items(stream)
    if stream.is_ordered:
        if not isinstance(ordered, OfTwo):
            return None
        most = min(most, ordered.part_bytes // stream.dtype.itemsize)
    leaf, total = task.contributions[0][0], task.results[0][0]
    flags = leaf.flags
    if leaf.size > most or not flags.c_contiguous or not flags.aligned:
        return None
    if task.has_outputs and not task.is_in_place and np.may_share_memory(leaf, total):
        return None  # MPI must not be given the memory of the result beside it
    return OnePiece(task, None if task.is_in_place else leaf, total)


class Movement:
    """The movement of one reduction's data; all that it needs is allocated when it is made.

    Parameters
    ----------
    task : Task
    ordered : OrderedWay, optional
        How all parts are combined, where an order is asked for.
    """

    def __init__(self, task: Task, ordered: OrderedWay | None) -> None:
        group, plan = task.group, task.plan
        self._task = task
        self._ways: ChoiceOfWay = group.kept[ChoiceOfWay]
        self._ordered = ordered or self._ways.narrow
        self._delivery = PackDelivery(plan, task.results, has_outputs=task.has_outputs)
        scratch_bytes = plan.scratch_bytes
        if plan.is_ordered:
            scratch_bytes = max(scratch_bytes, self._ordered.scratch_bytes)
        scratch = Scratch(group.scratch(scratch_bytes + ALIGNMENT))
        self._work = Work(group, plan.op, scratch, is_in_place=task.is_in_place)

    def steps(self) -> Steps[None]:
        """Moves everything."""
        plan, group = self._task.plan, self._task.group
        if group.layout.has_one_each and not plan.is_ordered and plan.op in _BY_MPI_ALONE:
            return self._steps()
        return group.quiet(self._steps())

    def _steps(self) -> Steps[None]:
        """Moves what has no order first, and all else together, so that a window is never idle."""
        plan, work, unordered = self._task.plan, self._work, self._ways.unordered
        for pack in plan.packs:
            if not pack.is_ordered:
                parts = self._parts_of_pack(pack, ALL_CHUNKS)
                yield from unordered(pack.dtype, plan.op).reduce(work, parts)
        for stream in plan.streams:
            if not stream.is_ordered:
                yield from unordered(stream.dtype, plan.op).reduce(work, self._pieces(stream))
        if plan.is_ordered:
            yield from self._ordered.reduce(work, self._ordered_parts())

    def _parts_of_pack(self, pack: Pack, chunks: slice) -> list[Part]:
        """Returns the part of these chunks; none where they are empty, which has its results."""
        part = PackPart(pack, chunks, self._task.contributions, self._delivery)
        if part.length:
            return [part]
        self._work.scratch.clear()
        part.deliver(self._work.scratch.take(part.dtype, 0))
        return []

    def _pieces(self, stream: Stream) -> Iterator[Part]:
        for piece in stream.cut(self._task.most_items(stream)):
            yield StreamPart(stream, piece, self._task.contributions, self._task.results)

    def _ordered_parts(self) -> Iterator[Part]:
        part_bytes = self._ordered.part_bytes
        for pack in self._task.plan.packs:
            if pack.is_ordered:
                for chunks in groups_of_chunks(pack, part_bytes):
                    yield from self._parts_of_pack(pack, chunks)
        for stream in self._task.plan.streams:
            if stream.is_ordered:
                most = min(part_bytes // stream.dtype.itemsize, stream.piece)
                for piece in stream.cut(most):
                    yield StreamPart(stream, piece, self._task.contributions, self._task.results)
