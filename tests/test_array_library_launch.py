"""The tests that need torch or JAX, with interpreters that have them.

The one that runs all other tests has neither: what imports none must work without, and there these
tests are skipped.
"""

import subprocess

import pytest

from launching import (
    LIBRARIES,
    RANKS,
    ROOT,
    find_interpreter,
    pass_on_ranks,
    rank_environment,
    room_for,
)

pytestmark = pytest.mark.mpi_skip  # it starts ranks itself

FOLDER = ROOT / "tests" / "ranks"
# What does the same with any array library, and with torch only; and memory of threads.
NAMES = ("array_librar*", "*torch*", "gradients*", "result_memory")
FILES = sorted({file for name in NAMES for file in FOLDER.glob(f"test_{name}.py")})
# On 3 ranks what combines values of ranks: not what is done with them on each rank alone.
OF_ONE_RANK = ("datasets", "torch_compile", "torch_on_gpu", "result_memory")
FILES_OF_MORE_RANKS = [file for file in FILES if not file.stem.endswith(OF_ONE_RANK)]
FILES_OF_JAX = sorted(FOLDER.glob("test_jax_*.py"))
# On 3 ranks with 5 replicas, each of which compiles: random programs, and mistakes.
RANDOM_PROGRAMS = "test_any_graph_of_collectives_has_the_value_and_the_gradient_of_one_process"
OF_JAX_ON_MORE_RANKS = [
    f"{FOLDER / 'test_jax_functions.py'}::{RANDOM_PROGRAMS}",
    FOLDER / "test_jax_mistakes.py",
]

# Few launches with many tests: a rank takes two seconds to import torch. The layouts of each, in
# tests/ranks/conftest.py, have ranks of one replica, in a greenlet, and of several, in threads.
LAUNCHES = [("openmpi", 1), ("mpich", 2), ("openmpi", 3)]


@pytest.mark.parametrize(("library", "ranks"), LAUNCHES)
def test_ranks_with_torch(library, ranks):
    if library not in LIBRARIES or ranks not in RANKS:
        pytest.skip("MPI_REPLICA_TEST_LIBRARIES or MPI_REPLICA_RANKS leaves it out")
    pass_on_ranks(library, ranks, FILES if ranks < 3 else FILES_OF_MORE_RANKS, arrays=True)


@pytest.mark.parametrize(("library", "ranks"), LAUNCHES)
def test_ranks_with_jax(library, ranks):
    if library not in LIBRARIES or ranks not in RANKS:
        pytest.skip("MPI_REPLICA_TEST_LIBRARIES or MPI_REPLICA_RANKS leaves it out")
    # XLA's optimizations, a seventh of the time, are seen with one of the libraries.
    env = {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"} if library == "openmpi" else None
    tests = FILES_OF_JAX if ranks < 3 else OF_JAX_ON_MORE_RANKS
    pass_on_ranks(library, ranks, tests, arrays="jax", env=env)


# What needs no ranks. Of the pages those programs that are no recipes.
IN_ONE_PROCESS = [
    "tests/test_dataset_array_libraries.py",
    "tests/test_docstrings.py",
    "tests/test_elastic_torch.py",
    "tests/test_imported_libraries.py",
    "tests/test_pages.py::test_programs_that_are_files_print_the_same_in_one_process",
]


def test_one_process_with_torch():
    command = [find_interpreter("openmpi", arrays=True), "-m", "pytest", "-p", "no:cacheprovider"]
    with room_for(ranks=1):
        done = subprocess.run(
            [*command, *IN_ONE_PROCESS],
            cwd=ROOT,
            env=rank_environment(300),
            capture_output=True,
            text=True,
            timeout=300,
        )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "torch is not installed" not in done.stdout, done.stdout
    assert " passed" in done.stdout, done.stdout
