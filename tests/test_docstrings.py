"""The documentation of the public names is there, has the parts it needs, and its examples run."""

import ast
import doctest
import importlib
import inspect
import pkgutil
import re
from pathlib import Path

import numpy as np
import pytest

import mpi_replica as mr

# The MPI transport is tested on real ranks; importing it starts MPI.
MODULES = sorted(
    module.name
    for module in pkgutil.walk_packages(mr.__path__, "mpi_replica.")
    if module.name not in ("mpi_replica.ranks.mpi", "mpi_replica.__main__")
)


def public_objects():
    for name in mr.__all__:
        thing = getattr(mr, name)
        if inspect.isclass(thing) or inspect.isfunction(thing):
            yield name, thing
    for name in mr.errors.__all__:
        yield f"errors.{name}", getattr(mr.errors, name)
    yield "data.Dataset", mr.data.Dataset


def public_methods():
    for name, thing in public_objects():
        if inspect.isclass(thing):
            for method_name, method in inspect.getmembers(thing, inspect.isfunction):
                if not method_name.startswith("_") and "mpi_replica" in method.__module__:
                    yield f"{name}.{method_name}", method


PUBLIC = {
    f"mpi_replica.{name}": thing
    for name, thing in [*public_objects(), ("data.ArraySpec", mr.data.ArraySpec)]
}


def examples_of(name):
    """Those of a public name, which says that it is of another module than that of its file."""
    thing = PUBLIC[name]
    names = vars(mr) | {"mr": mr, "np": np, thing.__name__: thing}
    found = doctest.DocTestFinder().find(thing, name, module=False, globs=names)
    return [test for test in found if test.examples]


@pytest.mark.parametrize("module_name", MODULES)
def test_the_examples_in_docstrings_run(module_name):
    module = importlib.import_module(module_name)
    with np.printoptions(legacy=False):
        result = doctest.testmod(module, extraglobs={"mr": mr, "np": np})
    assert result.failed == 0


@pytest.mark.parametrize("name", PUBLIC)
def test_the_examples_of_public_names_run(name):
    runner = doctest.DocTestRunner()
    with np.printoptions(legacy=False):
        for test in examples_of(name):
            runner.run(test)
    assert runner.summarize().failed == 0


def test_there_are_examples_to_run():
    found = {test.name for name in PUBLIC for test in examples_of(name)}
    assert {
        "mpi_replica.Strategy.run",
        "mpi_replica.Strategy.reduce",
        "mpi_replica.ReplicaContext.all_reduce",
        "mpi_replica.ReplicaContext.all_gather",
        "mpi_replica.ReplicaContext.merge_call",
        "mpi_replica.MPIStrategy",
        "mpi_replica.Variable",
    } <= found


@pytest.mark.parametrize(("name", "thing"), [*public_objects(), *public_methods()])
def test_every_public_name_is_documented_in_one_line_first(name, thing):
    text = inspect.getdoc(thing)
    assert text, f"{name} has no docstring"
    first = text.splitlines()[0]
    assert first.endswith(".") or "\n\n" not in text, f"{name}: no point ends {first!r}"
    assert len(first) <= 100


def functions_users_call():
    """Where each function begins that a public name leads to: its file and line."""
    doors = [mr, mr.data, mr.errors, mr.experimental, mr.testing]
    things = [getattr(door, name) for door in doors for name in door.__all__]
    for thing in things:
        methods = [
            inspect.getattr_static(thing, name)
            for name, _ in inspect.getmembers(thing)
            if inspect.isclass(thing) and (not name.startswith("_") or name.startswith("__"))
        ]
        for method in [thing, *methods]:
            code = getattr(inspect.unwrap(getattr(method, "__func__", method)), "__code__", None)
            if code is not None:
                yield code.co_filename, code.co_firstlineno


def first_words():
    """Of the docstring of each function but properties: where it begins, and the first word."""
    for path in sorted(Path(mr.__file__).parent.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            text = isinstance(node, ast.FunctionDef) and ast.get_docstring(node)
            decorators = [ast.unparse(each) for each in getattr(node, "decorator_list", [])]
            if text and not any("property" in decorator for decorator in decorators):
                line = min([node.lineno, *(each.lineno for each in node.decorator_list)])
                yield (str(path), line), text.split()[0].rstrip(".,:;")


def test_what_users_call_is_documented_in_the_imperative_and_all_else_in_the_indicative():
    public = set(functions_users_call())
    words = dict(first_words())
    imperative = {place: word for place, word in words.items() if place in public}
    indicative = {place: word for place, word in words.items() if place not in public}
    assert len(imperative) > 100
    assert len(indicative) > 500
    assert [item for item in imperative.items() if re.search("[^s]s$", item[1])] == []
    assert [item for item in indicative.items() if not re.search("[^s]s$", item[1])] == []


COLLECTIVES = [
    mr.Strategy.run,
    mr.Strategy.reduce,
    mr.Strategy.gather,
    mr.ReplicaContext.all_reduce,
    mr.ReplicaContext.all_gather,
    mr.ReplicaContext.merge_call,
    mr.Strategy.verify,
    mr.Strategy.barrier,
    mr.Strategy.gather_objects,
    mr.StrategyExtended.reduce_to,
    mr.StrategyExtended.batch_reduce_to,
    mr.StrategyExtended.broadcast_to,
    mr.MPIStrategy,
    mr.MPIStrategy.close,
    mr.Variable,
    mr.DistributedIterator.__next__,
]


@pytest.mark.parametrize("thing", COLLECTIVES, ids=lambda thing: thing.__qualname__)
def test_every_collective_call_says_that_it_is_one(thing):
    assert "ollective" in inspect.getdoc(thing)


@pytest.mark.parametrize("thing", COLLECTIVES[:6], ids=lambda thing: thing.__qualname__)
def test_the_calls_of_the_model_tell_parameters_results_errors_cost_and_source(thing):
    text = inspect.getdoc(thing).lower()
    for part in (
        "Parameters",
        "Returns",
        "Raises",
        "Notes",
        "Examples",
        "tf.distribute",
        "message",
    ):
        assert part.lower() in text, f"{thing.__qualname__} says nothing about {part}"


def test_all_names_of_the_package_exist():
    for name in [*mr.__all__]:
        assert hasattr(mr, name)
    assert mr.experimental.CommunicationOptions is mr.CommunicationOptions
    assert mr.experimental.CommunicationImplementation is mr.CommunicationImplementation
    assert mr.experimental.ValueContext is mr.ValueContext


@pytest.mark.parametrize("name", mr.errors.__all__)
def test_every_exception_has_the_common_base_and_the_builtin_that_fits(name):
    builtin = {
        "CollectiveMismatchError": RuntimeError,
        "CollectiveTimeoutError": TimeoutError,
        "CheckpointError": (OSError, ValueError),
        "ContextError": RuntimeError,
        "CorruptCheckpointError": (OSError, ValueError),
        "DivergenceError": RuntimeError,
        "LaunchError": RuntimeError,
        "MPIReplicaError": BaseException,
        "RankLostError": RuntimeError,
        "RemoteReplicaError": RuntimeError,
        "ReplicaStopped": BaseException,
        "StructureMismatchError": ValueError,
    }[name]
    kind = getattr(mr.errors, name)
    assert issubclass(kind, mr.errors.MPIReplicaError)
    assert issubclass(kind, builtin)
    if name == "ReplicaStopped":
        assert not issubclass(kind, Exception)


def test_the_map_of_the_public_names_is_whole():
    entries = [line.split()[0] for line in mr.__doc__.splitlines() if line.startswith("    ")]
    names = [
        *mr.__all__,
        *(f"data.{name}" for name in mr.data.__all__ if name not in mr.__all__),
        *(f"errors.{name}" for name in mr.errors.__all__),
        *("mpi_replica.testing", "python"),  # the plugin, and the command
    ]
    assert sorted(entries) == sorted(names)
