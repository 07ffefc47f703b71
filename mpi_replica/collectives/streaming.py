"""The movement of a reduction that does not fit into the header: part by part, each its way."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from operator import itemgetter
from typing import Any

import numpy as np

from .delivery import PackDelivery
from .group import Group
from .packing import Pack, Plan, Stream
from .parts import PackPart, Part, StreamPart, groups_of_chunks
from .scratch import ALIGNMENT, Scratch
from .steps import Steps
from .ways import OrderedWay, Way, Ways, Work

__all__ = ["Movement"]

Array = np.ndarray[Any, Any]


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
        self._ways: Ways = group.kept[Ways]
        self._ordered = ordered or self._ways.narrow
        self._contributions = contributions
        self._results = results
        self._is_in_place = is_in_place
        self._delivery = PackDelivery(plan, results, has_outputs=has_outputs)
        scratch_bytes = plan.scratch_bytes
        if plan.is_ordered:
            scratch_bytes = max(scratch_bytes, self._ordered.scratch_bytes)
        scratch = Scratch(group.scratch(scratch_bytes + ALIGNMENT))
        self._work = Work(group, plan.op, scratch, is_in_place=is_in_place)

    def steps(self) -> Steps[None]:
        """Move everything."""
        return self._group.quiet(self._steps())

    def _steps(self) -> Steps[None]:
        for way, parts in itertools.groupby(self._parts(), key=itemgetter(0)):
            yield from way.reduce(self._work, map(itemgetter(1), parts))

    def _parts(self) -> Iterator[tuple[Way, Part]]:
        """Yield the parts that are not empty, each with its way."""
        for pack in self._plan.packs:
            for way, part in self._parts_of_pack(pack):
                if part.length:
                    yield way, part
                else:
                    part.deliver(self._work.scratch.take(part.dtype, 0))
        for stream in self._plan.streams:
            yield from self._parts_of_stream(stream)

    def _parts_of_pack(self, pack: Pack) -> Iterator[tuple[Way, Part]]:
        contributions, delivery = self._contributions, self._delivery
        if not pack.is_ordered:
            way = self._ways.unordered(pack.dtype, self._plan.op)
            yield way, PackPart(pack, slice(None), contributions, delivery)
            return
        for chunks in groups_of_chunks(pack, self._ordered.part_bytes):
            yield self._ordered, PackPart(pack, chunks, contributions, delivery)

    def _parts_of_stream(self, stream: Stream) -> Iterator[tuple[Way, Part]]:
        if stream.is_ordered:
            way: Way = self._ordered
            most = min(self._ordered.part_bytes // stream.dtype.itemsize, stream.piece)
            pieces = stream.cut(most)
        else:
            group = self._group
            way = self._ways.unordered(stream.dtype, self._plan.op)
            large = group.layout.has_one_each and (self._is_in_place or group.is_crowded)
            pieces = stream.pieces(large=large, far=group.is_between_hosts)
        for piece in pieces:
            yield way, StreamPart(stream, piece, self._contributions, self._results)
