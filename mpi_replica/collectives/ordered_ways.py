"""How the contributions of all replicas to a part meet in one order, on every layout.

Every rank combines what its replicas contribute, one partial for each subtree of the tree over the
replicas that it hosts whole; then each rank combines a slice of all partials, and gives its result
to all. Two partials, of two ranks, have no order: what MPI combines as numpy does goes straight
there. Sums of floats of 2 bytes are always made in this order: where each rank has one replica its
partial travels as it is, which is half of what it accumulates in.
"""

from __future__ import annotations

import collections
import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ..core.array_ways import Array
from ..core.tree import Partial, tree_of
from ..ranks.transport import ALIGNMENT
from .agreement.group import Group
from .agreement.steps import AllToAll, Gather, Steps
from .combine import combine_of
from .parts import Part
from .plan import mpi_agrees
from .settlement import settle
from .ways import Straight, Way, Work

# Bytes of a part: the fastest that were measured.
_MESSAGE_PART_BYTES = 1 << 20
LEAST_PART_BYTES = 1 << 16  # so much may share memory in a pack

# What all ranks of a host need together for a part.
_SCRATCH_BYTES = 1 << 23

#: Two ranks should not write to one line of the cache.
LINE_BYTES = 64


class OrderedWay(Way):
    """A way that combines in the order of the tree over the replicas.

    Attributes
    ----------
    part_bytes : int
        The most bytes of a part, in what it accumulates in.
    """

    part_bytes: int

    def __init__(self, group: Group) -> None:
        super().__init__(group)
        layout = group.layout
        tree = tree_of(layout.counts)
        self.order = tree.order
        self.local: Sequence[Partial] = tree.partials[layout.rank]
        #: How many partials each rank has, and where those of each begin among all.
        self.counts = np.array([len(partials) for partials in tree.partials])
        self.starts = [0, *itertools.accumulate(self.counts.tolist())]
        self.number: int = self.starts[-1]
        # none on a spare
        self.local_temporaries = max((p.order.temporaries for p in self.local), default=0)

    @property
    def scratch_bytes(self) -> int:
        """Bytes that `reduce` needs at most for a part."""
        slice_bytes = self.part_bytes // self.size + LINE_BYTES
        slice_buffers = self.order.temporaries + 3  # a total, a mask, and a rounded total
        part_buffers = self.local_temporaries + 1
        arrays = 4 + part_buffers + slice_buffers + 2 * len(self.local)
        return (
            part_buffers * self.part_bytes
            + slice_buffers * slice_bytes
            + arrays * ALIGNMENT
            + self._message_bytes(slice_bytes)
        )

    def _message_bytes(self, slice_bytes: int) -> int:
        """Returns the bytes beyond that for what is sent and received."""
        return 0

    def slices(self, part: Part) -> npt.NDArray[np.int64]:
        """Returns where the slices of the ranks begin, and where the last one ends."""
        starts: npt.NDArray[np.int64] = self._start_of_slice(part, np.arange(self.size + 1))
        starts[-1] = part.length
        return starts

    def own_slice(self, part: Part) -> slice:
        """Returns the slice of this rank."""
        rank = self.rank
        is_last = rank == self.size - 1
        stop = part.length if is_last else self._start_of_slice(part, rank + 1)
        return slice(self._start_of_slice(part, rank), stop)

    def _start_of_slice(self, part: Part, rank: Any) -> Any:
        line = max(1, LINE_BYTES // part.dtype.itemsize)
        return part.length * rank // self.size // line * line

    def sent_dtype(self, part: Part) -> np.dtype[Any]:
        """Returns the dtype of partials: that of the leaf where each is one replica's."""
        return part.result_dtype if self.layout.has_one_each else part.dtype

    def fill(self, work: Work, part: Part, targets: Sequence[Array]) -> None:
        """Combines what the local replicas contribute: a target for each partial."""
        scratch, dtype = work.scratch, targets[0].dtype
        combine = combine_of(work.op, part.dtype)
        temporaries = [scratch.take(dtype, part.length) for _ in range(self.local_temporaries)]
        for partial, target in zip(self.local, targets, strict=True):
            part.gather(partial, combine, target, temporaries)

    def total(self, work: Work, part: Part, arrays: list[Array] | Array, target: Array) -> None:
        """Combines partials, or slices of them, into the result.

        Where they are one array it is written to.
        """
        scratch, size, order = work.scratch, target.size, self.order
        combine = combine_of(work.op, part.dtype)
        wide = target if target.dtype == part.dtype else scratch.take(part.dtype, size)
        if order.has_levels and isinstance(arrays, np.ndarray) and arrays.dtype == part.dtype:
            order.combine_rows(combine, arrays, wide)
        else:
            temporaries = [scratch.take(part.dtype, size) for _ in range(order.temporaries)]
            order.combine(combine, list(arrays), wide, temporaries)
        round_into(target, wide, work)


def round_into(target: Array, wide: Array, work: Work) -> None:
    """Does what is left to do to a total, and rounds it into `target` if that is another array."""
    settle(wide, work.scale, work.scratch)
    if wide is not target:
        np.copyto(target, wide, casting="unsafe")


class Here(OrderedWay):
    """All replicas are on this rank."""

    part_bytes = _MESSAGE_PART_BYTES

    def reduce(self, work: Work, parts: Iterable[Part]) -> Steps[None]:
        for part in parts:
            work.scratch.clear()
            # The tree has one partial, which lies where the result goes, if it can.
            result = wide = part.result
            if wide is None or part.result_dtype != part.dtype:
                wide = work.scratch.take(part.dtype, part.length)
            self.fill(work, part, [wide])
            round_into(wide if result is None else result, wide, work)
            part.deliver(wide if result is None else None)
        yield from ()


class Scattered(OrderedWay):
    """Each rank is given its slice of all partials by ``Alltoallv``."""

    def __init__(self, group: Group, most_part_bytes: int = _MESSAGE_PART_BYTES) -> None:
        super().__init__(group)
        if most_part_bytes > _MESSAGE_PART_BYTES and self.layout.has_one_each:
            self.part_bytes = most_part_bytes
            return
        ranks = max(collections.Counter(group.hosts).values())
        buffers = 3 + 2 * int(self.counts.max()) + self.number // self.size + self.order.temporaries
        share = _SCRATCH_BYTES // (ranks * buffers)
        self.part_bytes = max(LEAST_PART_BYTES, min(_MESSAGE_PART_BYTES, share))

    def _message_bytes(self, slice_bytes: int) -> int:
        return 2 * len(self.local) * self.part_bytes + self.number * slice_bytes

    def reduce(self, work: Work, parts: Iterable[Part]) -> Steps[None]:
        scratch = work.scratch
        for part in parts:
            scratch.clear()
            sent = self.sent_dtype(part)
            starts = self.slices(part)
            lengths = np.diff(starts)
            mine = self.own_slice(part)
            length = mine.stop - mine.start
            send = self._sent(work, part, sent, starts)
            receive = scratch.take(sent, length * self.number)
            yield AllToAll(
                send.view(np.uint8),
                (lengths * (len(self.local) * sent.itemsize)).tolist(),
                receive.view(np.uint8),
                (self.counts * (length * sent.itemsize)).tolist(),
            )
            result = part.result
            target = scratch.take(part.result_dtype, part.length) if result is None else result
            self.total(work, part, receive.reshape(self.number, length), target[mine])
            counts = (lengths * target.itemsize).tolist()
            yield Gather(None, target.view(np.uint8), counts)
            part.deliver(target if result is None else None)

    def _sent(
        self, work: Work, part: Part, sent: np.dtype[Any], starts: npt.NDArray[np.int64]
    ) -> Array:
        """Returns this rank's partials, those of each rank's slice beside each other."""
        number, scratch = len(self.local), work.scratch
        send = part.contribution(sent) if number == 1 else None
        if send is not None:
            return send
        partials = [scratch.take(sent, part.length) for _ in range(number)]
        self.fill(work, part, partials)
        if number == 1:
            return partials[0]
        send = scratch.take(sent, part.length * number)
        pairs = itertools.pairwise(starts.tolist())
        slices = [partial[start:stop] for start, stop in pairs for partial in partials]
        np.concatenate(slices, out=send)
        return send


class OfTwo(Scattered):
    """Two ranks with one partial each: the sum of two numbers is the same in either order.

    So it needs no window. Only what MPI would combine in another way than numpy is scattered.
    """

    def __init__(self, group: Group, most_part_bytes: int) -> None:
        super().__init__(group, most_part_bytes)
        (partial,) = self.local
        self._straight = Straight(group, partial)

    def reduce(self, work: Work, parts: Iterable[Part]) -> Steps[None]:
        for part in parts:
            if part.result_dtype == part.dtype and mpi_agrees(part.dtype, work.op):
                yield from self._straight.reduce(work, [part])
            else:
                yield from super().reduce(work, [part])
