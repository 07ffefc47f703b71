"""What watches over a job: it starts the launcher, hands signals on, and leaves nothing behind."""

from __future__ import annotations

import contextlib
import os
import select
import selectors
import signal
import subprocess
import time
from collections.abc import Callable, Mapping

from .commands import SECONDS_TO_SAVE
from .job import Job
from .output import DeathNotice, OutputStream, Tags
from .processes import adopt_orphans, descendants, ends_with_parent, ranks_below

# The exit status of a job that ran too long: that of the command `timeout`.
_TIMED_OUT = 124

_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)

# What launchers hand to the ranks of all hosts, as measured with Open MPI 5.0.11 and MPICH 5.0.2.
# The others end Open MPI's launcher and its ranks in 0.2 s, or MPICH's launcher alone.
_HANDED_ON = {
    "openmpi": {signal.SIGUSR1, signal.SIGUSR2},
    "mpich": {signal.SIGTERM, signal.SIGUSR1},
    "srun": {signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP},
}

# What launchers return when a signal has ended them and their ranks.
_STATUS_WHEN_ENDED = {"openmpi": 1, "mpich": 255}

_SECONDS_TO_END = 2.0
_READ_BYTES = 1 << 16


def start(job: Job, environ: Mapping[str, str]) -> int:
    """Runs a job to its end and returns the exit status.

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
    """A launcher at work, its output and the signals for it."""

    def __init__(self, stack: contextlib.ExitStack, job: Job, environ: Mapping[str, str]) -> None:
        self._job = job
        self._kind = job.launcher
        self._is_timed_out = False
        self._interrupts = 0
        # A signal that the launcher itself got, and does not hand on.
        self._ended_by = 0
        # The last one that went on to ranks or launcher.
        self._forwarded = 0
        self._notice = DeathNotice()
        # Which knows files as well, epoll does not.
        self._selector = stack.enter_context(selectors.PollSelector())
        self._signals = self._listen(stack)
        # In a terminal Ctrl-C goes to all in the group, and only they may read from it.
        self._is_in_terminal = os.isatty(0) and os.tcgetpgrp(0) == os.getpgrp()
        adopt_orphans()
        self._launcher = subprocess.Popen(
            job.command,
            env={**environ, **job.added},
            stdout=subprocess.PIPE if job.tag or self._kind == "mpich" else None,
            stderr=subprocess.PIPE if job.tag else None,
            process_group=None if self._is_in_terminal else 0,
            preexec_fn=ends_with_parent(),
        )
        self._streams = [
            OutputStream(
                self._selector, pipe, target, self._notice, Tags(self._kind) if job.tag else None
            )
            for pipe, target in ((self._launcher.stdout, 1), (self._launcher.stderr, 2))
            if pipe is not None
        ]

    def _listen(self, stack: contextlib.ExitStack) -> int:
        """Lets signals be written to a pipe; returns the end to read from."""
        source, sink = os.pipe()
        for end in (source, sink):
            stack.callback(os.close, end)
            os.set_blocking(end, False)
        stack.callback(signal.set_wakeup_fd, signal.set_wakeup_fd(sink))
        for number in (*_FORWARDED, signal.SIGCHLD):
            before = signal.getsignal(number)
            if before is not signal.SIG_IGN or number == signal.SIGCHLD:
                signal.signal(number, lambda *_: None)
                # One that comes after the end would change the exit status.
                after = before if number == signal.SIGCHLD else signal.SIG_IGN
                stack.callback(signal.signal, number, after)
        self._selector.register(source, selectors.EVENT_READ)
        return source

    def run(self) -> int:
        start = time.monotonic()
        steps = self._steps_after_timeout()
        try:
            while self._launcher.poll() is None:
                limit = start + steps[0][0] if steps else None
                self._serve(None if limit is None else max(0.0, limit - time.monotonic()))
                if limit is not None and time.monotonic() >= limit:
                    steps.pop(0)[1]()
            self._drain()
        finally:
            if self._launcher.poll() != 0:
                self._kill()
        return self._status()

    def _serve(self, seconds: float | None) -> None:
        """Waits for signals and output, and passes them on."""
        for key, _ in self._selector.select(seconds):
            if key.fileobj == self._signals:
                for number in os.read(self._signals, _READ_BYTES):
                    if number != signal.SIGCHLD:
                        self._forward(signal.Signals(number))
            else:
                key.data.pass_on()

    def _drain(self) -> None:
        """Passes on what the launcher has written before its end."""
        left = _SECONDS_TO_END  # a process left behind may hold the pipes
        while left > 0 and not all(stream.is_closed for stream in self._streams):
            was_ended = self._is_timed_out or self._ended_by
            if any(stream.has_text for stream in self._streams) and not was_ended:
                self._serve(None)  # it takes as long as whoever reads it
            else:
                start = time.monotonic()
                self._serve(left)
                left -= time.monotonic() - start

    def _forward(self, number: signal.Signals) -> None:
        self._forwarded = number
        if number == signal.SIGINT:
            self._interrupt()
        elif number in _HANDED_ON[self._kind]:
            self._launcher.send_signal(number)
        elif ranks := ranks_below(self._launcher.pid):
            for rank in ranks:
                _send(rank, number)
        else:
            self._ended_by = number
            self._launcher.send_signal(number)

    def _interrupt(self) -> None:
        self._interrupts += 1
        self._ended_by = signal.SIGINT
        if self._interrupts > 2:
            self._kill()
        elif not self._is_in_terminal:  # which has told it already
            self._launcher.send_signal(signal.SIGINT)

    def _steps_after_timeout(self) -> list[tuple[float, Callable[[], None]]]:
        """Returns what is done with a job that runs too long, and after how many seconds."""
        seconds = self._job.timeout_seconds
        if seconds is None:
            return []
        later = seconds + SECONDS_TO_SAVE
        return [
            (seconds, self._tell_of_timeout),
            # The launcher ends ranks on other hosts, too, if it still can.
            (later, lambda: self._launcher.send_signal(signal.SIGINT)),
            (later + _SECONDS_TO_END, self._kill),
        ]

    def _tell_of_timeout(self) -> None:
        self._is_timed_out = True
        seconds = f"{self._job.timeout_seconds:g}"
        _tell(
            f"the job did not end within {seconds} s (--timeout {seconds}): its ranks get SIGTERM,"
            f" and SIGKILL {SECONDS_TO_SAVE} s later."
        )
        self._forward(signal.SIGTERM)

    def _kill(self) -> None:
        """Kills all processes of the job on this host, also those that lost their parents."""
        while processes := descendants(os.getpid()):
            for process in processes:
                _send(process, signal.SIGKILL)
            self._launcher.wait()  # first, since its status is the job's
            try:
                os.waitpid(-1, 0)
            except ChildProcessError:
                break
        if self._launcher.poll() is None:  # there is no /proc
            self._launcher.kill()
            self._launcher.wait()

    def _status(self) -> int:
        status = self._launcher.returncode
        if self._is_timed_out:
            return _TIMED_OUT
        if self._ended_by and (status < 0 or status == _STATUS_WHEN_ENDED.get(self._kind)):
            return 128 + self._ended_by
        if status < 0:
            return 128 - status
        if self._job.statuses is not None:
            return self._status_of_the_ranks_left(status, self._job.statuses)
        return self._notice.status(status) if self._kind == "mpich" else status

    def _status_of_the_ranks_left(self, status: int, statuses: Mapping[int, int]) -> int:
        if status:
            return statuses.get(status, status)
        if self._forwarded:
            return 128 + self._forwarded
        _tell("no rank has come to the end of the program: all were lost.")
        return 1


def _send(process: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(process, number)


def _tell(text: str) -> None:
    """Writes a line of the command's own, unless nobody reads."""
    if select.select([], [2], [], _SECONDS_TO_END)[1]:
        with contextlib.suppress(BrokenPipeError):
            os.write(2, f"mpi_replica run: {text}\n".encode())
