"""The transport over MPI: the only module that imports mpi4py."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

with warnings.catch_warnings():
    # mpi4py warns where launcher and library do not match; launch.py makes it an error.
    warnings.simplefilter("ignore", RuntimeWarning)
    from mpi4py import MPI

from ..core.argument_checks import is_switched_on
from ..core.exceptions import LaunchError, RankLostError
from ..core.options import ReduceOp
from .abort import abort_job
from .communicators import checked_communicator
from .header_exchanges import Exchange, HeaderExchanges
from .host import cores, getpid, is_crowded, machine
from .interrupts import is_of_signal_handler
from .library_facts import is_intel_mpi
from .pause import SECONDS_BEFORE_SLEEP, monotonic, pause
from .point_to_point import MPIMailbox, PointToPoint
from .survivors import Survivors
from .transport import HEADER_BYTES, Bytes, Messages, Payload, Transport, WaitGivenUpError, Words
from .ulfm import all_gather_objects, begin_to_agree, failed_ranks, is_loss, loss_error
from .windows import SharedWindows

_MPI_OPS = {
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

#: With 0 there is no watcher: on any rank, then on none.
_WATCH = "MPI_REPLICA_WATCH"

# A watcher tells when the wait is over; where none does, the rank itself ends it so much later.
_SECONDS_FOR_THE_WATCHER = 3.0

# A wait begins with asking again and again: first so often, which is not counted as a wait, then
# for so long. Each time lets another thread of this process run, which may take its time.
_SPINS = 200
_SPIN_SECONDS = 0.001
# Where all have come, data only moves on while ranks ask: who sleeps holds it up.
_SECONDS_OF_DATA = 1.0


def require_running() -> None:
    """Raises unless MPI has started, and has not ended: any call ends the process without a word.

    Raises
    ------
    LaunchError
        It is not running.
    """
    if not MPI.Is_initialized():
        raise LaunchError(
            "MPI has not started, since the program has set mpi4py.rc.initialize = False. Call"
            " MPI.Init_thread() before a strategy is made, or leave that out."
        )
    if MPI.Is_finalized():
        raise LaunchError(
            "MPI has ended, by MPI.Finalize(): no strategy can be made any more. Leave that call"
            " out: mpi4py makes it at the end of the program."
        )


def call_before_end(function: Callable[[], None]) -> None:
    """Has `function` called where MPI begins to end, as long as Python is there.

    MPI deletes the attributes of COMM_SELF before it does anything else (MPI-4.1, 11.2.4).
    """
    keyval = MPI.Comm.Create_keyval(delete_fn=lambda *_: function())
    MPI.COMM_SELF.Set_attr(keyval, function)


def world_size() -> int:
    """Returns the number of processes that MPI was started with."""
    return int(MPI.COMM_WORLD.Get_size())


def survivors_of(communicator: Any, num_spares: int) -> Survivors:
    """Returns what is known of the ranks of a communicator, before they come together.

    Raises
    ------
    TypeError, ValueError
        `communicator` is not an intracommunicator.
    """
    return Survivors(MPI, checked_communicator(MPI, communicator), num_spares, MPITransport)


def _may_watch() -> bool:
    threads = MPI.Query_thread() == MPI.THREAD_MULTIPLE
    return threads and is_switched_on(_WATCH, "1")


class MPITransport(Transport):
    """A world of ranks over an MPI communicator, which it frees.

    Parameters
    ----------
    communicator : Intracomm
        Nobody else uses it.
    is_fault_tolerant : bool
        Whether the library goes on without a lost rank.
    """

    def __init__(self, communicator: MPI.Intracomm, *, is_fault_tolerant: bool = False) -> None:
        self._comm = communicator
        self._comm.Set_errhandler(MPI.ERRORS_RETURN)
        self.is_fault_tolerant = is_fault_tolerant
        self.communicator = self._comm
        self.rank = self._comm.Get_rank()
        self.size = self._comm.Get_size()
        host = MPI.Get_processor_name()
        place = (machine(host), cores())
        mine = (host, place, getpid(), _may_watch())
        hosts, places, pids, may_watch = zip(*all_gather_objects(self._comm, mine), strict=True)
        self.hosts, self.pids = hosts, pids
        if self.size > 1 and all(may_watch):
            self.mailbox = MPIMailbox(MPI, self._comm)
        crowded = {machine: is_crowded(machine, places) for machine, _ in places}
        # Where ranks outnumber cores a rank that spins keeps the one it waits for from running.
        self._spins = range(0 if crowded[place[0]] else _SPINS)
        self._spin_seconds = 0.0 if crowded[place[0]] else _SPIN_SECONDS
        # A blocking collective of one rank does not match a non-blocking one of another.
        self.is_crowded = any(crowded.values())
        self.is_between_hosts = len(set(hosts)) > 1
        self._blocks = not self.is_crowded
        self._is_intel = is_intel_mpi(MPI)
        self._windows = SharedWindows(MPI)
        self._exchanges = HeaderExchanges(MPI, self._comm, hosts)
        self.headers, self._of_size = self._exchanges.headers, self._exchanges.of_size

    def exchange(self, header: bytes, size_bytes: int = HEADER_BYTES, rest: Payload = b"") -> None:
        request = self._start_exchange(header, size_bytes, rest)
        # Every collective waits here: the first spins are those of `_wait`, without a call of it.
        test = request.Test
        try:
            for _ in self._spins:
                if test():
                    self.is_in_flight = False
                    self.steps = self.steps_ended = self.steps + 1
                    return
        except MPI.Exception as error:
            raise self._as_loss(error) from None
        self._wait(request)

    @property
    def _blocks_now(self) -> bool:
        """Whether a call of MPI may block: nobody has to give up the wait for it."""
        return self._blocks and self.timeout_seconds is None

    def begin_exchange(self, header: bytes, size_bytes: int = HEADER_BYTES) -> Callable[[], bool]:
        return self._asking(self._start_exchange(header, size_bytes, b"").Test)

    def _asking(self, test: Callable[[], bool]) -> Callable[[], bool]:
        def has_ended() -> bool:
            try:
                return test()
            except MPI.Exception as error:
                raise self._as_loss(error) from None

        return has_ended

    def _start_exchange(
        self, header: bytes, size_bytes: int, rest: Payload
    ) -> MPI.Request | Exchange:
        mine, request = self._of_size[size_bytes]
        start = len(header)
        mine[:start] = header
        if rest:
            mine[start : start + len(rest)] = rest
        self.sent_bytes += size_bytes
        if request is None:
            begun: MPI.Request = self._begin(
                self._comm.Iallgather, (mine, self.headers[size_bytes])
            )
            return begun
        self.is_in_flight = True
        try:  # as `_begin` does, without a call of it
            request.Start()
        except BaseException as error:
            raise self._not_begun(error) from None
        return request

    def maximum(self, words: Words) -> Words:
        greatest = np.empty_like(words)
        self.sent_bytes += words.nbytes
        arguments = (words, greatest, MPI.MAX)
        self._run(self._comm.Iallreduce, arguments, SECONDS_BEFORE_SLEEP)
        return greatest

    def begin_maximum(self, words: Words) -> Callable[[], Words | None]:
        greatest = np.empty_like(words)
        request = self._begin(self._comm.Iallreduce, (words, greatest, MPI.MAX))
        has_ended = self._asking(request.Test)
        # what is returned holds both buffers
        return lambda: greatest if words is not None and has_ended() else None

    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        lengths = np.empty(self.size, np.int64)
        mine = np.array([len(data)], np.int64)
        self.sent_bytes += mine.nbytes
        self._run(self._comm.Iallgather, (mine, lengths))
        receive = np.empty(int(lengths.sum()), np.uint8)
        counts = lengths.tolist()
        # The ranks may be here because they disagree, even about timeouts: no blocking call.
        self._gather_blocks(np.frombuffer(data, np.uint8), receive, counts, blocks=False)
        starts = [0, *itertools.accumulate(counts)]
        return [receive[start:end].tobytes() for start, end in itertools.pairwise(starts)]

    def all_gather_blocks(self, send: Bytes | None, receive: Bytes, counts: Sequence[int]) -> None:
        # Where a rank dies in a small blocking one, others may be told that it has succeeded.
        blocks = self._blocks_now and not self.is_fault_tolerant
        self._gather_blocks(send, receive, counts, blocks=blocks)

    def _gather_blocks(
        self, send: Bytes | None, receive: Bytes, counts: Sequence[int], *, blocks: bool
    ) -> None:
        starts = [0, *itertools.accumulate(counts)]
        self.sent_bytes += counts[self.rank]
        # Intel's Iallgatherv goes in pieces of the smallest block: on three ranks 70 kB beside an
        # empty one took 20 s, beside 1 kB none (2021.19).
        if starts[-1] <= _LARGEST_MESSAGE_BYTES and (blocks or not self._is_intel):
            spec = [receive, (list(counts), starts[:-1]), MPI.BYTE]
            source = MPI.IN_PLACE if send is None else [send, MPI.BYTE]
            call = self._comm.Allgatherv if blocks else self._comm.Iallgatherv
            self._run(call, (source, spec))
            return
        if send is not None:
            receive[starts[self.rank] : starts[self.rank + 1]] = send
        for root, (begin, end) in enumerate(itertools.pairwise(starts)):
            self._broadcast(receive[begin:end], root, blocks=blocks)

    def broadcast(self, data: Bytes, root: int) -> None:
        self.sent_bytes += data.nbytes
        # As for `all_gather_blocks`.
        self._broadcast(data, root, blocks=self._blocks_now and not self.is_fault_tolerant)

    def _broadcast(self, data: Bytes, root: int, *, blocks: bool) -> None:
        call = self._comm.Bcast if blocks else self._comm.Ibcast
        for start in range(0, data.size, _LARGEST_MESSAGE_BYTES):  # each has its own base address
            piece = data[start : start + _LARGEST_MESSAGE_BYTES]
            self._run(call, ([piece, MPI.BYTE], root))

    def all_reduce(
        self, send: npt.NDArray[Any] | None, receive: npt.NDArray[Any], op: ReduceOp
    ) -> None:
        if send is not None and send.dtype is not receive.dtype:
            send = send.view(receive.dtype)  # "q" and "l" are int64, which MPI tells apart
        source = MPI.IN_PLACE if send is None else send
        arguments = (source, receive, _MPI_OPS[op])
        self.sent_bytes += receive.nbytes
        call = self._comm.Allreduce if self._blocks_now else self._comm.Iallreduce
        self._run(call, arguments)

    def all_to_all(
        self, send: Bytes, send_counts: Sequence[int], receive: Bytes, receive_counts: Sequence[int]
    ) -> None:
        call = self._comm.Alltoallv if self._blocks_now else self._comm.Ialltoallv
        self.sent_bytes += send.nbytes
        specs = ([send, send_counts, MPI.BYTE], [receive, receive_counts, MPI.BYTE])
        self._run(call, specs)

    def open_shared_memory(self, size_bytes: int) -> Bytes:
        try:
            return self._windows.open(self, size_bytes)
        except MPI.Exception as error:
            raise self._as_loss(error) from None

    def barrier(self) -> None:
        self._windows.sync()
        self._run(self._comm.Barrier if self._blocks_now else self._comm.Ibarrier, ())
        self._windows.sync()

    def pass_on(self, messages: Messages, sizes: Mapping[int, int]) -> Messages:
        self.sent_bytes += sum(map(len, messages.values()))
        try:
            request = PointToPoint(MPI, self._comm, messages, sizes, _LARGEST_MESSAGE_BYTES)
        except MPI.Exception as error:
            raise self._as_loss(error) from None
        self.is_in_flight = True
        self._wait(request)
        return request.received

    def agree(self, word: int) -> int:
        words, loss = np.array([word], np.int32), self.loss
        try:
            self._wait(begin_to_agree(self._comm, words), buffers=words)
        except RankLostError:
            # The word is agreed on all the same. A loss that is new comes up at the next exchange.
            self.loss = loss
        self.is_in_flight = loss is not None
        return int(words[0])

    def failed_ranks(self) -> Sequence[int]:
        return failed_ranks(MPI, self._comm) if self.is_fault_tolerant else ()

    def revoke(self) -> None:
        if self.loss is None:
            self.loss = loss_error(MPI, self._comm, self.hosts, self.pids)
        if self.is_fault_tolerant:
            self._comm.Revoke()
            self._exchanges.revoke()

    def abort(self, status: int) -> None:
        abort_job(MPI, status)

    def close(self) -> None:
        self._exchanges.free()
        if self.mailbox is not None:
            self.mailbox.close()
        self._windows.free()
        # A new communicator with its id would get results of its old agreements (Open MPI 5.0.11).
        if not self.is_fault_tolerant:
            self._comm.Free()

    def _run(
        self,
        call: Callable[..., MPI.Request | None],
        arguments: tuple[Any, ...],
        seconds_before_sleep: float = _SECONDS_OF_DATA,
    ) -> None:
        """Does the call, and waits for it where it does not block."""
        self.steps += 1
        try:
            request = self._begin(call, arguments)
        except BaseException:
            self.steps -= 1  # the other ranks may get it a second time
            raise
        if request is not None:
            self.steps -= 1  # counted when it is waited for
            self._wait(request, seconds_before_sleep, arguments)
        else:
            if self.is_fault_tolerant and self._comm.Is_revoked():
                # One that is ended so must not pass for one that has succeeded.
                raise self._as_loss(MPI.Exception(MPI.ERR_REVOKED))
            self.is_in_flight = False
            self.steps_ended = self.steps

    def _begin(self, call: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        """Does the call that begins an exchange; `is_in_flight` is right after it."""
        self.is_in_flight = True
        try:
            return call(*arguments)
        except BaseException as error:
            raise self._not_begun(error) from None

    def _not_begun(self, error: BaseException) -> BaseException:
        """Returns what is raised for an error in the call that would have begun an exchange."""
        self.is_in_flight = is_of_signal_handler(error, __file__)
        return self._as_loss(error)

    def _as_loss(self, error: BaseException) -> BaseException:
        """Returns `error`, or the `RankLostError` in its place: nothing can be sent then."""
        if not is_loss(MPI, error, self._comm if self.is_fault_tolerant else None):
            return error
        if self.loss is None:
            self.loss = loss_error(MPI, self._comm, self.hosts, self.pids)
        self.is_in_flight = True
        return self.loss or error

    def _wait(
        self,
        request: MPI.Request | Exchange | PointToPoint,
        seconds_before_sleep: float = SECONDS_BEFORE_SLEEP,
        buffers: Any = None,
    ) -> None:
        """Polls until the request is complete; gives the core away while it is not."""
        self.steps += 1
        test, timeout_seconds = request.Test, self.timeout_seconds
        if timeout_seconds is not None and self.mailbox is not None:
            timeout_seconds += _SECONDS_FOR_THE_WATCHER
        start = monotonic()
        try:
            while not test():
                waited = monotonic() - start
                if waited < self._spin_seconds:
                    continue
                is_late = timeout_seconds is not None and waited > timeout_seconds
                if self.is_interrupted or is_late:
                    raise WaitGivenUpError
                pause(waited, seconds_before_sleep)
        except BaseException as error:
            _in_flight_for_ever.append((self, request, buffers))
            self.steps_ended = self.steps
            raise self._as_loss(error) from None
        self.is_in_flight = False
        self.steps_ended = self.steps
        del buffers  # held until here: mpi4py keeps no reference for non-blocking calls
