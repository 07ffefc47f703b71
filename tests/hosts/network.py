"""Hosts as tests use them: what the machine does not let us do is a skip."""

import contextlib

import pytest

from hosts.namespaces import ENVIRONMENT, HOSTS, Hosts, NoHostsError
from hosts.namespaces import joined_hosts as _joined_hosts
from launching import ROOT, run_ranks


class Network(Hosts):
    """Hosts on which tests run programs."""

    def run_on_hosts(
        self, library, ranks_per_host, arguments, *, hosts=HOSTS, env=None, **settings
    ):
        """Run ``python ARGUMENTS...`` on some ranks of each host; see `run_ranks`."""
        return run_ranks(
            library,
            ranks_per_host * len(hosts),
            arguments,
            env=ENVIRONMENT | {"PYTHONPATH": str(ROOT)} | (env or {}),
            prefix=self.prefix(ROOT),
            options=self.options(library, ranks_per_host, hosts),
            **settings,
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
