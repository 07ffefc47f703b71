"""The tests in tests/ranks, on several ranks, with each MPI library."""

import pytest

from launching import LIBRARIES, RANKS, pass_on_ranks

pytestmark = pytest.mark.mpi_skip  # it starts ranks itself


# Of the other numbers of ranks only what depends on the library and its processes: what calls do
# with their data is the same for any number, and tests/test_steps.py shows it in one process.
WHOLE = {("openmpi", 1), ("openmpi", 2), ("mpich", 2)}
OF_THE_LIBRARY = (
    "agreement",
    "all_gather",
    "all_reduce",
    "barrier",
    "communicators",
    "failures",
    "reproducible",
    "shared_memory",
    "transport_errors",
    "transport_mpi",
)


# Where each of several replicas has a thread of its own, whatever is imported: that the tests hold
# for both kinds is seen where it costs least.
WITH_THREADS = ("openmpi", 1)


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("library", LIBRARIES)
def test_ranks(library, ranks):
    check_ranks(library, ranks)


# Above 32 ranks agreement goes another way, which the tests of fewer ranks take by force.
@pytest.mark.skipif("openmpi" not in LIBRARIES or max(RANKS) < 4, reason="not asked for")
def test_ranks_of_a_large_world():
    files = [f"tests/ranks/test_{name}.py" for name in ("barrier", "result_memory")]
    # They start one after the other, on few cores.
    pass_on_ranks("openmpi", 33, files, env={"MPI_REPLICA_TEST_FENCE": "120"})


@pytest.mark.skipif(
    WITH_THREADS[0] not in LIBRARIES or WITH_THREADS[1] not in RANKS, reason="not asked for"
)
def test_ranks_whose_replicas_have_threads():
    check_ranks(*WITH_THREADS, env={"MPI_REPLICA_THREADS": "1"})


def check_ranks(library, ranks, **settings):
    """Run the tests, and fail where they do not pass on all ranks."""
    files = ["tests/ranks"]
    if (library, ranks) not in WHOLE:
        files = [f"tests/ranks/test_{name}.py" for name in OF_THE_LIBRARY]
    pass_on_ranks(library, ranks, files, **settings)
