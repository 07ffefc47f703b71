"""Variables of the environment that switch something on or off."""

import pytest

from mpi_replica.core.argument_checks import is_switched_on


@pytest.mark.parametrize("default", ["0", "1"])
def test_a_switch_is_off_at_0_and_on_at_1_and_its_default_where_it_is_empty(
    default, monkeypatch, caplog
):
    found = []
    for text in ("0", "1", ""):
        monkeypatch.setenv("MPI_REPLICA_SWITCH", text)
        found.append(is_switched_on("MPI_REPLICA_SWITCH", default))
    monkeypatch.delenv("MPI_REPLICA_SWITCH")
    found.append(is_switched_on("MPI_REPLICA_SWITCH", default))
    assert found == [False, True, default == "1", default == "1"]
    assert caplog.records == []


@pytest.mark.parametrize("text", ["off", "no", "2", " 0"])
def test_a_switch_that_is_neither_0_nor_1_is_told_once(text, monkeypatch, caplog):
    monkeypatch.setenv("MPI_REPLICA_SWITCH", text)
    assert is_switched_on("MPI_REPLICA_SWITCH", "0")
    assert is_switched_on("MPI_REPLICA_SWITCH", "0")
    (record,) = caplog.records
    assert record.getMessage() == f"MPI_REPLICA_SWITCH={text!r} is neither 0 nor 1: 1 is used."
