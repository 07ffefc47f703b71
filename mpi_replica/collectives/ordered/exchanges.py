"""How the contributions of all replicas to a part meet: each way gives the same bits.

Every rank combines what its replicas contribute, one partial for each subtree that it hosts whole.
Then each rank combines a slice of all partials, and gives its result to all.
"""

from __future__ import annotations

import abc
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ...layout import Layout
from ...transport import Bytes, Transport
from ...tree import tree_of
from ..scratch import ALIGNMENT, Scratch
from .parts import Part
from .settling import settle

__all__ = ["AlltoallExchange", "Exchange", "LocalExchange", "SharedMemoryExchange", "window_bytes"]

Array = np.ndarray[Any, Any]

#: Does an exchange of the transport.
Carry = Callable[..., Any]

# Bytes of a part: the fastest that were measured.
_WINDOW_PART_BYTES = 1 << 19
_MESSAGE_PART_BYTES = 1 << 20
_LEAST_PART_BYTES = 1 << 16  # so much may share memory in a pack

# Of a host: the window, and beside it what all of its ranks need together.
_WINDOW_BYTES = 1 << 24
_MOST_WINDOW_BYTES = 3 << 23
_SCRATCH_BYTES = 1 << 23

# Two ranks should not write to one line of the cache.
_LINE_BYTES = 64


class Exchange(abc.ABC):
    """A way in which parts are combined over the ranks.

    Attributes
    ----------
    part_bytes : int
        The most bytes of a part, in what it accumulates in.
    """

    part_bytes: int

    def __init__(self, transport: Transport, layout: Layout, carry: Carry) -> None:
        self.transport = transport
        self.carry = carry
        tree = tree_of(layout.counts)
        self.order = tree.order
        self.local = tree.partials[layout.rank]
        #: How many partials each rank has, and where those of each begin among all.
        self.counts = [len(partials) for partials in tree.partials]
        self.starts = [0, *itertools.accumulate(self.counts)]
        self.number = self.starts[-1]
        self.has_one_replica_each = all(count == 1 for count in layout.counts)
        # none on a spare
        self.local_temporaries = max((p.order.temporaries for p in self.local), default=0)

    @property
    def scratch_bytes(self) -> int:
        """Bytes that `run` needs at most for its parts."""
        slice_bytes = self.part_bytes // self.transport.size + _LINE_BYTES
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
        """Return the bytes beyond that for what is sent and received."""
        return 0

    def run(
        self,
        parts: Sequence[Part],
        combine: Callable[..., Any],
        scale: int,
        scratch: Scratch,
        timeout_seconds: float | None,
    ) -> None:
        """Reduce the parts; called where all ranks have agreed to.

        Parameters
        ----------
        combine : callable
            Combines two arrays: a ufunc.
        scale : int
            What the results are divided by.
        """
        work = _Work(self, combine, scale, scratch, timeout_seconds)
        for part in parts:
            if not part.length:
                part.deliver(np.empty(0, part.result_dtype))
        self._reduce(work, [part for part in parts if part.length])

    @abc.abstractmethod
    def _reduce(self, work: _Work, parts: Sequence[Part]) -> None:
        """Reduce parts that are not empty."""

    def slices(self, part: Part) -> list[int]:
        """Return where the slices of the ranks begin, and where the last one ends."""
        size, length = self.transport.size, part.length
        line = max(1, _LINE_BYTES // part.dtype.itemsize)
        starts = [length * rank // size // line * line for rank in range(size)]
        return [*starts, length]

    def sent_dtype(self, part: Part) -> np.dtype[Any]:
        """Return the dtype of partials: that of the leaf where each is one replica's."""
        return part.result_dtype if self.has_one_replica_each else part.dtype


class _Work:
    """What all parts of a call have in common."""

    def __init__(
        self,
        exchange: Exchange,
        combine: Callable[..., Any],
        scale: int,
        scratch: Scratch,
        timeout_seconds: float | None,
    ) -> None:
        self.exchange = exchange
        self.scratch = scratch
        self._combine = combine
        self._scale = scale
        self._timeout_seconds = timeout_seconds

    def carry(self, call: Callable[..., Any], *arguments: Any) -> None:
        """Do an exchange of the transport."""
        self.exchange.carry(call, *arguments, self._timeout_seconds)

    def fill(self, part: Part, targets: Sequence[Array]) -> None:
        """Combine what the local replicas contribute: a target for each partial."""
        exchange = self.exchange
        temporaries = self._temporaries(exchange.local_temporaries, targets[0].dtype, part.length)
        for partial, target in zip(exchange.local, targets, strict=True):
            part.gather(partial, self._combine, target, temporaries)

    def total(self, part: Part, arrays: Sequence[Array], target: Array) -> None:
        """Combine partials, or slices of them, into the result."""
        order = self.exchange.order
        wide = target
        if target.dtype != part.dtype:
            wide = self.scratch.take(part.dtype, target.size)
        temporaries = self._temporaries(order.temporaries, part.dtype, target.size)
        order.combine(self._combine, arrays, wide, temporaries)
        self.settle(wide, target)

    def settle(self, wide: Array, target: Array) -> None:
        """Do what is left to do to a total, and round it into `target` if that is another array."""
        settle(wide, self._scale, self.scratch)
        if wide is not target:
            np.copyto(target, wide, casting="unsafe")

    def _temporaries(self, number: int, dtype: np.dtype[Any], length: int) -> list[Array]:
        return [self.scratch.take(dtype, length) for _ in range(number)]


class LocalExchange(Exchange):
    """All replicas are on this rank."""

    part_bytes = _MESSAGE_PART_BYTES

    def _reduce(self, work: _Work, parts: Sequence[Part]) -> None:
        for part in parts:
            work.scratch.clear()
            # The tree has one partial, which lies where the result goes, if it can.
            result = wide = part.result
            if wide is None or part.result_dtype != part.dtype:
                wide = work.scratch.take(part.dtype, part.length)
            work.fill(part, [wide])
            work.settle(wide, wide if result is None else result)
            part.deliver(wide if result is None else None)


class AlltoallExchange(Exchange):
    """Each rank is given its slice of all partials by ``Alltoallv``."""

    def __init__(self, transport: Transport, layout: Layout, carry: Carry) -> None:
        super().__init__(transport, layout, carry)
        ranks = max(map(transport.hosts.count, transport.hosts))
        buffers = 3 + 2 * max(self.counts) + self.number // transport.size + self.order.temporaries
        share = _SCRATCH_BYTES // (ranks * buffers)
        self.part_bytes = max(_LEAST_PART_BYTES, min(_MESSAGE_PART_BYTES, share))

    def _message_bytes(self, slice_bytes: int) -> int:
        return 2 * len(self.local) * self.part_bytes + self.number * slice_bytes

    def _reduce(self, work: _Work, parts: Sequence[Part]) -> None:
        for part in parts:
            work.scratch.clear()
            self._reduce_part(work, part)

    def _reduce_part(self, work: _Work, part: Part) -> None:
        scratch, sent, rank = work.scratch, self.sent_dtype(part), self.transport.rank
        starts = self.slices(part)
        mine = slice(starts[rank], starts[rank + 1])
        length = mine.stop - mine.start
        pairs = list(itertools.pairwise(starts))
        given = scratch.take(sent, length * self.number)
        self._exchange_partials(work, part, sent, pairs, given)
        result = part.result
        target = scratch.take(part.result_dtype, part.length) if result is None else result
        work.total(part, list(given.reshape(self.number, length)), target[mine])
        counts = [(stop - start) * target.itemsize for start, stop in pairs]
        gather = self.transport.all_gather_blocks
        work.carry(gather, None, target.view(np.uint8), counts)
        part.deliver(target if result is None else None)

    def _exchange_partials(
        self,
        work: _Work,
        part: Part,
        sent: np.dtype[Any],
        pairs: Sequence[tuple[int, int]],
        given: Array,
    ) -> None:
        """Give each rank its slice of this rank's partials, and fill `given` with one's own."""
        number, scratch = len(self.local), work.scratch
        send = part.contribution(sent) if number == 1 else None
        if send is None:
            partials = [scratch.take(sent, part.length) for _ in range(number)]
            work.fill(part, partials)
            send = partials[0]
            if number > 1:  # those of each rank beside each other
                send = scratch.take(sent, part.length * number)
                slices = [partial[start:stop] for start, stop in pairs for partial in partials]
                np.concatenate(slices, out=send)
        counts = [(stop - start) * number * sent.itemsize for start, stop in pairs]
        given_counts = [given.nbytes // self.number * count for count in self.counts]
        exchange = self.transport.all_to_all
        work.carry(exchange, send.view(np.uint8), counts, given.view(np.uint8), given_counts)


def window_bytes(layout: Layout) -> tuple[int, int]:
    """Return the bytes of a part in a window, and of the window; 0 where it would be too large."""
    buffers = 2 * tree_of(layout.counts).order.count + 2
    part_bytes = min(_WINDOW_PART_BYTES, _WINDOW_BYTES // buffers)
    part_bytes = max(_LEAST_PART_BYTES, part_bytes // _LINE_BYTES * _LINE_BYTES)
    size = part_bytes * buffers
    return (part_bytes, size) if size <= _MOST_WINDOW_BYTES else (0, size)


class SharedMemoryExchange(Exchange):
    """All ranks put their partials into one window, and combine a slice of them there.

    While ranks put a part there they combine the one before it, and take out the result of the one
    before that: everything lies there twice, and one barrier comes between two steps.
    """

    def __init__(self, transport: Transport, layout: Layout, carry: Carry, window: Bytes) -> None:
        super().__init__(transport, layout, carry)
        self._window = window
        self.part_bytes, _ = window_bytes(layout)

    def _reduce(self, work: _Work, parts: Sequence[Part]) -> None:
        if not parts:
            return
        for step in range(len(parts) + 2):
            work.scratch.clear()
            if step < len(parts):
                self._give(work, parts[step], step)
            if 1 <= step <= len(parts):
                self._combine(work, parts[step - 1], step - 1)
            if step >= 2:
                part = parts[step - 2]
                part.deliver(self._total(part, step - 2))
            if step <= len(parts):
                work.carry(self.transport.barrier)

    def _give(self, work: _Work, part: Part, step: int) -> None:
        """Put this rank's partials into the window."""
        rank = self.transport.rank
        mine = self._partials(part, step)[self.starts[rank] : self.starts[rank + 1]]
        own = self._own(part)
        if own is None:
            work.fill(part, mine)
            return
        place = self._place_of_slice(part)  # nobody else reads this one
        np.copyto(mine[0][: place.start], own[: place.start])
        np.copyto(mine[0][place.stop :], own[place.stop :])

    def _combine(self, work: _Work, part: Part, step: int) -> None:
        """Combine this rank's slice of all partials."""
        place = self._place_of_slice(part)
        slices = [partial[place] for partial in self._partials(part, step)]
        own = self._own(part)
        if own is not None:
            slices[self.starts[self.transport.rank]] = own[place]
        total = self._total(part, step)[place]
        if total.dtype == part.dtype:
            work.total(part, slices, total)
            return
        # Rounding stores number by number: two to three times slower where each has to wait for a
        # line that another core has read before.
        rounded = work.scratch.take(total.dtype, total.size)
        work.total(part, slices, rounded)
        np.copyto(total, rounded)

    def _own(self, part: Part) -> Array | None:
        """Return this rank's partial where it lies in memory already."""
        return part.contribution(self.sent_dtype(part)) if len(self.local) == 1 else None

    def _place_of_slice(self, part: Part) -> slice:
        starts, rank = self.slices(part), self.transport.rank
        return slice(starts[rank], starts[rank + 1])

    def _partials(self, part: Part, step: int) -> list[Array]:
        first = step % 2 * self.number
        dtype = self.sent_dtype(part)
        return [self._place(first + index, dtype, part.length) for index in range(self.number)]

    def _total(self, part: Part, step: int) -> Array:
        return self._place(2 * self.number + step % 2, part.result_dtype, part.length)

    def _place(self, index: int, dtype: np.dtype[Any], length: int) -> Array:
        start = index * self.part_bytes
        return self._window[start : start + length * dtype.itemsize].view(dtype)
