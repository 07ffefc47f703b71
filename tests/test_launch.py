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


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("library", LIBRARIES)
def test_ranks(library, ranks):
    files = ["tests/ranks"]
    if (library, ranks) not in WHOLE:
        files = [f"tests/ranks/test_{name}.py" for name in OF_THE_LIBRARY]
    pass_on_ranks(library, ranks, files)
