"""Traced processes of jobs that never ran, of which all true times are known.

True times are nanoseconds since the job began. Each process has a clock of its own.
"""

import itertools
import random
from typing import NamedTuple

import hypothesis.strategies as st
import numpy as np

from mpi_replica.ranks.watch.event_log import NUM_FIELDS, OF_RANK, SPAN_KINDS, EventKind
from mpi_replica.trace.traced_processes import Membership, TracedProcess

MICROSECOND, MILLISECOND, SECOND = 10**3, 10**6, 10**9
HOUR = 3600 * SECOND

# As `TracedCalls` compares clocks.
ROUNDS = 16


class LocalClock(NamedTuple):
    """The clock of a process."""

    ahead: int
    #: 1 where it runs as time does.
    speed: float

    def read(self, times):
        return np.rint(self.ahead + self.speed * np.asarray(times, float)).astype(np.int64)


local_clocks = st.builds(
    LocalClock, st.integers(0, 100 * HOUR), st.floats(-1e-4, 1e-4).map(lambda drift: 1 + drift)
)


class SimulatedProcess:
    """A process, which notes what it does by its own clock.

    Attributes
    ----------
    at : int
        The true time at which it has done all so far.
    slow_to_send, slow_to_receive : int
        How much longer its messages take than those of others.
    """

    slow_to_send = slow_to_receive = 0

    def __init__(self, clock, rank=0, *, restart=0, begins=0):
        self.clock, self.at = clock, begins
        self._names = {"(one of too many names)": 0}
        self._rows = []
        self.memberships = {}
        self._facts = {
            "host": f"host{rank}",
            "pid": 1000 * (restart + 1) + rank,
            "restart": restart,
            "epoch_ns": 1_700_000_000 * SECOND + begins,
            "clock_ns": int(clock.read(begins)),
        }

    def works(self, nanoseconds):
        self.at += nanoseconds

    def span(self, part, nanoseconds):
        """Do a part of the program for so long."""
        begun = self.at
        self.works(nanoseconds)
        self.add(EventKind.SPAN, SPAN_KINDS[part], OF_RANK, begun, self.at, part)

    def sample(self, place, at):
        """Be seen at a line of the program."""
        self.add(EventKind.SAMPLE, place, OF_RANK, at, at)

    def add(self, kind, text, track, begin, end, number=0, size=0):
        name = self._names.setdefault(text, len(self._names))
        begin, end = self.clock.read([begin, end]).tolist()
        self._rows.append((kind, name, track, begin, end, number, size))

    def forget(self, number):
        """Lose the first events."""
        del self._rows[:number]

    def traced(self, *, is_killed=False):
        """Return what it has left."""
        return TracedProcess(
            **self._facts,
            end_ns=None if is_killed else int(self.clock.read(self.at)),
            memberships=self.memberships,
            names=list(self._names),
            rows=np.array(self._rows, np.int64).reshape(-1, NUM_FIELDS),
        )


class World:
    """Processes that call together, the first of them as rank 0.

    Attributes
    ----------
    arrivals : list of dict
        When each of them came to each call.
    latency : int
        How long a message takes in the mean.
    """

    _new_names = itertools.count(1 << 40)

    def __init__(self, members, seed=0, latency=10 * MICROSECOND):
        self.members = list(members)
        self.arrivals = []
        self._random, self.latency = random.Random(seed), latency
        self._name = next(self._new_names)
        self._numbers = {}
        self._steps = 0
        for rank, process in enumerate(self.members):
            number = self._numbers[process] = len(process.memberships)
            process.memberships[number] = Membership(None, rank, len(self.members))

    def call(self, text="all_reduce(SUM, 8 B) at train.py:8", late=None, *, compares=False):
        """Let all call, some of them so many nanoseconds late."""
        for process, nanoseconds in (late or {}).items():
            process.works(nanoseconds)
        number = self._steps
        begins, _ = self._exchange()
        if compares:
            self.compare()
        for process, begin in begins.items():
            track = self._numbers[process]
            process.add(EventKind.CALL, text, track, begin, process.at, number, 256)
        self.arrivals.append(begins)

    def compare(self, rounds=ROUNDS, stall=0):
        """Compare clocks, by all exchanges or the first ones; one rank is late once, by `stall`."""
        number = self._steps
        stalled = self._random.randrange(ROUNDS)
        for index in range(rounds):
            if index == stalled:
                self._random.choice(self.members).works(stall)
            begins, ends = self._exchange()
            for process, track in self._numbers.items():
                times = begins[process], ends[process]
                process.add(EventKind.CLOCK, "", track, *times, number, index)
        for process, track in self._numbers.items():
            process.memberships[track] = process.memberships[track]._replace(name=self._name)

    def go_on(self, comparisons=None):
        """Let all call for a while, some of them late, and compare clocks now and then."""
        draw = self._random
        for _ in range(comparisons or draw.randint(1, 4)):
            self.call(compares=True)
            for _ in range(draw.randint(0, 3)):
                self.works(draw.choice([MILLISECOND, SECOND, 20 * SECOND]))
                self.call(late={draw.choice(self.members): draw.randint(0, 10 * MILLISECOND)})

    def works(self, nanoseconds):
        """Let all of them do something between two calls, about as long."""
        for process in self.members:
            process.works(round(nanoseconds * self._random.uniform(0.9, 1.1)))

    def _exchange(self):
        """Send messages: nobody ends before all have begun."""
        self._steps += 1
        begins = {
            process: process.at + process.slow_to_send + self._delay() for process in self.members
        }
        last = max(begins.values())
        for process in self.members:
            process.at = last + process.slow_to_receive + self._delay()
        return begins, {process: process.at for process in self.members}

    def _delay(self):
        """Return how long a message takes, now and then some times as long as usual."""
        return round(self.latency * (0.1 + self._random.expovariate(1)))
