"""How the contributions of all replicas to a part meet.

Where an order is wanted each way gives the same bits: every rank combines what its replicas
contribute, one partial for each subtree of the tree over the replicas that it hosts whole; then
each rank combines a slice of all partials, and gives its result to all. Sums of floats of 2 bytes
are always made so: their partials travel as they are, which is half of what they accumulate in.
"""

from __future__ import annotations

import abc
import itertools
import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from ..layout import Layout
from ..options import CommunicationImplementation, ReduceOp
from ..transport.base import Bytes, SharedMemoryError
from ..tree import Partial, in_a_row, tree_of
from .extremes import are_keyed, extreme, from_keys, to_keys
from .group import Group
from .inline import UFUNCS
from .parts import Part
from .scratch import ALIGNMENT, Scratch
from .settlement import settle
from .steps import AllToAll, Barrier, Gather, OpenWindow, Raise, Reduce, Steps

__all__ = ["OrderedWay", "Way", "Ways", "Work", "window_bytes"]

Array = np.ndarray[Any, Any]

_SHARED_MEMORY = CommunicationImplementation.SHARED_MEMORY
_ALLTOALL = CommunicationImplementation.ALLTOALL

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

_log = logging.getLogger("mpi_replica")


class Work:
    """What all parts of a call have in common."""

    def __init__(
        self, group: Group, op: ReduceOp, scratch: Scratch, *, is_in_place: bool = False
    ) -> None:
        self.op = op
        self.combine: Callable[..., Any] = UFUNCS[op]
        self.scale = group.layout.num_replicas if op is ReduceOp.MEAN else 1
        self.scratch = scratch
        #: Whether each large result is the memory of its leaf, on all ranks.
        self.is_in_place = is_in_place

    def extreme(self, left: Array, right: Array, *, out: Array, **_: Any) -> None:
        """Combine two arrays of floats as MIN or MAX do, with the signature of a ufunc."""
        if left is not out:
            np.copyto(out, left, casting="unsafe")
        used_bytes = self.scratch.used_bytes
        spare = [self.scratch.take(out.dtype, out.size).reshape(out.shape) for _ in range(2)]
        extreme(self.op, out, right, *spare)
        self.scratch.used_bytes = used_bytes


class Way(abc.ABC):
    """A way in which parts are combined over the ranks."""

    def __init__(self, group: Group) -> None:
        self.size, self.rank = group.layout.size, group.layout.rank

    @abc.abstractmethod
    def reduce(self, work: Work, parts: Iterable[Part]) -> Steps[None]:
        """Reduce parts, which are not empty."""


class Straight(Way):
    """By ``Allreduce``, from the leaf into the result where nothing is to be done to it.

    MPI wants "in place" from all ranks or from none: where one has several replicas, all combine in
    the result, or in scratch memory, and reduce that in place.
    """

    def __init__(self, group: Group) -> None:
        super().__init__(group)
        self._has_one_each = group.layout.has_one_each
        self._mine = in_a_row(len(group.layout.local_replica_ids))

    def reduce(self, work: Work, parts: Iterable[Part]) -> Steps[None]:
        scratch, op, scale = work.scratch, work.op, work.scale
        mine, has_one_each = self._mine, self._has_one_each
        is_in_place = work.is_in_place
        for part in parts:
            scratch.clear()
            dtype, send = part.dtype, None
            total = result = part.result
            if total is None:
                total = scratch.take(dtype, part.length)
            if result is None or not has_one_each:
                part.gather(mine, work.combine, total, ())
            elif not is_in_place:
                send = part.contribution(dtype)
                # MPI must not be given the memory of the result beside it.
                if send is None or np.may_share_memory(send, total):
                    send = scratch.take(dtype, part.length)
                    part.gather(mine, work.combine, send, ())
            if dtype.kind == "b":  # MIN and MAX, which MPI knows for integers only
                number = np.dtype(np.uint8)
                yield Reduce(send if send is None else send.view(number), total.view(number), op)
            else:
                yield Reduce(send, total, op)
            if scale != 1:
                np.divide(total, scale, out=total)
            part.deliver(total if result is None else None)


class Keyed(Way):
    """MIN and MAX of floats, by ``Allreduce`` of integers in their place."""

    def __init__(self, group: Group) -> None:
        super().__init__(group)
        self._mine = in_a_row(len(group.layout.local_replica_ids))

    def reduce(self, work: Work, parts: Iterable[Part]) -> Steps[None]:
        scratch, op, mine = work.scratch, work.op, self._mine
        for part in parts:
            scratch.clear()
            total = part.result
            if total is None:
                total = scratch.take(part.dtype, part.length)
            part.gather(mine, work.extreme, total, ())
            if self.size == 1:  # which NaN it is must not depend on the layout
                settle(total, 1, scratch)
            else:
                key = np.dtype(f"i{total.dtype.itemsize}")
                keys, shifted = scratch.take(key, total.size), scratch.take(key, total.size)
                is_nan = scratch.take(np.dtype(np.bool_), total.size)
                to_keys(op, total, keys, shifted, is_nan)
                yield Reduce(None, keys, op)
                from_keys(op, keys, total, shifted, is_nan)
            part.deliver(total if part.result is None else None)


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
        self.counts = [len(partials) for partials in tree.partials]
        self.starts = [0, *itertools.accumulate(self.counts)]
        self.number = self.starts[-1]
        self.has_one_replica_each = all(count == 1 for count in layout.counts)
        # none on a spare
        self.local_temporaries = max((p.order.temporaries for p in self.local), default=0)

    @property
    def scratch_bytes(self) -> int:
        """Bytes that `reduce` needs at most for a part."""
        slice_bytes = self.part_bytes // self.size + _LINE_BYTES
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

    def slices(self, part: Part) -> list[int]:
        """Return where the slices of the ranks begin, and where the last one ends."""
        size, length = self.size, part.length
        line = max(1, _LINE_BYTES // part.dtype.itemsize)
        starts = [length * rank // size // line * line for rank in range(size)]
        return [*starts, length]

    def sent_dtype(self, part: Part) -> np.dtype[Any]:
        """Return the dtype of partials: that of the leaf where each is one replica's."""
        return part.result_dtype if self.has_one_replica_each else part.dtype

    def fill(self, work: Work, part: Part, targets: Sequence[Array]) -> None:
        """Combine what the local replicas contribute: a target for each partial."""
        scratch, dtype = work.scratch, targets[0].dtype
        temporaries = [scratch.take(dtype, part.length) for _ in range(self.local_temporaries)]
        for partial, target in zip(self.local, targets, strict=True):
            part.gather(partial, work.combine, target, temporaries)

    def total(self, work: Work, part: Part, arrays: Sequence[Array], target: Array) -> None:
        """Combine partials, or slices of them, into the result."""
        scratch, size = work.scratch, target.size
        wide = target if target.dtype == part.dtype else scratch.take(part.dtype, size)
        temporaries = [scratch.take(part.dtype, size) for _ in range(self.order.temporaries)]
        self.order.combine(work.combine, arrays, wide, temporaries)
        round_into(target, wide, work)


def round_into(target: Array, wide: Array, work: Work) -> None:
    """Do what is left to do to a total, and round it into `target` if that is another array."""
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

    def __init__(self, group: Group) -> None:
        super().__init__(group)
        ranks = max(map(group.hosts.count, group.hosts))
        buffers = 3 + 2 * max(self.counts) + self.number // self.size + self.order.temporaries
        share = _SCRATCH_BYTES // (ranks * buffers)
        self.part_bytes = max(_LEAST_PART_BYTES, min(_MESSAGE_PART_BYTES, share))

    def _message_bytes(self, slice_bytes: int) -> int:
        return 2 * len(self.local) * self.part_bytes + self.number * slice_bytes

    def reduce(self, work: Work, parts: Iterable[Part]) -> Steps[None]:
        scratch, rank = work.scratch, self.rank
        for part in parts:
            scratch.clear()
            sent = self.sent_dtype(part)
            starts = self.slices(part)
            mine = slice(starts[rank], starts[rank + 1])
            length = mine.stop - mine.start
            pairs = list(itertools.pairwise(starts))
            send = self._sent(work, part, sent, pairs)
            given = scratch.take(sent, length * self.number)
            number = len(self.local)
            counts = [(stop - start) * number * sent.itemsize for start, stop in pairs]
            given_counts = [length * sent.itemsize * count for count in self.counts]
            yield AllToAll(send.view(np.uint8), counts, given.view(np.uint8), given_counts)
            result = part.result
            target = scratch.take(part.result_dtype, part.length) if result is None else result
            self.total(work, part, list(given.reshape(self.number, length)), target[mine])
            counts = [(stop - start) * target.itemsize for start, stop in pairs]
            yield Gather(None, target.view(np.uint8), counts)
            part.deliver(target if result is None else None)

    def _sent(
        self, work: Work, part: Part, sent: np.dtype[Any], pairs: Sequence[tuple[int, int]]
    ) -> Array:
        """Return this rank's partials, those of each rank's slice beside each other."""
        number, scratch = len(self.local), work.scratch
        send = part.contribution(sent) if number == 1 else None
        if send is not None:
            return send
        partials = [scratch.take(sent, part.length) for _ in range(number)]
        self.fill(work, part, partials)
        if number == 1:
            return partials[0]
        send = scratch.take(sent, part.length * number)
        slices = [partial[start:stop] for start, stop in pairs for partial in partials]
        np.concatenate(slices, out=send)
        return send


def window_bytes(layout: Layout) -> tuple[int, int]:
    """Return the bytes of a part in a window, and of the window; 0 where it would be too large."""
    buffers = 2 * tree_of(layout.counts).order.count + 2
    part_bytes = min(_WINDOW_PART_BYTES, _WINDOW_BYTES // buffers)
    part_bytes = max(_LEAST_PART_BYTES, part_bytes // _LINE_BYTES * _LINE_BYTES)
    size = part_bytes * buffers
    return (part_bytes, size) if size <= _MOST_WINDOW_BYTES else (0, size)


class SharedWindow(OrderedWay):
    """All ranks put their partials into one window, and combine a slice of them there.

    While ranks put a part there they combine the one before it, and take out the result of the one
    before that: everything lies there twice, and one barrier comes between two steps.
    """

    def __init__(self, group: Group, window: Bytes) -> None:
        super().__init__(group)
        self._window = window
        self.part_bytes, _ = window_bytes(group.layout)

    def reduce(self, work: Work, parts: Iterable[Part]) -> Steps[None]:
        coming = iter(parts)
        in_window: deque[tuple[int, Part]] = deque()  # those that are combined, and are taken out
        for turn in itertools.count():
            work.scratch.clear()
            part = next(coming, None)
            if part is None and not in_window:
                return
            if part is not None:
                self._give(work, part, turn)
            for number, earlier in in_window:
                if number == turn - 1:
                    self._combine(work, earlier, number)
                else:
                    earlier.deliver(self._total(earlier, number))
            if in_window and in_window[0][0] == turn - 2:
                in_window.popleft()
            if part is not None:
                in_window.append((turn, part))
            if in_window:
                yield Barrier()

    def _give(self, work: Work, part: Part, turn: int) -> None:
        """Put this rank's partials into the window."""
        rank = self.rank
        mine = self._partials(part, turn)[self.starts[rank] : self.starts[rank + 1]]
        own = self._own(part)
        if own is None:
            self.fill(work, part, mine)
            return
        place = self._place_of_slice(part)  # nobody else reads this one
        np.copyto(mine[0][: place.start], own[: place.start])
        np.copyto(mine[0][place.stop :], own[place.stop :])

    def _combine(self, work: Work, part: Part, turn: int) -> None:
        """Combine this rank's slice of all partials."""
        place = self._place_of_slice(part)
        slices = [partial[place] for partial in self._partials(part, turn)]
        own = self._own(part)
        if own is not None:
            slices[self.starts[self.rank]] = own[place]
        total = self._total(part, turn)[place]
        if total.dtype == part.dtype:
            self.total(work, part, slices, total)
            return
        # Rounding stores number by number: two to three times slower where each has to wait for a
        # line that another core has read before.
        rounded = work.scratch.take(total.dtype, total.size)
        self.total(work, part, slices, rounded)
        np.copyto(total, rounded)

    def _own(self, part: Part) -> Array | None:
        """Return this rank's partial where it lies in memory already."""
        return part.contribution(self.sent_dtype(part)) if len(self.local) == 1 else None

    def _place_of_slice(self, part: Part) -> slice:
        starts, rank = self.slices(part), self.rank
        return slice(starts[rank], starts[rank + 1])

    def _partials(self, part: Part, turn: int) -> list[Array]:
        first = turn % 2 * self.number
        dtype = self.sent_dtype(part)
        return [self._place(first + index, dtype, part.length) for index in range(self.number)]

    def _total(self, part: Part, turn: int) -> Array:
        return self._place(2 * self.number + turn % 2, part.result_dtype, part.length)

    def _place(self, index: int, dtype: np.dtype[Any], length: int) -> Array:
        start = index * self.part_bytes
        return self._window[start : start + length * dtype.itemsize].view(dtype)


class Ways:
    """The ways of a group; the window is opened when it is first needed."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self.straight, self.keyed = Straight(group), Keyed(group)
        is_alone = group.layout.size == 1
        #: For sums of floats of 2 bytes, where no order is asked for.
        self.narrow: OrderedWay = Here(group) if is_alone else Scattered(group)
        self._ordered: dict[CommunicationImplementation, OrderedWay] = {_ALLTOALL: self.narrow}
        if is_alone:
            self._ordered = dict.fromkeys(CommunicationImplementation, self.narrow)
        #: Why there is no shared memory, where that is known.
        self._problem: SharedMemoryError | None = None

    def unordered(self, dtype: np.dtype[Any], op: ReduceOp) -> Way:
        """Return the way for what accumulates in this dtype, in any order."""
        return self.keyed if are_keyed(dtype, op) else self.straight

    def ordered(self, implementation: CommunicationImplementation) -> OrderedWay | None:
        """Return the way of ordered sums; None where `opened` must come first."""
        return self._ordered.get(implementation)

    def opened(self, implementation: CommunicationImplementation) -> Steps[OrderedWay]:
        """Make the way for `implementation`, and return it; an error where it can't be had."""
        shared = yield from self._shared_window()
        if implementation is _SHARED_MEMORY and shared is None:
            yield Raise(
                ValueError(
                    f"implementation=SHARED_MEMORY can't be had: {self._problem}. Use AUTO or"
                    " ALLTOALL."
                )
            )
        hosts = self._group.hosts
        if shared is None and self._group.layout.rank == 0 and len(set(hosts)) == 1:
            _log.warning(
                "reproducible sums go by Alltoallv, which is slower than shared memory: %s.",
                self._problem,
            )
        way = self._ordered[implementation] = shared or self.narrow
        return way

    def _shared_window(self) -> Steps[OrderedWay | None]:
        """Return the way by shared memory; None where it can't be had."""
        if self._problem is None and _SHARED_MEMORY not in self._ordered:
            layout = self._group.layout
            part_bytes, size_bytes = window_bytes(layout)
            if part_bytes:
                window = yield OpenWindow(size_bytes)
            else:
                window = SharedMemoryError(
                    f"{layout.num_replicas} replicas would need {size_bytes >> 20} MiB of it"
                )
            if isinstance(window, SharedMemoryError):
                self._problem = window
            else:
                self._ordered[_SHARED_MEMORY] = SharedWindow(self._group, window)
        return self._ordered.get(_SHARED_MEMORY)
