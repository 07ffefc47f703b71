"""What users see as the module of a public name: the one from which they take it."""

import inspect
import pickle
import traceback

import pytest

import mpi_replica as mr

NAMES = [
    *((mr, name) for name in mr.__all__),
    *((mr.errors, name) for name in mr.errors.__all__),
    *((mr.data, name) for name in mr.data.__all__ if name not in mr.__all__),
]
KINDS = [
    pytest.param(door, name, id=f"{door.__name__}.{name}")
    for door, name in NAMES
    if inspect.isclass(getattr(door, name)) or inspect.isfunction(getattr(door, name))
]


@pytest.mark.parametrize(("door", "name"), KINDS)
def test_a_public_name_is_pickled_by_the_module_that_users_know(door, name):
    thing = getattr(door, name)
    assert thing.__module__ == door.__name__
    assert pickle.loads(pickle.dumps(thing)) is thing
    # As pickle wrote it wherever the file was, and whatever it was called.
    assert pickle.loads(f"c{door.__name__}\n{name}\n.".encode()) is thing


@pytest.mark.parametrize("name", mr.errors.__all__)
def test_an_exception_is_printed_and_pickled_as_one_of_errors(name):
    error = getattr(mr.errors, name)("what is wrong")
    assert traceback.format_exception_only(error) == [f"mpi_replica.errors.{name}: what is wrong\n"]
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), again.args) == (type(error), error.args)


def test_there_are_names_to_look_at():
    assert {"mpi_replica.PerReplica", "mpi_replica.errors.RankLostError"} <= {p.id for p in KINDS}
    assert {"mpi_replica.get_strategy", "mpi_replica.data.Dataset"} <= {p.id for p in KINDS}
