"""The jobs that compute with another library, as their users start them."""

import re
import signal
import subprocess

import pytest

import mpi_replica as mr
from launching import (
    LIBRARIES,
    ONE_AFTER_ANOTHER,
    RANKS,
    ROOT,
    find_interpreter,
    rank_environment,
    room_for,
    run_ranks,
)

pytestmark = pytest.mark.mpi_skip  # it starts ranks itself

SCRIPTS = ROOT / "scripts"
STOPPED = ROOT / "tests" / "stopped.py"
OF_TORCH = [SCRIPTS / "train_torch.py", SCRIPTS / "contrastive.py"]
BOTH = ["-c", ONE_AFTER_ANOTHER, len(OF_TORCH), *OF_TORCH]
OPTIONS = ["--replicas", "4", "--epochs", "2"]
OF_JAX = [SCRIPTS / "train_jax.py", "--replicas", "4", "--epochs", "4"]
# XLA's optimizations, a fifth of the time of JAX, are seen in tests/ranks.
ENVIRONMENT = {"PYTHONPATH": str(ROOT), "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
HASH = r"^weights sha256 [0-9a-f]{64}$"

# On how many ranks of which library the job runs, which of them gets a signal at which of its
# agreements, nearly 400, and what signal. Without one it comes to the end.
STOPS = [
    ("openmpi", 2, 1, 250, signal.SIGKILL),  # in the second epoch, which begins anew
    ("mpich", 2, 0, 0, 0),
]


def on_ranks(library, ranks, arguments, **settings):
    if library not in LIBRARIES or ranks not in RANKS:
        pytest.skip("MPI_REPLICA_TEST_LIBRARIES or MPI_REPLICA_RANKS leaves it out")
    return run_ranks(library, ranks, arguments, env=ENVIRONMENT, arrays=True, **settings)


def alone(python, *arguments):
    """Return what a program prints in one process, without MPI."""
    with room_for(ranks=1):
        done = subprocess.run(
            [python, *map(str, arguments)],
            env=rank_environment(120, ENVIRONMENT),
            capture_output=True,
            text=True,
            timeout=120,
        )
    assert done.returncode == 0, done.stderr
    return done.stdout


def hashes(stdout):
    return re.findall(HASH, stdout, re.MULTILINE)


@pytest.fixture(scope="module")
def of_torch():
    """What the programs print that need torch, one after the other."""
    printed = alone(find_interpreter("openmpi", arrays=True), *BOTH, *OPTIONS)
    assert len(hashes(printed)) == len(OF_TORCH), printed
    return printed


def test_four_replicas_learn_with_the_same_bits_of_torch_on_three_ranks(of_torch):
    done = on_ranks("mpich", 3, [*BOTH, *OPTIONS])
    assert done.returncode == 0, done.stderr
    assert done.stdout == of_torch  # all of it: other ranks than 0 print nothing


def test_a_module_a_replica_goes_on_from_a_checkpoint_on_other_ranks(tmp_path, of_torch):
    program = [OF_TORCH[0], *OPTIONS, "--checkpoint-dir", tmp_path]
    for library, ranks, *stop in STOPS:
        done = on_ranks(library, ranks, [STOPPED, *map(int, stop), *program])
        assert (done.returncode == 0) == (stop[-1] == 0), done.stderr
        assert mr.latest_checkpoint(tmp_path) is not None
    assert "epoch 1:" not in done.stdout
    assert hashes(done.stdout) == hashes(of_torch)[:1]


def test_a_module_a_replica_goes_on_without_a_rank_that_is_killed(of_torch):
    stop = [0, 250, int(signal.SIGKILL)]
    ulfm = ["--with-ft", "ulfm"]
    arguments = [STOPPED, *stop, OF_TORCH[0], *OPTIONS, "--elastic"]
    done = on_ranks("openmpi", 3, arguments, options=ulfm)
    assert done.returncode == 0, done.stderr
    assert "lost rank 0 " in done.stderr
    assert hashes(done.stdout) == hashes(of_torch)[:1]


@pytest.fixture(scope="module")
def of_jax():
    """What the program prints whose compiled step has its collectives inside."""
    printed = alone(find_interpreter("openmpi", arrays=True), *OF_JAX)
    assert len(hashes(printed)) == 1, printed
    return printed


def test_four_replicas_learn_with_the_same_bits_of_jax_on_three_ranks(of_jax):
    done = on_ranks("openmpi", 3, OF_JAX)
    assert done.returncode == 0, done.stderr
    assert done.stdout == of_jax


def test_a_compiled_step_goes_on_from_a_checkpoint_on_other_ranks(tmp_path, of_jax):
    program = [*OF_JAX, "--checkpoint-dir", tmp_path]
    for library, ranks, *stop in STOPS:
        done = on_ranks(library, ranks, [STOPPED, *map(int, stop), *program])
        assert (done.returncode == 0) == (stop[-1] == 0), done.stderr
        assert mr.latest_checkpoint(tmp_path) is not None
    assert "epoch 1:" not in done.stdout
    assert hashes(done.stdout) == hashes(of_jax)
