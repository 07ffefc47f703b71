"""Which ranks give their headers to one of their host, and not to all others."""

import pytest

from mpi_replica.ranks.two_level import is_two_level


@pytest.mark.parametrize(
    ("hosts", "expected"),
    [
        ("a", False),
        ("aaaa", False),
        ("abcd", False),
        ("abca", True),
        ("aabb", True),
        ([*map(str, range(32)), "0"], True),
        ([*map(str, range(33)), "0"], False),
    ],
)
def test_headers_have_two_levels_between_few_hosts_of_which_one_has_several_ranks(hosts, expected):
    assert is_two_level(hosts) == expected
