"""The launcher's side of the connections that its ranks open: who has begun, and how each ends."""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import resource
import secrets
import selectors
import socket
import struct
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from ..core.layout import numbers_text
from ..ranks.launcher_connection import VARIABLE, keep_alive

#: The exit status of a program which has saved at a signal, by CheckpointManager.exit_if_signalled.
SAVED = 75

# By the program itself, or by our own end of the whole job.
_ENDS_OF_PROGRAM = {"error", "exit", "left", "abort"}

# A library that can tell the ranks that one is lost does so in this time.
_SECONDS_TO_HEAR = 3.0

_READ_BYTES = 1 << 16
_GET_ADDRESS = 0x8915  # SIOCGIFADDR of linux/sockios.h


class ConnectedRank:
    """What a rank has told, and whether its process is there."""

    def __init__(self, number: int, host: str, pid: int) -> None:
        self.number, self.host, self.pid = number, host, pid
        #: All facts, of each the latest one.
        self.facts: dict[str, Any] = {}
        #: For which processes it waits in vain, as it has told last, and when.
        self.waits_for: set[int] = set()
        self.waits_at = 0.0
        #: When it told that its program has ended, and when its process did; None before.
        self.told_end_at: float | None = None
        self.ended_at: float | None = None
        #: Whether its host has fallen silent: then nobody else sees its end either.
        self.is_silent = False

    @property
    def has_failed(self) -> bool:
        """Whether it has told of an end that is none of its own good will."""
        return bool(self.facts.get("status"))

    @property
    def has_saved(self) -> bool:
        """Whether it has told that it has saved, and ends for that."""
        return self.facts.get("status") == SAVED

    @property
    def is_lost(self) -> bool:
        """Whether it has ended without a word."""
        return self.ended_at is not None and self.facts.get("end") is None

    @property
    def is_replaced(self) -> bool:
        """Whether another program has taken its place, whose end is not seen here."""
        return self.facts.get("end") == "unknown"

    def __str__(self) -> str:
        return f"rank {self.number} ({self.host}, pid {self.pid})"


class RankConnections:
    """Waits for the ranks of a job, and for their ends.

    Parameters
    ----------
    selector : BaseSelector
        Has a function to call as data of each connection.
    size : int
        How many ranks there are.
    is_between_hosts : bool
        Whether some of them are on other hosts.
    words : sequence of str
        What the ranks are told beside where this process is: see `VARIABLE`.
    """

    def __init__(
        self,
        selector: selectors.BaseSelector,
        size: int,
        is_between_hosts: bool,
        words: Sequence[str],
    ) -> None:
        self.size = size
        #: Those that have come, by number.
        self.ranks: dict[int, ConnectedRank] = {}
        #: Those that have ended without a word, in the order in which it was seen.
        self.lost: list[ConnectedRank] = []
        self._gone_on_without: set[int] = set()
        #: The first one that has ended with a status that is not 0, and when that was seen; one
        #: that has saved only where no other one has failed.
        self.failed: ConnectedRank | None = None
        self.failed_at = 0.0
        # That of the first one which has begun to end by itself: its end may take longer than that
        # of others, which end since it does.
        self._first_status = 0
        #: When the first one began to end, by something else than a loss.
        self.program_ends_at = math.inf
        #: When the first one came; infinite before.
        self.first_at = math.inf
        self._selector = selector
        self._secret = secrets.token_hex(16)
        # Each with what deals with it, and returns whether there may be more.
        self._open: dict[socket.socket, Callable[[], bool]] = {}
        # Those that have ended, until it is noted.
        self._ended: list[ConnectedRank] = []
        # A host with many ranks may have few files open at first.
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        wanted = soft + size if hard == resource.RLIM_INFINITY else min(soft + size, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        addresses = []
        if sys.platform == "linux":  # where names of sockets stand in no folder
            name = f"mpi_replica-{secrets.token_hex(8)}"
            self._listen(socket.AF_UNIX, f"\0{name}")
            addresses.append(f":{name}")
        if is_between_hosts or not addresses:
            listener = self._listen(socket.AF_INET, ("" if is_between_hosts else "127.0.0.1", 0))
            hosts = _own_addresses() if is_between_hosts else ["127.0.0.1"]
            addresses += [f"{host}:{listener.getsockname()[1]}" for host in hosts]
        #: The environment variable that lets the ranks find this process.
        self.variable = {VARIABLE: " ".join([self._secret, *words, *addresses])}

    def _listen(self, family: int, address: str | tuple[str, int]) -> socket.socket:
        listener = socket.socket(family)
        listener.bind(address)
        listener.listen(self.size)
        listener.setblocking(False)
        self._register(listener, lambda: self._accept(listener))
        return listener

    def _register(self, opened: socket.socket, serve: Callable[[], bool]) -> None:
        self._open[opened] = serve
        self._selector.register(opened, selectors.EVENT_READ, serve)

    def read(self) -> None:
        """Reads all that has come, also from ranks that are not yet known, without waiting."""
        while any([serve() for serve in list(self._open.values())]):
            pass

    def close(self) -> None:
        """Ends all connections, and with them the ranks, on all hosts."""
        for opened in list(self._open):
            self._close(opened)

    def _close(self, opened: socket.socket) -> None:
        del self._open[opened]
        self._selector.unregister(opened)
        opened.close()

    def _accept(self, listener: socket.socket) -> bool:
        try:
            connection, _ = listener.accept()
            connection.setblocking(False)
            if connection.family == socket.AF_INET:
                keep_alive(connection)
        except OSError:  # there is none, or it has gone again
            return False
        received = _Received()
        self._register(connection, lambda: self._receive(connection, received))
        return True

    def _receive(self, connection: socket.socket, received: _Received) -> bool:
        if connection not in self._open:
            return False
        is_silent = False
        try:
            data = connection.recv(_READ_BYTES)
        except BlockingIOError:
            return False
        except ConnectionResetError:
            data = b""
        except OSError:  # no sign of life
            data, is_silent = b"", True
        now = time.monotonic()
        try:
            for fact in received.facts(data):
                self._note(fact, received, now)
            has_ended = not data
        except (ValueError, KeyError, TypeError, RecursionError):  # no rank of this job
            has_ended = True
        if has_ended:
            self._close(connection)
            if received.rank is not None:
                received.rank.is_silent = is_silent
                self._note_end(received.rank)
        return not has_ended

    def _note_end(self, ended: ConnectedRank) -> None:
        self._ended.append(ended)
        if len(self._ended) > 1:
            return
        if ended.facts.get("end") is None:  # what others have told came before
            self.read()
        for rank in self._ended:
            rank.ended_at = time.monotonic()
            if rank.is_lost:
                self.lost.append(rank)
        self._ended = []

    def _note(self, facts: dict[str, Any], received: _Received, now: float) -> None:
        rank = received.rank
        if rank is None:
            if not secrets.compare_digest(facts["secret"], self._secret):
                raise ValueError
            rank = received.rank = ConnectedRank(facts["rank"], facts["host"], facts["pid"])
            self.ranks[rank.number] = rank
            self.first_at = min(self.first_at, now)
        else:
            if "num_replicas" in facts:  # a program may have strategies of some of its ranks, too
                known = rank.facts.get("num_replicas", 0)
                facts["num_replicas"] = max(facts["num_replicas"], known)
            rank.facts |= facts
            if "waits_for" in facts:
                rank.waits_for, rank.waits_at = set(facts["waits_for"]), now
            if "status" in facts:
                rank.told_end_at = now
            if rank.has_failed and (self.failed is None or self.failed.has_saved > rank.has_saved):
                self.failed, self.failed_at = rank, now
            self._gone_on_without.update(facts.get("went_on_without", ()))
            if facts.get("begins_end") in _ENDS_OF_PROGRAM:
                self.program_ends_at = min(self.program_ends_at, now)
                if facts["begins_end"] != "left" and self._first_status in (0, SAVED):
                    self._first_status = rank.facts.get("ends_with") or self._first_status

    @property
    def status_of_failure(self) -> int:
        """The exit status of the job where a rank has failed: that of the first one; 0 else."""
        if self.failed is None:
            return 0
        status = int(self.failed.facts["status"])
        return status if self._first_status in (0, SAVED) else self._first_status

    @property
    def have_all_begun(self) -> bool:
        """Whether MPI has started on all ranks."""
        return len(self.ranks) == self.size and all(
            "mpi" in rank.facts for rank in self.ranks.values()
        )

    def left_alone(self, then: float) -> str:
        """Returns, in words, who waits for ever for a rank that had ended then; mostly empty.

        It has made no strategy, and others begin with one, in the start of MPI or behind it.
        """
        gone = [
            rank
            for rank in self.ranks.values()
            if rank.facts.get("end") == "done" and not {"begins_mpi", "mpi"} & rank.facts.keys()
            if (rank.ended_at or math.inf) <= then
        ]
        there = [rank for rank in self.ranks.values() if rank.facts.get("end") is None]
        in_start = [r.number for r in there if "begins_mpi" in r.facts and "mpi" not in r.facts]
        in_strategy = [r.number for r in there if r.facts.get("makes_with") == self.size]
        if not gone or not (in_start or in_strategy):
            return ""
        if in_start:
            what = f"MPI can't start without it on {numbers_text('rank', in_start)}"
        else:
            waits = f"wait{'s' * (len(in_strategy) == 1)}"
            what = f"{numbers_text('rank', in_strategy)} {waits} for it to make a strategy"
        return f"{gone[0]} has come to its end, and {what}. Make the strategy on all ranks"

    def have_ended_well(self, is_elastic: bool) -> bool:
        """Returns whether all ranks have come to their end with status 0.

        Of an elastic job all but those without which the others have gone on, and those that were
        lost when their program had come to its end.
        """
        ends = {rank.facts.get("end") for rank in self.ranks.values() if not rank.is_lost}
        if is_elastic:
            is_whole = all(rank.facts.get("begins_end") == "done" for rank in self.missed)
        else:
            is_whole = len(self.ranks) == self.size and not self.lost
        return is_whole and ends == {"done"}

    @property
    def last_end(self) -> float:
        """When the process of the last of all ranks has ended; infinite where one has not."""
        return self._last([rank.ended_at for rank in self.ranks.values()])

    @property
    def last_told_end(self) -> float:
        """When the last of all ranks has told its end, or ended; infinite where one has not."""
        return self._last([rank.told_end_at or rank.ended_at for rank in self.ranks.values()])

    def _last(self, ends: Sequence[float | None]) -> float:
        is_known = len(ends) == self.size and not any(r.is_replaced for r in self.ranks.values())
        return max((end or math.inf for end in ends), default=math.inf) if is_known else math.inf

    @property
    def missed(self) -> list[ConnectedRank]:
        """The lost ranks without which the others have not gone on."""
        return [rank for rank in self.lost if rank.pid not in self._gone_on_without]

    @property
    def is_waited_for(self) -> bool:
        """Whether a rank has told that it waits for one that is lost."""
        return any(
            lost.pid in rank.waits_for and rank.waits_at > (lost.ended_at or 0.0) + _SECONDS_TO_HEAR
            for lost in self.lost
            for rank in self.ranks.values()
        )

    def fact(self, name: str) -> Any:
        """Returns what some rank has told under this name; None where none has."""
        told = (rank.facts[name] for rank in self.ranks.values() if name in rank.facts)
        return next(told, None)

    def missing(self) -> list[int]:
        """Returns the ranks that have not come."""
        return [number for number in range(self.size) if number not in self.ranks]

    def loss_text(self) -> str:
        """Returns which rank was lost first; empty where an error of the program came before."""
        # Those that ended later were ended by the library, or by us.
        lost = [rank for rank in self.missed if (rank.ended_at or 0.0) < self.program_ends_at]
        if lost:
            if len(self.lost) == self.size:  # those that came before, too: nobody is left
                lost = self.lost
            silent = "its host gives no sign of life"
            how = silent if lost[0].is_silent else "its process ended without a word"
            text = f"{lost[0]} was lost: {how}"
            left = [rank for rank in self.ranks.values() if "at_once" in rank.facts]
            first = min(left, key=lambda rank: rank.told_end_at or math.inf, default=lost[0])
            if (first.told_end_at or math.inf) < (lost[0].ended_at or 0.0):
                text = f"{first} has left by os._exit(0) while others went on, of which {text}"
            return text
        if self.failed is not None and self.program_ends_at == math.inf:
            return f"{self.failed} has ended by the loss of a rank"
        return ""


class _Received:
    """What has come over one connection."""

    def __init__(self) -> None:
        self.rank: ConnectedRank | None = None
        self._text = b""

    def facts(self, data: bytes) -> list[dict[str, Any]]:
        """Returns what has come whole."""
        *lines, self._text = (self._text + data).split(b"\n")
        if len(self._text) > _READ_BYTES:
            raise ValueError("no end of a line")
        return [json.loads(line) for line in lines]


def _own_addresses() -> list[str]:
    """Returns the names and addresses by which this host may be known to others."""
    addresses = [socket.gethostname()]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                request = struct.pack("256s", name.encode()[:15])
                answer = fcntl.ioctl(asked, _GET_ADDRESS, request)
                addresses.insert(-1, socket.inet_ntoa(answer[20:24]))
    return [address for address in addresses if not address.startswith("127.")]
