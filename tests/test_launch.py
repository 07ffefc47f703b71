"""The tests in tests/ranks, on several ranks, with each MPI library."""

import re

import pytest

from launching import LIBRARIES, RANKS, run_ranks

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
    done = run_ranks(
        library,
        ranks,
        # The cache is one folder, which all ranks would write.
        ["-m", "pytest", "--only-mpi", "--color=no", "-p", "no:cacheprovider", *files],
        timeout_seconds=600,
        **settings,
    )
    wrong = []
    if done.returncode != 0:
        wrong.append(f"return code {done.returncode}")
    # pytest also returns 0 when all tests are skipped.
    summaries = re.findall(r"^=* ?(?:.*, )?(\d+) passed.* in [\d.]+s", done.stdout, re.MULTILINE)
    if len(summaries) != 1:
        wrong.append(f"{len(summaries)} reports of tests that passed, where rank 0 writes one")
    # From pytest-mpi. Ranks that a launcher of another library started are each alone.
    if f"size: {ranks}\n" not in done.stdout:
        wrong.append(f"no world of size {ranks}")
    if wrong:
        pytest.fail(f"{'; '.join(wrong)}\n{done.stdout}\n{done.stderr}", pytrace=False)
