"""Where ranks outnumber the cores that they share."""

import pytest

from mpi_replica.ranks import host
from mpi_replica.ranks.host import is_crowded, machine

FIRST, SECOND, BOTH = frozenset([0]), frozenset([1]), frozenset([0, 1])


@pytest.mark.parametrize(
    ("places", "crowded"),
    [
        ([("a", BOTH), ("a", BOTH)], False),
        ([("a", FIRST), ("a", SECOND)], False),
        ([("a", FIRST), ("a", FIRST)], True),
        ([("a", BOTH), ("a", BOTH), ("a", SECOND)], True),
        ([("a", BOTH), ("b", BOTH), ("b", BOTH)], False),
        ([("a", FIRST), ("b", FIRST), ("b", BOTH), ("b", SECOND)], False),
    ],
)
def test_a_machine_is_crowded_where_its_ranks_outnumber_the_cores_that_they_may_run_on(
    places, crowded
):
    assert is_crowded("a", places) == crowded


def test_hosts_are_machines_of_their_own_where_the_system_does_not_tell(monkeypatch, tmp_path):
    monkeypatch.setattr(host, "_BOOT_ID", str(tmp_path / "none"))
    assert [machine("a"), machine("b")] == ["a", "b"]


def test_hosts_that_a_kernel_was_started_once_for_are_one_machine(monkeypatch, tmp_path):
    kernel = tmp_path / "boot_id"
    kernel.write_text("5d1e\n")
    monkeypatch.setattr(host, "_BOOT_ID", str(kernel))
    assert machine("a") == machine("b") == "5d1e"
