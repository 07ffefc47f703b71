"""A job that is stopped at any moment goes on with other ranks, and ends as if it never stopped."""

import signal
import subprocess
import sys

import pytest

import mpi_replica as mr
from launching import LIBRARIES, RANKS, ROOT, rank_environment, run_ranks

pytestmark = pytest.mark.mpi_skip  # it starts ranks itself

STOPPED = ROOT / "tests" / "stopped.py"
DIGITS = ROOT / "scripts" / "train_digits.py"
OPTIONS = ["--replicas", "4", "--epochs", "3", "--batch-size", "256"]
ENVIRONMENT = {"PYTHONPATH": str(ROOT)}
SAVED_ON_SIGNAL = 75

# How many ranks there are, which of them is stopped at which of its agreements, and how. A whole
# run has 124 of them.
STOPS = [
    (4, 3, 25, signal.SIGTERM),
    (3, 0, 43, signal.SIGKILL),
    (2, 1, 30, signal.SIGUSR1),
    (1, 0, 3, signal.SIGKILL),  # as soon as it has begun
]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """What an undisturbed run prints, on one rank."""
    out = tmp_path_factory.mktemp("undisturbed") / "digits.png"
    done = subprocess.run(
        [sys.executable, DIGITS, *OPTIONS, "--out", out],
        env=rank_environment(60, ENVIRONMENT),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    found = hashes(done)
    assert len(found) == 2, done.stdout
    return found


def hashes(done):
    return [line for line in done.stdout.splitlines() if " sha256 " in line]


def test_a_job_stopped_again_and_again_ends_with_the_bits_of_an_undisturbed_run(
    tmp_path, undisturbed
):
    """Each part runs on other ranks, and of another library than the one before."""
    kept = tmp_path / "kept"
    end = ["--checkpoint-dir", kept, "--out", tmp_path / "digits.png"]

    def run(part, ranks, culprit, at, number):
        library = LIBRARIES[part % len(LIBRARIES)]
        stop = [culprit, at, int(number)]
        return run_ranks(library, ranks, [STOPPED, *stop, DIGITS, *OPTIONS, *end], env=ENVIRONMENT)

    newest = None
    for part, (ranks, *stop) in enumerate(STOPS):
        if ranks not in RANKS:
            continue
        done = run(part, ranks, *stop)
        assert hashes(done) == [], done.stdout
        if stop[-1] == signal.SIGKILL:
            assert done.returncode != 0
        else:
            assert done.returncode == SAVED_ON_SIGNAL, done.stderr
            assert f"rank {stop[0]} got {stop[-1].name}: saved" in done.stderr
            assert mr.latest_checkpoint(kept) != newest
        newest = mr.latest_checkpoint(kept)
    done = run(len(STOPS), max(RANKS), 0, 0, 0)
    assert done.returncode == 0, done.stderr
    assert hashes(done) == undisturbed


@pytest.mark.skipif("openmpi" not in LIBRARIES, reason="of the two, Open MPI alone has ULFM")
@pytest.mark.parametrize(("killed", "at", "spares"), [(0, 43, 0), (1, 99, 1)])
def test_an_elastic_job_goes_on_without_a_rank_and_has_the_bits_of_an_undisturbed_run(
    killed, at, spares, tmp_path, undisturbed
):
    stop = [killed, at, int(signal.SIGKILL)]
    end = ["--elastic", "--spares", spares, "--out", tmp_path / "digits.png"]
    done = run_ranks(
        "openmpi",
        3,
        [STOPPED, *stop, DIGITS, *OPTIONS, *end],
        env=ENVIRONMENT,
        options=["--with-ft", "ulfm"],
    )
    assert done.returncode == 0, done.stderr
    assert f"lost rank {killed} " in done.stderr
    assert hashes(done) == undisturbed
