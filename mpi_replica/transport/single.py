"""One rank without MPI: every exchange is with oneself."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ..options import ReduceOp
from .base import Bytes, Transport

__all__ = ["SingleTransport"]


class SingleTransport(Transport):
    """A world of one rank."""

    def __init__(self) -> None:
        self.rank = 0
        self.size = 1
        self.hosts = (socket.gethostname(),)
        self.pids = (os.getpid(),)
        self.communicator = None

    def exchange(self, header: bytes, timeout_seconds: float | None = None) -> memoryview:
        return memoryview(header)

    def maximum(
        self, words: npt.NDArray[np.uint64], timeout_seconds: float | None = None
    ) -> npt.NDArray[np.uint64]:
        return words

    def begin_exchange(self, header: bytes) -> Callable[[], memoryview | None]:
        return lambda: memoryview(header)

    def begin_maximum(
        self, words: npt.NDArray[np.uint64]
    ) -> Callable[[], npt.NDArray[np.uint64] | None]:
        return lambda: words

    def all_gather_bytes(self, data: bytes, timeout_seconds: float | None = None) -> list[bytes]:
        return [data]

    def all_gather_blocks(
        self,
        send: Bytes | None,
        receive: Bytes,
        counts: Sequence[int],
        timeout_seconds: float | None = None,
    ) -> None:
        if send is not None:
            np.copyto(receive, send)

    def all_reduce(
        self,
        send: npt.NDArray[Any] | None,
        receive: npt.NDArray[Any],
        op: ReduceOp,
        timeout_seconds: float | None = None,
    ) -> None:
        if send is not None:
            np.copyto(receive, send)

    def abort(self, status: int) -> None:
        os._exit(status)

    def close(self) -> None:
        """Nothing is held."""
