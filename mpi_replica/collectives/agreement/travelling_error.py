"""Exceptions on their way to other ranks.

An exception travels as bytes that its sender has loaded back and compared. Where pickle can't make
it again, as its ``__init__`` wants other arguments, it is made without that, also in a group. Where
a rank can't load them, all ranks but the one of origin raise a `RemoteReplicaError` with its text
instead.
"""

from __future__ import annotations

import io
import os
import pickle
import sysconfig
import traceback
from collections.abc import Callable
from typing import Any, NamedTuple

from ...core.exceptions import RemoteReplicaError, add_note, text_of
from ...core.tracebacks import is_of_package, printed

# numpy's own frames say nothing of where the program is wrong.
_LIBRARIES = tuple({sysconfig.get_path(name) + os.sep for name in ("stdlib", "purelib", "platlib")})

# What errors are raised from travels with them, no further than this.
_MOST_CAUSES = 8

# The bit of ``type.__flags__`` that classes have which a program has defined: Py_TPFLAGS_HEAPTYPE.
_HEAP_TYPE = 1 << 9


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
    #: What it was raised from.
    cause: TravellingError | None = None

    @property
    def words(self) -> str:
        """It in words, as `in_words` of its own gives them, with the module of its class."""
        return f"{self.type_name}: {self.text}".removesuffix(": ")

    @property
    def told(self) -> str:
        """It in words, with its origin."""
        return f"{self.words}, by {self.origin}"


def pack(error: BaseException, origin: str, serial: int = -1, depth: int = 0) -> TravellingError:
    """Returns `error`, raised by `origin`, as plain data. Never raises."""
    text, lines = text_of(error), ""
    if depth == 0:  # it shows those that it was raised from, too
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
    cause = BaseException.__getattribute__(error, "__cause__")  # its own may raise
    packed = None if cause is None or depth == _MOST_CAUSES else pack(cause, origin, -1, depth + 1)
    return TravellingError(_bytes_of(error), name, text, origin, lines, serial, packed)


def place_of(error: BaseException, *, may_be_library: bool) -> str:
    """Returns "file:line" of the innermost frame of the program, or nothing.

    That is none of this package, and none of a library; with `may_be_library`, where there is no
    other one, of a library: a step function may be one.
    """
    place = place_in_library = ""
    for frame, line in traceback.walk_tb(error.__traceback__):
        file = frame.f_code.co_filename
        if not is_of_package(file):
            here = f"{os.path.basename(file)}:{line}"
            # Compiled modules name the source that they were made from, wherever that was.
            module = str(frame.f_globals.get("__file__"))
            if file.startswith(_LIBRARIES) or module.startswith(_LIBRARIES):
                place_in_library = here
            else:
                place = here
    return place or (place_in_library if may_be_library else "")


def _bytes_of(error: BaseException) -> bytes:
    return _checked_bytes(error, pickle.dumps) or _checked_bytes(error, _dumps_without_init)


def _dumps_without_init(error: BaseException, protocol: int) -> bytes:
    file = io.BytesIO()
    _PicklerWithoutInit(file, protocol).dump(error)
    return file.getvalue()


class _PicklerWithoutInit(pickle.Pickler):
    """Pickles exceptions that pickle can't make: their ``__init__`` wants other arguments.

    So it does those in a group. Attributes that can't be pickled stay behind; a note says so.
    """

    def reducer_override(self, obj: Any) -> Any:
        """Returns how an exception is made; any other object is left to pickle."""
        if not issubclass(type(obj), BaseException) or _checked_bytes(obj, pickle.dumps):
            return NotImplemented
        state, missing = {}, []
        for name, value in vars(obj).items():
            try:
                pickle.loads(pickle.dumps(value, protocol=5))
                state[name] = value
            except Exception:
                missing.append(name)
        if missing:
            note = f"(what can't be pickled is not here: {', '.join(missing)})"
            state["__notes__"] = [*state.get("__notes__", []), note]
        _, args, *_ = _built_in(type(obj)).__reduce__(obj)
        return _made_without_init, (type(obj), args, state)


def _made_without_init(kind: type[BaseException], args: Any, state: dict[str, Any]) -> Any:
    error = kind.__new__(kind, *args)
    _built_in(kind).__init__(error, *args)  # it has more than `args`: the status of a SystemExit
    vars(error).update(state)
    return error


def _built_in(kind: type[BaseException]) -> Any:
    """Returns the exception of Python's own that it is derived from."""
    return next(base for base in kind.__mro__ if not base.__flags__ & _HEAP_TYPE)


def _checked_bytes(error: BaseException, dumps: Callable[..., bytes]) -> bytes:
    """Returns `error` as bytes, if they become the same again; else none."""
    try:
        data = dumps(error, protocol=5)
        return data if _same(pickle.loads(data), error) else b""
    except BaseException:  # user code: __reduce__ and __init__ may raise anything
        return b""


def _same(copy: BaseException, error: BaseException) -> bool:
    if type(copy) is not type(error) or text_of(copy) != text_of(error):
        return False
    if isinstance(copy, BaseExceptionGroup) and isinstance(error, BaseExceptionGroup):
        pairs = zip(copy.exceptions, error.exceptions, strict=True)
        return all(_same(*pair) for pair in pairs)
    try:
        if bool(copy.args == error.args):
            return True
    except Exception:  # arrays in args have no single truth value
        pass
    return pickle.dumps(copy.args, protocol=5) == pickle.dumps(error.args, protocol=5)


def load(packed: TravellingError) -> BaseException | None:
    """Returns the exception that travelled, with a note that tells its origin, or None."""
    error = _loaded(packed)
    if error is None or not add_note(error, f"raised by {packed.origin}:\n{packed.traceback}"):
        return None
    return error


def _loaded(packed: TravellingError) -> BaseException | None:
    try:
        error = pickle.loads(packed.data)
        if not isinstance(error, BaseException):
            return None
    except BaseException:  # also where there is nothing to load
        return None
    return _with_cause(error, packed)


def _with_cause(error: BaseException, packed: TravellingError) -> BaseException:
    if packed.cause is not None:
        cause = _loaded(packed.cause) or stand_in(packed.cause)
        BaseException.__setattr__(error, "__cause__", cause)
    return error


def stand_in(packed: TravellingError) -> BaseException:
    """Returns what is raised for an exception that can't travel, or that takes no note."""
    text = (
        f"{packed.words}. It was raised by {packed.origin} and can't be pickled,"
        f" so this error stands for it. Its traceback there:\n{packed.traceback}"
    )
    return _with_cause(RemoteReplicaError(text), packed)
