"""What users see as the module of a public name: the one from which they take it."""

import inspect
import pickle
import subprocess
import sys
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


def output_of(program):
    """Returns what a program prints that is the first to import the package."""
    command = [sys.executable, "-c", f"import sys\nimport mpi_replica as mr\n{program}"]
    return subprocess.run(command, capture_output=True, check=True, text=True).stdout.split()


def test_what_most_programs_do_without_is_imported_where_it_is_looked_at():
    rooms = ["checkpoint", "data", "strategy.elastic.state", "torch", "trace"]
    loaded = f"print(*(name for name in {rooms} if f'mpi_replica.{{name}}' in sys.modules))\n"
    assert output_of(loaded) == []
    assert output_of("mr.MPIStrategy().run(lambda: mr.PerReplica)\n" + loaded) == []
    assert output_of(f"mr.latest_checkpoint\n{loaded}") == ["checkpoint"]
    assert output_of(f"mr.InputContext\n{loaded}") == ["data"]
    assert output_of(f"mr.data\n{loaded}") == ["data"]
    assert output_of(f"mr.experimental\n{loaded}") == ["data"]
    assert output_of(f"mr.ElasticState\n{loaded}") == ["checkpoint", "strategy.elastic.state"]


@pytest.mark.parametrize("name", [*mr._LATER, *sorted({*mr._MODULES} & {*mr.__all__})])
def test_a_name_that_nobody_has_looked_at_is_listed_and_found(name):
    assert output_of(f"print({name!r} in dir(mr), mr.{name} is mr.{name})") == ["True", "True"]


def test_all_names_come_with_a_star():
    names = output_of("from mpi_replica import *\nprint(*globals())")
    assert set(mr.__all__) <= set(names)


def test_what_a_strategy_gives_is_of_the_public_module_before_its_name_was_looked_at():
    program = (
        "strategy = mr.MPIStrategy()\n"
        "dataset = strategy.experimental_distribute_dataset([[1.0], [2.0]])\n"
        "values = [dataset, iter(dataset)]\n"
        "strategy.experimental_distribute_values_from_function(values.append)\n"
        "strategy.distribute_datasets_from_function(lambda context: [values.append(context)])\n"
        "print(*(f'{type(value).__module__}.{type(value).__name__}' for value in values))"
    )
    names = ["DistributedDataset", "DistributedIterator", "ValueContext", "InputContext"]
    assert output_of(program) == [f"mpi_replica.{name}" for name in names]
