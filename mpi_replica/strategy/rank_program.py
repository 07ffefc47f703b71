"""A rank of ``run``: the program, whose end is told to the launcher.

The launcher runs this file as a script. The package is not imported before the program does it: its
numpy would start with other threads of BLAS than those that the program sets.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import gc
import importlib.util
import io
import os
import pkgutil
import signal
import sys
import threading
import types
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from os import getpid
from types import CodeType
from typing import Any, NoReturn

_ERRORS = "mpi_replica.core.exceptions"
_FAULT_TOLERANCE = "OMPI_MCA_mpi_ft_enable"  # as in ranks/open_mpi.py


def main(words: Sequence[str]) -> int:
    """Runs the program; returns the exit status of this rank.

    Parameters
    ----------
    words : sequence of str
        ``-m`` and a module, ``-c`` and a text, or a script, folder or archive; its arguments.
    """
    # UCX, which both libraries load, would take SIGHUP as a wish to debug it: a rank whose terminal
    # is gone would go on, and a handler of the program be lost.
    os.environ.setdefault("UCX_DEBUG_SIGNO", "0")
    connection = _loaded("ranks.launcher_connection")
    try:
        connection.connect_to_launcher()
    except ConnectionError as error:
        sys.stderr.write(f"mpi_replica run: {error}\n")
        return 1
    # The last thing that is done at exit: whoever dies before may be needed by the others.
    atexit.register(_tell_end, connection, getpid())
    _watch_exit(connection)
    process = getpid()
    status = _run(words, connection)
    if getpid() != process and _has_mpi():
        _end_forked_child(status)
    return status


def _loaded(name: str) -> Any:
    """Returns a module of the package, which the package finds under its name later."""
    folder = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    path = os.path.join(folder, *name.split(".")) + ".py"
    spec: Any = importlib.util.spec_from_file_location(f"mpi_replica.{name}", path)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _tell_end(connection: Any, process: int) -> None:
    if getpid() != process:
        return
    status = None
    try:
        for stream in (getattr(sys, "stdout", None), getattr(sys, "stderr", None)):
            try:
                if stream is not None and not getattr(stream, "closed", False):
                    stream.flush()
            except Exception:  # Python tells of it a little later, and ends with this status
                status = 120
    finally:
        connection.tell_end(status)


def _watch_exit(connection: Any) -> None:
    """Makes ``os._exit(0)`` an end that is told, and in elastic jobs each ``os._exit`` a loss.

    Open MPI 5.0.11 would not tell the other ranks of an elastic job, which would wait.
    """
    process, leave = getpid(), os._exit
    is_elastic = os.environ.get(_FAULT_TOLERANCE) == "1"

    def leaving(function: Any) -> Any:
        def leave_connection(*arguments: Any) -> None:
            is_rank = getpid() == process
            if is_rank:
                connection.leave()  # what takes the place of this program tells nothing
            try:
                function(*arguments)
            finally:  # nothing has
                if is_rank:
                    connection.stay()

        return leave_connection

    def exit_at_once(status: int) -> NoReturn:
        if getpid() == process and not connection.has_told_end():
            if is_elastic:
                os.kill(process, signal.SIGKILL)
            if status == 0:
                connection.tell(at_once=True)  # MPI has not come to its end, which others may need
                connection.note_end("done", 0)
                connection.tell_end()
        leave(status)

    os._exit = exit_at_once
    os.execv, os.execve = leaving(os.execv), leaving(os.execve)


def _run(words: Sequence[str], connection: Any) -> int:
    """Runs the program as Python would; returns the status with which Python would end."""
    try:
        compiled, module = _program(words)
        sys.modules["__main__"] = module
        exec(compiled, module.__dict__)
    except SystemExit as end:
        code: Any = end.code
        is_number = code is None or isinstance(code, int)
        status = (code or 0) & 0xFF if is_number else 1  # as the system cuts it
        if is_number and code and not -(2**63) <= code < 2**63:
            status = 255  # as Python has it
        connection.note_end("exit" if status else "done", status)
        if not is_number:
            own: Any = getattr(sys, "stderr", None)
            stream: Any = sys.__stderr__ if own is None else own
            with contextlib.suppress(Exception):  # of a stream, or a text, of the program's own
                stream.write(f"{code}\n")
        return status
    except BaseException as error:
        step = error.__traceback__
        while step is not None and step.tb_frame.f_code.co_filename == __file__:
            step = step.tb_next  # what this file does says nothing to the user
        status = 130 if isinstance(error, KeyboardInterrupt) else 1
        connection.note_end(_kind_of(error), status)
        sys.excepthook(type(error), BaseException.with_traceback(error, step), step)
        return status
    connection.note_end("done", 0)
    return 0


def _has_mpi() -> bool:
    mpi: Any = sys.modules.get("mpi4py.MPI")
    return mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized()


def _end_forked_child(status: int) -> NoReturn:
    """Ends a child that the program forked and that came to its end, without an end of MPI.

    Behind all else Python would have mpi4py end MPI, whose connections are the parent's: that of
    Open MPI 5.0.11 waits for ever, that of MPICH 5.0.2 ends the child with another status.
    """
    try:
        threading._shutdown()  # type: ignore[attr-defined]  # as Python does it, in this order
        atexit._run_exitfuncs()
        vars(sys.modules["__main__"]).clear()
        gc.collect()
        for held in gc.get_objects():  # files that other modules hold
            if isinstance(held, (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom)):
                with contextlib.suppress(Exception):
                    held.flush()
    finally:
        os._exit(status)


def _kind_of(error: BaseException | None) -> str:
    """Returns what `note_end` calls an end by this error, which may come of the end of others."""
    errors: Any = sys.modules.get(_ERRORS)
    kind = "error"
    seen: set[int] = set()  # the program can close the chain to a circle
    while errors is not None and error is not None and id(error) not in seen:
        if isinstance(error, errors.RankLostError):
            if not error._is_of_program:
                return "loss"
            kind = "left"
        seen.add(id(error))
        error = error.__context__ if error.__cause__ is None else error.__cause__
    return kind


def _program(words: Sequence[str]) -> tuple[CodeType, types.ModuleType]:
    """Returns code and ``__main__`` of the program; sys.argv and sys.path are made its own."""
    first, *rest = words
    if first == "-c":
        _set_path("")
        sys.argv = ["-c", *rest[1:]]
        return _compiled(rest[0], "<string>"), _main_module()
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
        if spec is None:
            raise ImportError(f"there is no __main__ in {path!r}")
        return _code_of(spec), _main_module(spec)
    _set_path(os.path.dirname(os.path.realpath(first)))
    try:
        with io.open_code(path) as file:
            code = pkgutil.read_code(file)
    except OSError as error:  # as Python says it, in one line, with its status
        why = f"[Errno {error.errno}] {error.strerror}"
        sys.stderr.write(f"{sys.executable}: can't open file {path!r}: {why}\n")
        raise SystemExit(2) from None
    if code is None:  # no compiled file
        with io.open_code(path) as file:
            code = _compiled(file.read(), path)
    return code, _main_module(path=path)


def _compiled(text: str | bytes, path: str) -> CodeType:
    # What this file imports from __future__ is not for the program.
    return compile(text, path, "exec", dont_inherit=True)


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
    vars(module)["__builtins__"] = builtins  # where exec finds none it sets their dict
    module.__spec__ = spec
    if spec is not None:
        module.__loader__, module.__package__ = spec.loader, spec.parent
        path = spec.origin
    if path is not None:
        module.__file__ = path
    return module


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
