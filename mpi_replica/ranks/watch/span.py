"""Parts of a program, and of the package, as a trace shows them."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from time import perf_counter_ns
from typing import ParamSpec, TypeVar

from ...core.context import current_state
from . import event_log
from .event_log import KINDS_OF_PROGRAMS, EventLog

P = ParamSpec("P")
T = TypeVar("T")


class span:
    """Name a part of the program for the trace: a context manager, and a decorator of functions.

    Inside of a replica it stands on the track of that replica.

    Parameters
    ----------
    name : str
        A trace has 65536 different names at most: leave numbers of steps out.
    kind : {'program', 'input', 'checkpoint'}, optional
        What its time counts as in the table, in a thread that calls strategies.

    Raises
    ------
    ValueError
        There is no such kind.
    TypeError
        `name` is no text; or it decorates a generator or a coroutine, whose parts are not together
        in time.

    Notes
    -----
    No communication. It costs 0.4 µs where nothing is traced, and 1 µs otherwise.

    See Also
    --------
    Strategy.trace : Records what they show.

    Examples
    --------
    >>> import mpi_replica as mr
    >>> with mr.span("forward"):
    ...     2 + 2
    4
    >>> @mr.span("load")
    ... def load():
    ...     return 4
    >>> load()
    4
    """

    __slots__ = ("_begun", "_kind", "_name")

    def __init__(self, name: str, *, kind: str = "program") -> None:
        if not isinstance(name, str):
            raise TypeError(f"span needs a name, got {name!r}. Write mr.span('forward').")
        if kind not in KINDS_OF_PROGRAMS:
            raise ValueError(f"span has kind={kind!r}, which is none of {KINDS_OF_PROGRAMS}.")
        self._name = name
        self._kind = kind
        #: When it was entered and not left, in which trace: by track, since replicas of a rank may
        #: be in one and the same span, and more than once where it recurs.
        self._begun: dict[int, list[tuple[EventLog, int]]] = {}

    def __enter__(self) -> None:
        log = event_log.current
        if log is not None:
            track = log.track(current_state())
            self._begun.setdefault(track, []).append((log, perf_counter_ns()))

    def __exit__(self, kind_of_error: object, error: object, traceback: object) -> None:
        if not self._begun:
            return
        log = event_log.current
        if log is None:
            self._begun.clear()  # what was entered in a trace that has ended
            return
        state = current_state()
        if begun := self._begun.get(log.track(state)):
            of_log, at = begun.pop()
            if of_log is log:
                log.add_span(self._name, self._kind, at, state)

    def __call__(self, function: Callable[P, T]) -> Callable[P, T]:
        if (
            inspect.isgeneratorfunction(function)
            or inspect.iscoroutinefunction(function)
            or inspect.isasyncgenfunction(function)
        ):
            raise TypeError(
                f"span({self._name!r}) can't decorate {function.__qualname__}, a generator or"
                " coroutine: others run between its parts. Use 'with span(...)' inside of it."
            )

        @functools.wraps(function)
        def traced(*args: P.args, **kwargs: P.kwargs) -> T:
            with self:
                return function(*args, **kwargs)

        return traced


def span_of_package(name: str, kind: str) -> span:
    """Returns a span of a kind that programs can't have."""
    made = span(name)
    made._kind = kind
    return made
