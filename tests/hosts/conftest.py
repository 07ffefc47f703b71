"""What the tests on several hosts share."""

import pytest

from hosts.network import joined_hosts


@pytest.fixture
def network():
    """Hosts for this test alone: what it leaves running on them ends with it."""
    with joined_hosts() as network:
        yield network
