"""One rank among as many as one likes: all others do what it does.

So all of the runtime's own code runs as it would on thousands of ranks. The numbers that come out
are wrong, except where all contribute the same.
"""

import contextlib
from unittest import mock

import numpy as np

import mpi_replica as mr
from mpi_replica.ranks.header_exchanges import sizes_of_headers
from mpi_replica.ranks.single import SingleTransport
from mpi_replica.ranks.transport import HEADER_BYTES, SharedMemoryError


class Mirror(SingleTransport):
    """The transport of the first of some ranks, each on a host of its own."""

    is_between_hosts = True

    def __init__(self, size):
        super().__init__()
        self.size = size
        self.hosts = tuple(f"host{rank}" for rank in range(size))
        self.pids = tuple(range(1, size + 1))
        self.headers = {n: np.zeros(n * size, np.uint8) for n in sizes_of_headers(size)}

    def _count(self, sent_bytes):
        self.steps = self.steps_ended = self.steps + 1
        self.sent_bytes += sent_bytes

    def exchange(self, header, size_bytes=HEADER_BYTES, rest=b""):
        self._count(size_bytes)
        message = np.frombuffer(header + bytes(rest), np.uint8)
        self.headers[size_bytes].reshape(self.size, size_bytes)[:, : message.size] = message

    def maximum(self, words):
        self._count(words.nbytes)
        return words

    def all_gather_bytes(self, data):
        self._count(LENGTH_BYTES)
        self._count(len(data))
        return [data] * self.size

    def all_gather_blocks(self, send, receive, counts):
        self._count(counts[0])
        receive[:] = np.resize(receive[: counts[0]] if send is None else send, receive.size)

    def all_reduce(self, send, receive, op):
        self._count(receive.nbytes)
        super().all_reduce(send, receive, op)

    def all_to_all(self, send, send_counts, receive, receive_counts):
        self._count(send.nbytes)
        receive[:] = np.resize(send, receive.size)

    def open_shared_memory(self, size_bytes):
        raise SharedMemoryError("the ranks are on several hosts")


#: What `all_gather_bytes` sends first.
LENGTH_BYTES = 8


@contextlib.contextmanager
def mirrored(size):
    """Give the strategy of one of `size` ranks."""
    start = "mpi_replica.strategy.start"
    with (
        mock.patch(f"{start}.open_survivors", return_value=None),
        mock.patch(f"{start}.SingleTransport", return_value=Mirror(size)),
        mr.MPIStrategy() as strategy,
    ):
        yield strategy
