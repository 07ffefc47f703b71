"""Exceptions on their way to other ranks.

An exception travels as bytes that its sender has loaded back and compared. Where a rank can't
load them, all ranks but the one of origin raise a `RemoteReplicaError` with its text instead.
"""

from __future__ import annotations

import os
import pickle
import sysconfig
import traceback
from typing import NamedTuple

from ...core.exceptions import RemoteReplicaError, add_note, text_of
from ...core.tracebacks import is_of_package, printed

# numpy's own frames say nothing of where the program is wrong.
_LIBRARIES = tuple({sysconfig.get_path(name) + os.sep for name in ("stdlib", "purelib", "platlib")})


class TravellingError(NamedTuple):
    """An exception as plain data."""

    #: The pickled exception; empty when it can't be pickled.
    data: bytes
    type_name: str
    text: str
    #: "replica 3 (rank 1) at train.py:44"
    origin: str
    traceback: str
    #: Serial number of the agreed error that this one is, or -1.
    serial: int

    @property
    def words(self) -> str:
        """It in words, as `in_words` of its own gives them, with the module of its class."""
        return f"{self.type_name}: {self.text}".removesuffix(": ")


def pack(error: BaseException, origin: str, serial: int = -1) -> TravellingError:
    """Returns `error`, raised by `origin`, as plain data. Never raises."""
    text = text_of(error)
    try:
        lines = printed(error)
    except BaseException:  # code of the program
        lines = "<no traceback: the exception can't be formatted>"
    kind = type(error)
    name = (
        kind.__qualname__
        if kind.__module__ in ("builtins", "__main__")
        else (f"{kind.__module__}.{kind.__qualname__}")
    )
    return TravellingError(_bytes_of(error), name, text, origin, lines, serial)


def place_of(error: BaseException) -> str:
    """Returns "file:line" of the innermost frame of the program, or nothing.

    That is none of this package, and where there is another one none of a library.
    """
    place = place_in_library = ""
    for frame, line in traceback.walk_tb(error.__traceback__):
        file = frame.f_code.co_filename
        if not is_of_package(file):
            here = f"{os.path.basename(file)}:{line}"
            if file.startswith(_LIBRARIES):
                place_in_library = here
            else:
                place = here
    return place or place_in_library


def _bytes_of(error: BaseException) -> bytes:
    try:
        data = pickle.dumps(error, protocol=5)
        copy = pickle.loads(data)
        return data if type(copy) is type(error) and _same(copy, error) else b""
    except BaseException:  # user code: __reduce__ and __init__ may raise anything
        return b""


def _same(copy: BaseException, error: BaseException) -> bool:
    try:
        if bool(copy.args == error.args):
            return True
    except Exception:  # arrays in args have no single truth value
        pass
    return pickle.dumps(copy, protocol=5) == pickle.dumps(error, protocol=5)


def load(packed: TravellingError) -> BaseException | None:
    """Returns the exception that travelled, with a note that tells its origin, or None."""
    try:
        error = pickle.loads(packed.data)
    except BaseException:  # also where there is nothing to load
        return None
    if not isinstance(error, BaseException):
        return None
    takes_note = add_note(error, f"raised by {packed.origin}:\n{packed.traceback}")
    return error if takes_note else None


def stand_in(packed: TravellingError) -> RemoteReplicaError:
    """Returns what is raised for an exception that can't travel, or that takes no note."""
    return RemoteReplicaError(
        f"{packed.words}. It was raised by {packed.origin} and can't be pickled,"
        f" so this error stands for it. Its traceback there:\n{packed.traceback}"
    )
