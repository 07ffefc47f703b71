"""What a call wants of the other ranks, step by step, as plain data.

A call yields steps; the driver does them, and sends back what came of each.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np

from ...core.options import ReduceOp
from ...ranks import Bytes, Messages, SharedMemoryError, Transport
from ...ranks.transport import Payload

T = TypeVar("T")


class Agree(NamedTuple, Generic[T]):
    """All ranks prepare something, and go on where none of them failed.

    The only place behind the header where functions of the program may run, or memory of any size
    may be taken: an error is told to all ranks, which raise it. All ranks must come to it.
    """

    #: Gives what travels with the header, of `Group.sizes.room_bytes` at most, and what is sent
    #: back.
    prepare: Callable[[], tuple[Payload, T]]
    #: What is done where some rank failed, and the ranks still answer each other.
    undo: Callable[[], None] | None = None


class Raise(NamedTuple):
    """All ranks raise the same error, each by its own reckoning; the strategy works on."""

    error: Exception


class Gather(NamedTuple):
    """Blocks of bytes of all ranks, one behind the other; see `Transport.all_gather_blocks`."""

    send: Bytes | None
    receive: Bytes
    rank_bytes: Sequence[int]

    def exchange(self, transport: Transport) -> None:
        """Does it."""
        transport.all_gather_blocks(self.send, self.receive, self.rank_bytes)


class Bcast(NamedTuple):
    """Bytes of one rank, for all; see `Transport.broadcast`."""

    data: Bytes
    root: int

    def exchange(self, transport: Transport) -> None:
        """Does it."""
        transport.broadcast(self.data, self.root)


class Reduce(NamedTuple):
    """Arrays of all ranks, combined item by item; see `Transport.all_reduce`."""

    send: np.ndarray[Any, Any] | None
    total: np.ndarray[Any, Any]
    op: ReduceOp

    def exchange(self, transport: Transport) -> None:
        """Does it."""
        transport.all_reduce(self.send, self.total, self.op)


class AllToAll(NamedTuple):
    """A block of bytes for each rank, and one from each; see `Transport.all_to_all`."""

    send: Bytes
    send_bytes: Sequence[int]
    receive: Bytes
    receive_bytes: Sequence[int]

    def exchange(self, transport: Transport) -> None:
        """Does it."""
        transport.all_to_all(*self)


class Barrier(NamedTuple):
    """All ranks come here before any goes on."""

    def exchange(self, transport: Transport) -> None:
        """Does it."""
        transport.barrier()


class Texts(NamedTuple):
    """A few bytes of each rank, of any length; what is sent back are those of all, by rank."""

    data: bytes

    def exchange(self, transport: Transport) -> list[bytes]:
        """Does it."""
        return transport.all_gather_bytes(self.data)


class PassOn(NamedTuple):
    """Messages to other ranks, and the sizes of those that come; sent back: what came, by rank."""

    messages: Messages
    sizes: Mapping[int, int]

    def exchange(self, transport: Transport) -> Messages:
        """Does it."""
        return transport.pass_on(self.messages, self.sizes)


class OpenWindow(NamedTuple):
    """Memory that all ranks see; sent back: that, or why there is none, alike on all ranks."""

    size_bytes: int

    def exchange(self, transport: Transport) -> Bytes | SharedMemoryError:
        """Does it."""
        try:
            return transport.open_shared_memory(self.size_bytes)
        except SharedMemoryError as problem:
            return problem


Exchange = Gather | Bcast | Reduce | AllToAll | Barrier | Texts | PassOn | OpenWindow
Step = Agree[Any] | Raise | Exchange

#: Yields steps, is sent what came of each, and returns the results.
Steps = Generator[Step, Any, T]
