"""What the tests on several ranks share. Each of them runs on every rank, in the same order."""

import pytest

# By name: the arguments of MPIStrategy on a rank.
LAYOUTS = {
    "one": lambda rank: {},
    "two": lambda rank: {"replicas_per_rank": 2},
    "mixed": lambda rank: {"replicas_per_rank": 1 + rank % 2},
    "four": lambda rank: {"num_replicas": 4},
    "five": lambda rank: {"num_replicas": 5},
    "six": lambda rank: {"num_replicas": 6},
}

# By number of ranks: 3 ranks with 5 replicas and 4 with 6 are where order and uneven blocks show.
LAYOUTS_ON = {1: ["one", "four"], 2: ["one", "two"], 3: ["five"], 4: ["six"]}

# What must also be seen in further layouts; for all tests that would take too long.
FURTHER_ON = {2: ["mixed"], 4: ["one"]}
FURTHER = ("test_all_reduce", "test_agreement")


def pytest_itemcollected(item):
    item.add_marker("mpi")


def pytest_generate_tests(metafunc):
    if "strategy" in metafunc.fixturenames:
        from mpi4py import MPI  # `mpi_replica.testing` has started it

        size = MPI.COMM_WORLD.size
        layouts = LAYOUTS_ON.get(size, ["one", "mixed"])
        if metafunc.module.__name__.rpartition(".")[2] in FURTHER:
            layouts = [*layouts, *FURTHER_ON.get(size, [])]
        metafunc.parametrize("strategy", layouts, indirect=True)


@pytest.fixture
def strategy(request, passed_everywhere):
    """A strategy in each layout for this number of ranks."""
    from mpi4py import MPI  # starts MPI, so not when this file is imported

    import mpi_replica as mr

    strategy = mr.MPIStrategy(**LAYOUTS[request.param](MPI.COMM_WORLD.rank))
    yield strategy
    if passed_everywhere():
        strategy.close()  # a collective call
