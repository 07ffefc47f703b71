"""A rank of ``run --elastic``: the program, and an exit status that says how all ranks have ended.

The launcher of Open MPI reports success when it goes on without lost ranks, also where none was
left. So the ranks themselves agree on how they have ended, and say so by their status.

The launcher runs this file as a script. The package is not imported before the program has ended:
its numpy would start with other threads of BLAS than those that the program sets.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
import pkgutil
import sys
import threading
import types
from collections.abc import Iterator, Sequence
from importlib.machinery import ModuleSpec
from types import CodeType
from typing import Any


def main(statuses: str, words: Sequence[str]) -> int:
    """Runs the program; returns the exit status of this rank.

    Parameters
    ----------
    statuses : str
        Two numbers and a comma between: when all ranks have ended well, and when all that were not
        lost have. The program's own status stays where it is not 0.
    words : sequence of str
        ``-m`` and a module, ``-c`` and a text, or a script, folder or archive; its arguments.
    """
    well, well_but_lost = map(int, statuses.split(","))
    process = os.getpid()
    status = _run(words)
    if os.getpid() != process:  # a forked child has nothing to do with MPI
        return status
    with _package():
        from mpi_replica.strategy import job_end
    # What Python waits for when a program ends: these threads may call MPI.
    threading._shutdown()  # type: ignore[attr-defined]
    outcome = job_end.leave_together(status == 0)
    if status != 0:
        return status if status not in (well, well_but_lost) else 1
    if not outcome.is_well:
        return 0  # the status of another rank is the job's
    return well_but_lost if outcome.has_lost else well


def _run(words: Sequence[str]) -> int:
    """Runs the program as Python would; returns the status with which Python would end."""
    try:
        code, module = _program(words)
        sys.modules["__main__"] = module
        exec(code, module.__dict__)
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        sys.stderr.write(f"{end.code}\n")
        return 1
    except BaseException as error:
        step = error.__traceback__
        while step is not None and step.tb_frame.f_code.co_filename == __file__:
            step = step.tb_next  # what this file does says nothing to the user
        sys.excepthook(type(error), error.with_traceback(step), step)
        return 130 if isinstance(error, KeyboardInterrupt) else 1
    return 0


def _program(words: Sequence[str]) -> tuple[CodeType, types.ModuleType]:
    """Returns code and ``__main__`` of the program; sys.argv and sys.path are made its own."""
    first, *rest = words
    if first == "-c":
        _set_path("")
        sys.argv = ["-c", *rest[1:]]
        return compile(rest[0], "<string>", "exec"), _main_module()
    if first == "-m":
        _set_path(os.getcwd())
        spec = _spec_of_module(rest[0])
        sys.argv = [str(spec.origin), *rest[1:]]
        return _code_of(spec), _main_module(spec)
    sys.argv = [first, *rest]
    path = os.path.abspath(first)
    importer: Any = pkgutil.get_importer(path)
    if importer is not None:  # a folder or an archive
        _set_path(path)
        spec = importer.find_spec("__main__")
        return _code_of(spec), _main_module(spec)
    _set_path(os.path.dirname(os.path.realpath(first)))
    with io.open_code(path) as file:
        code = pkgutil.read_code(file)
    if code is None:  # no compiled file
        with io.open_code(path) as file:
            code = compile(file.read(), path, "exec")
    return code, _main_module(path=path)


def _set_path(first: str) -> None:
    if not sys.flags.safe_path:  # where it is, this script's folder is not there
        sys.path[0] = first


def _spec_of_module(name: str) -> ModuleSpec:
    spec = importlib.util.find_spec(name)
    if spec is not None and spec.submodule_search_locations is not None:
        name = f"{name}.__main__"
        spec = importlib.util.find_spec(name)
    if spec is None:
        raise ImportError(f"there is no module {name!r}")
    return spec


def _code_of(spec: ModuleSpec) -> CodeType:
    loader: Any = spec.loader
    code = loader.get_code(spec.name)
    if code is None:
        raise ImportError(f"there is no Python code in {spec.origin}")
    return code  # type: ignore[no-any-return]


def _main_module(spec: ModuleSpec | None = None, path: str | None = None) -> types.ModuleType:
    module = types.ModuleType("__main__")
    module.__spec__ = spec
    if spec is not None:
        module.__loader__, module.__package__ = spec.loader, spec.parent
        path = spec.origin
    if path is not None:
        module.__file__ = path
    return module


@contextlib.contextmanager
def _package() -> Iterator[None]:
    """Returns a context in which this package is found, also where the program has not used it."""
    folder = os.path.dirname(os.path.abspath(__file__))
    while os.path.exists(os.path.join(folder, "__init__.py")):
        folder = os.path.dirname(folder)
    sys.path.append(folder)
    try:
        yield
    finally:
        sys.path.remove(folder)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
