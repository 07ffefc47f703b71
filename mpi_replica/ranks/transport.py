"""The contract of a transport: what the collectives ask of MPI, and nothing more."""

from __future__ import annotations

import abc
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from ..core.exceptions import RankLostError
from ..core.options import ReduceOp

#: Size of the message by which ranks agree: small enough for the eager protocol of every library.
HEADER_BYTES = 256
#: Larger ones, in which some numbers fit beside what is in the smallest.
LARGER_HEADER_BYTES = tuple(64 + (1 << exponent) for exponent in range(9, 16))

#: No number needs a larger one. Shared memory begins at a multiple of it.
ALIGNMENT = 16

Bytes = npt.NDArray[np.uint8]
#: What travels behind the head of a header.
Payload = bytes | memoryview
Words = npt.NDArray[np.uint64]
#: Of ranks: something for each, or from each.
Messages = Mapping[int, bytes | bytearray]


class WaitGivenUpError(Exception):
    """A wait was ended before the others came. Requests in flight are never touched again."""


class SharedMemoryError(Exception):
    """Memory that all ranks see can't be had; the text says why, alike on all ranks."""


class Mailbox(abc.ABC):
    """Messages from rank to rank, beside the collectives: what watchers use.

    Nothing here waits for another rank. One thread at a time.
    """

    #: Held by who uses a mailbox, of whatever strategy of this process: what comes in one of them
    #: may have to be told in another. Living ranks begin to agree under it, too (see `ulfm`).
    lock: ClassVar[threading.RLock] = threading.RLock()

    @staticmethod
    def renew_lock() -> None:
        """Makes a new lock, in a forked child: a thread of the parent may have held the old one."""
        Mailbox.lock = threading.RLock()

    @abc.abstractmethod
    def send(self, rank: int, data: bytes) -> None:
        """Sends `data` to another rank, which may never read it."""

    @abc.abstractmethod
    def receive(self) -> tuple[int, bytes] | None:
        """Returns a message and the rank that sent it; None where none has come."""

    @abc.abstractmethod
    def close(self) -> None:
        """Gives back what it holds. Collective."""


class Transport(abc.ABC):
    """Collective communication of the ranks of one communicator.

    Every method is collective: the agreement of the floor above sees to it that all ranks call
    the same ones in the same order. Buffers are C-contiguous.
    """

    rank: int
    size: int
    #: Host name of each rank.
    hosts: tuple[str, ...]
    #: Process id of each rank.
    pids: tuple[int, ...]
    #: None where there are no other ranks, or MPI does not allow calls from a second thread.
    mailbox: Mailbox | None = None
    #: How many exchanges were begun, and how many of them have ended: all ranks count alike.
    steps: int = 0
    steps_ended: int = 0
    #: Bytes that this rank gave to all exchanges; of a broadcast those that all get.
    sent_bytes: int = 0
    #: What the last `exchange` gave: the headers of all ranks, one behind the other, by the bytes
    #: of each. `HEADER_BYTES` is the smallest.
    headers: Mapping[int, Bytes]
    #: Whether an exchange was begun that has not ended: nothing else can be sent then.
    is_in_flight: bool = False
    #: Whether some host has more ranks than cores: each exchange then costs turns of the cores.
    is_crowded: bool = False
    #: Whether the ranks are on several hosts: each exchange then costs a way over the network.
    is_between_hosts: bool = False
    #: Whether the ranks that are left can go on without one that has died (ULFM).
    is_fault_tolerant: bool = False
    #: Why nothing can be sent any more: a rank has died.
    loss: RankLostError | None = None
    #: Whether it came out by `agree` that a rank has died, so that all living ranks know of it.
    has_told_loss: bool = False
    #: How long an exchange may wait for the other ranks; then it ends with `WaitGivenUpError`,
    #: which is final. Set for the time of a call.
    timeout_seconds: float | None = None
    #: Set from another thread: waits end with `WaitGivenUpError`. A blocking call is not woken.
    is_interrupted: bool = False
    #: What the user may see as ``strategy.communicator``: an MPI communicator, or None.
    communicator: Any

    @abc.abstractmethod
    def exchange(self, header: bytes, size_bytes: int = HEADER_BYTES, rest: Payload = b"") -> None:
        """Fills ``headers[size_bytes]`` with those of all ranks, in rank order.

        Each is `header` and, behind it, `rest`: together they have `size_bytes` bytes at most, the
        same number on all ranks. What stands behind a shorter one is undefined.
        """

    @abc.abstractmethod
    def maximum(self, words: Words) -> Words:
        """Returns the greatest of each of a few words over all ranks."""

    @abc.abstractmethod
    def begin_exchange(self, header: bytes, size_bytes: int = HEADER_BYTES) -> Callable[[], bool]:
        """Starts an `exchange`; what is returned tells whether it has ended."""

    @abc.abstractmethod
    def begin_maximum(self, words: Words) -> Callable[[], Words | None]:
        """Starts a `maximum`; what is returned gives its result, or None while it goes on."""

    @abc.abstractmethod
    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        """Returns `data` of each rank, in rank order; lengths may differ."""

    @abc.abstractmethod
    def all_gather_blocks(self, send: Bytes | None, receive: Bytes, counts: Sequence[int]) -> None:
        """Fills `receive` with the blocks of all ranks, one behind the other.

        ``counts`` are the bytes of each rank's block. None for `send`: this rank's block is in
        its place already (that holds on all ranks or on none).
        """

    @abc.abstractmethod
    def broadcast(self, data: Bytes, root: int) -> None:
        """Fills `data` with that of the rank `root`, of which it is read alone."""

    @abc.abstractmethod
    def all_reduce(
        self, send: npt.NDArray[Any] | None, receive: npt.NDArray[Any], op: ReduceOp
    ) -> None:
        """Combines arrays of all ranks element by element into `receive`; MEAN is not divided.

        None for `send`: in place (that holds on all ranks or on none).
        """

    @abc.abstractmethod
    def all_to_all(
        self, send: Bytes, send_counts: Sequence[int], receive: Bytes, receive_counts: Sequence[int]
    ) -> None:
        """Gives each rank its block of `send`, and fills `receive` with those that it is given.

        Counts are the bytes of the blocks, which lie one behind the other in rank order.
        """

    @abc.abstractmethod
    def pass_on(self, messages: Messages, sizes: Mapping[int, int]) -> Messages:
        """Sends messages to other ranks, and returns what those send here, both by rank.

        Each knows what comes: `sizes` are the bytes of each rank that sends something here.
        """

    @abc.abstractmethod
    def open_shared_memory(self, size_bytes: int) -> Bytes:
        """Returns memory that all ranks can read and write; it is held until `close`.

        What a rank wrote before a `barrier` the others can read after it.

        Raises
        ------
        SharedMemoryError
            The ranks are on several hosts, or there is too little of it.
        """

    @abc.abstractmethod
    def barrier(self) -> None:
        """Returns when all ranks have come."""

    def agree(self, word: int) -> int:
        """Returns the bits that the words of all living ranks have in common: the same on all.

        It also works when ranks have died, and after `revoke`; `is_fault_tolerant` transports only.
        A rank that knows of a loss gives 0: after that no rank agrees again.
        """
        raise NotImplementedError

    def failed_ranks(self) -> Sequence[int]:
        """Returns the ranks that have died, as far as this one knows. Any thread may ask."""
        return ()

    @abc.abstractmethod
    def revoke(self) -> None:
        """Ends every exchange of all ranks with a `RankLostError`. One rank alone may do it."""

    @abc.abstractmethod
    def abort(self, status: int) -> None:
        """Ends the processes of all ranks with this exit status."""

    @abc.abstractmethod
    def close(self) -> None:
        """Gives back what the transport holds; called when all ranks have agreed to."""
