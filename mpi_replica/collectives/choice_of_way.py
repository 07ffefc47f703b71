"""Which way a part goes: straight, by keys, scattered, through a window, or here alone."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np

from ..core.options import CommunicationImplementation, ReduceOp
from ..core.tree import tree_of
from ..ranks.transport import SharedMemoryError
from .agreement.group import Group
from .agreement.steps import OpenWindow, Raise, Steps
from .extremes import are_keyed
from .ordered_ways import Here, OfTwo, OrderedWay, Scattered
from .shared_window import SharedWindow, window_bytes
from .ways import Keyed, Straight, Way

_AUTO = CommunicationImplementation.AUTO
_SHARED_MEMORY = CommunicationImplementation.SHARED_MEMORY
_ALLTOALL = CommunicationImplementation.ALLTOALL

# Of floats of 2 bytes, in what they accumulate in, where half of that travels; and of what goes by
# Allreduce between two ranks. The fastest that were measured.
_NARROW_PART_BYTES = 1 << 21

_log = logging.getLogger("mpi_replica")


class ChoiceOfWay:
    """The ways of a group; the window is opened when it is first needed."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self.straight, self.keyed = Straight(group), Keyed(group)
        #: For what is ordered although no order is asked for, as sums of floats of 2 bytes.
        self.narrow: OrderedWay
        self._ordered: dict[CommunicationImplementation, OrderedWay]
        layout = group.layout
        if layout.size == 1:
            self.narrow = Here(group)
            self._ordered = dict.fromkeys(CommunicationImplementation, self.narrow)
        elif layout.size == tree_of(layout.counts).order.count == 2:
            self.narrow = OfTwo(group, _NARROW_PART_BYTES)
            self._ordered = {_AUTO: self.narrow, _ALLTOALL: Scattered(group)}
        else:
            self.narrow = Scattered(group, _NARROW_PART_BYTES)
            self._ordered = {_ALLTOALL: Scattered(group)}
        #: Why there is no shared memory, where that is known.
        self._problem: SharedMemoryError | None = None

    def unordered(self, dtype: np.dtype[Any], op: ReduceOp) -> Way:
        """Returns the way for what accumulates in this dtype, in any order."""
        return self.keyed if are_keyed(dtype, op) else self.straight

    def ordered(self, implementation: CommunicationImplementation) -> OrderedWay | None:
        """Returns the way of ordered sums; None where `opened` must come first."""
        return self._ordered.get(implementation)

    def opened(self, implementation: CommunicationImplementation) -> Steps[OrderedWay]:
        """Makes the way for `implementation`, and returns it; an error where it can't be had."""
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
        way = self._ordered[implementation] = shared or self._ordered[_ALLTOALL]
        return way

    def _shared_window(self) -> Steps[OrderedWay | None]:
        """Returns the way by shared memory; None where it can't be had."""
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
