"""A host that is lost with all its ranks, in the middle of a job that goes on without it."""

import os
import subprocess
import sys

import pytest

from hosts.namespaces import FOLDER, HOSTS, write_hostfile
from mpi_replica.launcher.elasticity import RANKS_LOST

pytestmark = pytest.mark.mpi_skip  # it starts ranks itself

ALONE = {**os.environ, "MPI_REPLICA_TRANSPORT": "single"}


def hash_of(line):
    return line.split()[2]


@pytest.mark.parametrize("dying", [1, 2], ids=["one of two ranks", "the whole host"])
def test_a_lost_host_changes_no_bit_of_what_the_others_compute(network, dying, tmp_path):
    alone = subprocess.run(
        [sys.executable, FOLDER / "lost_host.py", "none", "0"],
        env=ALONE,
        capture_output=True,
        text=True,
        check=True,
    )
    write_hostfile("openmpi", tmp_path / "hosts", dict.fromkeys(HOSTS, 2))
    options = ["--elastic", "--on-loss", "warn-status", "--hostfile", tmp_path / "hosts", "-n", 6]
    program = [FOLDER / "lost_host.py", "node2", dying]
    done = network.run_command("openmpi", *options, *program)
    # The launcher learns of it from all hosts, and ends no rank that has something to print.
    assert done.returncode == RANKS_LOST, done.stdout + done.stderr
    lines = sorted(done.stdout.splitlines())
    assert len(lines) == 2 * len(HOSTS) - dying
    for rank, line in enumerate(lines):
        assert line.startswith(f"rank {rank} ")
        assert line.endswith(f" without {','.join(['node2'] * dying)}")
        assert hash_of(line) == hash_of(alone.stdout)
