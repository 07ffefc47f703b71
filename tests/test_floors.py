"""The house: imports go down only, MPI stays behind the transport, files stay small."""

import ast
import graphlib
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "mpi_replica"
MOST_LINES = 450

# A module may import what is on its own floor or below. A folder stands for all that is in it.
FLOORS = {
    6: ["__init__", "__main__", "doctor", "elastic_rank", "experimental", "testing"],
    5: [
        *(
            "mpi_strategy",
            "strategy",
            "default_strategy",
            "extended",
            "data",
            "checkpoint",
            "elastic",
        ),
        *(
            "variables",
            "assignment",
            "storage",
            "verifying",
            "distribution",
            "message_passing",
            "batch_mean",
        ),
    ],
    4: ["replicas", "run_end", "replica", "replica_context", "merge_fn", "context", "job_end"],
    3: ["collectives"],
    2: ["launcher", "transport", "watch", "interrupts", "start", "numerics", "blas", "resolver"],
    1: [
        "nest",
        "dtypes",
        "values",
        "indexed_slices",
        "layout",
        "tree",
        "randomness",
        "caller",
        "abstract_variable",
    ],
    0: ["argument_checks", "errors", "options", "array_libraries", "containers", "doors"],
}
MPI_MODULE = f"{PACKAGE}.transport.mpi"  # the only one that may import mpi4py

FLOOR_OF = {name: floor for floor, names in FLOORS.items() for name in names}


class Import(NamedTuple):
    target: str
    line: int
    at_import: bool  # it runs when the module is imported, not when a function is called


def module_name(path):
    """``mpi_replica/data/__init__.py`` is the module ``mpi_replica.data``."""
    parts = Path(path).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def floor_of(module):
    """Return the floor of a module, or None when the table does not name it."""
    _, _, inside = module.partition(".")
    return FLOOR_OF.get(inside.partition(".")[0] or "__init__")


def read_imports(path, tree, modules):
    """Yield each Import of a file, those in functions and in `if TYPE_CHECKING:` too."""
    module = module_name(path)
    package = module if Path(path).name == "__init__.py" else module.rpartition(".")[0]

    def absolute(name, level):
        if level == 0:
            return name
        anchor = package.split(".")
        anchor = anchor[: len(anchor) - level + 1]
        return ".".join([*anchor, name] if name else anchor)

    def visit(node, at_import):
        if isinstance(node, ast.Import):
            yield from (Import(alias.name, node.lineno, at_import) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            origin = absolute(node.module, node.level)
            for alias in node.names:  # a module of that package, or a name in it
                inner = f"{origin}.{alias.name}"
                yield Import(inner if inner in modules else origin, node.lineno, at_import)
        elif isinstance(node, ast.Call) and node.args:
            called = ast.unparse(node.func).rpartition(".")[2]
            name = getattr(node.args[0], "value", None)
            if called in ("import_module", "__import__") and isinstance(name, str):
                bare = name.lstrip(".")
                yield Import(absolute(bare, len(name) - len(bare)), node.lineno, at_import)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            at_import = False
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            at_import = False
        for child in ast.iter_child_nodes(node):
            yield from visit(child, at_import)

    return visit(tree, True)


def find_faults(sources):
    """Return what is wrong with a package, as a list of str.

    Parameters
    ----------
    sources : dict of str to str
        By path, such as ``mpi_replica/nest.py``: the text of the file.
    """
    faults = []
    modules = {module_name(path) for path in sources}
    trees = {path: ast.parse(text, path) for path, text in sources.items()}
    imports = {path: list(read_imports(path, tree, modules)) for path, tree in trees.items()}
    same_floor = {}
    brings_mpi = {
        module_name(path)
        for path, found in imports.items()
        if any(is_mpi(target) and at_import for target, _, at_import in found)
    }
    for path, found in imports.items():
        module, floor = module_name(path), floor_of(module_name(path))
        if floor is None:
            faults.append(f"{path}: has no floor; enter it in FLOORS")
            continue
        for target, line, at_import in found:
            where = f"{path}:{line}: imports {target}"
            if is_mpi(target):
                if module != MPI_MODULE:
                    faults.append(f"{where}; only {MPI_MODULE} may")
            elif target.partition(".")[0] != PACKAGE:
                continue
            elif target not in modules:
                faults.append(f"{where}, which does not exist")
            elif target == PACKAGE and floor < FLOOR_OF["__init__"]:
                faults.append(f"{where} itself; import the module that defines the name")
            elif (target_floor := floor_of(target)) is None:
                continue  # reported for the target's own file
            elif target_floor > floor:
                faults.append(f"{where}, which is up: floor {floor} to floor {target_floor}")
            elif target_floor == floor and target != module:
                same_floor.setdefault(module, set()).add(target)
            if target in brings_mpi and at_import:
                faults.append(
                    f"{where}, which imports mpi4py; import it in the function that uses it"
                )
    try:
        graphlib.TopologicalSorter(same_floor).prepare()
    except graphlib.CycleError as error:
        faults.append(f"a cycle on one floor: {' <- '.join(error.args[1])}")
    for path, text in sources.items():
        if (lines := len(text.splitlines())) > MOST_LINES:
            faults.append(f"{path}: has {lines} lines, more than {MOST_LINES}; split it by idea")
        faults += [
            f"{path}:{node.lineno}: a bare assert, gone under -O; raise an error that says more"
            for node in ast.walk(trees[path])
            if isinstance(node, ast.Assert)
        ]
    return faults


def is_mpi(target):
    return target.partition(".")[0] == "mpi4py"


def test_the_package_keeps_the_rules_of_the_house():
    paths = sorted((ROOT / PACKAGE).rglob("*.py"))
    sources = {str(path.relative_to(ROOT)): path.read_text("utf-8") for path in paths}
    faults = find_faults(sources)
    assert f"{PACKAGE}/__init__.py" in sources
    assert not faults, "\n" + "\n".join(faults)


HOUSE = {
    "__init__.py": "from mpi_replica.strategy import Strategy",
    "__main__.py": "import mpi_replica",
    "strategy.py": "from . import context\ndef start():\n    from .transport import mpi",
    "context.py": "import mpi_replica.collectives.packing",
    "collectives/__init__.py": "",
    "collectives/packing.py": "from mpi_replica.collectives import reduction",
    "collectives/reduction.py": "from ..nest import paths\nfrom ..transport.base import Transport",
    "transport/__init__.py": "",
    "transport/base.py": "import numpy as np",
    "transport/mpi.py": "from mpi4py import MPI",
    "nest.py": "from .errors import MPIReplicaError",
    "errors.py": "",
}


def faults_with(changes):
    house = HOUSE | changes
    return find_faults({f"{PACKAGE}/{path}": text for path, text in house.items()})


def test_a_good_house_has_no_faults():
    assert faults_with({}) == []


@pytest.mark.parametrize(
    ("path", "text", "fault"),
    [
        ("nest.py", "from mpi_replica.context import x", "floor 1 to floor 4"),
        ("nest.py", "from . import context", "floor 1 to floor 4"),
        ("nest.py", "def f():\n    from .context import x", "nest.py:2: imports"),
        ("nest.py", "if TYPE_CHECKING:\n    from .context import x", "nest.py:2: imports"),
        ("collectives/packing.py", "from ..context import x", "floor 3 to floor 4"),
        ("nest.py", "import importlib\nimportlib.import_module('.context', 'x')", "floor 1 to"),
        ("strategy.py", "from mpi_replica import Strategy", "imports mpi_replica itself"),
        ("strategy.py", "from . import Strategy", "imports mpi_replica itself"),
        ("strategy.py", "import mpi_replica as mr", "imports mpi_replica itself"),
        ("strategy.py", "from .absent import x", "imports mpi_replica.absent, which does not"),
        ("utilities.py", "", "utilities.py: has no floor"),
        ("strategy.py", "def f():\n    import mpi4py.MPI", "only mpi_replica.transport.mpi may"),
        ("transport/base.py", "from mpi4py import MPI", "only mpi_replica.transport.mpi may"),
        ("strategy.py", "__import__('mpi4py.MPI')", "only mpi_replica.transport.mpi may"),
        ("strategy.py", "from .transport.mpi import Transport", "in the function that uses it"),
        ("transport/__init__.py", "from . import mpi", "in the function that uses it"),
        ("collectives/reduction.py", "from . import packing", "a cycle on one floor"),
        ("collectives/reduction.py", "def f():\n    from .packing import x", "a cycle on one"),
        ("nest.py", "pass\n" * (MOST_LINES + 1), f"has {MOST_LINES + 1} lines"),
        ("nest.py", "def f(x):\n    assert x, 'x'", "nest.py:2: a bare assert"),
    ],
)
def test_each_fault_is_found(path, text, fault):
    faults = faults_with({path: text})
    assert any(fault in found for found in faults), faults


@pytest.mark.parametrize("launched", [False, True])
def test_import_starts_no_mpi(launched):
    variables = {"OMPI_COMM_WORLD_SIZE": "2", "PMI_RANK": "0", "PMI_SIZE": "2"} if launched else {}
    code = f"import sys, {PACKAGE}; sys.exit('mpi4py.MPI' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=os.environ | variables,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr or f"`import {PACKAGE}` imported mpi4py.MPI"


def test_notes_and_texts_of_exceptions_are_taken_by_what_can_not_fail():
    """An exception of a program may refuse both, on one rank alone: the others would wait."""
    for path in sorted((ROOT / PACKAGE).rglob("*.py")):
        if path.name != "errors.py":
            text = path.read_text().replace(" errors.add_note(", "")
            assert ".add_note(" not in text, path
