"""The tests in tests/ranks, on several ranks, with each MPI library."""

import pytest

from launching import LIBRARIES, RANKS, pass_on_ranks

pytestmark = pytest.mark.mpi_skip  # it starts ranks itself

WHOLE = {("openmpi", 1), ("openmpi", 2), ("mpich", 2)}

ENVIRONMENTS = {
    # Each of several replicas has a thread of its own, whatever is imported: that the tests hold
    # for both kinds is seen where it costs least.
    ("openmpi", 1): {"MPI_REPLICA_THREADS": "1"},
    # A replica a rank, where Open MPI's two ranks have one and two.
    ("mpich", 2): {"MPI_REPLICA_TEST_LAYOUT": "one"},
}

# Of the other numbers of ranks what depends on how many there are, by Open MPI, whose ranks give
# way while they wait for each other on two cores; and by all libraries what is their own. What
# calls do with their data is the same for any number: tests/test_steps.py shows it in one process.
OF_MORE_RANKS = {("openmpi", 3), ("openmpi", 4)}
OF_THE_LIBRARY = ("barrier", "communicators", "shared_memory", "transport_errors", "transport_mpi")
OF_THE_NUMBER = ("agreement", "all_gather", "all_reduce", "failures", "reproducible")


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("library", LIBRARIES)
def test_ranks(library, ranks):
    job = (library, ranks)
    names = OF_THE_LIBRARY + OF_THE_NUMBER if job in OF_MORE_RANKS else OF_THE_LIBRARY
    files = ["tests/ranks"] if job in WHOLE else [f"tests/ranks/test_{name}.py" for name in names]
    pass_on_ranks(library, ranks, files, env=ENVIRONMENTS.get(job))


# Where its collectives were wrong: persistent ones of two ranks, and uneven ones of more.
@pytest.mark.skipif(len(LIBRARIES) < 2, reason="not asked for")
@pytest.mark.parametrize(
    ("ranks", "names"),
    [(2, (*OF_THE_LIBRARY, "all_reduce_small", "failures")), (3, ("all_gather", "transport_mpi"))],
)
def test_ranks_of_intel_mpi(ranks, names):
    pass_on_ranks("intel", ranks, [f"tests/ranks/test_{name}.py" for name in names])


# Above 32 ranks agreement goes another way, which the tests of fewer ranks take by force.
@pytest.mark.skipif("openmpi" not in LIBRARIES or max(RANKS) < 4, reason="not asked for")
def test_ranks_of_a_large_world():
    files = [f"tests/ranks/test_{name}.py" for name in ("barrier", "result_memory")]
    # They start one after the other, on few cores.
    pass_on_ranks("openmpi", 33, files, env={"MPI_REPLICA_TEST_FENCE": "120"})
