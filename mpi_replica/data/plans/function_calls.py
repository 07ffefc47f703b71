"""Calls of a user's function on elements: one after the other, or in a pool of threads."""

from __future__ import annotations

import contextvars
import functools
import itertools
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from os import getpid
from queue import SimpleQueue
from time import monotonic
from typing import Any, TypeVar

from ...core.thread_state import ThreadState
from ...ranks.host import cores
from ..read_ahead import SECONDS_TO_END

#: Leave a number to the dataset.
AUTOTUNE = -1

_MOST_THREADS = 16

T = TypeVar("T")

#: A call that is to be made, and where its result goes; None where a thread is to end.
_Calls = SimpleQueue[tuple["Future[Any]", Callable[[], Any]] | None]


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
        self._calls: _Calls | None = None
        self._threads: list[threading.Thread] = []
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
                yield _result_of(begun.popleft())
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
        # Threads stay behind in a fork.
        if self._calls is None or self._process != getpid():
            self._calls, self._threads, self._process = SimpleQueue(), [], getpid()
            weakref.finalize(self, _end, self._calls, self._threads)
        if len(self._threads) < self._count:
            # Daemons: a call that never returns must not keep the program from ending.
            thread = threading.Thread(
                target=_make, args=(self._calls,), name="mpi_replica-map", daemon=True
            )
            thread.start()
            self._threads.append(thread)
        future: Future[T] = Future()
        # For each: what the caller has set with np.errstate, torch and JAX holds in its calls, too.
        run, state = contextvars.copy_context().run, ThreadState.of_this_thread()
        hold_in = state.outside_of_inference().hold_in
        self._calls.put((future, functools.partial(run, hold_in, call)))
        return future


def _result_of(future: Future[T]) -> T:
    """Returns a result, or raises: `Future.result` would add a line of Python's own to an error."""
    error = future.exception()
    try:
        if error is not None:
            raise error
        return future.result()
    finally:
        del error, future  # the traceback holds this frame


def _make(calls: _Calls) -> None:
    """Makes calls, in a thread, until it is to end."""
    while (wanted := calls.get()) is not None:
        future, call = wanted
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(call())
            except BaseException as error:
                future.set_exception(error)
        del wanted, future, call  # nothing is held while it waits


def _end(calls: _Calls, threads: Sequence[threading.Thread]) -> None:
    """Ends threads, and waits for the ends of those whose calls return."""
    for _ in threads:
        calls.put(None)
    until = monotonic() + SECONDS_TO_END
    for thread in threads:
        if thread is not threading.current_thread():
            thread.join(max(0, until - monotonic()))
