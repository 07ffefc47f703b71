"""The house: imports go down only, MPI stays behind the ranks, and a name stands for one thing."""

import ast
import collections
import functools
import graphlib
import io
import os
import subprocess
import sys
import tokenize
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "mpi_replica"

# A room is a file or a folder at the top of the package, with all that is in it. It may import what
# is on its own floor or below.
FLOORS = {
    7: ["__main__"],
    6: ["__init__", "errors", "experimental", "torch", "testing", "doctor"],
    5: ["strategy"],
    4: ["replicas", "data", "checkpoint"],
    3: ["collectives", "launcher", "trace"],
    2: ["ranks"],
    1: ["core"],
}
MOST_FLOORS = 7  # as many rooms as may stand on each other, by their imports
MOST_ENTRIES = 17  # at the top of the package
MOST_CODE_LINES = 300  # of a file; docstrings, comments, blank lines and imports do not count
MPI_MODULE = f"{PACKAGE}.ranks.mpi"  # the only one that may import mpi4py
# How ranks agree knows none of the calls that they agree on.
AGREEMENT, KINDS = f"{PACKAGE}.collectives.agreement", f"{PACKAGE}.collectives"
# Rooms of which nothing runs while a program's test has patched clocks and pids.
OWN_PROCESSES = ["launcher", "trace", "doctor", "__main__"]
PID_CALLS = {"os.getpid", "os.getppid"}

FLOOR_OF = {name: floor for floor, names in FLOORS.items() for name in names}


class Import(NamedTuple):
    target: str
    line: int
    at_import: bool  # it runs when the module is imported, not when a function is called


def module_name(path):
    """``mpi_replica/data/__init__.py`` is the module ``mpi_replica.data``."""
    parts = Path(path).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def room_of(module):
    _, _, inside = module.partition(".")
    return inside.partition(".")[0] or "__init__"


def is_in(module, package):
    return module == package or module.startswith(f"{package}.")


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


def code_lines(text):
    """Return how many lines of a file are code: no docstring, comment, import or blank line."""
    code, free = set(), set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in _NO_CODE:
            code.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, _HAVE_DOCSTRINGS) and ast.get_docstring(node) is not None:
            free.update(range(node.body[0].lineno, node.body[0].end_lineno + 1))
        if isinstance(node, ast.Import | ast.ImportFrom):
            free.update(range(node.lineno, node.end_lineno + 1))
    return len(code - free)


_HAVE_DOCSTRINGS = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
_NO_CODE = {
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE),
    *(tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER),
}


def longest_chain(arrows):
    """Return the longest list of rooms of which each imports the next; there are no circles."""

    @functools.cache
    def below(room):
        return [room, *max((below(x) for x in sorted(arrows.get(room, ()))), key=len, default=[])]

    return max(map(below, sorted(arrows)), key=len, default=[])


def find_faults(sources):
    """Return what is wrong with a package, as a list of str.

    Parameters
    ----------
    sources : dict of str to str
        By path, such as ``mpi_replica/core/nest.py``: the text of the file.
    """
    modules = {module_name(path) for path in sources}
    trees = {path: ast.parse(text, path) for path, text in sources.items()}
    imports = {path: list(read_imports(path, tree, modules)) for path, tree in trees.items()}
    return [
        *faults_of_imports(imports, modules),
        *faults_of_rooms(imports, modules),
        *faults_of_names(trees),
        *faults_of_clocks(trees),
        *(
            f"{path}: has {lines} lines of code, more than {MOST_CODE_LINES}; split it by idea"
            for path, text in sources.items()
            if (lines := code_lines(text)) > MOST_CODE_LINES
        ),
        *(
            f"{path}:{node.lineno}: a bare assert, gone under -O; raise an error that says more"
            for path, tree in trees.items()
            for node in ast.walk(tree)
            if isinstance(node, ast.Assert)
        ),
    ]


def faults_of_imports(imports, modules):
    """Yield what single imports do that they may not, and circles of modules."""
    within = {}
    brings_mpi = {
        module_name(path)
        for path, found in imports.items()
        if any(is_mpi(target) and at_import for target, _, at_import in found)
    }
    for path, found in imports.items():
        module = module_name(path)
        floor = FLOOR_OF.get(room_of(module))
        for target, line, at_import in found:
            where = f"{path}:{line}: imports {target}"
            if is_mpi(target):
                if module != MPI_MODULE:
                    yield f"{where}; only {MPI_MODULE} may"
            elif target.partition(".")[0] != PACKAGE:
                continue
            elif target not in modules:
                yield f"{where}, which does not exist"
            elif target == PACKAGE and room_of(module) not in ("__main__", "__init__"):
                yield f"{where} itself; import the module that defines the name"
            elif floor is not None and FLOOR_OF.get(room_of(target), 0) > floor:
                up = FLOOR_OF[room_of(target)]
                yield f"{where}, which is up: floor {floor} to floor {up}"
            elif target != module:
                within.setdefault(module, set()).add(target)
            if is_in(module, AGREEMENT) and is_in(target, KINDS) and not is_in(target, AGREEMENT):
                yield f"{where}; {AGREEMENT} knows no kind of call"
            if target in brings_mpi and at_import:
                yield f"{where}, which imports mpi4py; import it in the function that uses it"
    yield from circle_in(within, "modules")


def faults_of_rooms(imports, modules):
    """Yield what is wrong with the rooms as a whole: their number, their circles, their height."""
    arrows = {room_of(module): set() for module in modules}
    for room in sorted(arrows):
        if room not in FLOOR_OF:
            yield f"{room}: has no floor; enter it in FLOORS"
    if len(arrows) > MOST_ENTRIES:
        yield f"{len(arrows)} entries at the top of the package, more than {MOST_ENTRIES}"
    for path, found in imports.items():
        room = room_of(module_name(path))
        arrows[room] |= {room_of(x.target) for x in found if x.target in modules} - {room}
    circle = list(circle_in(arrows, "rooms"))
    yield from circle
    if not circle and len(chain := longest_chain(arrows)) > MOST_FLOORS:
        yield f"{len(chain)} floors, more than {MOST_FLOORS}: {' -> '.join(chain)}"


def circle_in(arrows, of):
    try:
        graphlib.TopologicalSorter(arrows).prepare()
    except graphlib.CycleError as error:
        yield f"a circle of {of}: {' <- '.join(error.args[1])}"


def faults_of_names(trees):
    """Yield names that stand for two things, and files that are not named by a noun."""
    files = collections.defaultdict(list)
    classes = collections.defaultdict(list)
    for path, tree in trees.items():
        name = Path(path).name
        if name not in ("__init__.py", "__main__.py"):
            files[name].append(path)
            if name.endswith("ing.py"):
                yield f"{path}: is named by a gerund; name it by the noun that it defines"
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                classes[node.name].append(f"{path}:{node.lineno}")
    for what, found in (("file", files), ("class", classes)):
        for name, places in found.items():
            if len(places) > 1:
                yield f"{' and '.join(places)}: {len(places)} times a {what} {name}"


def faults_of_clocks(trees):
    """Yield where a rank reads a clock, sleeps or asks for its pid by what a test may patch.

    Names that are bound with the package are the true ones, whatever a program's test puts in the
    place of ``time.sleep``. What has only processes of its own is free.
    """
    for path, tree in trees.items():
        module = module_name(path)
        if room_of(module) in OWN_PROCESSES:
            continue
        in_functions = {
            id(inner)
            for node in ast.walk(tree)
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            for inner in ast.walk(node)
        }
        for node in ast.walk(tree):
            where = f"{path}:{getattr(node, 'lineno', 0)}"
            if isinstance(node, ast.Import) and "time" in {alias.name for alias in node.names}:
                yield f"{where}: imports time; bind its functions, which a test may patch there"
            elif isinstance(node, ast.Attribute) and ast.unparse(node) in PID_CALLS:
                yield f"{where}: {ast.unparse(node)}; bind it at import, a test may patch it"
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                bound = {f"{node.module}.{alias.name}" for alias in node.names}
                is_late = module == MPI_MODULE or id(node) in in_functions
                if is_late and (node.module == "time" or bound & PID_CALLS):
                    yield f"{where}: binds {min(bound)} late: a test may have patched it by then"


def is_mpi(target):
    return target.partition(".")[0] == "mpi4py"


def test_the_package_keeps_the_rules_of_the_house():
    paths = sorted((ROOT / PACKAGE).rglob("*.py"))
    sources = {str(path.relative_to(ROOT)): path.read_text("utf-8") for path in paths}
    faults = find_faults(sources)
    assert f"{PACKAGE}/__init__.py" in sources
    assert not faults, "\n" + "\n".join(faults)


HOUSE = {
    "__init__.py": "from . import errors\nfrom mpi_replica.strategy import Strategy",
    "__main__.py": "import mpi_replica\nfrom .doctor import examine",
    "errors.py": "from .core.exceptions import MPIReplicaError",
    "doctor/__init__.py": "from ..strategy import Strategy\nfrom ..ranks import transport",
    "testing/__init__.py": "from ..strategy import Strategy",
    "strategy/__init__.py": "from ..replicas import run\ndef start():\n    from ..ranks import mpi",
    "replicas/__init__.py": "",
    "replicas/run.py": "import mpi_replica.collectives.pack\nclass Run: pass",
    "data/__init__.py": "from ..collectives.agreement import driver",
    "data/source.py": "",
    "checkpoint/__init__.py": "from ..collectives import pack",
    "checkpoint/index.py": "",
    "collectives/__init__.py": "",
    "collectives/pack.py": "from mpi_replica.collectives import reduce\nclass Pack: pass",
    "collectives/reduce.py": "from ..core.nest import paths\nfrom .agreement.driver import Driver",
    "collectives/agreement/__init__.py": "",
    "collectives/agreement/driver.py": "from ...ranks.transport import Transport",
    "launcher/__init__.py": "from ..ranks import transport",
    "trace/__init__.py": "from ..ranks import transport",
    "ranks/__init__.py": "",
    "ranks/transport.py": "import numpy as np\nfrom ..core import exceptions",
    "ranks/mpi.py": "from mpi4py import MPI",
    "core/__init__.py": "",
    "core/nest.py": "from .exceptions import MPIReplicaError",
    "core/exceptions.py": "",
}


def faults_with(changes):
    house = HOUSE | changes
    return find_faults({f"{PACKAGE}/{path}": text for path, text in house.items()})


def test_a_good_house_has_no_faults():
    assert faults_with({}) == []


REDUCE, NEST = "collectives/reduce.py", "core/nest.py"


@pytest.mark.parametrize(
    ("path", "text", "fault"),
    [
        (NEST, "from mpi_replica.replicas.run import x", "floor 1 to floor 4"),
        (NEST, "from ..replicas import run", "floor 1 to floor 4"),
        (NEST, "def f():\n    from ..replicas.run import x", "nest.py:2: imports"),
        (NEST, "if TYPE_CHECKING:\n    from ..replicas.run import x", "nest.py:2: imports"),
        (REDUCE, "from ..replicas import run", "floor 3 to floor 4"),
        (NEST, "import importlib\nimportlib.import_module('..ranks', 'x')", "floor 1 to floor 2"),
        ("strategy/face.py", "from mpi_replica import Strategy", "imports mpi_replica itself"),
        ("strategy/face.py", "from .. import Strategy", "imports mpi_replica itself"),
        ("strategy/face.py", "import mpi_replica as mr", "imports mpi_replica itself"),
        ("strategy/face.py", "from .absent import x", "mpi_replica.strategy.absent, which does"),
        ("strategy/face.py", "def f():\n    import mpi4py.MPI", "only mpi_replica.ranks.mpi may"),
        ("ranks/transport.py", "from mpi4py import MPI", "only mpi_replica.ranks.mpi may"),
        ("strategy/face.py", "__import__('mpi4py.MPI')", "only mpi_replica.ranks.mpi may"),
        ("strategy/face.py", "from ..ranks.mpi import T", "in the function that uses it"),
        ("ranks/__init__.py", "from . import mpi", "in the function that uses it"),
        (REDUCE, "from . import pack", "a circle of modules"),
        (REDUCE, "def f():\n    from .pack import x", "a circle of modules"),
        ("collectives/agreement/driver.py", "from ..pack import Pack", "knows no kind of call"),
        ("collectives/agreement/driver.py", "from .. import pack", "knows no kind of call"),
        (NEST, "x = 1\n" * (MOST_CODE_LINES + 1), f"has {MOST_CODE_LINES + 1} lines of code"),
        (NEST, "def f(x):\n    assert x, 'x'", "nest.py:2: a bare assert"),
        ("utilities.py", "", "utilities: has no floor"),
        ("tools/__init__.py", "", "tools: has no floor"),
        ("data/packing.py", "", "data/packing.py: is named by a gerund"),
        ("testing/waiting.py", "", "testing/waiting.py: is named by a gerund"),
        ("data/nest.py", "", "data/nest.py: 2 times a file nest.py"),
        ("data/errors.py", "", "data/errors.py: 2 times a file errors.py"),
        ("data/source.py", "class Pack: pass", "2 times a class Pack"),
        ("data/source.py", "def f():\n    class Run: pass", "2 times a class Run"),
        (REDUCE, "class A: pass\nclass A: pass", "reduce.py:2: 2 times a class A"),
        (REDUCE, "import time\ntime.sleep(1)", "reduce.py:1: imports time;"),
        (REDUCE, "import os\nos.getpid()", "reduce.py:2: os.getpid; bind it"),
        (REDUCE, "import os\nf = os.getppid", "reduce.py:2: os.getppid; bind it"),
        (REDUCE, "def f():\n    from time import sleep", "reduce.py:2: binds time.sleep late"),
        (REDUCE, "def f():\n    from os import getpid", "reduce.py:2: binds os.getpid late"),
        ("ranks/mpi.py", "from time import monotonic", "mpi.py:1: binds time.monotonic late"),
    ],
)
def test_each_fault_is_found(path, text, fault):
    faults = faults_with({path: text})
    assert any(fault in found for found in faults), faults


def test_a_circle_of_rooms_is_found_where_their_modules_make_none():
    changes = {
        "data/__init__.py": "from ..checkpoint import index",
        "checkpoint/__init__.py": "from ..data import source",
    }
    (fault,) = faults_with(changes)
    assert fault.startswith("a circle of rooms: ")


def test_floors_are_counted_by_imports_and_not_by_the_table():
    """Each of these arrows is allowed: it stays on its floor, or goes down."""
    changes = {
        "replicas/__init__.py": "from ..data import source",
        "data/source.py": "from ..collectives import pack",
    }
    (fault,) = faults_with(changes)
    assert fault.startswith("8 floors, more than 7: __main__ -> ")
    assert fault.endswith(" -> strategy -> replicas -> data -> collectives -> ranks -> core")
    (fault,) = faults_with({"launcher/__init__.py": "from ..collectives import pack"} | changes)
    assert fault.startswith("8 floors")
    assert faults_with({"launcher/__init__.py": "from ..collectives import pack"}) == []


def test_what_is_bound_with_the_package_and_what_has_its_own_processes_is_no_fault():
    bound = "from os import getpid\nfrom time import sleep\nsleep(getpid())"
    own = "import os\nimport time\ntime.sleep(os.getpid())"
    assert faults_with({REDUCE: bound, "launcher/__init__.py": own}) == []


def test_there_are_not_too_many_entries():
    more = MOST_ENTRIES - len(FLOOR_OF)
    rooms = {f"room{i}.py": "" for i in range(more)}
    doors = {"experimental.py": "", "torch.py": ""}
    assert not any("entries" in fault for fault in faults_with(rooms | doors))
    assert f"{MOST_ENTRIES + 1} entries at the top of the package, more than {MOST_ENTRIES}" in (
        faults_with(rooms | doors | {"one_more/__init__.py": ""})
    )


def test_code_is_what_is_no_docstring_comment_import_or_blank_line():
    text = '''"""A module.

With a docstring.
"""

from x import (  # both lines
    y,
)

# A comment.


class A:
    """A class."""

    def f(self):
        """A method.

        In some words.
        """
        # And a comment.
        import z

        return """Not
        a docstring.""", y(
            1,
        )  # four lines and the end
'''
    assert code_lines(text) == 2 + 4
    limit = "x = [\n    1,\n]\n" * (MOST_CODE_LINES // 3)
    assert faults_with({NEST: f'"""A docstring."""\n\n# A comment.\nimport y\n{limit}'}) == []


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
        if path.name != "exceptions.py":
            text = path.read_text().replace(" exceptions.add_note(", "")
            assert ".add_note(" not in text, path
