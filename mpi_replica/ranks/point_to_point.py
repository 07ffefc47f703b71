"""Messages from rank to rank over MPI, beside the collectives."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any

from .transport import Mailbox, Messages
from .ulfm import is_loss

# Open MPI's shared memory sends up to 4 KiB at once. Larger messages would wait for the receiver.
_LETTER_BYTES = 3072
# The number of a letter, its part, and how many parts it has.
_LETTER_HEAD = struct.Struct("<QII")
_TAG = 2  # of a `PointToPoint`, on the communicator itself


class MPIMailbox(Mailbox):
    """The letters of the watchers of a communicator's ranks, over a duplicate of it.

    What is for a rank that has died is lost, and no error.

    Parameters
    ----------
    mpi : module
        ``mpi4py.MPI``.
    communicator : Intracomm
    """

    def __init__(self, mpi: Any, communicator: Any) -> None:
        self._mpi = mpi
        self._comm = communicator.Dup()
        self._number = 0
        self._sent: list[tuple[Any, bytes]] = []
        self._parts: dict[tuple[int, int], dict[int, bytes]] = {}

    def send(self, rank: int, data: bytes) -> None:
        self._number += 1
        count = max(1, -(-len(data) // _LETTER_BYTES))
        for index in range(count):
            part = data[index * _LETTER_BYTES : (index + 1) * _LETTER_BYTES]
            letter = _LETTER_HEAD.pack(self._number, index, count) + part
            try:
                self._sent.append((self._comm.Isend([letter, self._mpi.BYTE], rank), letter))
            except self._mpi.Exception as error:
                self._require_loss(error)
        self._sent = [sent for sent in self._sent if not self._has_ended(sent[0])]

    def _has_ended(self, request: Any) -> bool:
        try:
            return bool(request.Test())
        except self._mpi.Exception as error:
            self._require_loss(error)
            return True

    def receive(self) -> tuple[int, bytes] | None:
        status = self._mpi.Status()
        while (message := self._next(status)) is not None:
            letter = bytearray(status.Get_count(self._mpi.BYTE))
            message.Recv([letter, self._mpi.BYTE])
            sender = status.Get_source()
            number, index, count = _LETTER_HEAD.unpack_from(letter)
            parts = self._parts.setdefault((sender, number), {})
            parts[index] = bytes(letter[_LETTER_HEAD.size :])
            if len(parts) == count:
                del self._parts[sender, number]
                return sender, b"".join(parts[i] for i in range(count))
        return None

    def _next(self, status: Any) -> Any:
        try:
            return self._comm.Improbe(status=status)
        except self._mpi.Exception as error:
            self._require_loss(error)
            self._comm.Ack_failed()  # messages of the others still come after this
            return None

    def _require_loss(self, error: Any) -> None:
        if not is_loss(self._mpi, error):
            raise error

    def close(self) -> None:
        self._comm.Free()


class PointToPoint:
    """Messages on their way to other ranks, and those that come from others.

    Parameters
    ----------
    mpi : module
        ``mpi4py.MPI``.
    communicator : Intracomm
    messages : mapping
        Of each rank to which something is sent, the bytes.
    sizes : mapping
        Of each rank that sends something here, how many bytes.
    most_bytes : int
        Larger messages go in pieces of this size.
    """

    def __init__(
        self,
        mpi: Any,
        communicator: Any,
        messages: Messages,
        sizes: Mapping[int, int],
        most_bytes: int,
    ) -> None:
        self.received = {rank: bytearray(size) for rank, size in sizes.items()}
        # MPI reads from memory that nobody else may hold any more.
        self._messages = messages
        both = (communicator.Irecv, self.received), (communicator.Isend, messages)
        self._requests = [
            begin([piece, mpi.BYTE], rank, _TAG)
            for begin, data_by_rank in both
            for rank, data in data_by_rank.items()
            for piece in _pieces(data, most_bytes)
        ]

    def Test(self) -> bool:
        """Returns whether all have arrived, as an MPI request does."""
        self._requests = [request for request in self._requests if not request.Test()]
        return not self._requests


def _pieces(data: bytes | bytearray, most_bytes: int) -> list[memoryview]:
    whole = memoryview(data)
    return [whole[start : start + most_bytes] for start in range(0, len(data), most_bytes)]
