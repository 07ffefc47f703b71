"""The main job, scripts/train_digits.py, as its users start it."""

import functools
import re
import runpy
import subprocess
import sys

import numpy as np
import pytest

import mpi_replica as mr
from launching import LIBRARIES, RANKS, ROOT, rank_environment, run_ranks

pytestmark = pytest.mark.mpi_skip  # it starts ranks itself

SCRIPT = ROOT / "scripts" / "train_digits.py"
EPOCHS = 4  # enough for 0.96
# A warning on any rank is an error.
COMMAND = ["-W", "error", SCRIPT, "--epochs", EPOCHS]

# Of 1437 rows, 35 at a time, 2 are left: two of four replicas get none of them.
TWO_ROWS_LEFT = ["--batch-size", 35]

# Four replicas on each number of ranks, with one library or the other: six are on four with both.
LAYOUTS = [(LIBRARIES[ranks % len(LIBRARIES)], ranks) for ranks in RANKS]


def trained(done, folder):
    """Return the two hashes that the job has printed, where it is trained."""
    told = f"{done.stdout}\n{done.stderr}"
    assert done.returncode == 0, told
    # All of stdout: other ranks than 0 print nothing.
    lines = r"test accuracy (0\.\d{4})\nloss sha256 ([0-9a-f]{64})\nweights sha256 ([0-9a-f]{64})\n"
    found = re.fullmatch(lines, done.stdout)
    assert found, told
    assert float(found[1]) >= 0.96, told
    assert done.stderr.count("| 0/") == 1, told  # one progress bar begins
    assert [path.name for path in folder.iterdir()] == ["digits.png"]
    assert (folder / "digits.png").read_bytes().startswith(b"\x89PNG\r\n")
    return found[2], found[3]


def train_alone(folder, *options):
    """Train without mpirun; return the hashes."""
    done = subprocess.run(
        [sys.executable, *map(str, COMMAND), *map(str, options)],
        cwd=folder,
        env=rank_environment(timeout_seconds=120),
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    return trained(done, folder)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Return the hashes of a job on one process, by its options."""
    return functools.cache(lambda *options: train_alone(tmp_path_factory.mktemp("alone"), *options))


@pytest.mark.parametrize(("library", "ranks"), LAYOUTS)
def test_four_replicas_learn_digits_with_the_same_bits_on_any_ranks(
    library, ranks, alone, tmp_path
):
    options = ["--replicas", 4]
    done = run_ranks(library, ranks, [*COMMAND, *options], cwd=tmp_path)
    assert trained(done, tmp_path) == alone(*options)


@pytest.mark.parametrize(
    ("library", "dtype"), list(zip(LIBRARIES, ["float32", "float64"], strict=False))
)
def test_six_replicas_on_four_ranks_have_the_bits_of_one_process(library, dtype, alone, tmp_path):
    options = ["--replicas", 6, "--dtype", dtype]
    done = run_ranks(library, 4, [*COMMAND, *options], cwd=tmp_path)
    assert trained(done, tmp_path) == alone(*options)


@pytest.mark.parametrize("library", LIBRARIES[-1:])
def test_digits_are_learnt_with_a_replica_on_each_rank(library, tmp_path):
    trained(run_ranks(library, 2, COMMAND, cwd=tmp_path), tmp_path)


def curves(num_replicas, seed=0):
    """Return losses and accuracies of two epochs."""
    train = runpy.run_path(str(SCRIPT))["train"]
    with mr.MPIStrategy(num_replicas=num_replicas) as strategy:
        about = {"batch_size": TWO_ROWS_LEFT[1], "seed": seed, "dtype": "float64"}
        return np.array(train(strategy, epochs=2, **about)[:2])


@pytest.mark.parametrize("num_replicas", [2, 3, 4])
def test_rows_weigh_alike_however_many_replicas_share_a_batch(num_replicas):
    np.testing.assert_allclose(curves(num_replicas), curves(1), rtol=1e-6)


def test_the_seed_decides_the_curves():
    assert np.array_equal(curves(2, seed=1), curves(2, seed=1))
    assert not np.array_equal(curves(2, seed=1), curves(2, seed=2))


def test_curves_go_to_the_file_that_out_names(tmp_path, monkeypatch, capsys):
    file = tmp_path / "curves.png"
    options = ["--epochs", "1", "--out", str(file), "--replicas", "2"]
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *options])
    runpy.run_path(str(SCRIPT), run_name="__main__")
    assert file.read_bytes().startswith(b"\x89PNG\r\n")
    assert capsys.readouterr().out.startswith("test accuracy 0.")
