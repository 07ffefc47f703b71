"""What the user wants to run: a script, a module or any other program, looked for beforehand."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import shutil
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

from ..core.exceptions import LaunchError

_RANK = Path(__file__).parent.parent / "strategy/rank_program.py"
_LEFTOVERS = Path(__file__).parent / "leftovers.py"

# Those of Python with which a script runs as without; the last one may need the word behind it.
_FLAGS = re.compile("-[bBdEIOPqsSuv]+|-[bBdEIOPqsSuv]*(?:[WX].+|([WX]))")


def program_command(words: Sequence[str]) -> list[str]:
    """Returns the command of one rank.

    Parameters
    ----------
    words : sequence of str
        ``['-m', module, ...]``, ``['-c', text, ...]``, a script or folder for Python, or any
        program and its arguments.

    Raises
    ------
    LaunchError
        It isn't there: told once, before as many ranks as there are tell it.
    """
    first, rest = words[0], list(words[1:])
    if first in ("-m", "-c"):
        if not rest:
            raise LaunchError(f"{first} needs {'a module' if first == '-m' else 'a program'}.")
        if first == "-m":
            _check_module(rest[0])
        return [sys.executable, first, *rest]
    is_program = os.access(first, os.X_OK) and not first.endswith((".py", ".pyz"))
    if os.path.isdir(first) or (os.path.isfile(first) and not is_program):
        _check_script(first)
        return [sys.executable, first, *rest]
    if os.path.isfile(first):
        # A name without a folder would be looked for on the path.
        path: str | None = first if os.path.dirname(first) else os.path.join(os.curdir, first)
    else:
        path = None if os.path.dirname(first) else shutil.which(first)
    if path is None:
        raise LaunchError(
            f"there is no program {first!r} in {os.getcwd()}"
            f"{'' if os.path.dirname(first) else ' or on the PATH'}. Give a script of Python, -m"
            " and a module, or another program; options of run stand before it."
        )
    command = [path, *rest]
    if (place := _num_words_before_program(command)) and command[place] not in ("-m", "-c"):
        _check_script(command[place])
    return command


def is_of_python(program: Sequence[str]) -> bool:
    """Returns whether `rank_program` can stand around this command."""
    return _num_words_before_program(program) > 0


def rank_program(program: Sequence[str]) -> list[str]:
    """Returns the command of a rank that tells the launcher how it ends.

    Parameters
    ----------
    program : sequence of str
        What `program_command` gives, of Python.
    """
    num_words = _num_words_before_program(program)
    return [*program[:num_words], str(_RANK), *program[num_words:]]


def _num_words_before_program(command: Sequence[str]) -> int:
    """Returns how many words are Python and its flags; 0 for other programs, or without a script.

    Examples
    --------
    >>> _num_words_before_program([sys.executable, "-uW", "error", "-X", "dev", "-m", "train"])
    5
    >>> _num_words_before_program([sys.executable, "-u"])
    0
    """
    words = list(command[1:]) if _is_this_python(command[0]) else []
    while words and (match := _FLAGS.fullmatch(words[0])):
        words = words[2 if match[1] else 1 :]
    if not words or (words[0].startswith("-") and (words[0] not in ("-m", "-c") or not words[1:])):
        return 0
    return len(command) - len(words)


def _is_this_python(path: str) -> bool:
    """Returns whether this program is the Python that runs here, perhaps by another name.

    It is another one in the folder of another environment, also where both link to one file.
    """
    with contextlib.suppress(OSError):
        return os.path.samefile(path, sys.executable) and os.path.samefile(
            os.path.dirname(path), os.path.dirname(sys.executable)
        )
    return False


def leftovers_program() -> list[str]:
    """Returns the command that removes what dead processes left; when the job began is missing."""
    return [sys.executable, "-IS", str(_LEFTOVERS)]


def _check_script(path: str) -> None:
    """Raises where Python could not run this file or folder. A pipe is left to Python."""
    if os.path.isdir(path):
        if not any(os.path.exists(os.path.join(path, f"__main__{end}")) for end in (".py", ".pyc")):
            raise LaunchError(f"the folder {path!r} has no __main__.py that Python could run.")
    elif os.path.isfile(path) or not os.path.exists(path):
        try:
            open(path, "rb").close()
        except OSError as error:
            raise LaunchError(
                f"Python can't read the script {path!r}, seen from {os.getcwd()}: {error.strerror}."
            ) from error


def _check_module(name: str) -> None:
    """Raises unless Python would find the module. No module is imported: one might start MPI."""
    parts = name.split(".")
    spec: ModuleSpec | None = None
    try:
        spec = importlib.util.find_spec(parts[0]) if parts[0] else None
        for end in range(2, len(parts) + 1):
            folders = None if spec is None else spec.submodule_search_locations
            spec = PathFinder.find_spec(".".join(parts[:end]), folders) if folders else None
    except (ImportError, ValueError):
        spec = None
    if spec is None:
        raise LaunchError(f"there is no module {name!r} that {sys.executable} could run with -m.")
    folders = spec.submodule_search_locations
    if folders is not None and PathFinder.find_spec(f"{name}.__main__", folders) is None:
        raise LaunchError(f"the package {name!r} has no __main__.py that Python could run with -m.")
