"""Calls of a user's function on elements: one after the other, or in a pool of threads."""

from __future__ import annotations

import contextvars
import itertools
import os
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from ...core.thread_state import ThreadState
from ...ranks.host import cores

#: Leave a number to the dataset.
AUTOTUNE = -1

_MOST_THREADS = 16

T = TypeVar("T")


def name_of(function: Callable[..., Any]) -> str:
    """Returns a name of a function, the same on all ranks."""
    return getattr(function, "__qualname__", type(function).__qualname__)


def spread(function: Callable[..., Any], element: Any) -> Any:
    """Calls a function with an element; the items of a tuple are arguments, as in tf."""
    # A named tuple is one argument, as a dict is.
    return called(function, *element) if type(element) is tuple else called(function, element)


def called(function: Callable[..., T], *arguments: Any) -> T:
    """Calls a function of the program, that makes a row.

    Raises
    ------
    RuntimeError
        It has raised a StopIteration, which generators above make an error that tells no row.
    """
    try:
        return function(*arguments)
    except StopIteration as error:
        raise RuntimeError(
            f"a row of the input raised {error!r}, which would end what iterates over it. Raise"
            " another error, or leave rows out with filter or take."
        ) from error


class FunctionCalls:
    """Makes calls and returns their results in order, so many at once."""

    def __init__(self, parallel_calls: int) -> None:
        if parallel_calls == AUTOTUNE:
            parallel_calls = min(_MOST_THREADS, len(cores()))
        self._count = parallel_calls
        self._pool: ThreadPoolExecutor | None = None
        self._process = 0

    def results(self, calls: Iterator[Callable[[], T]]) -> Iterator[T]:
        """Iterates the results of calls, which begin while earlier results are taken.

        What a call raises is raised in its turn, and so is what making the next call raises.
        """
        if self._count == 1:
            for call in calls:
                yield call()
            return
        coming = self._futures(calls)
        begun: deque[Future[T]] = deque()
        try:
            begun.extend(itertools.islice(coming, self._count))
            while begun:
                yield begun.popleft().result()
                begun.extend(itertools.islice(coming, 1))
        finally:
            for future in begun:
                future.cancel()

    def _futures(self, calls: Iterator[Callable[[], T]]) -> Iterator[Future[T]]:
        """Begins a call for each that is asked for; what making one raises, the last one has."""
        try:
            for call in calls:
                yield self._begin(call)
        except Exception as error:
            failed: Future[T] = Future()
            failed.set_exception(error)
            yield failed

    def _begin(self, call: Callable[[], T]) -> Future[T]:
        # The threads of a pool stay behind in a fork.
        if self._pool is None or self._process != os.getpid():
            self._pool = ThreadPoolExecutor(self._count, "mpi_replica-map")
            self._process = os.getpid()
        # For each: what the caller has set with np.errstate, torch and JAX holds in its calls, too.
        run, state = contextvars.copy_context().run, ThreadState.of_this_thread()
        return self._pool.submit(run, state.outside_of_inference().hold_in, call)
