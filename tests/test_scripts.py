"""The main job, scripts/train_digits.py, as its users start it."""

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
EPOCHS = 8  # enough for 0.97
# A warning on any rank is an error.
COMMAND = ["-W", "error", SCRIPT, "--epochs", EPOCHS]

# Of 1437 rows, 35 at a time, 2 are left: two of four replicas get none of them.
TWO_ROWS_LEFT = ["--batch-size", 35]

# Each number of ranks with Open MPI, one with MPICH, and several replicas on a rank.
JOBS = [("openmpi", ranks, []) for ranks in RANKS]
JOBS += [("mpich", RANKS[len(RANKS) // 2], []), ("openmpi", 2, ["--replicas", 4])]
JOBS = [job for job in JOBS if job[0] in LIBRARIES]


def assert_trained(done, folder):
    told = f"{done.stdout}\n{done.stderr}"
    assert done.returncode == 0, told
    # All of stdout: other ranks than 0 print nothing.
    found = re.fullmatch(r"test accuracy (0\.\d{4})\n", done.stdout)
    assert found, told
    assert float(found[1]) >= 0.97, told
    assert done.stderr.count(f"| 0/{EPOCHS} [") == 1, told  # one progress bar begins
    assert [path.name for path in folder.iterdir()] == ["digits.png"]
    assert (folder / "digits.png").read_bytes().startswith(b"\x89PNG\r\n")


@pytest.mark.parametrize(("library", "ranks", "options"), JOBS)
def test_digits_are_learnt_on_ranks(library, ranks, options, tmp_path):
    assert_trained(run_ranks(library, ranks, [*COMMAND, *options], cwd=tmp_path), tmp_path)


def test_digits_are_learnt_without_mpirun(tmp_path):
    done = subprocess.run(
        [sys.executable, *map(str, COMMAND)],
        cwd=tmp_path,
        env=rank_environment(timeout_seconds=120),
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert_trained(done, tmp_path)


def curves(num_replicas, seed=0):
    """Return losses and accuracies of two epochs."""
    train = runpy.run_path(str(SCRIPT))["train"]
    with mr.MPIStrategy(num_replicas=num_replicas) as strategy:
        return np.array(train(strategy, epochs=2, batch_size=TWO_ROWS_LEFT[1], seed=seed))


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
