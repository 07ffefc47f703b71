"""Hosts as tests use them: what the machine does not let us do is a skip."""

import contextlib
import subprocess

import pytest

from command_line import variables
from hosts.namespaces import ENVIRONMENT, HOSTFILES, HOSTS, VARIABLES, Hosts, NoHostsError
from hosts.namespaces import joined_hosts as _joined_hosts
from launching import ROOT, SLOTS_ARE_READ, find_interpreter, run_ranks

_ENVIRONMENT = ENVIRONMENT | {"PYTHONPATH": str(ROOT)}


class Network(Hosts):
    """Hosts on which tests run programs."""

    def run_on_hosts(
        self, library, ranks_per_host, arguments, *, hosts=HOSTS, env=None, options=(), **settings
    ):
        """Run ``python ARGUMENTS...`` on some ranks of each host; see `run_ranks`."""
        return run_ranks(
            library,
            ranks_per_host * len(hosts),
            arguments,
            env=_ENVIRONMENT | (env or {}),
            prefix=self.prefix(ROOT),
            options=[*self.options(library, ranks_per_host, hosts), *options],
            **settings,
        )

    def run_by_hostfile(self, library, hostfile, ranks, arguments):
        """Run ``mpiexec --hostfile FILE -n RANKS python ARGUMENTS...``; see `run_ranks`."""
        return run_ranks(
            library,
            ranks,
            arguments,
            env=_ENVIRONMENT | VARIABLES[library] | SLOTS_ARE_READ,
            prefix=self.prefix(ROOT),
            options=[HOSTFILES[library][1], hostfile],
        )

    def run_command(self, library, *arguments):
        """Run ``python -m mpi_replica run ARGUMENTS...`` on the switch."""
        command = [find_interpreter(library), "-m", "mpi_replica", "run", *map(str, arguments)]
        return subprocess.run(
            [*self.prefix(ROOT), *command],
            env=variables(_ENVIRONMENT | VARIABLES[library]),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=120,
        )

    def slow_down(self, megabits_per_second, delay_milliseconds):
        """Make all links slow; skip the test where the kernel can't."""
        try:
            super().slow_down(megabits_per_second, delay_milliseconds)
        except NoHostsError as error:
            pytest.skip(str(error))


@contextlib.contextmanager
def joined_hosts():
    """Make the hosts; skip the test where the machine does not let us."""
    with contextlib.ExitStack() as stack:
        try:
            network = stack.enter_context(_joined_hosts(Network))
        except NoHostsError as error:
            pytest.skip(str(error))
        yield network
