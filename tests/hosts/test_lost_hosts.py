"""A host that is lost with all its ranks, in the middle of a job that goes on without it."""

import os
import subprocess
import sys

import pytest

from hosts.namespaces import FOLDER, HOSTS
from mpi_replica.launcher.elasticity import RANKS_LOST, elastic_program

pytestmark = pytest.mark.mpi_skip  # it starts ranks itself

ALONE = {**os.environ, "MPI_REPLICA_TRANSPORT": "single"}
FAULT_TOLERANT = ["--with-ft", "ulfm"]


def hash_of(line):
    return line.split()[2]


@pytest.mark.parametrize("dying", [1, 2], ids=["one of two ranks", "the whole host"])
def test_a_lost_host_changes_no_bit_of_what_the_others_compute(network, dying):
    alone = subprocess.run(
        [sys.executable, FOLDER / "lost_host.py", "none", "0"],
        env=ALONE,
        capture_output=True,
        text=True,
        check=True,
    )
    program = [sys.executable, FOLDER / "lost_host.py", "node2", str(dying)]
    _, *words = elastic_program(program, "warn-status")
    done = network.run_on_hosts("openmpi", 2, words, options=FAULT_TOLERANT)
    # The launcher learns of it from all hosts, and ends no rank that has something to print.
    assert done.returncode == RANKS_LOST, done.stdout + done.stderr
    lines = sorted(done.stdout.splitlines())
    assert len(lines) == 2 * len(HOSTS) - dying
    for rank, line in enumerate(lines):
        assert line.startswith(f"rank {rank} ")
        assert line.endswith(f" without {','.join(['node2'] * dying)}")
        assert hash_of(line) == hash_of(alone.stdout)
