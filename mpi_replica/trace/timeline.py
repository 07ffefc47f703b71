"""All processes of a trace on one clock: who came last to each call, and how long others waited."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ..ranks.watch.event_log import EventKind
from .clocks import Clock, clocks_of
from .traced_processes import Events, Floats, Integers, TracedProcess

#: Of a call: no rank is known to have come last.
UNDECIDED = -1


class Calls(Events):
    """The collective calls of a process."""

    def __init__(self, events: Events) -> None:
        super().__init__(events.rows, events.begin, events.end)
        #: How long each waited for the rank that came last.
        self.wait: Floats = np.zeros(len(self))
        #: The process that came last, and how long after the one before it; `UNDECIDED` where that
        #: is less than what clocks may be wrong, and where not all ranks have told of the call.
        self.last: Integers = np.full(len(self), UNDECIDED)
        self.late_by: Floats = np.zeros(len(self))
        #: When that one came.
        self.all_there: Floats = self.begin.copy()
        #: Whether all ranks have told of it.
        self.is_whole: npt.NDArray[np.bool_] = np.zeros(len(self), bool)


class Timeline:
    """A trace on one clock, whose times are nanoseconds since the first event.

    Parameters
    ----------
    processes : sequence of TracedProcess
    """

    def __init__(self, processes: Sequence[TracedProcess]) -> None:
        self.processes = processes
        self.clocks: list[Clock] = clocks_of(processes)
        pairs = list(zip(self.clocks, processes, strict=True))
        bounds = sorted(clock.bound(one.rows[:, 3:5]).max(initial=0.0) for clock, one in pairs)
        #: By how much times of two processes may be wrong to each other.
        self.bound = float(sum(bounds[-2:]))
        times = [clock.common(one.rows[:, 3:5]) for clock, one in pairs]
        begin = min((one.min() for one in times if one.size), default=0.0)
        self._times = [one - begin for one in times]
        self.duration = float(max(one.max(initial=0.0) for one in self._times))
        self.calls = [Calls(self.events(n, EventKind.CALL)) for n in range(len(processes))]
        worlds: dict[int, dict[int, int]] = {}
        for n, process in enumerate(processes):
            for number, one in process.memberships.items():
                if one.name is not None:
                    worlds.setdefault(one.name, {})[n] = number
        for members in worlds.values():
            self._meet(members)

    def events(self, n: int, kind: EventKind) -> Events:
        """Returns the events of one kind of a process, by the one clock."""
        is_it = self.processes[n].rows[:, 0] == kind
        return Events(self.processes[n].rows[is_it], *self._times[n][is_it].T)

    def _meet(self, members: dict[int, int]) -> None:
        """Finds out who waited for whom in a world, given by the number of each of its processes.

        Its ranks call alike, and so what one of them does behind as many exchanges is the same
        call.
        """
        some, world = next(iter(members.items()))
        if len(members) < self.processes[some].memberships[world].size:
            return  # nobody knows when the others came
        rows = []
        for n, world in members.items():
            calls = self.calls[n]
            mine = np.flatnonzero((calls.track == world) & (calls.size > 0))
            numbers, first = np.unique(calls.number[mine], return_index=True)
            rows.append(dict(zip(numbers.tolist(), mine[first].tolist(), strict=True)))
        common = sorted(set.intersection(*map(set, rows)))
        places = [[known[number] for number in common] for known in rows]
        ids = np.array(list(members))
        begins = np.array([self.calls[n].begin[at] for n, at in zip(ids, places, strict=True)])
        doubts = np.array(
            [
                self.clocks[n].bound(self.calls[n].rows[at, 3])
                for n, at in zip(ids, places, strict=True)
            ]
        )
        newest, columns = begins.argmax(axis=0), np.arange(len(common))
        all_there = begins.max(axis=0, initial=-np.inf)
        sure = all_there - doubts[newest, columns]
        begins[newest, columns] = doubts[newest, columns] = -np.inf
        others, latest_others = begins.max(axis=0), (begins + doubts).max(axis=0)
        late_by = all_there - others
        last = np.where(sure > latest_others, ids[newest], UNDECIDED)
        for n, at in zip(ids, places, strict=True):
            calls = self.calls[n]
            calls.wait[at] = np.minimum(all_there, calls.end[at]) - calls.begin[at]
            calls.last[at], calls.late_by[at] = last, late_by
            calls.all_there[at], calls.is_whole[at] = all_there, True
