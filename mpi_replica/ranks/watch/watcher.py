"""The watcher: one thread in each process that looks at the waits of all its strategies.

It needs no help from the thread that waits, nor from the communicator on which it waits.
"""

from __future__ import annotations

import contextlib
import logging
import os
import random
import threading
from collections.abc import Callable
from os import getpid
from time import monotonic
from typing import Any

from ...core.standard_error import write_error
from ...core.thread_frames import current_frames
from ..interrupts import gate
from ..transport import Mailbox
from . import event_log
from .cycles import CycleSearch
from .recorder import RecordedCall, nanoseconds_since_epoch
from .samples import take_samples
from .stack_signal import StackSignal
from .stall_report import Answer, rank_report
from .strategy_watch import StrategyWatch

_log = logging.getLogger("mpi_replica")

_TICK_SECONDS = 0.1
_TICK_SECONDS_WHILE_ASKING = 0.01
_SECONDS_BETWEEN_SAMPLES = 0.02
_STOP_SECONDS = 5.0
_SECONDS_FOR_LOG = 0.5

# What a rank writes of its flight record when the job is aborted; all of it where a folder is set.
_SHOWN_CALLS = 8
_FLIGHT_FOLDER = "MPI_REPLICA_FLIGHT_FOLDER"

# Every rank gets the signal, or is told by several: one text is enough.
_SECONDS_BETWEEN_PRINTS = 1.0


class Watcher:
    """Looks at watches while there are any."""

    # Held as long as the thread shall go on, which waits for it: in C, and not as for an Event in
    # Python, since the thread of a program that is sampled does so fifty times a second.
    _going_on: threading.Lock

    def __init__(self) -> None:
        self._watches: list[StrategyWatch] = []
        self._cycles: CycleSearch | None = None
        self._thread: threading.Thread | None = None
        self._has_failed = False
        self._printed = -_SECONDS_BETWEEN_PRINTS
        self._signal = StackSignal()

    def add(self, watch: StrategyWatch, host: str) -> None:
        """Looks at `watch` from now on."""
        if self._cycles is None:
            self._cycles = CycleSearch(host, getpid())
        watch.on_cycle = self._deal_with_cycle
        watch.on_print = self._print
        watch.is_watched = True
        self._watches = [*self._watches, watch]
        if self._thread is None:
            self._signal.install()
            self._going_on = threading.Lock()
            self._going_on.acquire()
            self._thread = threading.Thread(
                target=self._work, args=[self._going_on], name="mpi_replica watch", daemon=True
            )
            self._thread.start()

    def remove(self, watch: StrategyWatch) -> None:
        """Looks at `watch` no more; the last one ends the thread."""
        watch.close()
        self._watches = [other for other in self._watches if other is not watch]
        if not self._watches:
            self.stop()

    def stop(self) -> None:
        """Ends the thread: MPI must not be called after it was finalized."""
        thread, self._thread = self._thread, None
        if thread is not None and thread is not threading.current_thread():
            self._going_on.release()
            try:
                thread.join(_STOP_SECONDS)
            finally:  # where a signal's handler raises, it ends all the same
                self._signal.remove()

    def forget(self) -> None:
        """Forgets all, in a forked child: thread and watches are the parent's."""
        Mailbox.renew_lock()
        self._watches, self._thread = [], None
        self._signal.remove()  # it would be told to the parent, whose pipe this is

    def write_flight_records(self, reason: str) -> None:
        """Lets all ranks write where they are and what they called last."""
        for watch in self._watches:
            try:
                watch.tell(("print", reason))
            except Exception:  # MPI may be why the job is aborted
                _log.debug("the other ranks can't be told", exc_info=True)
        self._do(self._print, reason)
        if event_log.current is not None:
            # What is killed now writes no more. Below a signal's handler a write may wait for it.
            event_log.current.write(_SECONDS_FOR_LOG)

    def _work(self, going_on: threading.Lock) -> None:
        due, draw = 0.0, random.Random()
        while True:
            log = event_log.current
            asking = any(watch.is_asking for watch in self._watches)
            seconds = _TICK_SECONDS_WHILE_ASKING if asking else _TICK_SECONDS
            if log is not None and log.has_samples:
                # Not in step with the program, and without a draw from its own generator.
                seconds = min(seconds, _SECONDS_BETWEEN_SAMPLES * draw.uniform(0.5, 1.5))
            if going_on.acquire(timeout=seconds):
                return
            if log is not None:
                self._do(self._trace, log)
            now = monotonic()
            if log is None or asking or now >= due:
                due = now + _TICK_SECONDS
                self._do(self._tick, now)

    def _trace(self, log: event_log.EventLog) -> None:
        if log.has_samples:
            watches = self._watches
            take_samples(log, {watch.thread() for watch in watches if not watch.is_waiting})
        log.write_if_due()

    def _tick(self, now: float) -> None:
        for watch in self._watches:
            self._do(watch.tick, now)
        if self._cycles is not None:
            self._do(self._cycles.tick, self._watches, now)
        gate.let_through(now)
        if self._signal.take():
            self.write_flight_records("SIGUSR2")

    def _do(self, part: Callable[..., None], *arguments: Any) -> None:
        """Does a part of the watch. It goes on where that fails: nobody else watches."""
        try:
            part(*arguments)
        except Exception:
            if not self._has_failed:
                self._has_failed = True
                with contextlib.suppress(Exception):  # logging fails where stderr is closed
                    _log.exception(
                        "the thread that watches the waits of this process has failed in a part of"
                        " its work. It goes on, and does not tell of it again: stall reports,"
                        " limits of waits and cycles of strategies that wait for each other may be"
                        " missing."
                    )

    def _deal_with_cycle(self, watch: StrategyWatch, message: tuple[Any, ...]) -> None:
        if self._cycles is not None:
            self._cycles.receive(self._watches, watch, message)

    def _print(self, reason: str) -> None:
        """Writes where this rank is, and its last calls: a text for each thread that has calls."""
        now = monotonic()
        every = self._watches
        if not every or now - self._printed < _SECONDS_BETWEEN_PRINTS:
            return
        self._printed = now
        since_epoch_ns = nanoseconds_since_epoch()
        calls = {watch: watch.recorder.last(since_epoch_ns=since_epoch_ns) for watch in every}
        folder = os.environ.get(_FLIGHT_FOLDER)
        if folder:
            for watch in every:
                self._write_file(watch, folder, calls[watch])
        by_thread: dict[int, list[StrategyWatch]] = {}
        for watch in every:
            by_thread.setdefault(watch.thread(), []).append(watch)
        widest = max((watch.layout for watch in every), key=lambda layout: layout.size)
        for thread in by_thread.keys() & current_frames().keys():
            text = rank_report(_place_and_calls({w: calls[w] for w in by_thread[thread]}))
            write_error(f"[rank {widest.rank} of {widest.size}] {reason}: {text}\n")

    def _write_file(self, watch: StrategyWatch, folder: str, calls: list[RecordedCall]) -> None:
        path = os.path.join(folder, f"flight-rank-{watch.layout.rank}.txt")
        try:
            os.makedirs(folder, exist_ok=True)
            with open(path, "a", encoding="utf-8", errors="backslashreplace") as file:
                file.writelines(f"{call}\n" for call in calls)
        except OSError as error:
            write_error(f"the flight record can't be written to {path}: {error}\n")


def _place_and_calls(by_watch: dict[StrategyWatch, list[RecordedCall]]) -> Answer:
    """Returns where the thread of some strategies is, and the last calls of all of them."""
    calls = [(call, watch) for watch, own in by_watch.items() for call in own[-_SHOWN_CALLS:]]
    calls.sort(key=lambda pair: pair[0].begun)
    recent = tuple(call for call, _ in calls[-_SHOWN_CALLS:])
    here = (calls[-1][1] if calls else [*by_watch][-1]).here()
    # One that was left halfway is over, though what it waited for has not come.
    is_waiting = here.is_waiting and bool(recent) and recent[-1].ended is None
    return here._replace(recent=recent, is_waiting=is_waiting)


#: The one watcher of the process.
watcher = Watcher()
