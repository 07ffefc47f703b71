"""Hosts of a job with their slots: what is found, and where the next start of a job is."""

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launching import LIBRARIES, find_interpreter, find_launcher, rank_environment
from mpi_replica.errors import LaunchError
from mpi_replica.launcher.commands import Request, command, question
from mpi_replica.launcher.host_slots import (
    HostSlots,
    hosts_in_file,
    hosts_of_job,
    slots_for,
    slots_in_list,
)

pytestmark = pytest.mark.mpi_skip  # it starts ranks itself


def of(*pairs):
    return tuple(HostSlots(*pair) for pair in pairs)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("n1 slots=2\nn2 slots = 4 max-slots=8\n", of(("n1", 2), ("n2", 4))),
        ("n1:2\n\n  n2:4 binding=user\n", of(("n1", 2), ("n2", 4))),
        ("n1\nn2 max_slots=3\n", of(("n1", None), ("n2", None))),
        ("n2\nn1.some.org\nn2\nn2\n", of(("n2", 3), ("n1.some.org", None))),
        ("n1:2\nn2:1\nn1:3\n", of(("n1", 5), ("n2", 1))),
        ("# n0 slots=9\nn1 slots=2 # n2\n// n3\n10.0.0.1:1\n", of(("n1", 2), ("10.0.0.1", 1))),
    ],
)
def test_a_hostfile_of_either_library_says_hosts_and_slots(tmp_path, text, expected):
    file = tmp_path / "hosts"
    file.write_text(text)
    assert hosts_in_file(file) == hosts_of_job(str(file), {}) == expected


def test_a_hostfile_that_says_nothing_is_an_error(tmp_path):
    file = tmp_path / "hosts"
    file.write_text("# none\n")
    with pytest.raises(LaunchError, match="names no host"):
        hosts_of_job(str(file), {})
    with pytest.raises(LaunchError, match="absent"):
        hosts_of_job(str(tmp_path / "absent"), {})


@pytest.mark.parametrize("line", ["+n0", "^n2", "someone@n2", "fe80::2"])
def test_a_hostfile_whose_hosts_fit_in_no_list_is_counted_and_gives_none(tmp_path, line):
    file = tmp_path / "hosts"
    file.write_text(f"n1 slots=2\n{line}\n")
    assert len(hosts_in_file(file)) == 2
    assert hosts_of_job(str(file), {}) == ()


def test_pbs_says_a_slot_by_each_line(tmp_path):
    file = tmp_path / "nodes"
    file.write_text("n2\nn1\nn2\n")
    environ = {"PBS_NODEFILE": str(file)}
    assert hosts_of_job(None, environ) == of(("n2", 2), ("n1", 1))
    other = tmp_path / "hosts"
    other.write_text("n7:3\n")
    assert hosts_of_job(str(other), environ) == of(("n7", 3))
    with pytest.raises(LaunchError, match="absent"):
        hosts_of_job(None, {"PBS_NODEFILE": str(tmp_path / "absent")})


@pytest.mark.parametrize(
    ("text", "expected"),
    [("2(x3),1", [2, 2, 2, 1]), ("4", [4]), ("", []), ("2(x3", []), ("many", []), ("2,", [])],
)
def test_a_list_of_slurm_is_read_or_says_nothing(text, expected):
    assert slots_in_list(text) == expected


@pytest.fixture
def scontrol(tmp_path):
    """Return what makes a stand-in of scontrol; it gives the variables of a job of three hosts."""

    def make(body):
        path = tmp_path / "scontrol"
        path.write_text(f"#!/bin/sh\n{body}\n")
        path.chmod(0o755)
        return {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-3]", "PATH": f"{tmp_path}:/bin"}

    return make


NAMES = '[ "$*" = "show hostnames n[1-3]" ] && echo n1 && echo n2 && echo n3'


def test_slurm_says_hosts_and_slots(scontrol):
    slurm = scontrol(NAMES)
    expected = of(("n1", 2), ("n2", 2), ("n3", 1))
    tasks = {"SLURM_TASKS_PER_NODE": "2(x2),1"}
    assert hosts_of_job(None, slurm | tasks) == expected
    older = {"SLURM_NODELIST": slurm.pop("SLURM_JOB_NODELIST")}
    assert hosts_of_job(None, slurm | tasks | older) == expected


@pytest.mark.parametrize("tasks", ["", "1", "strange"])
def test_slots_that_slurm_does_not_say_of_all_hosts_are_unknown(scontrol, tasks):
    """In the shell of ``srun --pty`` it says one, of the step."""
    slurm = scontrol(NAMES) | {"SLURM_TASKS_PER_NODE": tasks}
    assert hosts_of_job(None, slurm) == of(("n1", None), ("n2", None), ("n3", None))


def test_hosts_that_can_not_be_found_out_are_none(scontrol, tmp_path):
    assert hosts_of_job(None, {}) == ()
    assert hosts_of_job(None, {"SLURM_JOB_ID": "7", "PATH": str(tmp_path)}) == ()
    assert hosts_of_job(None, scontrol("exit 1")) == ()
    assert hosts_of_job(None, scontrol("exit 0")) == ()
    slurm = scontrol(NAMES)
    assert hosts_of_job(None, slurm | {"PATH": str(tmp_path / "absent")}) == ()
    assert hosts_of_job(None, slurm | {"SLURM_JOB_NODELIST": ""}) == ()


@pytest.mark.parametrize(
    ("ranks", "before", "left", "expected"),
    [
        (8, of(("a", 4), ("b", 4)), of(("a", 4), ("b", 4)), 8),
        (8, of(("a", 4), ("b", 4)), of(("b", 4)), 4),
        (3, of(("a", 4), ("b", 4)), of(("b", 4)), 3),
        (6, of(("a", 4), ("b", 2)), of(("b", 2)), 2),
        # As many as its share, where nobody says more.
        (8, of(("a", None), ("b", None), ("c", None)), of(("a", None)), 3),
        (8, of(("a", 4), ("b", None)), of(("b", None)), 4),
        # Slurm says one task a host where the job asked for none; MPICH takes slots for a hint.
        (16, of(("a", 1), ("b", 1)), of(("a", 1)), 8),
        (9, of(("a", 4), ("b", 4)), of(), 0),
    ],
)
def test_a_job_has_as_many_ranks_as_are_slots_on_the_hosts_that_are_left(
    ranks, before, left, expected
):
    assert slots_for(ranks, before, left) == expected


HOSTS = st.lists(st.one_of(st.none(), st.integers(1, 8)), min_size=1, max_size=6)


@given(ranks=st.integers(1, 40), slots=HOSTS, data=st.data())
def test_a_job_never_grows_when_hosts_are_lost_and_does_not_end_while_one_is_left(
    ranks, slots, data
):
    before = of(*((f"n{i}", number) for i, number in enumerate(slots)))
    lost = data.draw(st.sets(st.sampled_from(before)))
    left = [host for host in before if host not in lost]
    now = slots_for(ranks, before, left)
    assert (now == 0) == (not left)
    assert now <= slots_for(ranks, before, before) == ranks
    assert now >= slots_for(ranks, before, left[1:]) or len(left) == 0


@pytest.mark.parametrize("library", LIBRARIES)
def test_each_launcher_starts_ranks_on_the_hosts_that_it_is_told(library):
    """More ranks than slots Open MPI refuses."""
    path = find_launcher(find_interpreter(library))
    # Not ``echo``: MPICH's launcher (5.0) writes to what has ended at once, and dies of SIGPIPE.
    hello = [sys.executable, "-c", "print('hello')"]

    def run(words):
        return subprocess.run(
            words,
            env=rank_environment(60, {"PRTE_MCA_rmaps_default_mapping_policy": None}),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60,
        )

    for host in (HostSlots("localhost", 3), HostSlots("localhost")):
        ranks = host.slots or 1
        words = command(library, (5, 0), path, Request(ranks, hello, hosts=[host]))
        done = run(words)
        assert (done.returncode, done.stdout) == (0, "hello\n" * ranks), done.stderr
    done = run(question(library, (5, 0), path, "localhost", hello))
    assert (done.returncode, done.stdout) == (0, "hello\n"), done.stderr
