"""A job that loses a host is started again on the others, with any library."""

import os
import signal
import socket
import struct
import subprocess
import sys

import pytest

from command_line import LIMIT_SECONDS, variables
from hosts.namespaces import ENVIRONMENT, FOLDER, HOSTS, VARIABLES, write_hostfile
from launching import LIBRARIES, ROOT, find_interpreter
from mpi_replica.launcher.processes import descendants

pytestmark = pytest.mark.mpi_skip  # it starts ranks itself

RANKS_PER_HOST = 2
RANKS = RANKS_PER_HOST * len(HOSTS)
PROGRAM = FOLDER / "goes_on_elsewhere.py"


def undisturbed(folder):
    environment = {"MPI_REPLICA_TRANSPORT": "single", "MPI_REPLICA_NUM_REPLICAS": str(RANKS)}
    done = subprocess.run(
        [sys.executable, PROGRAM, folder / "alone", ""],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.split()[0]


def cut_off(network, job, ranks):
    network.cut("node2")


def kill_daemon(network, job, ranks):
    """Kill what stands above the ranks of a host, as the machine's processes show it."""
    daemons = [pid for pid in descendants(job.pid) if is_daemon_of(pid, ranks)]
    assert daemons
    for pid in daemons:
        os.kill(pid, signal.SIGKILL)


def is_daemon_of(pid, ranks):
    with open(f"/proc/{pid}/comm") as file:
        name = file.read().strip()
    return name in ("prted", "hydra_pmi_proxy") and ranks & set(descendants(pid))


def kill_ranks(network, job, ranks):
    for rank in ranks:
        os.kill(rank, signal.SIGKILL)


@pytest.mark.parametrize("lose", [cut_off, kill_daemon, kill_ranks])
@pytest.mark.parametrize("library", LIBRARIES)
def test_a_job_goes_on_by_the_hosts_that_are_left(library, lose, network, tmp_path):
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(tmp_path / "socket"))
    listener.listen(RANKS)
    listener.settimeout(LIMIT_SECONDS)
    hostfile = tmp_path / "hosts"
    write_hostfile(library, hostfile, dict.fromkeys(HOSTS, RANKS_PER_HOST))
    words = ["--hostfile", hostfile, "-n", RANKS, "--restarts", 2, PROGRAM]
    words += [tmp_path / "kept", tmp_path / "socket"]
    command = [find_interpreter(library), "-m", "mpi_replica", "run", *map(str, words)]
    with subprocess.Popen(
        [*network.prefix(ROOT), *command],
        env=variables(ENVIRONMENT | VARIABLES[library] | {"PYTHONPATH": str(ROOT)}),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as job:
        try:
            lines = [listener.accept()[0] for _ in range(RANKS)]
            hosts = [line.makefile().readline().strip() for line in lines]
            doomed = {
                pid_of(line) for line, host in zip(lines, hosts, strict=True) if host == "node2"
            }
            assert len(doomed) == RANKS_PER_HOST
            lose(network, job, doomed)
            out, error = job.communicate(timeout=LIMIT_SECONDS)
        finally:
            job.kill()
    for one in (listener, *lines):
        one.close()
    assert job.returncode == 0, error
    found, first, num_replicas, places = out.split()[-4:]
    assert (found, int(first), int(num_replicas)) == (undisturbed(tmp_path), 4, RANKS)
    assert "was lost" in error
    if lose is cut_off:
        assert "node2 left out" in error
        assert set(places.split(",")) == {"node1", "node3"}


DIES_ON_NODE2 = """
import os, signal, socket
from mpi4py import MPI
MPI.COMM_WORLD.Barrier()
if socket.gethostname() == "node2":
    os.kill(os.getpid(), signal.SIGKILL)
signal.pause()
"""


@pytest.mark.parametrize("library", LIBRARIES)
def test_nothing_is_left_on_other_hosts_of_a_job_that_is_not_started_again(
    library, network, tmp_path
):
    write_hostfile(library, tmp_path / "hosts", dict.fromkeys(HOSTS, RANKS_PER_HOST))
    words = ["--hostfile", tmp_path / "hosts", "-n", RANKS, "--restarts", 0, "-c", DIES_ON_NODE2]
    done = network.run_command(library, *words)
    assert done.returncode != 0
    assert "was lost" in done.stderr
    for host in HOSTS:
        look = [FOLDER / "agent", host, "find /dev/shm -mindepth 1"]
        assert subprocess.check_output([*network.prefix(ROOT), *look], text=True) == ""


def pid_of(line):
    """Return the process at the other end, as this namespace numbers it."""
    return struct.unpack("3i", line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0]
