"""The flight recorder: the last collective calls of a rank, for the day when something hangs."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from time import localtime, perf_counter_ns, strftime, time_ns
from typing import Any, NamedTuple

MOST_CALLS = 256


class RecordedCall(NamedTuple):
    """One collective call of this rank."""

    #: "all_reduce(SUM, 12 leaves, 4.1 MB) at train.py:88"
    text: str
    #: Seconds since the epoch.
    begun: float
    #: None while it goes on.
    ended: float | None

    def __str__(self) -> str:
        clock = strftime("%H:%M:%S", localtime(self.begun))
        lasted = "not ended" if self.ended is None else f"{(self.ended - self.begun) * 1e3:.1f} ms"
        return f"{clock}.{int(self.begun % 1 * 1e3):03d} {self.text}, {lasted}"


def nanoseconds_since_epoch() -> int:
    """Returns what makes a time of this process's clock a time of day, as the clock is set now."""
    return time_ns() - perf_counter_ns()


class FlightRecorder:
    """Keeps the last `MOST_CALLS` calls. Written by one thread, read by any."""

    #: Whether this rank would compare clocks where all ranks are, if all of them would.
    is_clock_due = False

    #: Errors of this rank's replicas, in words, while it waits to tell the other ranks of them.
    errors: Sequence[str] = ()

    def __init__(self) -> None:
        # Lists that are changed in place: this runs at every call.
        self._calls: deque[list[Any]] = deque(maxlen=MOST_CALLS)
        #: Text, begin and end of the latest call, in nanoseconds of the process's clock; the end is
        #: None while it goes on.
        self.latest: list[Any] = ["", 0, 0]
        #: The limit of the waits in the latest call.
        self.timeout_seconds: float | None = None

    def begin(self, text: str, timeout_seconds: float | None) -> None:
        """Notes that a call begins."""
        self.timeout_seconds = timeout_seconds
        self.latest = [text, perf_counter_ns(), None]
        self._calls.append(self.latest)

    def end(self) -> None:
        """Notes that the latest call has ended, in whatever way, where it had not."""
        if self.latest[2] is None:
            self.latest[2] = perf_counter_ns()

    def note(self, text: str) -> None:
        """Notes that something happens now."""

    def note_error(self, error: BaseException) -> None:
        """Notes that an error came up in the latest call."""

    def want_comparison(self) -> None:
        """Has clocks compared at the next call, which may be the last one."""

    def compare_clocks(self) -> None:
        """Compares the clocks of all ranks, at a place at which all of them are. Collective."""

    def last(
        self, number: int = MOST_CALLS, since_epoch_ns: int | None = None
    ) -> list[RecordedCall]:
        """Returns the last calls, the oldest first.

        Whoever reads twice, or from several recorders, gives what `nanoseconds_since_epoch` said:
        read again it is another by as much as this thread was kept from a core.
        """
        for _ in range(10):
            try:
                calls = list(self._calls)
                break
            except RuntimeError:  # a call was added meanwhile
                continue
        else:
            calls = [self.latest] if self.latest[0] else []
        offset = nanoseconds_since_epoch() if since_epoch_ns is None else since_epoch_ns
        return [
            RecordedCall(text, (begun + offset) / 1e9, ended and (ended + offset) / 1e9)
            for text, begun, ended in calls[-number:]
        ]
