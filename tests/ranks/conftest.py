"""What the tests on several ranks share. Each of them runs on every rank, in the same order."""

import pytest

# By name: the arguments of MPIStrategy on this rank. `num_replicas` must be at least the size.
LAYOUTS = {
    "one": lambda rank, size: {},
    "two": lambda rank, size: {"replicas_per_rank": 2},
    "uneven": lambda rank, size: {"num_replicas": {1: 4, 2: 3, 3: 5, 4: 6}.get(size, size + 2)},
    "mixed": lambda rank, size: {"replicas_per_rank": 1 + rank % 2},
}


def pytest_itemcollected(item):
    item.add_marker("mpi")


@pytest.fixture(params=LAYOUTS)
def strategy(request, passed_everywhere):
    """A strategy in each layout: one or two replicas a rank, blocks that differ by one, and
    `replicas_per_rank` that differs between ranks."""
    from mpi4py import MPI  # starts MPI, so not when this file is imported

    import mpi_replica as mr

    world = MPI.COMM_WORLD
    strategy = mr.MPIStrategy(**LAYOUTS[request.param](world.rank, world.size))
    yield strategy
    if passed_everywhere():
        strategy.close()  # a collective call
