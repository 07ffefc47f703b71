"""Where the ranks meet between the parts of a test: none goes on alone, and none waits for ever."""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import pickle
import signal
import struct
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from os import getpid
from time import monotonic, sleep
from typing import NoReturn

from ..core.layout import Layout, numbers_text
from ..ranks.interrupts import gate
from ..ranks.transport import HEADER_BYTES, Transport, WaitGivenUpError
from ..ranks.watch.stacks import Whereabouts, place_of_thread
from ..ranks.watch.stall_report import Answer, Processes, missing_text
from ..ranks.watch.strategy_watch import StrategyWatch
from ..ranks.watch.watcher import watcher
from .arrivals import FAILED, PASSED, Arrival
from .departure import Departure

# digest of what must be the same on all ranks, kind, stage, whether there is more to tell
_HEADER = struct.Struct("<16s8sB?")

# Parts of the limit. A rank that has waited for the first gives up all strategies: another may wait
# in one of their calls. One that comes after the second must ask whether that has happened.
_PATIENCE = 0.5
_LATE = 0.4

# At the end rank 0 writes its reports while the others wait.
_REPORT_STAGE, _END_STAGE = 1, 2
_END_FACTOR = 10

_SHORTEST_PAUSE_SECONDS = 20e-6
_LONGEST_PAUSE_SECONDS = 5e-4
_ANSWER_SECONDS = 3.0
_FORWARD_SECONDS = 0.5  # for the launcher, which forwards what the ranks wrote

# Of what a rank tells of its own failure while it waits.
_MOST_CHARACTERS = 10_000


class RanksMissingError(Exception):
    """A meeting that ranks have missed; rank 0 reports it, and ends the job after its report."""


@contextlib.contextmanager
def _alarms_let_pass() -> Iterator[None]:
    """Returns a context in which an alarm, as that of pytest-timeout, calls no handler.

    This rank waits for others, each of which has its own limit: what a handler raises here would
    end the session.
    """
    number = getattr(signal, "SIGALRM", None)
    is_main = threading.current_thread() is threading.main_thread()
    handler = signal.getsignal(number) if number is not None and is_main else None
    if number is None or not callable(handler):
        yield
        return
    signal.signal(number, lambda *_: None)
    try:
        yield
    finally:
        signal.signal(number, handler)


class Fence:
    """The meetings of all ranks.

    Parameters
    ----------
    transport : Transport
        Over all ranks, for the fence alone.
    limit_seconds : float
        How long a rank waits for the others; infinite for ever.
    """

    def __init__(self, transport: Transport, limit_seconds: float) -> None:
        self._transport = transport
        self.rank = transport.rank
        self.size = transport.size
        self.limit_seconds = transport.timeout_seconds = limit_seconds
        self.departure = Departure()
        #: Whether Ctrl-C has come while the ranks met before the report.
        self.was_interrupted = False
        #: What failed so far: printed where the job ends before rank 0 reports.
        self.failures: list[str] = []
        self._stderr = os.dup(2)  # the true one: pytest captures 2 during a test
        self._process = getpid()
        self._waiting: Arrival | None = None
        self._has_left_all = False
        self._is_lost = False
        self._met_at = monotonic()
        layout = Layout((1,) * self.size, self.rank)
        thread = threading.get_ident()
        self._watch = StrategyWatch(
            transport, layout, lambda: thread, lambda: ((), ""), lambda _: None, self._place
        )
        if not math.isinf(limit_seconds):  # for the strategies of tests
            StrategyWatch.timeout_seconds = limit_seconds
        self._watch.timeout_seconds = None
        self.do("the start")
        watcher.add(self._watch, transport.hosts[self.rank])
        gate.install(transport.abort)

    def do(self, doing: str) -> None:
        """Notes what this rank does between the meetings from now on."""
        self._doing = doing
        self._note(doing)

    def _note(self, text: str) -> None:
        if not self._is_lost:  # it waits for ever
            self._watch.recorder.end()
            self._watch.recorder.begin(text, None)

    def meet(self, arrival: Arrival) -> list[Arrival]:
        """Returns what each rank tells, once all are here.

        Where the others do not come this ends the job; rank 0 first reports.

        Raises
        ------
        RanksMissingError
            On rank 0, once: it is alone from then on, and meets nobody else.
        KeyboardInterrupt
            Here: it came during the meeting, and not at that before the report, which notes it.
        """
        if getpid() != self._process:
            self._end_child(arrival)
        if self._is_lost:
            return [arrival]
        gate.close()  # an interrupt would leave an exchange half done
        try:
            with _alarms_let_pass():
                arrivals = self._meet(arrival)
        finally:
            gate.open()
        if gate.take():
            if arrival.stage != _REPORT_STAGE:
                raise KeyboardInterrupt
            self.was_interrupted = True
        return arrivals

    def _end_child(self, arrival: Arrival) -> NoReturn:
        """Ends a forked child that has left its test: the rank is its parent, which comes, too."""
        self.say(
            f"{arrival.place}: a child that was forked here has left the test, and is ended. End it"
            f" with os._exit, or start it with multiprocessing.\n{arrival.text}"
        )
        os._exit(1)

    def _meet(self, arrival: Arrival) -> list[Arrival]:
        self._waiting = arrival
        self._note(f"the meeting at {arrival.place}")
        self._has_left_all = False
        if arrival.kind != PASSED:
            self.departure.leave_own(arrival.place)
        elif arrival.text:
            self.departure.leave_all(arrival.place)
        is_late = monotonic() - self._met_at > _LATE * self.limit_seconds
        has_more = is_late or arrival.kind == FAILED or arrival.text != ""
        compared = f"{arrival.place}\n{arrival.detail}".encode(errors="replace")
        digest = hashlib.blake2b(compared, digest_size=16).digest()
        header = _HEADER.pack(digest, arrival.kind.encode(), arrival.stage, has_more)
        header = header.ljust(HEADER_BYTES, b"\0")
        ended = self._transport.begin_exchange(header)
        self._wait(ended, arrival, _PATIENCE)
        headers = self._transport.headers[HEADER_BYTES].tobytes()
        arrivals = [arrival] * self.size
        if has_more or headers != header * self.size:
            arrivals = self._tell(arrival._replace(has_left_all=self._has_left_all))
        if any(other.has_left_all or (other.stage and other.text) for other in arrivals):
            self.departure.leave_all(arrival.place)
        elif any(other.kind != PASSED for other in arrivals):
            self.departure.leave_own(arrival.place)
        self._wait(self.departure.advance, arrival)
        self._waiting = None
        self._note(self._doing)
        self._met_at = monotonic()
        return arrivals

    def _wait(
        self, has_ended: Callable[[], bool], arrival: Arrival, patience: float = math.inf
    ) -> None:
        """Waits for the others; after a while gives up all strategies, and at last the job."""
        start, pause = monotonic(), _SHORTEST_PAUSE_SECONDS
        limit = self.limit_seconds * (_END_FACTOR if arrival.stage == _END_STAGE else 1)
        while not has_ended():
            self.departure.advance()
            waited = monotonic() - start
            if waited > patience * limit and not self._has_left_all:
                self._has_left_all = True
                self.departure.leave_all(arrival.place)
            if waited > limit:
                self._give_up(arrival, limit)
            sleep(pause)  # the ranks may outnumber the cores
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)

    def _tell(self, arrival: Arrival) -> list[Arrival]:
        try:
            texts = self._transport.all_gather_bytes(pickle.dumps(arrival))
        except WaitGivenUpError:
            self._give_up(arrival, self.limit_seconds)
        return [pickle.loads(data) for data in texts]

    def _place(self) -> Whereabouts:
        """Returns the answer for another rank that asks where this one is."""
        waiting = self._waiting
        if waiting is None:
            return place_of_thread(self._watch.thread())
        return Whereabouts((waiting.text or waiting.kind)[:_MOST_CHARACTERS], False)

    def _give_up(self, arrival: Arrival, waited_seconds: float) -> NoReturn:
        """Ends the job: some ranks did not come. The lowest of the others says where they are."""
        answers = self._watch.ask(_ANSWER_SECONDS)
        doing = {rank: answer.recent[-1].text for rank, answer in sorted(answers.items())}
        waiting = [rank for rank, text in doing.items() if text == doing[self.rank]]
        text = self._missing_text(arrival.place, waited_seconds, waiting, answers)
        if self.rank == 0:
            self._is_lost = True
            # Its report comes first, but may not come: a fixture may wait for the others in turn.
            watchdog = threading.Timer(self.limit_seconds, self._end, [text])
            watchdog.daemon = True
            watchdog.start()
            raise RanksMissingError(text)
        if self._transport.mailbox is None:
            self.say(text)
        elif waiting[0] == self.rank:
            self._end(text)
        sleep(3 * self.limit_seconds)  # another rank ends the job, if it can
        self._abort()

    def _missing_text(
        self,
        place: str,
        waited_seconds: float,
        waiting: Sequence[int],
        answers: Mapping[int, Answer],
    ) -> str:
        factor = f"{_END_FACTOR} times " if waited_seconds > self.limit_seconds else ""
        parts = [
            f"{place}: {numbers_text('rank', waiting)} waited {waited_seconds:g} s"
            f" ({factor}MPI_REPLICA_TEST_FENCE) for ranks that did not come. They wait in a call"
            " that not all ranks make, or need longer."
        ]
        for rank in waiting:
            if answers[rank].place.stack != PASSED:
                parts.append(f"rank {rank} waits: {answers[rank].place.stack}")
        if self._transport.mailbox is None:
            parts.append(
                "It is not known where the others are: that needs an MPI library for several"
                " threads, and no MPI_REPLICA_WATCH=0."
            )
            return "\n\n".join(parts)
        processes = Processes(self._transport.hosts, self._transport.pids)
        for rank in range(self.size):
            if rank not in waiting:
                parts.append(missing_text(processes.describe(rank), answers.get(rank)))
        return "\n\n".join(parts)

    def say(self, text: str) -> None:
        """Writes to the terminal, whatever pytest captures; it never fails, an abort may follow."""
        line = f"\n[rank {self.rank} of {self.size}] {text}\n"
        with contextlib.suppress(OSError):
            os.write(self._stderr, line.encode(errors="backslashreplace"))

    def _end(self, text: str) -> NoReturn:
        for failure in self.failures:
            self.say(f"failed earlier: {failure}")
        self.say(text)
        self._abort()

    def _abort(self) -> NoReturn:
        with contextlib.suppress(Exception):  # a test may have closed it
            sys.stdout.flush()
        sleep(_FORWARD_SECONDS)
        self._transport.abort(1)
        os._exit(1)  # a transport that returns

    def close(self) -> None:
        """Meets no more. Where ranks are missing, ends the job."""
        if self._is_lost:
            self._abort()
        StrategyWatch.timeout_seconds = None
        watcher.remove(self._watch)
        os.close(self._stderr)
        self._transport.close()
