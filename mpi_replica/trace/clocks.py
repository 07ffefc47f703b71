"""One clock for all processes of a trace.

An exchange ends on no rank before it has begun on all. So by each exchange the clock of a process
is between two limits to that of another one, and by the fastest of many in a row these are as
close as a message is fast. Between two such comparisons a clock runs evenly.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np

from ..ranks.watch.event_log import EventKind
from .traced_processes import Floats, Integers, TracedProcess

# Clocks of computers run apart by less, also where NTP corrects one (500 ppm, `adjtimex(2)`).
_MOST_DRIFT = 5e-4


class _Offset(NamedTuple):
    """What one comparison has shown of a clock: nanoseconds."""

    at: float
    offset: float
    bound: float


class Clock:
    """From the clock of a process to the common one. All times are nanoseconds.

    Parameters
    ----------
    start : int
        Which of the starts of a job it is part of: between two of them only the clocks of the
        hosts tell the time.
    offsets : sequence of _Offset
        One or more, of different times.

    Examples
    --------
    >>> clock = Clock(0, [_Offset(0.0, 100.0, 5.0), _Offset(1000.0, 200.0, 5.0)])
    >>> clock.common(np.array([0, 500, 1000])).tolist()
    [100.0, 650.0, 1200.0]
    """

    def __init__(self, start: int, offsets: Sequence[_Offset]) -> None:
        self.start = start
        known: Floats = np.array(sorted(offsets), float)
        self._at, self._offsets, self._bounds = known.T
        least, most = -_MOST_DRIFT, _MOST_DRIFT
        if len(offsets) > 1:
            seconds = self._at[-1] - self._at[0]
            slope = (self._offsets[-1] - self._offsets[0]) / seconds
            doubt = (self._bounds[-1] + self._bounds[0]) / seconds
            least, most = max(least, slope - doubt), min(most, slope + doubt)
        # Outside of the comparisons it runs as it did between them, as far as that is known.
        self._drift, self._drift_bound = (least + most) / 2, max(0.0, most - least) / 2

    def common(self, times: Integers | Floats) -> Floats:
        """Returns the times by the common clock."""
        at = times.astype(float)
        common: Floats = (
            at + np.interp(at, self._at, self._offsets) + self._drift * self._beyond(at)
        )
        return common

    def bound(self, times: Integers | Floats) -> Floats:
        """Returns by how much `common` may be wrong, to either side."""
        at = times.astype(float)
        bounds: Floats = np.interp(at, self._at, self._bounds)
        return bounds + self._drift_bound * np.abs(self._beyond(at))

    def _beyond(self, times: Floats) -> Floats:
        return times - np.clip(times, self._at[0], self._at[-1])


#: When the exchanges of a comparison began and ended, in a row for each, by process.
Comparison: TypeAlias = Mapping[int, tuple[Integers, Integers]]


def clocks_of(processes: Sequence[TracedProcess]) -> list[Clock]:
    """Returns a clock for each process."""
    comparisons = _comparisons(processes)
    clocks: dict[int, Clock] = {}
    origin = min(one.epoch_ns for one in processes)
    for first, process in enumerate(processes):
        if first not in clocks:
            # What nobody compares itself with is placed by the clock of its host.
            offset = float(process.epoch_ns - origin - process.clock_ns)
            moments = process.clock_ns, process.clock_ns + 1e9  # two: it has no drift
            exact = [_Offset(at, offset, 0.0) for at in moments]
            start = {first: Clock(first, exact)}
            _spread(start, comparisons)
            clocks |= start
    return [clocks[n] for n in range(len(processes))]


def _spread(start: dict[int, Clock], comparisons: Sequence[Comparison]) -> None:
    """Finds the clocks of all that have compared theirs with one of `start`, or with such a one.

    The first one there is right by definition. Where it takes no part any more the others are
    compared with the one that is known best.
    """
    offsets: dict[int, list[_Offset]] = {}
    for comparison in _in_reach(start, comparisons):
        doubts = {n: start[n].bound(comparison[n][0])[0] for n in comparison if n in start}
        anchor = min(doubts, key=lambda n: doubts[n])
        begins, ends = (start[anchor].common(times) for times in comparison[anchor])
        for n, (begun, ended) in comparison.items():
            if n == anchor:
                continue
            # It ends nowhere before it has begun here and there. Each says so of its own moment.
            at = float(np.median(begun))
            least = np.max(begins - ended - _MOST_DRIFT * np.abs(ended - at))
            most = np.min(ends - begun + _MOST_DRIFT * np.abs(begun - at))
            shown = _Offset(at, (least + most) / 2, abs(most - least) / 2 + doubts[anchor])
            offsets.setdefault(n, []).append(shown)
            start[n] = Clock(start[anchor].start, offsets[n])


def _in_reach(start: dict[int, Clock], comparisons: Sequence[Comparison]) -> Iterator[Comparison]:
    """Gives each comparison when one of its processes has a clock, those that have one first."""
    num_left, left = -1, comparisons
    while len(left) != num_left:
        num_left, later = len(left), []
        for comparison in left:
            if start.keys() & comparison.keys():
                yield comparison
            else:
                later.append(comparison)
        left = later


def _comparisons(processes: Sequence[TracedProcess]) -> list[Comparison]:
    """Returns all comparisons, those of the first processes first, each as they were made.

    A process that has one exchange twice in a comparison is damaged, and takes no part in that.
    """
    found: dict[tuple[int, int], dict[int, Integers]] = {}
    for n, process in enumerate(processes):
        rows = process.rows[process.rows[:, 0] == EventKind.CLOCK]
        for world, membership in process.memberships.items():
            of_world = rows[rows[:, 2] == world]
            for number in np.unique(of_world[:, 5]).tolist() if membership.name else ():
                exchanges = of_world[of_world[:, 5] == number]
                if len(np.unique(exchanges[:, 6])) < len(exchanges):
                    process.is_damaged = True
                    continue
                found.setdefault((membership.name or 0, number), {})[n] = exchanges
    comparisons: list[Comparison] = []
    for known in found.values():
        # One may have died in it, and of another one only the last ones may have been kept.
        common = functools.reduce(np.intersect1d, (rows[:, 6] for rows in known.values()))
        whole = {n: rows[np.isin(rows[:, 6], common), 3:5] for n, rows in known.items()}
        if len(common) and len(known) > 1:
            comparisons.append({n: (at[:, 0], at[:, 1]) for n, at in whole.items()})
    return comparisons
