"""The way in which parts are combined where all ranks see one piece of memory."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import numpy as np

from ..core.array_ways import Array
from ..core.layout import Layout
from ..core.tree import tree_of
from ..ranks.transport import Bytes
from .agreement.group import Group
from .agreement.steps import Barrier, Steps
from .ordered_ways import LEAST_PART_BYTES, LINE_BYTES, OrderedWay
from .parts import Part
from .ways import Work

# Bytes of a part: the fastest that were measured.
_WINDOW_PART_BYTES = 1 << 19

_WINDOW_BYTES = 1 << 24
_MOST_WINDOW_BYTES = 3 << 23


def window_bytes(layout: Layout) -> tuple[int, int]:
    """Returns the bytes of a part in a window, and of the window; 0 where it would be too large."""
    buffers = 2 * tree_of(layout.counts).order.count + 2
    part_bytes = min(_WINDOW_PART_BYTES, _WINDOW_BYTES // buffers)
    part_bytes = max(LEAST_PART_BYTES, part_bytes // LINE_BYTES * LINE_BYTES)
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
        given: Part | None = None
        combined: Part | None = None
        for turn in itertools.count():
            work.scratch.clear()
            part = next(coming, None)
            if part is not None:
                self._give(work, part, turn)
            if combined is not None:
                combined.deliver(self._total(combined, turn - 2))
            if given is not None:
                self._combine(work, given, turn - 1)
            given, combined = part, given
            if given is None and combined is None:
                return
            yield Barrier()

    def _give(self, work: Work, part: Part, turn: int) -> None:
        """Puts this rank's partials into the window."""
        rank = self.rank
        mine = self._partials(part, turn)[self.starts[rank] : self.starts[rank + 1]]
        own = self._own(part)
        if own is None:
            self.fill(work, part, list(mine))
            return
        place = self.own_slice(part)  # nobody else reads this one
        np.copyto(mine[0][: place.start], own[: place.start])
        np.copyto(mine[0][place.stop :], own[place.stop :])

    def _combine(self, work: Work, part: Part, turn: int) -> None:
        """Combines this rank's slice of all partials."""
        place = self.own_slice(part)
        slices: list[Array] | Array = self._partials(part, turn)[:, place]
        own = self._own(part)
        if own is not None:
            if not self.order.has_levels:
                slices = list(slices)  # then one's own need not be copied to the others
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
        """Returns this rank's partial where it lies in memory already."""
        return part.contribution(self.sent_dtype(part)) if len(self.local) == 1 else None

    def _partials(self, part: Part, turn: int) -> Array:
        """Returns those of all ranks, one behind the other."""
        dtype, number, size_bytes = self.sent_dtype(part), self.number, self.part_bytes
        start = turn % 2 * number * size_bytes
        memory, shape = self._window.data, (number, part.length)
        return np.ndarray(shape, dtype, memory, start, (size_bytes, dtype.itemsize))

    def _total(self, part: Part, turn: int) -> Array:
        start, dtype = (2 * self.number + turn % 2) * self.part_bytes, part.result_dtype
        return self._window[start : start + part.length * dtype.itemsize].view(dtype)
