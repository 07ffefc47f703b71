"""Ranks are killed at chosen moments of a job, and it ends with the bits of an undisturbed one.

scripts/chaos.py does the same at random moments, for longer. Moments are counted, never timed: a
rank dies when it comes to a call, or returns from it. Below the command that starts jobs again, a
process dies as soon as it is there.
"""

import functools
import subprocess

import pytest

from hosts.namespaces import NoHostsError
from kills import trials, whole_command
from kills.moments import Kill
from kills.trials import Trial
from kills.whole_command import Layout, Shot
from launching import (
    find_interpreter,
    find_launcher,
    not_installed,
    rank_environment,
    room_for,
)

pytestmark = pytest.mark.mpi_skip  # it starts ranks itself

# By name: ranks, spares, replicas on each of the others, and 20 kills in all.
TRIALS = {
    "making the strategy, and shared memory": (5, 0, 1, "0:make:3 3:make:4 2:window:1"),
    "one after another until one is left": (4, 0, 1, "0:any:100 3:any:250 1:any:400"),
    "a commit and its recovery": (5, 2, 1, "0:commit:21 2:commit:21 3:recover:5"),
    "a rank with its copy": (3, 0, 2, "0:any:210 1:any:210"),
    "a checkpoint, the begin and the end": (
        6,
        0,
        1,
        "1:begin:3 0:save:40 2:recover:6 5:end:2",
    ),
    "a spare while it takes a place": (4, 1, 2, "0:begin:2 3:recover:4"),
    "going back to a checkpoint": (5, 0, 1, "2:commit:30 3:commit:30 4:restore:3"),
}


@pytest.fixture(scope="module")
def python():
    """The interpreter of an Open MPI that goes on without a lost rank."""
    python = find_interpreter("openmpi")
    ask = "from mpi4py import MPI; from mpi_replica.ranks.library_facts import *; "
    command = [find_launcher(python), "--with-ft", "ulfm", "-n", "1", python, "-c"]
    done = subprocess.run(
        [*command, ask + "print(is_fault_tolerant(MPI))"],
        env=rank_environment(30),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    if "True" not in done.stdout:
        not_installed(f"this Open MPI has no fault tolerance (5.0 has): {done.stdout}{done.stderr}")
    return python


@pytest.fixture(scope="module")
def undisturbed(python, tmp_path_factory):
    """Return the hash of an undisturbed job with so many replicas, on one process."""
    environment = rank_environment(trials.LIMIT_SECONDS)
    return functools.cache(
        lambda replicas: trials.run_alone(
            python, tmp_path_factory.mktemp("undisturbed"), replicas, environment
        )
    )


@pytest.mark.parametrize("name", TRIALS)
def test_whoever_is_killed_the_job_ends_with_the_bits_of_an_undisturbed_one(
    name, python, undisturbed, tmp_path
):
    *layout, kills = TRIALS[name]
    trial = Trial(*layout, kills=tuple(map(Kill.of, kills.split())))
    environment = rank_environment(2 * trials.LIMIT_SECONDS)
    with room_for(trial.ranks):
        outcome = trials.run(python, tmp_path, trial, environment)
    problems = trials.problems(outcome, undisturbed(trial.replicas))
    assert not problems, f"{problems}\n{outcome.killed}\n{outcome.output}"
    assert set(outcome.killed.values()) == {str(kill) for kill in trial.kills}


@pytest.mark.parametrize(
    ("layout", "victims"),
    [
        (Layout("openmpi", is_elastic=True, hosts=1, ranks=2), ["rank", "rank"]),
        (Layout("mpich", is_elastic=False, hosts=1, ranks=2), ["mpiexec", "rank"]),
    ],
    ids=str,
)
def test_whatever_is_killed_below_the_command_the_job_ends_with_the_same_bits_and_leaves_nothing(
    layout, victims, undisturbed, tmp_path
):
    trial = whole_command.Trial(layout, tuple(Shot(0, 0, kind) for kind in victims))
    try:
        with room_for(layout.ranks):
            outcome = whole_command.run(find_interpreter(layout.library), tmp_path, trial)
    except NoHostsError as error:
        pytest.skip(str(error))
    problems = outcome.problems(undisturbed(whole_command.REPLICAS))
    assert not problems, f"{problems}\n{outcome.killed}\n{outcome.output}"
    assert [victim.kind for victim, _ in outcome.killed] == victims
    assert outcome.restarts > 0
