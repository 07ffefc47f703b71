"""What the tests on several ranks share. Each of them runs on every rank, in the same order."""

import gc
import os
import shutil
import tempfile
from pathlib import Path

import pytest

from everywhere import gathered
from on_a_device import DEVICE, make_tensors_there

# By name: the arguments of MPIStrategy on a rank.
LAYOUTS = {
    "one": lambda rank: {},
    "two": lambda rank: {"replicas_per_rank": 2},
    "mixed": lambda rank: {"replicas_per_rank": 1 + rank % 2},
    "four": lambda rank: {"num_replicas": 4},
    "five": lambda rank: {"num_replicas": 5},
    "six": lambda rank: {"num_replicas": 6},
    "eight": lambda rank: {"num_replicas": 8},
    "seven": lambda rank: {"num_replicas": 7},
    "three each": lambda rank: {"replicas_per_rank": 3},
    "more and more": lambda rank: {"replicas_per_rank": rank + 1},
}

# By number of ranks: 3 ranks with 5 replicas and 4 with 6 are where order and uneven blocks show.
LAYOUTS_ON = {1: ["one", "four"], 2: ["mixed"], 3: ["five"], 4: ["six"]}

# Another one alone, if given: what differs between layouts was seen with another library.
ONLY_LAYOUT = os.environ.get("MPI_REPLICA_TEST_LAYOUT")

# What must also be seen in further layouts; for all tests that would take too long.
FURTHER_ON = {2: ["one", "two"]}
FURTHER = ("test_all_reduce", "test_agreement")

# Of gradients: one replica in a greenlet, and several on a rank, each in a thread; on 2 ranks both.
GRADIENTS_ON = {1: ["one", "two", "three each"], 2: ["mixed"], 3: ["five"]}

# Of JAX, which compiles each function for each replica of a rank.
JAX_ON = {1: ["two"], 2: ["mixed"], 3: ["five"]}

# Where sums have one order in all layouts: a rank hosts one subtree of it, or several.
REPRODUCIBLE_ON = {
    1: ["one", "three each", "seven"],
    2: ["five", "seven"],
    3: ["more and more", "seven"],
    4: ["two", "six"],
}


def pytest_configure():
    if DEVICE != "cpu":
        make_tensors_there()


def pytest_itemcollected(item):
    item.add_marker("mpi")


def pytest_collection_finish():
    gc.freeze()  # some thousand tests: collections, for which many of them ask, leave them out


def pytest_generate_tests(metafunc):
    from mpi4py import MPI  # `mpi_replica.testing` has started it

    size = MPI.COMM_WORLD.size
    if "reproducible" in metafunc.fixturenames:
        layouts = REPRODUCIBLE_ON.get(size, ["one", "more and more"])
        if ONLY_LAYOUT:
            layouts = [ONLY_LAYOUT]
        metafunc.parametrize("reproducible", layouts, indirect=True)
    if "strategy" in metafunc.fixturenames:
        layouts = LAYOUTS_ON.get(size, ["one", "mixed"])
        name = metafunc.module.__name__.rpartition(".")[2]
        if name.startswith("test_gradients"):
            layouts = GRADIENTS_ON.get(size, layouts)
        if name.startswith("test_jax"):
            layouts = JAX_ON.get(size, layouts)
        if name == "test_jax_executions" and size == 1:
            layouts = ["one", "two", "five"]
        if name == "test_jax_functions" and size == 1 and "seed" in metafunc.fixturenames:
            layouts = ["one", "three each"]  # of random programs
        if name in FURTHER:
            layouts = [*layouts, *FURTHER_ON.get(size, [])]
        if ONLY_LAYOUT:
            layouts = [ONLY_LAYOUT]
        metafunc.parametrize("strategy", layouts, indirect=True)
    if "kept_strategy" in metafunc.fixturenames:
        layouts = [1 if ONLY_LAYOUT == "one" else 2]
        name = "replicas_per_rank={}".format
        metafunc.parametrize("kept_strategy", layouts, ids=name, indirect=True, scope="module")


@pytest.fixture(scope="module")
def kept_strategy(request):
    """One strategy for all tests of a file: what a mistake leaves behind, the next ones meet."""
    import mpi_replica as mr

    strategy = mr.MPIStrategy(replicas_per_rank=request.param)
    yield strategy
    if not request.session.testsfailed:
        strategy.close()  # a collective call
    else:
        strategy._close_here()


@pytest.fixture
def strategy(request, passed_everywhere):
    """A strategy in each layout for this number of ranks."""
    strategy = make_strategy(request.param)
    yield strategy
    if passed_everywhere():
        strategy.close()  # a collective call
    else:
        strategy._close_here()  # also of a test that was skipped: nobody finds it open


@pytest.fixture
def reproducible(request, passed_everywhere):
    """A reproducible strategy in each layout for this number of ranks."""
    strategy = make_strategy(request.param, reproducible=True)
    yield strategy
    if passed_everywhere():
        strategy.close()
    else:
        strategy._close_here()


@pytest.fixture
def shared_folder():
    """A folder of rank 0 for all ranks.

    Not pytest's ``tmp_path``: each rank would make one, and remove those of earlier runs while
    another rank looks at them. That leaves a folder open, which is an error at the end of pytest.
    """
    from mpi4py import MPI

    rank = MPI.COMM_WORLD.rank
    folder = Path(gathered(tempfile.mkdtemp() if rank == 0 else "")[0])
    yield folder
    if rank == 0:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def path(shared_folder):
    """Where all ranks save a checkpoint."""
    return shared_folder / "trained"


@pytest.fixture
def world():
    """The communicator of all ranks."""
    from mpi4py import MPI

    return MPI.COMM_WORLD


@pytest.fixture
def small_world(world):
    """Above 32 ranks agreement goes another way, and headers carry nothing."""
    if world.size > 32:
        pytest.skip("it is about 32 ranks and less")


@pytest.fixture
def few_ranks(world):
    """So many as each have something to do."""
    if world.size > 4:
        pytest.skip("some of so many ranks have nothing to do")


def make_strategy(layout, **options):
    from mpi4py import MPI  # starts MPI, so not when this file is imported

    import mpi_replica as mr

    about = LAYOUTS[layout](MPI.COMM_WORLD.rank)
    return mr.MPIStrategy(**about, communication_options=mr.CommunicationOptions(**options))
