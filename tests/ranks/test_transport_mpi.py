"""The transport over MPI keeps the contract on every kind of communicator."""

import numpy as np
import pytest

from everywhere import raises_everywhere
from mpi_replica.core.options import ReduceOp
from mpi_replica.ranks import windows
from mpi_replica.ranks.launch import open_transport
from mpi_replica.ranks.point_to_point import PointToPoint
from mpi_replica.ranks.transport import HEADER_BYTES, SharedMemoryError
from transport_contract import TransportContract


def transport_over(communicator):
    from mpi4py import MPI

    return open_transport(communicator or MPI.COMM_WORLD)


class TestWorld(TransportContract):
    def make(self):
        return transport_over(None)


class TestSelf(TransportContract):
    def make(self):
        from mpi4py import MPI

        return transport_over(MPI.COMM_SELF)


class TestHalves(TransportContract):
    """Two worlds side by side, of the even and the odd ranks."""

    def make(self):
        from mpi4py import MPI

        half = MPI.COMM_WORLD.Split(MPI.COMM_WORLD.rank % 2)
        transport = transport_over(half)
        half.Free()  # the transport has its own
        return transport


class TestReversed(TransportContract):
    """Ranks in another order than the world's."""

    def make(self):
        from mpi4py import MPI

        reversed_world = MPI.COMM_WORLD.Split(0, -MPI.COMM_WORLD.rank)
        transport = transport_over(reversed_world)
        reversed_world.Free()
        return transport


class TestInSmallPieces(TransportContract):
    """Messages above the largest size go in pieces."""

    large_block_bytes = 700

    @pytest.fixture(autouse=True)
    def small_messages(self, monkeypatch):
        import mpi_replica.ranks.mpi

        monkeypatch.setattr(mpi_replica.ranks.mpi, "_LARGEST_MESSAGE_BYTES", 3)

    def make(self):
        return transport_over(None)


@pytest.mark.parametrize(("size", "num_pieces"), [(0, 0), (1, 1), (3, 1), (4, 2), (11, 4)])
def test_a_message_goes_in_pieces_of_the_largest_size(size, num_pieces):
    from mpi4py import MPI

    world = MPI.COMM_WORLD.Dup()
    following, previous = (world.rank + 1) % world.size, (world.rank - 1) % world.size
    messages = PointToPoint(MPI, world, {following: bytes(range(size))}, {previous: size}, 3)
    assert len(messages._requests) == 2 * num_pieces
    while not messages.Test():
        pass
    assert messages.received == {previous: bytes(range(size))}
    world.Free()


class TestWithoutPersistentCollectives(TransportContract):
    """MPI libraries before version 4 have none, and those of some others are wrong."""

    @pytest.fixture(autouse=True)
    def unsound(self, monkeypatch):
        import mpi_replica.ranks.header_exchanges as module

        monkeypatch.setattr(module, "has_sound_persistent_collectives", lambda mpi: False)

    def make(self):
        return transport_over(None)

    def test_none_is_used(self, transport):
        assert {request for _, request in transport._of_size.values()} == {None}


class TestIntel(TransportContract):
    """Its Iallgatherv takes too long."""

    def make(self):
        transport = transport_over(None)
        transport._is_intel, transport._blocks = True, False
        return transport


class TestByWayOfOneRankOfEachHost(TransportContract):
    """Hosts of one, two and three ranks, which do not stand in their order."""

    hosts = "abbcbc"

    def make(self):
        from mpi4py import MPI

        from mpi_replica.ranks.header_exchanges import HeaderExchanges

        if MPI.COMM_WORLD.size > len(self.hosts):
            pytest.skip("it has no host for so many ranks")
        transport = transport_over(None)
        transport._exchanges.free()
        hosts = self.hosts[: transport.size]
        transport._exchanges = HeaderExchanges(MPI, transport._comm, hosts)
        transport.headers = transport._exchanges.headers
        transport._of_size = transport._exchanges.of_size
        return transport

    def test_ranks_that_come_in_any_order_get_the_headers_of_one_turn(self, transport):
        """One that is ahead begins the next turn while others are at this one."""
        for turn in range(60):
            if (turn + transport.rank) % 3 == 0:
                sum(range(20_000))
            transport.exchange(self.header(transport.rank, turn))
            expected = b"".join(self.header(r, turn) for r in range(transport.size))
            assert transport.headers[HEADER_BYTES].tobytes() == expected


class TestByWayOfOneRank(TestByWayOfOneRankOfEachHost):
    hosts = "aaaaaa"


class TestCrowded(TransportContract):
    """Where ranks outnumber cores nobody spins or blocks."""

    def make(self):
        transport = transport_over(None)
        transport._spins, transport._blocks = range(0), False
        return transport


def test_messages_on_the_users_communicator_do_not_meet_those_of_the_transport():
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    transport = transport_over(world)
    pending = world.irecv(source=MPI.ANY_SOURCE, tag=MPI.ANY_TAG)
    total = np.array([world.rank + 1.0])
    transport.all_reduce(None, total, ReduceOp.SUM)
    world.send(world.rank, (world.rank + 1) % world.size, tag=5)
    assert pending.wait() == (world.rank - 1) % world.size
    assert total[0] == sum(range(1, world.size + 1))
    transport.close()


# Shared memory that can't be had: on one rank, told on all.


def lacks(monkeypatch, transport):
    """Say that there is too little of it: only the first rank looks."""

    def lack(size_bytes):
        return f"there is none of {size_bytes} bytes"

    monkeypatch.setattr(windows, "lack_of_shared_memory", lack)


def fails(monkeypatch, transport):
    """Let the library fail where it makes it."""
    from mpi4py import MPI

    class Win:
        def Allocate_shared(*about, comm):
            raise MPI.Exception(MPI.ERR_NO_MEM)

    class Library:
        def __getattr__(self, name):
            return Win if name == "Win" else getattr(MPI, name)

    monkeypatch.setattr(transport._windows, "_mpi", Library())


@pytest.mark.parametrize("problem", [lacks, fails])
def test_shared_memory_that_can_not_be_had_is_one_error_on_all_ranks(monkeypatch, problem):
    """And the transport works on, and may have it later."""
    transport = transport_over(None)
    for _ in range(2):
        with monkeypatch.context() as patch:
            problem(patch, transport)
            error = raises_everywhere(SharedMemoryError, lambda: transport.open_shared_memory(1000))
        assert str(error).startswith(("there is none of 1000 bytes", "the MPI library gives none"))
        total = np.array([transport.rank])
        transport.all_reduce(None, total, ReduceOp.SUM)
        assert total[0] == sum(range(transport.size))
    assert transport.open_shared_memory(1000).size == 1000
    transport.close()
