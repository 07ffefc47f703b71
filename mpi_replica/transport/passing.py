"""Messages from one rank to another, all of a step under way at once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

__all__ = ["Passing"]

_TAG = 2


class Passing:
    """A message on its way to another rank, and those that come from others.

    Parameters
    ----------
    mpi : module
        ``mpi4py.MPI``.
    communicator : Intracomm
    data : bytes
        Sent to rank `to`, unless it is empty.
    sizes : mapping
        Of each rank that sends something here, how many bytes.
    """

    def __init__(
        self, mpi: Any, communicator: Any, data: bytes, to: int, sizes: Mapping[int, int]
    ) -> None:
        self._buffers = {rank: np.empty(size, np.uint8) for rank, size in sizes.items()}
        self._requests = [
            communicator.Irecv([buffer, mpi.BYTE], rank, _TAG)
            for rank, buffer in self._buffers.items()
        ]
        self._data = data
        if data:
            self._requests.append(communicator.Isend([data, mpi.BYTE], to, _TAG))

    def Test(self) -> bool:
        """Return whether all have arrived, as an MPI request does."""
        self._requests = [request for request in self._requests if not request.Test()]
        return not self._requests

    def received(self) -> dict[int, bytes]:
        """Return what has come, by rank."""
        return {rank: buffer.tobytes() for rank, buffer in self._buffers.items()}
