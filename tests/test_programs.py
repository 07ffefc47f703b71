"""The small programs in scripts/: right answers, and the same ones on any ranks."""

import runpy
import subprocess
import sys

import numpy as np
import pytest

import mpi_replica as mr
from launching import (
    LIBRARIES,
    ONE_AFTER_ANOTHER,
    RANKS,
    ROOT,
    rank_environment,
    run_ranks,
)

pytestmark = pytest.mark.mpi_skip  # it starts ranks itself

PROGRAMS = [ROOT / "scripts" / f"{name}.py" for name in ("kmeans", "evolution", "ensemble")]
# Five replicas, on two ranks or three: some ranks have more of them than others.
REPLICAS = ["--replicas", "5"]
LAYOUTS = [
    (library, min(ranks, max(RANKS))) for library, ranks in zip(LIBRARIES, (3, 2), strict=False)
]

# With so little work the answer is wrong.
TOO_LITTLE = [("kmeans", "--rounds"), ("evolution", "--generations"), ("ensemble", "--members")]


def run_alone(*arguments):
    """Run Python on one process, without MPI."""
    return subprocess.run(
        [sys.executable, "-W", "error", *map(str, arguments)],
        env=rank_environment(timeout_seconds=60),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.fixture(scope="module")
def alone():
    """Return what the programs print on one process."""
    done = run_alone("-c", ONE_AFTER_ANOTHER, len(PROGRAMS), *PROGRAMS, *REPLICAS)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


@pytest.mark.parametrize(("library", "ranks"), LAYOUTS)
def test_programs_print_the_same_numbers_on_any_ranks(library, ranks, alone):
    arguments = ["-W", "error", "-c", ONE_AFTER_ANOTHER, len(PROGRAMS), *PROGRAMS, *REPLICAS]
    done = run_ranks(library, ranks, arguments)
    assert done.returncode == 0, done.stderr
    assert done.stdout == alone  # all of it: other ranks than 0 print nothing


@pytest.mark.parametrize(("name", "option"), TOO_LITTLE)
def test_a_program_that_finds_a_wrong_answer_says_so_and_fails(name, option):
    done = run_alone(ROOT / "scripts" / f"{name}.py", option, 1)
    assert done.returncode == 1
    assert done.stderr.startswith("wrong: ")
    assert done.stderr.count("\n") == 1


def test_a_wrong_answer_is_told_once_by_all_ranks():
    done = run_ranks(LIBRARIES[0], min(2, max(RANKS)), [PROGRAMS[0], "--rounds", 1])
    assert done.returncode == 1
    assert done.stderr.count("wrong: ") == 1
    assert "Traceback" not in done.stderr


def test_a_cluster_without_points_stays_where_it_is():
    points = np.random.default_rng(0).normal(size=(20, 3))
    points[1] = points[0]  # two centres start there, of which the first is the nearest to all
    find = runpy.run_path(str(PROGRAMS[0]))["find"]
    with mr.MPIStrategy(num_replicas=3) as strategy:
        centres, _ = find(strategy, points, rounds=1)
    assert np.array_equal(centres[1], points[1])
    assert np.all(np.isfinite(centres))
