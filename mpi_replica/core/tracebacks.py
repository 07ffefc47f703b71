"""Tracebacks as they are printed: they end where the program's code does."""

from __future__ import annotations

import contextlib
import dis
import inspect
import os
import sys
import traceback
from types import FrameType

from .argument_checks import is_switched_on

# As the code of all its files names it: it is found by one path.
_PACKAGE_FOLDER = os.path.join(os.path.dirname(os.path.dirname(__file__)), "")

_SHOW_ALL = "MPI_REPLICA_FULL_TRACEBACK"

# Where an error is thrown into a replica that waits: it was raised elsewhere.
_WAITS = ("worker.py", "wait")


def is_of_package(file: str) -> bool:
    """Returns whether `file` is one of this package's, and not of the program that uses it."""
    return file.startswith(_PACKAGE_FOLDER)


def is_of_library(file: str, name: str) -> bool:
    """Returns whether a file is one of the library's own, such as "torch"."""
    library = sys.modules.get(name)
    path = None if library is None else getattr(library, "__path__", None)
    return path is not None and file.startswith(f"{path[0]}{os.sep}")


def printed(error: BaseException) -> str:
    """Returns what is printed of an error that nobody has caught.

    What the program did wrong is shown by the program's frames, and one line for this package; an
    error that came up in this package, where no statement raises it, by all frames.
    """
    parts = traceback.TracebackException.from_exception(error)
    if not is_switched_on(_SHOW_ALL, "0") and not came_up_in_package(error):
        left_out = _leave_out(parts)
        if left_out:
            return (
                f"{''.join(parts.format())}({left_out} frames inside mpi_replica are left out:"
                f" {_SHOW_ALL}=1 shows them)\n"
            )
    return "".join(parts.format())


def let_go(error: BaseException) -> None:
    """Has functions of this package that an error came through hold nothing any more.

    They hold the error, or a list of errors: with its traceback, and so with all that is held by
    functions of the program, it would stay in memory until a garbage collection.
    """
    seen: set[int] = set()
    errors: list[BaseException | None] = [error]
    while errors:
        one = errors.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        errors += (one.__cause__, one.__context__)
        for innermost, _ in traceback.walk_tb(one.__traceback__):
            frame: FrameType | None = innermost
            # One that is kept keeps those that called it, also where an error was thrown into it.
            while frame is not None and id(frame) not in seen:
                seen.add(id(frame))
                _clear(frame)
                frame = frame.f_back


def _clear(frame: FrameType) -> None:
    code = frame.f_code
    # A generator may wait: that would close it.
    if is_of_package(code.co_filename) and not code.co_flags & inspect.CO_GENERATOR:
        with contextlib.suppress(RuntimeError):  # it goes on
            frame.clear()


def _leave_out(parts: traceback.TracebackException) -> int:
    """Takes the package's frames out, also of the errors behind this one; returns how many."""
    left_out = 0
    errors: list[traceback.TracebackException | None] = [parts]
    while errors:  # a list, since there may be more than calls fit into each other
        one = errors.pop()
        if one is None:
            continue
        kept = [frame for frame in one.stack if not is_of_package(frame.filename)]
        left_out += len(one.stack) - len(kept)
        one.stack = traceback.StackSummary.from_list(kept)
        errors += (one.__cause__, one.__context__, *(one.exceptions or ()))
    return left_out


def came_up_in_package(error: BaseException) -> bool:
    """Returns whether an operation of this package failed that should not."""
    step = error.__traceback__
    if step is None:
        return False
    while step.tb_next is not None:
        step = step.tb_next
    code = step.tb_frame.f_code
    if not is_of_package(code.co_filename):
        return False
    if (os.path.basename(code.co_filename), code.co_name) == _WAITS:
        return False
    # A statement that raises says what is wrong with a call; other operations should not fail.
    return dis.opname[code.co_code[step.tb_lasti]] not in ("RAISE_VARARGS", "RERAISE")
