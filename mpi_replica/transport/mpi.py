"""The transport over MPI: the only module that imports mpi4py."""

from __future__ import annotations

import os
import struct
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

with warnings.catch_warnings():
    # mpi4py warns where launcher and library do not match; launch.py makes it an error.
    warnings.simplefilter("ignore", RuntimeWarning)
    from mpi4py import MPI

from ..options import ReduceOp
from .base import (
    HEADER_BYTES,
    Bytes,
    Mailbox,
    SharedMemoryError,
    Transport,
    WaitGivenUpError,
)
from .facts import LibraryFacts, library_facts
from .host import cores, is_crowded, lack_of_shared_memory, machine
from .two_level import TwoLevelExchange, is_two_level

__all__ = ["MPITransport", "facts", "world_size"]

_OPS = {
    ReduceOp.SUM: MPI.SUM,
    ReduceOp.MEAN: MPI.SUM,
    ReduceOp.MIN: MPI.MIN,
    ReduceOp.MAX: MPI.MAX,
    ReduceOp.PROD: MPI.PROD,
}

# Counts and displacements are C ints in MPI before version 4, and Open MPI 5.0.11's v-collectives
# fail beyond 2^31 on some ranks only. Larger messages go in pieces of this size.
_LARGEST_MESSAGE_BYTES = 1 << 30

# A request whose partners never came must keep its buffers for ever: MPI may still write there.
_in_flight_for_ever: list[Any] = []

# Open MPI's shared memory sends up to 4 KiB at once. Larger messages would wait for the receiver.
_LETTER_BYTES = 3072
# The number of a letter, its part, and how many parts it has.
_LETTER_HEAD = struct.Struct("<QII")

#: With 0 there is no watcher: on any rank, then on none.
_WATCH = "MPI_REPLICA_WATCH"

# A watcher tells when the wait is over; where none does, the rank itself ends it so much later.
_SECONDS_FOR_THE_WATCHER = 3.0

# A wait begins with asking again and again: first so often, which is not counted as a wait, then
# for so long. Each time lets another thread of this process run, which may take its time.
_SPINS = 200
_SPIN_SECONDS = 0.001
_SECONDS_BEFORE_SLEEP = 0.02
# Where all have come, data only moves on while ranks ask: who sleeps holds it up.
_SECONDS_OF_DATA = 1.0
# Who has waited long may wait a little longer, and leaves the core to others.
_SLEEP_PER_WAIT = 0.02
_LONGEST_SLEEP_SECONDS = 0.005


# macOS does not have it.
_give_core_away: Callable[[], None] = getattr(os, "sched_yield", lambda: time.sleep(0))


def world_size() -> int:
    """Return the number of processes that MPI was started with."""
    return int(MPI.COMM_WORLD.Get_size())


def facts() -> LibraryFacts:
    """Return what the MPI library is and can do."""
    return library_facts(MPI)


def _checked(communicator: Any) -> MPI.Intracomm:
    if communicator is None:
        return MPI.COMM_WORLD
    if not isinstance(communicator, MPI.Comm):
        raise TypeError(
            f"communicator must be an mpi4py intracommunicator, got {communicator!r}."
            " Leave it out for COMM_WORLD."
        )
    if communicator == MPI.COMM_NULL:
        raise ValueError(
            "communicator is COMM_NULL: this rank is not part of it (Split with UNDEFINED and"
            " Create_group give it to ranks outside). Make the strategy only on the ranks inside."
        )
    if communicator.Is_inter():
        raise ValueError(
            "communicator is an intercommunicator: its two groups can't form one world of"
            " replicas. Use communicator.Merge() to make an intracommunicator."
        )
    return communicator  # type: ignore[return-value]


def _is_of_signal_handler(error: BaseException) -> bool:
    """Return whether `error` came up in a signal's handler during a call, and not in the call."""
    step = error.__traceback__
    while step is not None and step.tb_next is not None:
        step = step.tb_next
    file = "" if step is None else step.tb_frame.f_code.co_filename
    return file != __file__ and not file.endswith((".pyx", ".pxi"))  # mpi4py's own frames


def _may_watch() -> bool:
    threads = MPI.Query_thread() == MPI.THREAD_MULTIPLE
    return threads and os.environ.get(_WATCH, "1") != "0"


class MPIMailbox(Mailbox):
    """Messages between the ranks of an MPI communicator, over a duplicate of it."""

    def __init__(self, communicator: MPI.Intracomm) -> None:
        self._comm = communicator.Dup()
        self._number = 0
        self._sent: list[tuple[MPI.Request, bytes]] = []
        self._parts: dict[tuple[int, int], dict[int, bytes]] = {}

    def send(self, rank: int, data: bytes) -> None:
        self._number += 1
        count = max(1, -(-len(data) // _LETTER_BYTES))
        for index in range(count):
            part = data[index * _LETTER_BYTES : (index + 1) * _LETTER_BYTES]
            letter = _LETTER_HEAD.pack(self._number, index, count) + part
            self._sent.append((self._comm.Isend([letter, MPI.BYTE], rank), letter))
        self._sent = [sent for sent in self._sent if not sent[0].Test()]

    def receive(self) -> tuple[int, bytes] | None:
        status = MPI.Status()
        while (message := self._comm.Improbe(status=status)) is not None:
            letter = bytearray(status.Get_count(MPI.BYTE))
            message.Recv([letter, MPI.BYTE])
            sender = status.Get_source()
            number, index, count = _LETTER_HEAD.unpack_from(letter)
            parts = self._parts.setdefault((sender, number), {})
            parts[index] = bytes(letter[_LETTER_HEAD.size :])
            if len(parts) == count:
                del self._parts[sender, number]
                return sender, b"".join(parts[i] for i in range(count))
        return None

    def close(self) -> None:
        self._comm.Free()


class MPITransport(Transport):
    """A world of ranks over a duplicate of an MPI communicator."""

    def __init__(self, communicator: Any = None) -> None:
        self._comm = _checked(communicator).Dup()
        self._comm.Set_errhandler(MPI.ERRORS_RETURN)
        self.communicator = self._comm
        self.rank = self._comm.Get_rank()
        self.size = self._comm.Get_size()
        host = MPI.Get_processor_name()
        place = (machine(host), cores())
        told = self._comm.allgather((host, place, os.getpid(), _may_watch()))
        hosts, places, pids, may_watch = zip(*told, strict=True)
        self.hosts, self.pids = hosts, pids
        if self.size > 1 and all(may_watch):
            self.mailbox = MPIMailbox(self._comm)
        crowded = {machine: is_crowded(machine, places) for machine, _ in places}
        # Where ranks outnumber cores a rank that spins keeps the one it waits for from running.
        self._spins = range(0 if crowded[place[0]] else _SPINS)
        self._spin_seconds = 0.0 if crowded[place[0]] else _SPIN_SECONDS
        # A blocking collective of one rank does not match a non-blocking one of another.
        self.is_crowded = any(crowded.values())
        self.is_between_hosts = len(set(hosts)) > 1
        self._blocks = not self.is_crowded
        self._windows: list[tuple[MPI.Win, MPI.Comm]] = []
        self._header = np.zeros(HEADER_BYTES, np.uint8)
        self.headers = np.zeros(HEADER_BYTES * self.size, np.uint8)
        self._header_view = self._header.data
        self._exchange: MPI.Prequest | TwoLevelExchange | None
        buffers = self._header, self.headers
        try:
            if is_two_level(hosts):
                self._exchange = TwoLevelExchange(MPI, self._comm, hosts, *buffers)
            else:
                self._exchange = self._comm.Allgather_init(*buffers)
        except NotImplementedError:  # persistent collectives are MPI-4
            self._exchange = None

    def exchange(self, header: bytes, timeout_seconds: float | None = None) -> None:
        request = self._start_exchange(header)
        # Every collective waits here: the first spins are those of `_wait`, without a call of it.
        test = request.Test
        for _ in self._spins:
            if test():
                self.is_in_flight = False
                self.steps = self.steps_ended = self.steps + 1
                return
        self._wait(request, timeout_seconds)

    def begin_exchange(self, header: bytes) -> Callable[[], bool]:
        return self._start_exchange(header).Test

    def _start_exchange(self, header: bytes) -> MPI.Request | TwoLevelExchange:
        self._header_view[: len(header)] = header
        self.sent_bytes += HEADER_BYTES
        if self._exchange is None:
            request: MPI.Request = self._begin(self._comm.Iallgather, (self._header, self.headers))
            return request
        self.is_in_flight = True
        try:  # as `_begin` does, without a call of it
            self._exchange.Start()
        except BaseException as error:
            self.is_in_flight = _is_of_signal_handler(error)
            raise
        return self._exchange

    def maximum(
        self, words: npt.NDArray[np.uint64], timeout_seconds: float | None = None
    ) -> npt.NDArray[np.uint64]:
        greatest = np.empty_like(words)
        self.sent_bytes += words.nbytes
        arguments = (words, greatest, MPI.MAX)
        self._run(self._comm.Iallreduce, arguments, timeout_seconds, _SECONDS_BEFORE_SLEEP)
        return greatest

    def begin_maximum(
        self, words: npt.NDArray[np.uint64]
    ) -> Callable[[], npt.NDArray[np.uint64] | None]:
        greatest = np.empty_like(words)
        request = self._comm.Iallreduce(words, greatest, MPI.MAX)
        # what is returned holds both buffers
        return lambda: greatest if words is not None and request.Test() else None

    def all_gather_bytes(self, data: bytes, timeout_seconds: float | None = None) -> list[bytes]:
        lengths = np.empty(self.size, np.int64)
        mine = np.array([len(data)], np.int64)
        self.sent_bytes += mine.nbytes
        self._run(self._comm.Iallgather, (mine, lengths), timeout_seconds)
        receive = np.empty(int(lengths.sum()), np.uint8)
        counts = lengths.tolist()
        # The ranks may be here because they disagree, even about timeouts: no blocking call.
        send = np.frombuffer(data, np.uint8)
        self._gather_blocks(send, receive, counts, timeout_seconds, blocks=False)
        ends = np.cumsum(lengths).tolist()
        return [
            receive[end - count : end].tobytes() for end, count in zip(ends, counts, strict=True)
        ]

    def all_gather_blocks(
        self,
        send: Bytes | None,
        receive: Bytes,
        counts: Sequence[int],
        timeout_seconds: float | None = None,
    ) -> None:
        blocks = self._blocks and timeout_seconds is None
        self._gather_blocks(send, receive, counts, timeout_seconds, blocks=blocks)

    def _gather_blocks(
        self,
        send: Bytes | None,
        receive: Bytes,
        counts: Sequence[int],
        timeout_seconds: float | None,
        *,
        blocks: bool,
    ) -> None:
        starts = [0]
        for count in counts:
            starts.append(starts[-1] + count)
        self.sent_bytes += counts[self.rank]
        if starts[-1] > _LARGEST_MESSAGE_BYTES:
            self._gather_large_blocks(send, receive, starts, timeout_seconds, blocks=blocks)
            return
        spec = [receive, (list(counts), starts[:-1]), MPI.BYTE]
        source = MPI.IN_PLACE if send is None else [send, MPI.BYTE]
        call = self._comm.Allgatherv if blocks else self._comm.Iallgatherv
        self._run(call, (source, spec), timeout_seconds)

    def _gather_large_blocks(
        self,
        send: Bytes | None,
        receive: Bytes,
        starts: Sequence[int],
        timeout_seconds: float | None,
        *,
        blocks: bool,
    ) -> None:
        # One broadcast for each piece: only so has each its own base address.
        if send is not None:
            receive[starts[self.rank] : starts[self.rank + 1]] = send
        for root in range(self.size):
            for start in range(starts[root], starts[root + 1], _LARGEST_MESSAGE_BYTES):
                stop = min(start + _LARGEST_MESSAGE_BYTES, starts[root + 1])
                piece = [receive[start:stop], MPI.BYTE]
                call = self._comm.Bcast if blocks else self._comm.Ibcast
                self._run(call, (piece, root), timeout_seconds)

    def all_reduce(
        self,
        send: npt.NDArray[Any] | None,
        receive: npt.NDArray[Any],
        op: ReduceOp,
        timeout_seconds: float | None = None,
    ) -> None:
        source = MPI.IN_PLACE if send is None else send
        arguments = (source, receive, _OPS[op])
        self.sent_bytes += receive.nbytes
        blocks = self._blocks and timeout_seconds is None
        call = self._comm.Allreduce if blocks else self._comm.Iallreduce
        self._run(call, arguments, timeout_seconds)

    def all_to_all(
        self,
        send: Bytes,
        send_counts: Sequence[int],
        receive: Bytes,
        receive_counts: Sequence[int],
        timeout_seconds: float | None = None,
    ) -> None:
        blocks = self._blocks and timeout_seconds is None
        call = self._comm.Alltoallv if blocks else self._comm.Ialltoallv
        self.sent_bytes += send.nbytes
        specs = ([send, send_counts, MPI.BYTE], [receive, receive_counts, MPI.BYTE])
        self._run(call, specs, timeout_seconds)

    def open_shared_memory(self, size_bytes: int) -> Bytes:
        host = self._comm.Split_type(MPI.COMM_TYPE_SHARED)
        problem = ""
        if host.Get_size() < self.size:
            problem = f"the ranks are on {len(set(self.hosts))} hosts"
        elif self.rank == 0:
            problem = lack_of_shared_memory(size_bytes)
        self._agree_on_problem(problem, host)
        try:
            # All of it on rank 0: one block for all ranks.
            window = MPI.Win.Allocate_shared(size_bytes if self.rank == 0 else 0, 1, comm=host)  # type: ignore[arg-type]
        except MPI.Exception as error:
            problem = f"the MPI library gives none ({error})"
        self._agree_on_problem(problem, host)
        window.Set_errhandler(MPI.ERRORS_RETURN)
        window.Lock_all(MPI.MODE_NOCHECK)
        memory: Bytes = np.frombuffer(window.Shared_query(0)[0], np.uint8)  # type: ignore[call-overload]
        if self.rank == 0:
            memory[:] = 0  # while it is known to be there
        self._windows.append((window, host))
        return memory

    def _agree_on_problem(self, problem: str, host: MPI.Comm) -> None:
        """Raise the problem of any rank on all ranks."""
        told = next(filter(None, self.all_gather_bytes(problem.encode())), None)
        if told is not None:
            host.Free()
            raise SharedMemoryError(told.decode())

    def barrier(self, timeout_seconds: float | None = None) -> None:
        blocks = self._blocks and timeout_seconds is None
        for window, _ in self._windows:
            window.Sync()
        self._run(self._comm.Barrier if blocks else self._comm.Ibarrier, (), timeout_seconds)
        for window, _ in self._windows:
            window.Sync()

    def abort(self, status: int) -> None:
        MPI.COMM_WORLD.Abort(status)
        os._exit(status)  # MPICH returns, and its launcher ends the processes a little later

    def close(self) -> None:
        if self._exchange is not None:
            self._exchange.Free()
            self._exchange = None
        if self.mailbox is not None:
            self.mailbox.close()
        for window, host in self._windows:
            window.Unlock_all()
            window.Free()
            host.Free()
        self._comm.Free()

    def _run(
        self,
        call: Callable[..., MPI.Request | None],
        arguments: tuple[Any, ...],
        timeout_seconds: float | None,
        seconds_before_sleep: float = _SECONDS_OF_DATA,
    ) -> None:
        """Do the call, and wait for it where it does not block."""
        self.steps += 1
        try:
            request = self._begin(call, arguments)
        except BaseException:
            self.steps -= 1  # the other ranks may get it a second time
            raise
        if request is not None:
            self.steps -= 1  # counted when it is waited for
            self._wait(request, timeout_seconds, seconds_before_sleep, arguments)
        else:
            self.is_in_flight = False
            self.steps_ended = self.steps

    def _begin(self, call: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        """Do the call that begins an exchange; see to it that `is_in_flight` is right after it."""
        self.is_in_flight = True
        try:
            return call(*arguments)
        except BaseException as error:
            self.is_in_flight = _is_of_signal_handler(error)
            raise

    def _wait(
        self,
        request: MPI.Request | TwoLevelExchange,
        timeout_seconds: float | None,
        seconds_before_sleep: float = _SECONDS_BEFORE_SLEEP,
        buffers: Any = None,
    ) -> None:
        """Poll until the request is complete; give the core away while it is not."""
        self.steps += 1
        test = request.Test
        if timeout_seconds is not None and self.mailbox is not None:
            timeout_seconds += _SECONDS_FOR_THE_WATCHER
        start = time.monotonic()
        try:
            while not test():
                waited = time.monotonic() - start
                if waited < self._spin_seconds:
                    continue
                _give_core_away()
                is_late = timeout_seconds is not None and waited > timeout_seconds
                if self.is_interrupted or is_late:
                    raise WaitGivenUpError
                if waited > seconds_before_sleep:
                    time.sleep(min(waited * _SLEEP_PER_WAIT, _LONGEST_SLEEP_SECONDS))
        except BaseException:
            _in_flight_for_ever.append((self, request, buffers))
            self.steps_ended = self.steps
            raise
        self.is_in_flight = False
        self.steps_ended = self.steps
        del buffers  # held until here: mpi4py keeps no reference for non-blocking calls
