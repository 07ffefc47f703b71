"""Calls of a user's function on elements: one after the other, or in a pool of threads."""

from __future__ import annotations

import contextvars
import os
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

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
    return function(*element) if type(element) is tuple else function(element)


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
        begun: deque[Future[T]] = deque()
        failure = None
        has_ended = False
        try:
            while True:
                while len(begun) < self._count and not has_ended:
                    try:
                        begun.append(self._begin(next(calls)))
                    except StopIteration:
                        has_ended = True
                    except Exception as error:
                        failure, has_ended = error, True
                if not begun:
                    break
                yield begun.popleft().result()
            if failure is not None:
                raise failure
        finally:
            for future in begun:
                future.cancel()

    def _begin(self, call: Callable[[], T]) -> Future[T]:
        # The threads of a pool stay behind in a fork.
        if self._pool is None or self._process != os.getpid():
            self._pool = ThreadPoolExecutor(self._count, "mpi_replica-map")
            self._process = os.getpid()
        # A copy for each: what the caller has set with np.errstate holds in its calls, too.
        return self._pool.submit(contextvars.copy_context().run, call)
