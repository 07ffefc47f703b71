"""One start of a job: the process of the launcher, what it writes, and what its ranks tell."""

from __future__ import annotations

import contextlib
import math
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Collection, Mapping

from ..core.exceptions import LaunchError
from ..core.layout import numbers_text
from ..ranks.watch.strategy_watch import stall_seconds
from .elasticity import RANKS_LOST
from .job import Job
from .output import (
    DeathNotice,
    OutputStream,
    Tags,
    is_output_blocked,
    is_output_unread,
    may_fill_up,
)
from .processes import descendants, ends_with_parent, ranks_below, send_signal
from .rank_connections import SAVED, RankConnections
from .restarts import Outcome

#: The exit status of a job that ran too long: that of the command `timeout`.
TIMED_OUT = 124
_KILLED = 128 + signal.SIGKILL

# What launchers hand to the ranks of all hosts, as measured with Open MPI 5.0.11 and MPICH 5.0.2.
# The others end Open MPI's launcher and its ranks in 0.2 s, or MPICH's launcher alone.
_HANDED_ON = {
    "openmpi": {signal.SIGUSR1, signal.SIGUSR2},
    "mpich": {signal.SIGTERM, signal.SIGUSR1},
    "srun": {signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP},
}

# What launchers return when a signal has ended them and their ranks.
_STATUS_WHEN_ENDED = {"openmpi": 1, "mpich": 255}
# That of MPICH's launcher where an assertion of its own fails, as 5.0's does now and then where it
# hears of the ends of several ranks at once (pmiserv_cb.c, control_cb: "assert (!closed)").
_STATUS_OF_A_FAULT = 255
# That of Open MPI's launcher where nothing begins: a network interface went while it listed them,
# which another start mends, or what it is told by environment variables is wrong.
_STATUS_BEFORE_BEGIN = 213

# How long the library may take to end the others where a rank has failed or was lost, and the
# launcher where all ranks have come to their end. One that goes on without a lost rank can't where
# MPI has not started on all.
_SECONDS_TO_END_OTHERS = 5.0
_SECONDS_TO_BEGIN_ANYWAY = 1.0
_SECONDS_TO_END_ITSELF = 15.0
# The launcher waits for processes that a rank has started and that hold its output.
_SECONDS_TO_END_CHILDREN = 2.0
# What a program does behind its last line may take long, such as objects that write at their end.
# Nobody knows it from an end of MPI that never comes to its own.
_SECONDS_TO_END_PROCESSES = 600.0
# A rank that is not there for so long, while others are, has ended before it could connect.
_SECONDS_TO_COME = 5.0
# A rank may end of these signals, at once or when it has saved; of others within some seconds.
_ENDING_SIGNALS = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
_SECONDS_OF_SIGNAL = 5.0


class JobStart:
    """A launcher at work.

    Parameters
    ----------
    job : Job
        What is started.
    environ : mapping
        The environment variables that are set already.
    selector : BaseSelector
        Gets what the launcher writes, and the connections of the ranks.
    is_in_terminal : bool
        Whether the launcher stays in the group of the terminal.
    restarts : int
        How often the job was started before.
    others : collection of int
        Processes below this one that are none of a job.
    """

    def __init__(
        self,
        job: Job,
        environ: Mapping[str, str],
        selector: selectors.BaseSelector,
        is_in_terminal: bool,
        restarts: int,
        others: Collection[int],
    ) -> None:
        self._job = job
        self._others = others
        self._started_at = time.monotonic()
        #: Whether its time is over.
        self.is_timed_out = False
        self._is_in_terminal = is_in_terminal
        self._is_first = restarts == 0
        self._interrupts = 0
        # A signal that the launcher itself got, and does not hand on.
        self._ended_by = 0
        # The last one that went on to ranks or launcher, and when.
        self._forwarded, self._forwarded_at = 0, 0.0
        #: Why the job was ended from here.
        self.ended_because = ""
        # Whether programs had come to their end by then, and some of their processes had not.
        self._is_cut_off = False
        self._missing_since: float | None = None
        # When the output was last seen to take nothing: a launcher that waits for it can't end.
        self._blocked_at = 0.0
        self._has_reported = False
        self._stall_seconds = stall_seconds()
        self._notice = DeathNotice()
        self._ranks: RankConnections | None = None
        added = {**job.added, **(job.added_again if restarts else {})}
        if job.is_watched:
            self._ranks = RankConnections(
                selector,
                job.num_ranks,
                job.num_hosts > 1,
                [f"{self._stall_seconds:g}", str(restarts)],
            )
            added |= self._ranks.variable
        has_tags = job.options.tag
        says_daemons = job.launcher == "openmpi" and job.num_hosts > 1
        is_file = may_fill_up(1)
        is_one_file = is_file and os.path.sameopenfile(1, 2)  # lines stay in their order
        try:
            self.launcher = subprocess.Popen(
                job.command,
                env={**environ, **added},
                stdout=subprocess.PIPE if has_tags or is_file or job.launcher == "mpich" else None,
                stderr=subprocess.PIPE if has_tags or is_one_file or says_daemons else None,
                process_group=None if is_in_terminal else 0,
                preexec_fn=ends_with_parent(),
            )
        except OSError as error:  # the system takes no more words, or no more processes
            raise LaunchError(f"{job.command[0]} can't be started: {error.strerror}.") from error
        self.streams = [
            OutputStream(
                selector, pipe, target, self._notice, Tags(job.launcher) if has_tags else None
            )
            for pipe, target in ((self.launcher.stdout, 1), (self.launcher.stderr, 2))
            if pipe is not None
        ]

    def forward(self, number: signal.Signals) -> None:
        """Hands a signal on to the ranks; to the launcher where there are none yet."""
        self._forwarded, self._forwarded_at = number, time.monotonic()
        if number == signal.SIGINT:
            self._interrupt()
        elif self.launcher.poll() is not None:  # its output alone is left
            if number in _ENDING_SIGNALS:
                self._ended_by = number
        elif number in _HANDED_ON[self._job.launcher]:
            self.launcher.send_signal(number)
        elif ranks := ranks_below(self.launcher.pid):
            for rank in ranks:
                # A script hands nothing on to the program that it starts; of one in Python, such
                # processes may be what it needs to save.
                send_signal(rank, number, to_group=self._ranks is None)
        else:
            self._ended_by = number
            self.launcher.send_signal(number)

    def _interrupt(self) -> None:
        self._interrupts += 1
        self._ended_by = signal.SIGINT
        if self._interrupts > 2:
            self.kill()
        elif not self._is_in_terminal:  # which has told it already
            self.launcher.send_signal(signal.SIGINT)

    def end(self) -> None:
        """Ends the ranks on all hosts at once, by the end of their connections."""
        if self._ranks is not None:
            self._ranks.close()

    def read_ranks(self) -> None:
        """Reads all that ranks have told so far."""
        if self._ranks is not None:
            self._ranks.read()

    def kill(self) -> None:
        """Kills all processes of the job on this host, also those that lost their parents."""
        self.read_ranks()  # how they have ended before
        while processes := descendants(os.getpid(), self._others):
            for process in processes:
                send_signal(process, signal.SIGKILL)
            self.launcher.wait()  # first, since its status is the job's
            for process in processes:
                with contextlib.suppress(ChildProcessError):  # the next round finds it as a child
                    os.waitpid(process, 0)
        if self.launcher.poll() is None:  # there is no /proc
            self.launcher.kill()
            self.launcher.wait()

    @property
    def was_ended(self) -> bool:
        """Whether it does not end by itself."""
        return bool(self.is_timed_out or self._ended_by or self.ended_because)

    @property
    def may_leave_files(self) -> bool:
        """Whether processes have not come to their end, as far as its launcher knows."""
        has_failed = self.launcher.returncode != 0 or self._notice.has_lost_daemon
        return has_failed or bool(self.ended_because)

    @property
    def have_ranks_ended(self) -> bool:
        """Whether no process is there of those that have come."""
        ranks = {} if self._ranks is None else self._ranks.ranks
        return all(rank.ended_at is not None for rank in ranks.values())

    @property
    def seconds_to_look(self) -> float | None:
        """After how many seconds `look` has something to do; None where it never has."""
        return None if self._ranks is None else 0.2 if self._ranks.missing() else 0.5

    def look(self) -> tuple[str, str]:
        """Returns why the job must be ended, and what else is to be told; both mostly empty."""
        now = time.monotonic()
        if self._ranks is None or self.ended_because:
            return "", ""
        if self._forwarded not in _ENDING_SIGNALS and is_output_blocked():
            self._blocked_at = now
        self.ended_because = self._reason_to_end(self._ranks, now)
        return self.ended_because, self._report_of_stuck_ranks(self._ranks, now)

    def _reason_to_end(self, ranks: RankConnections, now: float) -> str:
        if ranks.failed is not None:
            status = ranks.failed.facts["status"]
            # Where one has saved the others do, too, and what follows may take them longer.
            has_saved = ranks.failed.has_saved
            seconds = _SECONDS_TO_END_PROCESSES if has_saved else _SECONDS_TO_END_OTHERS
            if now > max(ranks.failed_at, self._blocked_at) + seconds:
                return f"{ranks.failed} has ended with status {status}, and others have not yet"
        if left_alone := ranks.left_alone(now - _SECONDS_TO_BEGIN_ANYWAY):
            return left_alone
        if ranks.lost and self._forwarded in _ENDING_SIGNALS and self.have_ranks_ended:
            if now < max(rank.ended_at or 0.0 for rank in ranks.lost) + _SECONDS_TO_END_CHILDREN:
                return ""
            self._ended_by = self._forwarded
            return "its ranks have ended of the signal, and processes that they started have not"
        if ranks.lost:
            first = ranks.lost[0]
            seconds = _SECONDS_TO_END_OTHERS
            if first.is_silent or ranks.is_waited_for:
                seconds = 0.0
            elif self._job.options.is_elastic:
                seconds = math.inf if ranks.have_all_begun else _SECONDS_TO_BEGIN_ANYWAY
            if now > (first.ended_at or 0.0) + seconds:
                return ranks.loss_text() or f"{first} has ended too early"
        if now > max(ranks.last_end, self._blocked_at) + _SECONDS_TO_END_ITSELF:
            return "all ranks have come to their end, and the launcher has not"
        there = [rank for rank in ranks.ranks.values() if rank.ended_at is None]
        if there and now > ranks.last_told_end + _SECONDS_TO_END_PROCESSES:
            self._is_cut_off = True
            limit = f"{_SECONDS_TO_END_PROCESSES:g} s"
            return f"all ranks have come to their end, and the process of {there[0]} not in {limit}"
        return self._reason_of_missing_ranks(ranks, now)

    def _reason_of_missing_ranks(self, ranks: RankConnections, now: float) -> str:
        missing = ranks.missing()
        if not missing or not ranks.ranks:
            return ""
        # Ranks of srun are no children of its own on this host either.
        if self._job.num_hosts > 1 or self._job.launcher == "srun":
            is_late = now > ranks.first_at + self._stall_seconds
        else:
            known = {rank.pid for rank in ranks.ranks.values()}
            here = [pid for pid in ranks_below(self.launcher.pid) if pid not in known]
            if len(here) >= len(missing):
                self._missing_since = None
                return ""
            self._missing_since = self._missing_since or now
            is_late = now > self._missing_since + _SECONDS_TO_COME
        return f"{numbers_text('rank', missing)} was lost before it could begin" if is_late else ""

    def _report_of_stuck_ranks(self, ranks: RankConnections, now: float) -> str:
        """Returns where ranks are for which others wait in the start of MPI."""
        begins = [one for one in ranks.ranks.values() if "begins_mpi" in one.facts]
        late = [one for one in ranks.ranks.values() if "place" in one.facts and one not in begins]
        is_early = now < ranks.first_at + self._stall_seconds
        if self._has_reported or is_early or not begins or not late:
            return ""
        self._has_reported = True
        where = "".join(f"\n  {rank} is at\n{rank.facts['place']}" for rank in late)
        waits = [one.number for one in begins]
        who = f"{numbers_text('rank', waits)} wait{'s' * (len(waits) == 1)}"
        return f"{who} in the start of MPI for others.{where}"

    def outcome(self) -> Outcome:
        """Returns what came of it, when the launcher has ended."""
        ranks, seconds = self._ranks, time.monotonic() - self._started_at
        if ranks is None:
            return Outcome(self._status(False), seconds)
        was_told_to_end = self._is_ended_by_signal(ranks)
        left_alone = "" if was_told_to_end else ranks.left_alone(time.monotonic())
        if left_alone:
            self.ended_because = left_alone
            return Outcome(1, seconds)
        loss = "" if was_told_to_end else self._loss(ranks)
        # What ranks write makes launchers end, Open MPI's with this status: it would the next one.
        if loss and self.launcher.returncode in (1, -signal.SIGPIPE) and is_output_unread():
            self.ended_because = "what read its output has ended, as `| head` does"
            return Outcome(128 + signal.SIGPIPE, seconds, is_final=True)
        status = self._status(bool(loss))
        return Outcome(
            status,
            seconds,
            loss,
            is_final=was_told_to_end or status == SAVED,
            has_package=ranks.fact("package") is not None,
            num_replicas=ranks.fact("num_replicas"),
            goes_on=ranks.fact("goes_on") is not None,
        )

    def _is_ended_by_signal(self, ranks: RankConnections) -> bool:
        """Returns whether ranks may have ended of a signal that they got from here."""
        if self.is_timed_out or self._forwarded in _ENDING_SIGNALS:
            return True
        first = min((rank.ended_at or 0.0 for rank in ranks.missed), default=time.monotonic())
        return 0.0 < self._forwarded_at <= first < self._forwarded_at + _SECONDS_OF_SIGNAL

    def _loss(self, ranks: RankConnections) -> str:
        """Returns what was lost; empty where the program itself has ended."""
        status = self.launcher.returncode
        is_killed = 128 < self._notice.status(status) < 128 + signal.NSIG
        loss = ranks.loss_text()
        if loss and self._job.options.is_elastic and len(ranks.lost) == ranks.size:
            return f"all ranks were lost. The first one: {loss}"
        # Ranks may fail by the end of what has started them.
        if status < 0 and not (loss or self.ended_because):
            return f"the launcher was ended by {signal.Signals(-status).name}"
        has_ended_well = ranks.have_ended_well(self._job.options.is_elastic)
        if self._notice.has_lost_daemon and not (loss or has_ended_well):
            return "the launcher has lost a daemon on another host"
        if loss or ranks.failed is not None:
            return loss
        if self.ended_because:
            return self.ended_because
        is_early = not self._job.options.is_elastic and not self.have_ranks_ended
        if status == 0 and (is_early or ranks.missing()):
            return "the launcher has ended before its ranks"
        is_openmpi = self._job.launcher == "openmpi"
        may_begin_now = is_openmpi and status == _STATUS_BEFORE_BEGIN and self._is_first
        is_asked_for = status and self._job.options.restarts is not None
        if not ranks.ranks and (is_killed or may_begin_now or is_asked_for):
            return f"the launcher has ended with status {status}, before a rank has begun"
        return ""

    def _status(self, is_lost: bool) -> int:
        """Returns the exit status of the job, if this is its last start."""
        status, ranks, options = self.launcher.returncode, self._ranks, self._job.options
        if self.is_timed_out:
            return TIMED_OUT
        is_cut_short = status < 0 or status == _STATUS_WHEN_ENDED.get(self._job.launcher)
        is_cut_short |= status != SAVED and any(stream.has_text for stream in self.streams)
        # MPICH's returns 11, which is 2 | 9, where ranks end of SIGINT and it kills the others.
        is_cut_short |= self._notice.status(status) != status
        if self._ended_by and is_cut_short:
            return 128 + self._ended_by
        if ranks is not None and ranks.have_ended_well(options.is_elastic) and not self._is_cut_off:
            # Whoever is killed in the end of MPI does not change it.
            return RANKS_LOST if ranks.lost and options.on_loss == "warn-status" else 0
        has_reason = is_lost or (ranks is not None and ranks.failed is not None)
        if self._job.launcher == "mpich" and status == _STATUS_OF_A_FAULT and has_reason:
            status = 0  # it says nothing of the ranks
        is_hidden = status == 0 or self.ended_because or options.is_elastic
        if ranks is not None and ranks.failed is not None and is_hidden and not is_lost:
            return ranks.status_of_failure
        if ranks is not None and (self.ended_because or options.is_elastic):
            # Open MPI's launcher reports 0 where it goes on without lost ranks, also without any.
            if not self.ended_because and self._forwarded:
                return 128 + self._forwarded
            if not self.ended_because and status == 0:
                is_loss_alone = is_lost and ranks.failed is None and len(ranks.lost) < ranks.size
                return _KILLED if is_loss_alone else 1
            if status == 0 or self.ended_because:
                return _KILLED
        if status < 0:
            return 128 - status
        if status == 0 and is_lost:
            return _KILLED  # so it does where it has lost a daemon
        return self._notice.status(status) if self._job.launcher == "mpich" else status
