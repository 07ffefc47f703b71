"""The documentation of the public names is there, has the parts it needs, and its examples run."""

import ast
import doctest
import enum
import functools
import importlib
import importlib.util
import inspect
import pkgutil
import re
from pathlib import Path

import numpy as np
import pytest

import mpi_replica as mr

HAS_TORCH = importlib.util.find_spec("torch") is not None

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
    for name in ("ArraySpec", "Dataset"):
        yield f"data.{name}", getattr(mr.data, name)
    if HAS_TORCH:
        for name in mr.torch.__all__:
            yield f"torch.{name}", getattr(mr.torch, name)


def methods_of(kind):
    """Yield the public ones of a class, and what ``next()`` calls, as functions."""
    for name in sorted({*dir(kind), *vars(kind)}):  # dir() of an Enum leaves out its methods
        method = inspect.getattr_static(kind, name, None)
        function = getattr(method, "__func__", method)
        if inspect.isfunction(function) and "mpi_replica" in function.__module__:
            if not name.startswith("_") or name == "__next__":
                yield name, function


def public_methods():
    for name, thing in public_objects():
        if inspect.isclass(thing):
            for method_name, method in methods_of(thing):
                yield f"{name}.{method_name}", method


PUBLIC = {f"mpi_replica.{name}": thing for name, thing in public_objects()}


def examples_of(name):
    """Those of a public name, which says that it is of another module than that of its file."""
    thing = PUBLIC[name]
    names = vars(mr) | {"mr": mr, "np": np, thing.__name__: thing}
    found = doctest.DocTestFinder().find(thing, name, module=False, globs=names)
    return [test for test in found if test.examples]


@pytest.mark.parametrize("module_name", MODULES)
def test_the_examples_in_docstrings_run(module_name):
    stem = module_name.rpartition(".")[2]
    library = "jax" if stem.startswith("jax") else "torch"
    if stem.startswith(library) and importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
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
    doors += [mr.torch] if HAS_TORCH else []
    things = [getattr(door, name) for door in doors for name in door.__all__]
    for thing in things:
        methods = [
            inspect.getattr_static(thing, name, None)
            for name in ({*dir(thing), *vars(thing)} if inspect.isclass(thing) else ())
            if (not name.startswith("_") or name.startswith("__"))
        ]
        for method in [thing, *methods]:
            code = getattr(inspect.unwrap(getattr(method, "__func__", method)), "__code__", None)
            if code is not None:
                yield code.co_filename, code.co_firstlineno


def first_words():
    """Of the docstring of each function but properties: where it begins, and the first word."""
    for path in sorted(Path(mr.__file__).parent.rglob("*.py")):
        if path.name == "torch_batch_norm.py" and not HAS_TORCH:
            continue  # which of it users call, only torch tells
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


# Classes of which users get objects, and make none.
MADE_BY_THE_PACKAGE = {
    mr.DistributedDataset,
    mr.DistributedIterator,
    mr.DistributedValues,
    mr.Strategy,
    mr.StrategyExtended,
    mr.data.Dataset,
}

# Methods of public classes by which other parts of the package reach what is inside.
FOR_THE_PACKAGE = {
    "DistributedDataset.begin_anew",
    "DistributedDataset.go_on_behind",
    "DistributedValues.components",
    "DistributedValues.require",
    "DistributedValues.shared_value",
    "IndexedSlices.changed",
    "IndexedSlices.divided",
    "IndexedSlices.of_replicas",
    "MPIStrategy.move",
    "Mirrored.components",
    "Mirrored.require",
    "Mirrored.shared_value",
    "PerReplica.components",
    "PerReplica.require",
    "ReplicaContext.in_run",
    "ReplicaContext.meet",
    "ReplicaContext.meet_elsewhere",
    "ReplicaContext.require_run",
    "ReplicaContext.will_begin_epoch",
    "ReplicaContext.will_write",
    "Strategy.move",
    "Strategy.name_of_variable",
    "Variable.components",
    "Variable.put_back",
    "Variable.put_back_components",
    "Variable.require",
    "Variable.shared_value",
}

# What takes a parameter, and is no error with any.
NEVER_RAISE = {"StrategyExtended.value_container"}


def sections_of(thing):
    """Return the lines of each section of a docstring, by its heading."""
    lines = (inspect.getdoc(thing) or "").splitlines()
    headings = [index for index, line in enumerate(lines[1:]) if line and set(line) == {"-"}]
    ends = [*headings, len(lines)][1:]
    return {lines[start]: lines[start + 2 : end] for start, end in zip(headings, ends, strict=True)}


def parameters_of(thing):
    return [
        name
        for name, parameter in inspect.signature(thing).parameters.items()
        if name not in ("self", "cls")
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]


def lacking_entries(sections, heading, names):
    """Return what of a section with an entry for each name is not there."""
    heads = [line.partition(" : ")[0] for line in sections.get(heading, ()) if line[:1] > " "]
    entries = {entry.strip("* ") for head in heads for entry in head.split(",")}
    return [f"{heading}: {name}" for name in names if name not in entries]


def lacking_examples(sections):
    return [] if any(">>>" in line for line in sections.get("Examples", ())) else ["Examples"]


def lacking_in_function(name, function):
    sections, parameters = sections_of(function), parameters_of(function)
    lacking = lacking_entries(sections, "Parameters", parameters)
    returns_nothing = inspect.signature(function).return_annotation in ("None", "NoReturn")
    if not returns_nothing and not {"Returns", "Yields"} & set(sections):
        lacking.append("Returns")
    may_raise = parameters or "ollective" in inspect.getdoc(function)
    if may_raise and name not in NEVER_RAISE and "Raises" not in sections:
        lacking.append("Raises")
    return lacking + lacking_examples(sections)


def lacking_in_class(kind):
    sections = sections_of(kind)
    if issubclass(kind, BaseException):  # what raises it, and what the program can do then
        return [] if "\n\n" in inspect.getdoc(kind) else ["more than one line"]
    if issubclass(kind, enum.Enum):
        lacking = lacking_entries(sections, "Attributes", kind.__members__)
    elif kind in MADE_BY_THE_PACKAGE:
        lacking = []
    else:
        lacking = lacking_entries(sections, "Parameters", parameters_of(kind))
    return lacking + lacking_examples(sections)


def test_no_docstring_of_a_public_name_lacks_a_section():
    methods = dict(public_methods())
    seen = {methods[name] for name in FOR_THE_PACKAGE}
    lacking = {}
    # The shorter name first: Strategy.run is that of MPIStrategy, too.
    for name, thing in sorted([*public_objects(), *methods.items()], key=lambda pair: len(pair[0])):
        if thing not in seen:
            seen.add(thing)
            is_class = inspect.isclass(thing)
            lacking[name] = (
                lacking_in_class(thing) if is_class else lacking_in_function(name, thing)
            )
    assert len(lacking) > 100
    lines = [f"{name}: {', '.join(what)}" for name, what in lacking.items() if what]
    assert not lines, "\n".join(["these docstrings lack:", *lines])


@functools.cache
def attributes_in_files():
    """Return the names that stand behind a dot, by file."""
    return {
        str(path): {x.attr for x in ast.walk(ast.parse(path.read_text())) if hasattr(x, "attr")}
        for path in Path(mr.__file__).parent.rglob("*.py")
    }


@pytest.mark.parametrize("name", sorted(FOR_THE_PACKAGE))
def test_what_stands_on_a_public_class_for_the_package_is_used_by_another_part_of_it(name):
    function = dict(public_methods())[name]
    users = {file for file, names in attributes_in_files().items() if function.__name__ in names}
    assert users - {inspect.getfile(function)}


def test_the_map_of_the_public_names_is_whole():
    entries = [line.split()[0] for line in mr.__doc__.splitlines() if line.startswith("    ")]
    names = [
        *mr.__all__,
        *(f"data.{name}" for name in mr.data.__all__ if name not in mr.__all__),
        *(f"errors.{name}" for name in mr.errors.__all__),
        *("mpi_replica.testing", "python"),  # the plugin, and the command
        *("torch", "torch.SyncBatchNorm", "torch.convert_sync_batchnorm"),
    ]
    assert set(entries) ^ set(names) == set()
    assert len(entries) == len(set(entries))
