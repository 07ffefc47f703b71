"""All processes of a trace on one clock: who came last to each call, and how long others waited."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..ranks.watch.event_log import SPAN_KINDS, EventKind
from .clocks import Clock, Floats, clocks_of
from .traced_processes import Events, Integers, TracedProcess

#: Of a call: no rank is known to have come last.
UNDECIDED = -1


@dataclass
class Calls:
    """The collective calls of a process, a row for each; times are nanoseconds of the one clock."""

    #: Numbers of texts, as "all_reduce(SUM, 12 leaves, 4.1 MB) at train.py:88".
    name: Integers
    begin: Floats
    end: Floats
    #: Bytes that this rank gave to it.
    size: Integers
    #: How long it waited for the rank that came last.
    wait: Floats
    #: The process that came last, and how long after the one before it; `UNDECIDED` where that is
    #: less than what clocks may be wrong, and where not all ranks have told of the call.
    last: Integers
    late_by: Floats
    #: When that one came.
    all_there: Floats
    #: Whether all ranks have told of it.
    is_whole: npt.NDArray[np.bool_]


class Timeline:
    """A trace on one clock.

    Parameters
    ----------
    processes : sequence of TracedProcess
    """

    def __init__(self, processes: Sequence[TracedProcess]) -> None:
        self.processes = processes
        self.clocks: list[Clock] = clocks_of(processes)
        self.calls = [self._calls_of(n) for n in range(len(processes))]
        #: By how much times of two processes may be wrong to each other, in nanoseconds.
        self.bound = max(
            (
                float(clock.bound(process.rows[:, 3:5]).max(initial=0.0))
                for clock, process in zip(self.clocks, processes, strict=True)
            ),
            default=0.0,
        )
        for members in self._worlds().values():
            self._meet(members)

    def spans(self, n: int, *kinds: str) -> Events:
        """Returns the spans of a process that are of one of `kinds`; by its own clock."""
        rows = self.processes[n].rows
        rows = rows[rows[:, 0] == EventKind.SPAN]
        return Events(rows[np.isin(rows[:, 5], [SPAN_KINDS.index(kind) for kind in kinds])])

    def _calls_of(self, n: int) -> Calls:
        events, clock = self.processes[n].events(EventKind.CALL), self.clocks[n]
        begin, nothing = clock.common(events.begin), np.zeros(len(events))
        return Calls(
            events.name,
            begin,
            np.maximum(begin, clock.common(events.end)),
            events.size,
            nothing,
            np.full(len(events), UNDECIDED),
            nothing.copy(),
            begin.copy(),
            np.zeros(len(events), bool),
        )

    def _worlds(self) -> dict[int, dict[int, int]]:
        """Returns for each world the number that each process has for it, by process."""
        worlds: dict[int, dict[int, int]] = {}
        for n, process in enumerate(self.processes):
            for number, one in process.memberships.items():
                if one.name is not None:
                    worlds.setdefault(one.name, {})[n] = number
        return worlds

    def _meet(self, members: dict[int, int]) -> None:
        """Finds out who waited for whom, in one world: all of it call alike."""
        some = next(iter(members))
        if len(members) < self.processes[some].memberships[members[some]].size:
            return  # nobody knows when the others came
        rows = {}
        for n, world in members.items():
            events = self.processes[n].events(EventKind.CALL)
            mine = np.flatnonzero((events.track == world) & (events.size > 0))
            numbers, first = np.unique(events.number[mine], return_index=True)
            rows[n] = dict(zip(numbers.tolist(), mine[first].tolist(), strict=True))
        common = sorted(set.intersection(*(set(known) for known in rows.values())))
        if not common:
            return
        ids = np.array(list(rows))
        places = np.array([[known[number] for number in common] for known in rows.values()])
        begins = np.array([self.calls[n].begin[at] for n, at in zip(ids, places, strict=True)])
        doubts = np.array(
            [
                self.clocks[n].bound(self.processes[n].events(EventKind.CALL).begin[at])
                for n, at in zip(ids, places, strict=True)
            ]
        )
        all_there = begins.max(axis=0)
        last, late_by = np.full(len(common), UNDECIDED), np.zeros(len(common))
        if len(ids) > 1:
            order = np.argsort(begins, axis=0)
            columns = np.arange(len(common))
            newest, other = order[-1], order[-2]
            late_by = begins[newest, columns] - begins[other, columns]
            is_sure = late_by > doubts[newest, columns] + doubts[other, columns]
            last = np.where(is_sure, ids[newest], UNDECIDED)
        for n, at in zip(ids, places, strict=True):
            calls = self.calls[n]
            calls.wait[at] = np.minimum(all_there, calls.end[at]) - calls.begin[at]
            calls.last[at], calls.late_by[at] = last, late_by
            calls.all_there[at], calls.is_whole[at] = all_there, True
