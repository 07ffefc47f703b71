"""When a rank dies: at an event that it counts, or some milliseconds after it."""

import collections
import contextlib
import functools
import os
import signal
import threading
from dataclasses import dataclass

__all__ = ["PHASES", "Kill", "Moments"]

#: What events are counted in, beside all of them ("any").
PHASES = ("make", "begin", "window", "commit", "save", "recover", "restore", "end")


@dataclass(frozen=True)
class Kill:
    """A rank that dies, and when: "2:commit:7" is rank 2 at the 7th event within commits.

    Parameters
    ----------
    rank : int
        As the ranks were numbered at the start.
    phase : str
        One of `PHASES`, or "any".
    count : int
        The first event is 1.
    delay_ms : float
        It dies so much after the event, wherever it is then: "2:any:7+0.5".
    """

    rank: int
    phase: str
    count: int
    delay_ms: float = 0.0

    @classmethod
    def of(cls, text):
        """Return the kill that a text stands for."""
        rank, phase, moment = text.split(":")
        if phase not in (*PHASES, "any"):
            raise ValueError(f"{text!r}: {phase!r} is none of {', '.join(PHASES)}, any")
        count, _, delay_ms = moment.partition("+")
        return cls(int(rank), phase, int(count), float(delay_ms or 0))

    def __str__(self):
        delay = f"+{self.delay_ms:.3f}" if self.delay_ms else ""
        return f"{self.rank}:{self.phase}:{self.count}{delay}"


class Moments:
    """Counts the events of this rank, and kills it where it is to die.

    Parameters
    ----------
    rank : int
    kills : sequence of Kill
        Those of other ranks do nothing here.
    tell : callable
        Called with a text before the rank dies.
    """

    def __init__(self, rank, kills, tell):
        self.counts = collections.Counter()
        self._phases, self._counts = collections.Counter(), False
        self._kills = {(kill.phase, kill.count): kill for kill in kills if kill.rank == rank}
        self._tell = tell

    def count(self, *phases):
        """Be in these phases from now on; in none, nothing is counted."""
        self._phases, self._counts = collections.Counter(phases), bool(phases)

    def event(self):
        """Count an event, and die where it is the last one."""
        for phase, depth in list(self._phases.items()):
            if depth and self._counts:
                self.counts[phase] += 1
                kill = self._kills.get((phase, self.counts[phase]))
                if kill is not None:
                    self._die(kill)

    def _die(self, kill):
        if not kill.delay_ms:
            self._die_now(kill)
        timer = threading.Timer(kill.delay_ms / 1000, self._die_now, [kill])
        timer.daemon = True
        timer.start()

    def _die_now(self, kill):
        self._tell(str(kill))
        os.kill(os.getpid(), signal.SIGKILL)

    def enter(self, phase):
        """Have events count in `phase`, too, until it is left; coming and going are events."""
        self._phases[phase] += 1
        self.event()

    def leave(self, phase):
        """Leave a phase, if this rank is in it."""
        if self._phases[phase]:
            self.event()
            self._phases[phase] -= 1

    @contextlib.contextmanager
    def within(self, phase):
        """Return a context that is a phase."""
        self.enter(phase)
        try:
            yield
        finally:
            self.leave(phase)

    def watch(self, owner, names, phase=None):
        """Make calls of functions that `owner` has events, which lie within `phase` if given."""
        for name in names.split():
            setattr(owner, name, self._watched(getattr(owner, name), phase))

    def _watched(self, function, phase):
        @functools.wraps(function)
        def watched(*args, **kwargs):
            if phase is not None:
                with self.within(phase):
                    return function(*args, **kwargs)
            self.event()
            try:
                return function(*args, **kwargs)
            finally:
                self.event()

        return watched
