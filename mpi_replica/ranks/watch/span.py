"""Parts of a program, and of the package, as a trace shows them."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from time import perf_counter_ns
from typing import ParamSpec, TypeVar

from ...core.context import current_state
from . import event_log
from .event_log import SPAN_KINDS

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
        What its time counts as in the table.

    Raises
    ------
    ValueError
        There is no such kind.
    TypeError
        It decorates a generator or a coroutine, whose parts are not together in time.

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
        if kind not in SPAN_KINDS:
            raise ValueError(f"span has kind={kind!r}, which is none of {SPAN_KINDS}.")
        self._name = name
        self._kind = kind
        self._begun = 0

    def __enter__(self) -> None:
        if event_log.current is not None:
            self._begun = perf_counter_ns()

    def __exit__(self, kind_of_error: object, error: object, traceback: object) -> None:
        log = event_log.current
        if self._begun and log is not None:
            log.add_span(str(self._name), self._kind, self._begun, current_state())

    def __call__(self, function: Callable[P, T]) -> Callable[P, T]:
        if inspect.isgeneratorfunction(function) or inspect.iscoroutinefunction(function):
            raise TypeError(
                f"span({self._name!r}) can't decorate {function.__qualname__}, a generator or"
                " coroutine: others run between its parts. Use 'with span(...)' inside of it."
            )

        @functools.wraps(function)
        def traced(*args: P.args, **kwargs: P.kwargs) -> T:
            with span(self._name, kind=self._kind):
                return function(*args, **kwargs)

        return traced
