"""The movement of a reduction that does not fit into the header: part by part, each its way."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..core.array_libraries import Array
from ..core.options import ReduceOp
from .agreement.group import Group
from .agreement.steps import Steps
from .choice_of_way import ChoiceOfWay
from .delivery import PackDelivery
from .ordered_ways import OrderedWay
from .parts import ALL_CHUNKS, PackPart, Part, StreamPart, groups_of_chunks
from .plan import Pack, Plan, Stream
from .scratch import ALIGNMENT, Scratch
from .ways import Work

# Where each rank has one replica numpy has nothing to do for these, and so nothing to warn of.
_BY_MPI_ALONE = (ReduceOp.SUM, ReduceOp.PROD)


class Movement:
    """The movement of one reduction's data; all that it needs is allocated when it is made.

    Parameters
    ----------
    ordered : OrderedWay, optional
        How all parts are combined, where an order is asked for.
    contributions, results : sequence of sequence of array
        The leaves of each local replica, and where their results go.
    has_outputs : bool
        Whether `results` has memory for the small leaves, too.
    is_in_place : bool
        Whether each large result is the memory of its leaf, on all ranks.
    """

    def __init__(
        self,
        group: Group,
        plan: Plan,
        ordered: OrderedWay | None,
        contributions: Sequence[Sequence[Array]],
        results: Sequence[list[Array]],
        *,
        has_outputs: bool,
        is_in_place: bool,
    ) -> None:
        self._group = group
        self._plan = plan
        self._ways: ChoiceOfWay = group.kept[ChoiceOfWay]
        self._ordered = ordered or self._ways.narrow
        self._contributions = contributions
        self._results = results
        self._delivery = PackDelivery(plan, results, has_outputs=has_outputs)
        scratch_bytes = plan.scratch_bytes
        if plan.is_ordered:
            scratch_bytes = max(scratch_bytes, self._ordered.scratch_bytes)
        scratch = Scratch(group.scratch(scratch_bytes + ALIGNMENT))
        self._work = Work(group, plan.op, scratch, is_in_place=is_in_place)

    def steps(self) -> Steps[None]:
        """Moves everything."""
        plan = self._plan
        if self._group.layout.has_one_each and not plan.is_ordered and plan.op in _BY_MPI_ALONE:
            return self._steps()
        return self._group.quiet(self._steps())

    def _steps(self) -> Steps[None]:
        """Moves what has no order first, and all else together, so that a window is never idle."""
        plan, work, unordered = self._plan, self._work, self._ways.unordered
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
        part = PackPart(pack, chunks, self._contributions, self._delivery)
        if part.length:
            return [part]
        self._work.scratch.clear()
        part.deliver(self._work.scratch.take(part.dtype, 0))
        return []

    def _pieces(self, stream: Stream) -> Iterator[Part]:
        group = self._group
        large = group.layout.has_one_each and (self._work.is_in_place or group.is_crowded)
        for piece in stream.pieces(large=large, far=group.is_between_hosts):
            yield StreamPart(stream, piece, self._contributions, self._results)

    def _ordered_parts(self) -> Iterator[Part]:
        part_bytes = self._ordered.part_bytes
        for pack in self._plan.packs:
            if pack.is_ordered:
                for chunks in groups_of_chunks(pack, part_bytes):
                    yield from self._parts_of_pack(pack, chunks)
        for stream in self._plan.streams:
            if stream.is_ordered:
                most = min(part_bytes // stream.dtype.itemsize, stream.piece)
                for piece in stream.cut(most):
                    yield StreamPart(stream, piece, self._contributions, self._results)
