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
from .transport import HEADER_BYTES, Bytes

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
        Its ranks; a duplicate of it is used. Collective.
    hosts : sequence of str
        Where each rank is, in any order.
    header, headers : array of bytes
        What this rank gives, and where those of all ranks are put, in rank order.
    """

    def __init__(
        self, mpi: Any, communicator: Any, hosts: Sequence[str], header: Bytes, headers: Bytes
    ) -> None:
        # Its own: what users send on theirs must not meet it.
        self._comm = communicator.Dup()
        self._start_all, self._test_all = mpi.Prequest.Startall, mpi.Request.Testall
        self._header = header
        rank, byte = self._comm.Get_rank(), mpi.BYTE
        ranks_of = grouped(hosts)
        first, *members = ranks_of[hosts[rank]]
        self._types = []
        everything = [headers, byte]
        if rank != first:
            self._place = None
            begins = [self._comm.Recv_init(everything, first)]
            begins.append(self._comm.Send_init([header, byte], first))
            self._steps = [_Step(begins, begins)]
        else:
            place = rank * HEADER_BYTES
            self._place = headers[place : place + HEADER_BYTES]
            blocks = {}  # of hosts, by their first ranks
            for ranks in ranks_of.values():
                starts = [other * HEADER_BYTES for other in ranks]
                block = byte.Create_indexed_block(HEADER_BYTES, starts).Commit()
                self._types.append(block)
                blocks[ranks[0]] = [headers, 1, block]
            mine = blocks.pop(first)
            from_members = [
                self._comm.Recv_init([headers[other * HEADER_BYTES :], HEADER_BYTES, byte], other)
                for other in members
            ]
            from_hosts = [self._comm.Recv_init(block, other) for other, block in blocks.items()]
            to_hosts = [self._comm.Send_init(mine, other) for other in blocks]
            to_members = [self._comm.Send_init(everything, other) for other in members]
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

    def Revoke(self) -> None:
        """Makes it fail on all ranks."""
        self._comm.Revoke()

    def Free(self) -> None:
        """Gives back what it holds. Collective."""
        for step in self._steps:
            for request in step.begins:
                request.Free()
        for block in self._types:
            block.Free()
        self._comm.Free()
