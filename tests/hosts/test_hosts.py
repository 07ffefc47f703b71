"""Ranks on several hosts: the same results as on one, and the same errors."""

import json
import re
import subprocess
import sys

import pytest

from hosts.namespaces import HOSTS, write_hostfile
from launching import LIBRARIES, ROOT, rank_environment
from mpi_replica.ranks.host import cores

pytestmark = pytest.mark.mpi_skip  # it starts ranks itself

DIGITS = ROOT / "scripts" / "train_digits.py"
OPTIONS = ["--replicas", "4", "--epochs", "2", "--batch-size", "256"]


# The last rank ends, and the others wait for it.
ENDING = """
import os, signal
import mpi_replica as mr

strategy = mr.MPIStrategy()
if strategy.rank == strategy.size - 1:
    {how}
strategy.run(lambda: mr.get_replica_context().all_reduce("SUM", 1.0))
"""


def hashes(done):
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    found = [line for line in done.stdout.splitlines() if " sha256 " in line]
    assert len(found) == 2, done.stdout
    return found


def found_by_ranks(folder):
    files = sorted(folder.glob("found-*.json"))
    return [json.loads(file.read_text()) for file in files]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """What one process finds, in a folder."""
    folder = tmp_path_factory.mktemp("alone")

    def run(*arguments):
        return subprocess.run(
            [sys.executable, *arguments],
            env=rank_environment(60, {"PYTHONPATH": str(ROOT)}),
            capture_output=True,
            text=True,
            timeout=60,
        )

    (folder / "hashes").write_text("\n".join(hashes(run(DIGITS, *OPTIONS, "--out", "/dev/null"))))
    run(ROOT / "tests" / "hosts" / "between_hosts.py", folder).check_returncode()
    return folder


@pytest.mark.parametrize("library", LIBRARIES)
def test_training_on_three_hosts_gives_the_bits_of_one_process(library, network, alone):
    done = network.run_on_hosts(library, 1, [DIGITS, *OPTIONS, "--out", "/dev/null"])
    assert hashes(done) == (alone / "hashes").read_text().splitlines()


# Each rank leaves the name of its host in a folder, and meets the others.
SOMEWHERE = """
import os, pathlib, socket, sys
import mpi_replica as mr

pathlib.Path(sys.argv[1], f"{socket.gethostname()} {os.getpid()}").touch()
with mr.MPIStrategy() as strategy:
    total = strategy.run(lambda: mr.get_replica_context().all_reduce("SUM", 1))
    if strategy.rank == 0:
        print(*strategy.experimental_local_results(total), "replicas")
"""


@pytest.mark.parametrize("start", ["mpiexec", "run"])
@pytest.mark.parametrize("library", LIBRARIES)
def test_a_hostfile_says_where_four_ranks_run(library, start, network, tmp_path):
    hostfile, hosts = tmp_path / "hostfile", tmp_path / "hosts"
    hosts.mkdir()
    write_hostfile(library, hostfile, {"node3": 1, "node1": 3})
    job = ["-c", SOMEWHERE, hosts]
    if start == "mpiexec":
        done = network.run_by_hostfile(library, hostfile, 4, job)
    else:
        done = network.run_command(library, "--hostfile", hostfile, "-n", 4, *job)
    assert (done.returncode, done.stdout) == (0, "4 replicas\n"), done.stderr
    found = sorted(path.name.split()[0] for path in hosts.iterdir())
    assert found == ["node1", "node1", "node1", "node3"]


@pytest.mark.skipif("openmpi" not in LIBRARIES, reason="Open MPI is not tested")
def test_a_hostfile_may_say_who_the_user_is_on_a_host(network, tmp_path):
    hostfile = tmp_path / "hostfile"
    write_hostfile("openmpi", hostfile, {"root@node1": 1, "root@node2": 1})
    done = network.run_command(
        "openmpi", "--hostfile", hostfile, "-n", 2, "-c", SOMEWHERE, tmp_path
    )
    assert (done.returncode, done.stdout) == (0, "2 replicas\n"), done.stderr
    assert sorted(path.name.split()[0] for path in tmp_path.glob("node*")) == ["node1", "node2"]


@pytest.mark.parametrize("links", ["fast", "slow"])
@pytest.mark.parametrize("library", LIBRARIES)
def test_collectives_and_checkpoints_between_hosts_are_those_of_one_process(
    library, links, network, alone, tmp_path
):
    """Shared memory is for one host, though two ranks on each could have it; cores are shared.

    Each message costs a way over the network: large arrays go in few, and the ranks of a host share
    one for their headers. Over slow links nothing times out.
    """
    if links == "slow":
        network.slow_down(megabits_per_second=100, delay_milliseconds=2)
    (expected,) = found_by_ranks(alone)
    program = ROOT / "tests" / "hosts" / "between_hosts.py"
    done = network.run_on_hosts(library, 2, [program, tmp_path])
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    ranks = found_by_ranks(tmp_path)
    assert [one["hosts"] for one in ranks] == [[host for host in HOSTS for _ in range(2)]] * 6
    for name in ("large", "small", "gathered"):
        assert [value for one in ranks for value in one[name]] == expected[name], name
    for one in ranks:
        # Two with its headers, one to each other host, and what TCP adds.
        assert 2 <= one["packets of a small call"] < 4
        assert one["crowded"] == (len(ranks) > len(cores()))
        assert one["own_error"] == ["KeyError('six')"]
        assert "the ranks are on 3 hosts. Use AUTO or ALLTOALL" in one["by_shared_memory"][0]
        for replicas in (1, 2):  # the call, the end of the step, and two messages
            assert one[f"steps of 4 MB, {replicas} a rank"] == 2 + 2
        assert one["first weight"] == 2
        assert one["goes on"]
    assert "slower than shared memory" not in done.stderr


@pytest.mark.parametrize("library", LIBRARIES)
def test_the_doctor_says_that_these_hosts_are_one_machine(library, network):
    done = network.run_on_hosts(library, 2, ["-m", "mpi_replica", "doctor", "--json"])
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    checks = {check["name"]: check for check in json.loads(done.stdout)["checks"]}
    assert checks["ranks"]["value"] == f"6 on one machine ({', '.join(HOSTS)})"
    crowded = f"has 6 ranks for {len(cores())} cores" in checks["ranks"]["advice"]
    assert crowded == (len(cores()) < 6)


@pytest.mark.parametrize(
    ("library", "hosts", "ranks_per_host"),
    list(zip(LIBRARIES, (HOSTS, HOSTS[:2]), (1, 2), strict=False)),
)
def test_misuse_between_hosts_is_the_same_error_on_every_rank(
    library, hosts, ranks_per_host, network
):
    """Of what tests/ranks tries on one host what comes late, is large, or ends a step early."""
    pytest_options = ["-m", "pytest", "--only-mpi", "--color=no", "-p", "no:cacheprovider"]
    selected = "same_error and (large or nest or raises or early or loop)"
    done = network.run_on_hosts(
        library,
        ranks_per_host,
        [*pytest_options, "-k", selected, "tests/ranks/test_misuse.py"],
        hosts=hosts,
        env={"MPI_REPLICA_TEST_LAYOUT": "one"},
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert f"size: {ranks_per_host * len(hosts)}\n" in done.stdout
    assert " passed" in done.stdout


@pytest.mark.parametrize("library", LIBRARIES)
def test_an_error_on_one_host_ends_the_job_on_all(library, network):
    program = ENDING.format(how="raise OSError('no space on node3')")
    done = network.run_on_hosts(library, 1, ["-c", program], timeout_seconds=60)
    check_ended(done)
    assert done.stderr.count("Traceback") == 1, done.stderr
    assert "OSError: no space on node3" in done.stderr


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_rank_killed_on_one_host_ends_the_job_on_all(library, network):
    program = ENDING.format(how="os.kill(os.getpid(), signal.SIGKILL)")
    check_ended(network.run_on_hosts(library, 1, ["-c", program], timeout_seconds=60))


def check_ended(done):
    """Check that the job ended by itself, and not by the limit of its launcher."""
    assert done.returncode != 0
    assert not re.search("timed out|timeout|time limit", done.stderr, re.IGNORECASE), done.stderr
