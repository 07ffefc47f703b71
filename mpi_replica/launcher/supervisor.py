"""What watches over a job: it starts it, hands signals on, and leaves nothing behind."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import time
from collections.abc import Callable, Mapping, Sequence

from ..core.exceptions import LaunchError
from ..ranks.launch import without_rank
from .commands import SECONDS_TO_SAVE
from .host_questions import HostQuestions
from .job import Job, plan
from .job_start import TIMED_OUT, JobStart
from .leftovers import remove_leftovers
from .output import tell
from .processes import adopt_orphans, descendants
from .rank_connections import SAVED
from .restarts import Restarts

_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)

_SECONDS_TO_END = 2.0
# A host that is silent is one to ssh after 3 s, to srun after 12.
_SECONDS_TO_ANSWER = 13.0
# At the end only what is left there depends on it; what questions leave, the next ones remove.
_SECONDS_TO_ANSWER_AT_THE_END = 5.0
_MOST_QUESTIONS_AT_THE_END = 3
_LOOK_SECONDS = 0.1
# The kernel counts milliseconds in 32 bits: it takes no more than 24 days.
_LONGEST_WAIT_SECONDS = 3600.0
_READ_BYTES = 1 << 16


def start(job: Job, environ: Mapping[str, str]) -> int:
    """Runs a job to its end, and again where ranks were lost; returns the exit status.

    Signals go on to the ranks, where the launcher hands them on; otherwise to the ranks of this
    host; before there are any, to the launcher. SIGINT (Ctrl-C) is for the launcher; a third one
    kills all. Those that were ignored, as under nohup, stay so. After the timeout the ranks get
    SIGTERM, and are killed some time later.

    Parameters
    ----------
    job : Job
        What `plan` gives.
    environ : mapping
        The environment variables that are set already.

    Returns
    -------
    int
        That of the program; 128 + n when it died of signal n; 124 when it ran too long.
    """
    with contextlib.ExitStack() as stack:
        return _Supervisor(stack, job, environ).run()


class _Supervisor:
    """The starts of a job, and the signals for it."""

    def __init__(self, stack: contextlib.ExitStack, job: Job, environ: Mapping[str, str]) -> None:
        self._job = job
        self._started_at = time.time()
        # Of the first strategy that was made.
        self._num_replicas: int | None = None
        self._environ = without_rank(environ)
        self._restarts = Restarts(job.options.restarts, job.options.restart_on == "any")
        # What is left to do where it runs too long, and when.
        self._steps = self._steps_after_timeout(time.monotonic())
        # One that has come while no rank was there.
        self._signal = 0
        # Whether a start before this one has shown that the program goes on from checkpoints.
        self._goes_on = False
        self._current: JobStart | None = None
        self._may_leave_files = False
        # Which knows files as well, epoll does not.
        self._selector = stack.enter_context(selectors.PollSelector())
        self._listen(stack)
        # In a terminal Ctrl-C goes to all in the group, and only they may read from it.
        self._is_in_terminal = False
        with contextlib.suppress(OSError):  # none, or one that is another session's
            self._is_in_terminal = os.tcgetpgrp(0) == os.getpgrp()
        # Of a shell that has become this process, such as the reader of `exec > >(tee log)`.
        self._others = descendants(os.getpid())
        adopt_orphans()

    def _listen(self, stack: contextlib.ExitStack) -> None:
        """Lets signals be written to a pipe, and read from it like what ranks tell."""
        source, sink = os.pipe()
        for end in (source, sink):
            stack.callback(os.close, end)
            os.set_blocking(end, False)
        stack.callback(signal.set_wakeup_fd, signal.set_wakeup_fd(sink))
        for number in _FORWARDED:
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, lambda *_: None)
                # One that comes after the end would change the exit status.
                stack.callback(signal.signal, number, signal.SIG_IGN)
        before = signal.signal(signal.SIGCHLD, lambda *_: None)
        stack.callback(signal.signal, signal.SIGCHLD, before)
        self._selector.register(source, selectors.EVENT_READ, lambda: self._read_signals(source))

    def run(self) -> int:
        while True:
            current = JobStart(
                self._job,
                self._environ,
                self._selector,
                self._is_in_terminal,
                self._restarts.count,
                self._others,
            )
            self._current = current
            try:
                self._run(current)
            finally:
                if current.launcher.poll() != 0:
                    current.kill()
                current.end()
                self._current = None
            outcome = current.outcome()
            self._may_leave_files |= current.may_leave_files or bool(outcome.loss)
            seconds, text = self._restarts.pause_seconds(outcome)
            if text or current.ended_because:
                tell(text or f"{current.ended_because}: the job was ended.")
            if seconds is None:
                if self._may_leave_files:
                    self._clean_up({} if outcome.is_final else self._job.questions)
                return self._status(outcome.status)
            self._goes_on = self._goes_on or outcome.goes_on
            self._compare_replicas(outcome.num_replicas)
            try:
                goes_on = self._pause(seconds)
            except LaunchError as error:
                tell(f"the job is not started again: {error}")
                return outcome.status
            for stream in current.streams:  # whose place the next one's take
                stream.close()
            if not goes_on:
                if self._signal:
                    return self._status(128 + self._signal)
                tell(f"{self._lateness}: it is not started again.")
                return TIMED_OUT

    def _status(self, status: int) -> int:
        """Returns the exit status for that of the last start, or of the signal in a pause."""
        # What batch systems send before the end, and the ranks were not yet there to answer it.
        has_saved = self._goes_on and status == 128 + signal.SIGUSR1
        return SAVED if has_saved else status

    def _compare_replicas(self, num_replicas: int | None) -> None:
        """Warns of a program whose replicas are as many as its ranks, which may change."""
        if self._num_replicas is None:
            self._num_replicas = num_replicas
        elif num_replicas not in (None, self._num_replicas):
            tell(
                f"the program has made {num_replicas} replicas, and {self._num_replicas} when it"
                " was started first: its results differ. Give MPIStrategy num_replicas instead of"
                " replicas_per_rank."
            )

    def _run(self, current: JobStart) -> None:
        while current.launcher.poll() is None:
            self._serve(self._seconds_to_wait(current.seconds_to_look))
            if self._is_late:
                self._steps.pop(0)[1](current)
            reason, report = current.look()
            if report:
                tell(report)
            if reason:
                current.end()
                self._give_time_to_end(current)
        self._drain(current)

    def _give_time_to_end(self, current: JobStart) -> None:
        """Lets the launcher clear up behind its ranks, and kills it where it does not end."""
        limit = time.monotonic() + _SECONDS_TO_END
        while current.launcher.poll() is None:
            left = limit - time.monotonic()
            if left < 0:
                current.kill()
            self._serve(max(0.0, left))

    def _pause(self, seconds: float) -> bool:
        """Waits, and asks meanwhile who is left; returns whether the job may go on then.

        Raises
        ------
        LaunchError
            It can't be started on the hosts that are left.
        """
        answered = self._ask(self._job.questions, seconds, _SECONDS_TO_ANSWER).answered
        if self._signal or self._is_late:
            return False
        if self._job.questions:
            self._leave_hosts_out(answered)
        return True

    def _clean_up(self, questions: Mapping[str, Sequence[str]]) -> None:
        """Lets hosts, and this one, remove what dead processes have left."""
        for _ in range(_MOST_QUESTIONS_AT_THE_END):
            unfinished = self._ask(questions, 0.0, _SECONDS_TO_ANSWER_AT_THE_END).unfinished
            questions = {host: questions[host] for host in unfinished}
            if not questions:
                return

    def _ask(
        self, asked: Mapping[str, Sequence[str]], seconds: float, seconds_more: float
    ) -> HostQuestions:
        """Waits, and longer for hosts that don't answer; a signal or a timeout ends the wait."""
        limit = time.monotonic() + seconds
        last = limit + seconds_more
        environ = {**self._environ, **self._job.added, **self._job.added_again}
        since = str(self._started_at)
        questions = HostQuestions(
            self._selector, {host: [*words, since] for host, words in asked.items()}, environ
        )
        try:
            while not (self._signal or self._is_late) and (
                (now := time.monotonic()) < limit or (questions.are_open and now < last)
            ):
                self._serve(self._seconds_to_wait(_LOOK_SECONDS))
        finally:
            questions.close()
            remove_leftovers(self._started_at)
        return questions

    def _leave_hosts_out(self, answered: set[str]) -> None:
        """Makes the job for the hosts that have answered, where these are not all."""
        hosts = self._job.hosts
        left = [host for host in hosts if host.name in answered]
        missing = ", ".join(host.name for host in hosts if host.name not in answered)
        if not left:
            raise LaunchError(f"none of its hosts answers ({missing}).")
        if missing:
            self._job = plan(self._job.options, self._environ, left, self._num_replicas)
            tell(f"{missing} left out, no answer came: {self._job.num_ranks} ranks go on.")

    def _seconds_to_wait(self, seconds: float | None) -> float | None:
        if not self._steps:
            return seconds
        left = max(0.0, self._steps[0][0] - time.monotonic())
        return min(left, _LONGEST_WAIT_SECONDS if seconds is None else seconds)

    def _serve(self, seconds: float | None) -> None:
        """Waits for signals, output and ranks, and deals with what has come."""
        for key, _ in self._selector.select(seconds):
            key.data()

    def _read_signals(self, source: int) -> None:
        for number in os.read(source, _READ_BYTES):
            if number == signal.SIGCHLD:
                continue
            if self._current is None:
                self._signal = number
            else:
                self._current.forward(signal.Signals(number))

    def _drain(self, current: JobStart) -> None:
        """Passes on what the launcher has written before its end, and sees the ends of ranks."""
        current.read_ranks()  # which came, and were gone, while this process got no CPU
        left = _SECONDS_TO_END  # a process left behind may hold the pipes
        while left > 0 and not (
            all(stream.is_closed for stream in current.streams) and current.have_ranks_ended
        ):
            if any(stream.has_text for stream in current.streams) and not current.was_ended:
                self._serve(self._seconds_to_wait(None))  # it takes as long as whoever reads it
                if self._is_late:
                    self._steps.pop(0)[1](current)
            else:
                start = time.monotonic()
                self._serve(left)
                left -= time.monotonic() - start

    def _steps_after_timeout(self, now: float) -> list[tuple[float, Callable[[JobStart], None]]]:
        """Returns what is done with a job that runs too long, and when."""
        seconds = self._job.options.timeout_seconds
        if seconds is None:
            return []
        later = now + seconds + SECONDS_TO_SAVE
        return [
            (now + seconds, self._tell_of_timeout),
            # The launcher ends ranks on other hosts, too, if it still can.
            (later, lambda current: current.launcher.send_signal(signal.SIGINT)),
            (later + _SECONDS_TO_END, JobStart.kill),
        ]

    @property
    def _is_late(self) -> bool:
        """Whether it is time for the next of the steps after the timeout."""
        return bool(self._steps) and time.monotonic() >= self._steps[0][0]

    @property
    def _lateness(self) -> str:
        seconds = f"{self._job.options.timeout_seconds:g}"
        return f"the job did not end within {seconds} s (--timeout {seconds})"

    def _tell_of_timeout(self, current: JobStart) -> None:
        current.is_timed_out = True
        tell(f"{self._lateness}: its ranks get SIGTERM, and SIGKILL {SECONDS_TO_SAVE} s later.")
        current.forward(signal.SIGTERM)
