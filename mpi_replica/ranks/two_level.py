"""Headers by way of one rank on each host.

Where every rank sends its header to every other one, those of a host share its way over the
network with each other. Here the ranks of a host give theirs to its first one; the first ranks
give each other those of their hosts, and all of them to the ranks of their own. Between three
hosts with 8 ranks each that is 6 messages over the network in the place of 384.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from ..core.layout import grouped
from .transport import Bytes

# The first ranks of so many hosts give to each other. Among more, libraries know better ways.
_MOST_HOSTS = 32


def is_two_level(hosts: Sequence[str]) -> bool:
    """Returns whether headers should go so, where `hosts` are those of all ranks."""
    number = len(set(hosts))
    return 1 < number < len(hosts) and number <= _MOST_HOSTS


class _Step(NamedTuple):
    """Requests that are started together, and those that must be complete before the next step."""

    begins: list[Any]
    awaits: list[Any]


class TwoLevelExchange:
    """An exchange of headers that can be done again and again, as a persistent request of MPI.

    `Test` carries it on: the ranks of a host wait for their first rank to ask.

    Parameters
    ----------
    mpi : module
        ``mpi4py.MPI``.
    communicator : mpi4py.MPI.Intracomm
        Its ranks; nothing else is sent on it.
    hosts : sequence of str
        Where each rank is, in any order.
    header, headers : array of bytes
        What this rank gives, and where those of all ranks are put, in rank order.
    """

    def __init__(
        self, mpi: Any, communicator: Any, hosts: Sequence[str], header: Bytes, headers: Bytes
    ) -> None:
        self._start_all, self._test_all = mpi.Prequest.Startall, mpi.Request.Testall
        self._header = header
        rank, byte, size_bytes = communicator.Get_rank(), mpi.BYTE, header.size
        ranks_of = grouped(hosts)
        first, *members = ranks_of[hosts[rank]]
        self._types = []
        everything = [headers, byte]
        if rank != first:
            self._place = None
            begins = [communicator.Recv_init(everything, first)]
            begins.append(communicator.Send_init([header, byte], first))
            self._steps = [_Step(begins, begins)]
        else:
            place = rank * size_bytes
            self._place = headers[place : place + size_bytes]
            blocks = {}  # of hosts, by their first ranks
            for ranks in ranks_of.values():
                starts = [other * size_bytes for other in ranks]
                block = byte.Create_indexed_block(size_bytes, starts).Commit()
                self._types.append(block)
                blocks[ranks[0]] = [headers, 1, block]
            mine = blocks.pop(first)
            from_members = [
                communicator.Recv_init([headers[other * size_bytes :], size_bytes, byte], other)
                for other in members
            ]
            from_hosts = [communicator.Recv_init(block, other) for other, block in blocks.items()]
            to_hosts = [communicator.Send_init(mine, other) for other in blocks]
            to_members = [communicator.Send_init(everything, other) for other in members]
            self._steps = [
                _Step(from_members + from_hosts, from_members),
                _Step(to_hosts, from_hosts),
                _Step(to_members, to_hosts + to_members),
            ]
        self._index = 0

    def Start(self) -> None:
        """Begins, with what stands in the header now."""
        if self._place is not None:
            self._place[:] = self._header
        self._index = 0
        # One call of MPI: where it fails, nothing has begun.
        self._start_all(self._steps[0].begins)

    def Test(self) -> bool:
        """Returns whether all headers have come, and this rank's buffers may be written again."""
        while self._test_all(self._steps[self._index].awaits):
            if self._index == len(self._steps) - 1:
                return True
            self._index += 1
            self._start_all(self._steps[self._index].begins)
        return False

    def Free(self) -> None:
        """Gives back what it holds."""
        for step in self._steps:
            for request in step.begins:
                request.Free()
        for block in self._types:
            block.Free()
