"""A watcher's view of one strategy: its own rank's waits, and what other ranks say of theirs.

A rank that waits too long asks all others where they are, and tells. The lowest rank that waits
does so: each one gives those below it a head start, and keeps still once another one has asked.
"""

from __future__ import annotations

import functools
import logging
import os
import pickle
from collections.abc import Callable
from time import monotonic, sleep, time
from typing import Any, NamedTuple

from ...core.exceptions import (
    CollectiveMismatchError,
    CollectiveTimeoutError,
    MPIReplicaError,
    RankLostError,
    in_words,
)
from ...core.layout import Layout
from ..launcher_connection import tell
from ..transport import Mailbox, Transport
from .recorder import FlightRecorder
from .stacks import Whereabouts, place_of_thread
from .stall_report import Answer, Processes, local_stall_report, stall_report

_log = logging.getLogger("mpi_replica")

_STALL_SECONDS = "MPI_REPLICA_STALL_SECONDS"
_DEFAULT_STALL_SECONDS = 60.0

# How long a rank may take for an answer: one that is stopped gives none.
_ANSWER_SECONDS = 0.5
# A thread that asks by itself looks for answers so often.
_POLL_SECONDS = 0.01
# Each rank waits so much longer than the one below it before it asks.
_HEAD_START_SECONDS = 0.1
_MOST_HEAD_STARTS = 10
# A rank whose wait was ended, and that has not come out of it after this time, is inside MPI.
_SECONDS_TO_COME_OUT = 2.0
# Who was asked leaves it to the one that asked, for so long.
_QUIET_SECONDS = 1.5

# Which exchange a rank is behind that has met a loss: ranks count the last ones differently then.
_BEHIND_A_LOSS = 1 << 62

#: What to do behind an error that ends a strategy.
IS_OVER = (
    "The strategy can't be used any more. End the program, or make a new strategy on all ranks."
)

#: The same behind a wait that was given up.
OTHERS_MAY_COME = (
    "The strategy can't be used any more, since the others may still come. End the program, or make"
    " a new strategy on all ranks."
)

_FINAL_ERRORS = {
    "timeout": CollectiveTimeoutError,
    "cycle": CollectiveMismatchError,
    "break": RankLostError,
}


def stall_seconds() -> float:
    """Returns after how many seconds a wait is reported."""
    return _stall_seconds_of(os.environ.get(_STALL_SECONDS, ""))


@functools.cache  # each strategy asks several times: what is wrong with it is told once
def _stall_seconds_of(text: str) -> float:
    try:
        seconds = float(text or _DEFAULT_STALL_SECONDS)
    except ValueError:
        seconds = 0.0
    if not seconds > 0:
        _log.warning(
            "%s=%r is not a positive number of seconds: %g is used.",
            _STALL_SECONDS,
            text,
            _DEFAULT_STALL_SECONDS,
        )
        return _DEFAULT_STALL_SECONDS
    return seconds


def head_start_seconds(rank: int) -> float:
    """Returns how much longer than rank 0 a rank waits before it asks or searches."""
    return _HEAD_START_SECONDS * min(rank, _MOST_HEAD_STARTS)


class _Inquiry(NamedTuple):
    """A question to all other ranks that is still open."""

    number: int
    is_timeout: bool
    deadline: float
    answers: dict[int, Answer]


class StrategyWatch:
    """What the watcher of this process knows of one strategy, and its mailbox.

    Parameters
    ----------
    transport, layout
        Those of the strategy.
    thread : callable
        Gives the ident of the thread that the strategy belongs to.
    local_meeting : callable
        Gives the local replicas that have not come to a call, and the text of the call at which
        the others wait, which is empty where none waits.
    give_up : callable
        Called, in any thread, with an error that makes the strategy unusable.
    place : callable, optional
        Gives the place of that thread. Default: that of its stack.

    Attributes
    ----------
    timeout_seconds : float or None
        The limit of waits in calls that have none of their own; set for all, or for one.
    """

    timeout_seconds: float | None = None

    def __init__(
        self,
        transport: Transport,
        layout: Layout,
        thread: Callable[[], int],
        local_meeting: Callable[[], tuple[tuple[int, ...], str]],
        give_up: Callable[[MPIReplicaError], None],
        place: Callable[[], Whereabouts] | None = None,
    ) -> None:
        self.layout = layout
        self.thread = thread
        self.recorder = FlightRecorder()
        self.is_watched = False
        self._is_closed = False
        #: Whether the strategy can't be used any more.
        self.is_over = False
        #: Whether the program of this rank has ended, and it waits for the others to know: in all
        #: strategies at once, of which one tells.
        self.is_leaving = False
        #: Whether it then waits for a limited time only.
        self.leaves_in_time = False
        #: Called with (watch, message) for messages about cycles.
        self.on_cycle: Callable[[StrategyWatch, tuple[Any, ...]], None] = lambda *_: None
        #: Called where a rank asks all others to print where they are.
        self.on_print: Callable[[str], None] = lambda _: None
        #: Called where the job can't go on, with its exit status.
        self.abort: Callable[[int], None] = transport.abort
        self._transport = transport
        self._processes = Processes(transport.hosts, transport.pids, transport.is_fault_tolerant)
        self._local_meeting = local_meeting
        self._give_up = give_up
        self._place = place or (lambda: place_of_thread(thread()))
        self._stall_seconds = stall_seconds()
        self._step = -1
        self._since = 0.0
        self._reports = 0
        self._quiet_until = 0.0
        self._inquiries = 0
        # The open ones: the watcher's own, and that of a thread that waits for its answers.
        self._inquiry: _Inquiry | None = None
        self._inquiry_of_thread: _Inquiry | None = None
        self._stuck_since: float | None = None
        self._local: tuple[tuple[int, ...], str] = ((), "")
        self._local_since = 0.0
        self._local_reports = 0

    @property
    def _mailbox(self) -> Mailbox | None:
        """What this rank may send and receive with, by whoever holds the lock."""
        return None if self._is_closed else self._transport.mailbox

    @property
    def step(self) -> int:
        """How many exchanges this rank has begun, that of its end among them."""
        if self._transport.loss is not None:
            return _BEHIND_A_LOSS + self.is_waiting
        return self._transport.steps + self.is_leaving

    @property
    def is_waiting(self) -> bool:
        """Whether this rank is in an exchange."""
        return self.is_leaving or self._transport.steps > self._transport.steps_ended

    @property
    def is_asking(self) -> bool:
        """Whether answers are expected soon."""
        return self._inquiry is not None

    def waits_for(self, now: float) -> float:
        """Returns for how many seconds this rank has been seen to wait in one exchange."""
        return now - self._since if self.is_waiting and self._step == self.step else 0.0

    def call(self) -> str:
        """Returns the text of the latest call."""
        if self.is_leaving:
            return "the end of the program"
        if self._transport.loss is not None:
            return "the recovery from a loss"
        latest = self.recorder.last(1)
        return latest[0].text if latest else "a call"

    def who(self) -> str:
        """Returns the words for this rank's replicas."""
        return self.layout.describe(self.layout.local_replica_ids)

    def here(self) -> Answer:
        """Returns where this rank is."""
        return Answer(
            self.step,
            self.is_waiting,
            self._local_meeting()[0],
            time(),
            tuple(self.recorder.last(4)),
            self._place(),
            self.recorder.errors,
        )

    def tell(self, message: tuple[Any, ...], receiver: int | None = None) -> None:
        """Sends a message to the watchers of all other ranks, or to that of one."""
        data = pickle.dumps(message, 5)
        with Mailbox.lock:
            mailbox = self._mailbox
            if mailbox is None:
                return
            receivers = range(self.layout.size) if receiver is None else [receiver]
            for rank in receivers:
                if rank != self.layout.rank:
                    mailbox.send(rank, data)

    def read(self) -> None:
        """Deals with the messages that have come."""
        with Mailbox.lock:
            mailbox = self._mailbox
            while mailbox is not None and (letter := mailbox.receive()) is not None:
                sender, data = letter
                self._deal_with(sender, *pickle.loads(data))

    def ask(self, seconds: float) -> dict[int, Answer]:
        """Returns where the ranks are, by rank: this one, and those that answer in this time."""
        with Mailbox.lock:
            inquiry = self._inquiry_of_thread = self._begin_inquiry(seconds)
        while len(inquiry.answers) < self.layout.size and monotonic() < inquiry.deadline:
            if self._mailbox is None:
                break
            sleep(_POLL_SECONDS)
            self.read()
        with Mailbox.lock:
            self._inquiry_of_thread = None
        return inquiry.answers

    def tell_of_break(self, error: BaseException) -> None:
        """Ends the waits of all other ranks: this one has left a call halfway."""
        text = f"{self.who()} left {self.call()} halfway, by {in_words(error)}. {IS_OVER}"
        self.tell(("final", "break", text))

    def close(self) -> None:
        """Waits until no other thread uses the mailbox, and lets none use it again.

        A watcher that goes through watches may still hold this one.
        """
        with Mailbox.lock:
            self.is_watched = False
            self._is_closed = True

    def tick(self, now: float) -> None:
        """Looks at the waits of this rank; called by the watcher, several times a second."""
        with Mailbox.lock:
            if not self.is_watched:
                return
            self.read()
            self._look_at_replicas(now)
            self._end_if_stuck(now)
            step, is_waiting = self.step, self.is_waiting
            if step != self._step:
                self._quiet_until = 0.0
            if not is_waiting or step != self._step:
                self._step, self._since = step, now
                self._reports = 0
                self._inquiry = None
            elif self._inquiry is not None:
                answered = len(self._inquiry.answers) == self.layout.size
                if answered or now > self._inquiry.deadline:
                    self._conclude(now, self._inquiry)
            elif now >= self._quiet_until and not self.is_over:
                self._ask_if_due(now)

    def give_up(self, kind: str, text: str) -> None:
        """Ends the use of the strategy on this rank, with the error that `kind` stands for."""
        self.is_over = True
        self._give_up(_FINAL_ERRORS[kind](text))

    def _ask_if_due(self, now: float) -> None:
        waited = now - self._since - head_start_seconds(self.layout.rank)
        mailbox = self._mailbox
        timeout = self.recorder.timeout_seconds or self.timeout_seconds
        if self._transport.loss is not None:
            timeout = None
        # Without a mailbox the rank itself ends a wait in time.
        is_timeout = timeout is not None and waited >= timeout and mailbox is not None
        is_due = is_timeout or waited >= self._stall_seconds * 2**self._reports
        if not is_due or self.layout.size == 1:
            return
        if mailbox is None:
            self._reports += 1
            _log.warning(
                "%s has waited %.0f s on %s. Without a watcher on every rank it is not known who"
                " is missing: it needs an MPI library for several threads.",
                self.call(),
                waited,
                self.who(),
            )
            return
        self._inquiry = self._begin_inquiry(_ANSWER_SECONDS, is_timeout)

    def _begin_inquiry(self, seconds: float, is_timeout: bool = False) -> _Inquiry:
        """Asks all other ranks where they are."""
        self._inquiries += 1
        self.tell(("ask", self._inquiries, self._step, self._reports))
        answers = {self.layout.rank: self.here()}
        return _Inquiry(self._inquiries, is_timeout, monotonic() + seconds, answers)

    def _conclude(self, now: float, inquiry: _Inquiry) -> None:
        self._inquiry = None
        self._reports += 1
        waited, lost = now - self._since, self._transport.failed_ranks()
        processes = self._processes._replace(lost=lost)
        if inquiry.is_timeout:
            waited = self.recorder.timeout_seconds or self.timeout_seconds or waited
            processes = processes._replace(can_be_lost=False)  # this strategy goes on no more
        text = stall_report(
            self.call(), waited, self._step, inquiry.answers, self.layout, processes
        )
        if not inquiry.is_timeout:
            self.recorder.note(text)
            pids, known = enumerate(self._transport.pids), {*inquiry.answers, *lost}
            # One of which the launcher knows that it has ended: the library has not told of it.
            tell(waits_for=[pid for rank, pid in pids if rank not in known])
            _log.warning("%s", text)  # last: logging fails where stderr is closed
            return
        text += f"\n{OTHERS_MAY_COME}"
        self.tell(("final", "timeout", text))
        self.give_up("timeout", text)

    def _end_if_stuck(self, now: float) -> None:
        """Ends the job where this rank is in a blocking call that another one has given up."""
        goes_on = not self.is_waiting or self.step != self._step or self.is_leaving
        if goes_on or not self.is_over:
            self._stuck_since = None
        elif self._stuck_since is None:
            self._stuck_since = now
        elif now - self._stuck_since > _SECONDS_TO_COME_OUT:
            try:
                _log.error(
                    "rank %d can't come out of %s, which another rank has given up: the job ends.",
                    self.layout.rank,
                    self.call(),
                )
            finally:  # logging fails where stderr is closed
                self.abort(1)

    def _look_at_replicas(self, now: float) -> None:
        """Reports replicas of this rank that wait for another one of it."""
        meeting = self._local_meeting()
        missing, call = meeting
        if self.is_waiting or not missing or not call or meeting != self._local:
            self._local, self._local_since, self._local_reports = meeting, now, 0
            return
        # Where other ranks wait for this one, they report it first.
        waited = now - self._local_since
        if waited >= self._stall_seconds * 2**self._local_reports + _ANSWER_SECONDS:
            self._local_reports += 1
            if now >= self._quiet_until:
                here, processes = self.here(), self._processes
                text = local_stall_report(call, waited, here, self.layout, processes)
                _log.warning("%s", text)
                self.recorder.note(text)

    def _deal_with(self, sender: int, kind: str, *contents: Any) -> None:
        if kind == "ask":
            self._answer(sender, *contents)
        elif kind == "answer":
            number, answer = contents
            for inquiry in (self._inquiry, self._inquiry_of_thread):
                if inquiry is not None and inquiry.number == number:
                    inquiry.answers[sender] = answer
        elif kind == "final":
            self.give_up(*contents)
        elif kind == "print":
            self.on_print(contents[0])
        else:
            self.on_cycle(self, (kind, *contents))

    def _answer(self, sender: int, number: int, step: int, reports: int) -> None:
        now = monotonic()
        if self._inquiry is None or sender < self.layout.rank:
            self._inquiry = None
            self._quiet_until = now + _QUIET_SECONDS
            if step == self._step:
                self._reports = max(self._reports, reports + 1)
        mailbox = self._mailbox
        if mailbox is not None:
            mailbox.send(sender, pickle.dumps(("answer", number, self.here()), 5))
