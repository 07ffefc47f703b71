"""The calls of a strategy while it is traced, and the clocks of its ranks."""

from __future__ import annotations

import math
import secrets
from time import perf_counter_ns

import numpy as np

from ...core.layout import Layout
from ..transport import Transport
from .event_log import EventKind, EventLog, pack_event
from .recorder import FlightRecorder

_NANOSECONDS = 1_000_000_000
# The fastest of so many exchanges shows how the clocks of two ranks differ.
_ROUNDS = 16
_SECONDS_BETWEEN_COMPARISONS = 10
_FIRST_EXCHANGES, _LEAST_EXCHANGES, _MOST_GROWTH = 64, 16, 4
_CALL = int(EventKind.CALL)  # without a look at the class


class TracedCalls(FlightRecorder):
    """A flight recorder that hands all calls to the log of the process.

    An exchange ends nowhere before all ranks have begun it, each by its own clock: `_ROUNDS` of
    them in a row, in which no rank is late, show how far clocks are apart.
    """

    #: Also of the first call: the clock of a rank that is killed soon shall be known.
    is_clock_due = True

    def __init__(self, log: EventLog, transport: Transport, layout: Layout) -> None:
        super().__init__()
        self._log = log
        self._transport = transport
        self._world = log.new_world(rank=layout.rank, size=transport.size)
        log.write()  # a rank that is killed soon shall be known
        # The greatest of all ranks is the name of their world.
        self._name = secrets.randbits(63)
        self._has_name = False
        # At the end of the last call.
        self._sent_bytes = transport.sent_bytes
        self._compared_ns = perf_counter_ns()
        self._compared_number = 0
        self._next_number: float = math.inf

    def end(self) -> None:
        latest = self.latest
        if latest[2] is not None:
            return
        text, begun, _ = latest
        latest[2] = ended = perf_counter_ns()
        transport, log = self._transport, self._log
        steps, sent_bytes = transport.steps, transport.sent_bytes
        name, size = log.names[text], sent_bytes - self._sent_bytes
        log.add(pack_event(_CALL, name, self._world, begun, ended, steps, size))
        self._sent_bytes = sent_bytes
        if steps >= self._next_number:
            self.is_clock_due = True

    def note(self, text: str) -> None:
        self._log.note(text)

    def note_error(self, error: BaseException) -> None:
        self._log.note(f"{type(error).__name__} in {self.latest[0]}")

    def want_comparison(self) -> None:
        self.is_clock_due = True

    def compare_clocks(self) -> None:
        transport, log = self._transport, self._log
        self.is_clock_due = False
        if not self._has_name:
            log.tell(world=self._world, calls_track=log.track())
        if transport.size == 1:  # there is nobody to compare with
            return
        number = transport.steps
        mine = np.array([perf_counter_ns() - self._compared_ns, self._name], np.uint64)
        greatest = mine
        for index in range(_ROUNDS):
            begun = perf_counter_ns()
            greatest = transport.maximum(mine)
            ended = perf_counter_ns()
            log.add(pack_event(EventKind.CLOCK, 0, self._world, begun, ended, number, index))
        if not self._has_name:
            self._has_name = True
            log.tell(world=self._world, name=int(greatest[1]))
            exchanges = _FIRST_EXCHANGES
        else:
            # The same on all ranks, since all they know of it has come with the exchanges.
            since = number - self._compared_number
            due = since * _SECONDS_BETWEEN_COMPARISONS * _NANOSECONDS // max(int(greatest[0]), 1)
            exchanges = min(max(due, _LEAST_EXCHANGES), _MOST_GROWTH * since)
        log.write()  # of a rank that is killed soon the clock shall be known, too
        self._compared_number = transport.steps
        self._next_number = self._compared_number + exchanges
        self._compared_ns = perf_counter_ns()
