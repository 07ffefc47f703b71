"""One rank without MPI: every exchange is with oneself."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping, Sequence
from os import getpid
from typing import Any

import numpy as np
import numpy.typing as npt

from ..core.options import ReduceOp
from .transport import HEADER_BYTES, LARGER_HEADER_BYTES, Bytes, Messages, Payload, Transport, Words


class SingleTransport(Transport):
    """A world of one rank."""

    def __init__(self) -> None:
        self.rank = 0
        self.size = 1
        self.hosts = (socket.gethostname(),)
        self.pids = (getpid(),)
        self.communicator = None
        self.headers = {
            size_bytes: np.zeros(size_bytes, np.uint8)
            for size_bytes in (HEADER_BYTES, *LARGER_HEADER_BYTES)
        }
        self._views = {size_bytes: memory.data for size_bytes, memory in self.headers.items()}

    def exchange(self, header: bytes, size_bytes: int = HEADER_BYTES, rest: Payload = b"") -> None:
        view, start = self._views[size_bytes], len(header)
        view[:start] = header
        if rest:
            view[start : start + len(rest)] = rest

    def maximum(self, words: Words) -> Words:
        return words

    def begin_exchange(self, header: bytes, size_bytes: int = HEADER_BYTES) -> Callable[[], bool]:
        self.exchange(header, size_bytes)
        return lambda: True

    def begin_maximum(self, words: Words) -> Callable[[], Words | None]:
        return lambda: words

    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        return [data]

    def all_gather_blocks(self, send: Bytes | None, receive: Bytes, counts: Sequence[int]) -> None:
        if send is not None:
            np.copyto(receive, send)

    def broadcast(self, data: Bytes, root: int) -> None:
        """Leaves it: the one rank has it."""

    def all_reduce(
        self, send: npt.NDArray[Any] | None, receive: npt.NDArray[Any], op: ReduceOp
    ) -> None:
        if send is not None:
            np.copyto(receive, send)

    def all_to_all(
        self, send: Bytes, send_counts: Sequence[int], receive: Bytes, receive_counts: Sequence[int]
    ) -> None:
        np.copyto(receive, send)

    def pass_on(self, messages: Messages, sizes: Mapping[int, int]) -> Messages:
        return {}

    def open_shared_memory(self, size_bytes: int) -> Bytes:
        return np.zeros(size_bytes, np.uint8)

    def barrier(self) -> None:
        """Returns at once: there is one rank."""

    def revoke(self) -> None:
        """Does nothing: no other rank waits."""

    def abort(self, status: int) -> None:
        os._exit(status)

    def close(self) -> None:
        """Does nothing: it holds nothing."""


class WaitingTransport(SingleTransport):
    """The transport of a rank that hosts no replicas: it knows the others, and sends them nothing.

    Parameters
    ----------
    rank : int
        Its own among all that live.
    hosts, pids : tuple
        Those of all that live.
    abort : callable
        Ends the processes of all ranks with an exit status.
    """

    def __init__(
        self, rank: int, hosts: tuple[str, ...], pids: tuple[int, ...], abort: Callable[[int], None]
    ) -> None:
        super().__init__()
        self.rank, self.hosts, self.pids = rank, hosts, pids
        self._abort = abort

    def abort(self, status: int) -> None:
        self._abort(status)
