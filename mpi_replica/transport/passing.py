"""Messages from rank to rank, all of a step under way at once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .base import Messages

__all__ = ["Passing"]

_TAG = 2


class Passing:
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
        self._requests = [
            communicator.Irecv([piece, mpi.BYTE], rank, _TAG)
            for rank, data in self.received.items()
            for piece in _pieces(data, most_bytes)
        ]
        self._requests += [
            communicator.Isend([piece, mpi.BYTE], rank, _TAG)
            for rank, data in messages.items()
            for piece in _pieces(data, most_bytes)
        ]

    def Test(self) -> bool:
        """Return whether all have arrived, as an MPI request does."""
        self._requests = [request for request in self._requests if not request.Test()]
        return not self._requests


def _pieces(data: bytes | bytearray, most_bytes: int) -> list[memoryview]:
    whole = memoryview(data)
    return [whole[start : start + most_bytes] for start in range(0, len(data), most_bytes)]
