"""Which hosts answer when their launcher asks them, and a job on those that are left."""

import subprocess
import time

import pytest

from command_line import variables
from hosts.namespaces import ENVIRONMENT, VARIABLES
from launching import LIBRARIES, ROOT, find_interpreter, find_launcher
from mpi_replica.launcher.commands import Request, command, question
from mpi_replica.launcher.host_slots import HostSlots
from mpi_replica.launcher.leftovers import ANSWER
from mpi_replica.launcher.program import leftovers_program

pytestmark = pytest.mark.mpi_skip  # it starts ranks itself

VERSION = (5, 0)
SECONDS = 10


def output_of(network, library, words):
    """Return what a launcher on the switch prints within the limit, by whatever way it ends."""
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    try:
        done = subprocess.run(
            [*network.prefix(ROOT), *words],
            env=variables(ENVIRONMENT | VARIABLES[library] | root),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=SECONDS,
        )
    except subprocess.TimeoutExpired as late:
        return (late.stdout or b"").decode()
    return done.stdout.decode()


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_host_without_a_link_does_not_answer_and_the_job_goes_on_on_the_others(network, library):
    launcher = find_launcher(find_interpreter(library))

    def answers(host):
        program = [*leftovers_program(), str(time.time())]
        words = question(library, VERSION, launcher, host, program)
        return ANSWER in output_of(network, library, words)

    assert answers("node1")
    assert answers("node2")
    network.cut("node2")
    assert not answers("node2")
    assert answers("node3")

    left = [HostSlots("node1", 2), HostSlots("node3", 1)]
    words = command(library, VERSION, launcher, Request(3, ["hostname"], hosts=left))
    names = output_of(network, library, words).split()
    assert sorted(names) == ["node1", "node1", "node3"]
