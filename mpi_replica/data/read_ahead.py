"""Reading ahead: a thread takes elements of an iterator before they are asked for."""

from __future__ import annotations

import atexit
import contextvars
import functools
import threading
import weakref
from collections.abc import Callable, Iterator
from os import getpid
from queue import SimpleQueue
from typing import Any, TypeVar

from ..core.thread_state import ThreadState

T = TypeVar("T")

_END: Any = object()

#: How long to wait for a thread that was told to end. One that reads just now ends after that read;
#: one whose read never returns must not keep the program from ending.
SECONDS_TO_END = 1.0


def read_ahead(make: Callable[[], Iterator[T]], count: int) -> Iterator[T]:
    """Iterates what `make` returns, with `count` elements read ahead in a thread.

    The thread begins with the first element asked for. It ends with the iterator, however that
    ends: the generator's `finally` runs too when nobody holds it any more.
    """
    reader = _Reader(make, count)
    try:
        while (answer := reader.take()) is not None:
            element, error = answer
            if error is not None:
                raise error
            yield element
    finally:
        reader.end()


class _Reader:
    """A thread that reads one element for each one it is asked for.

    The two sides share two queues and no lock, so that `end` may run at any moment, also where
    the garbage collector calls it.
    """

    def __init__(self, make: Callable[[], Iterator[Any]], count: int) -> None:
        # What torch and JAX have in the thread that asks; None where nothing is asked for.
        self._wishes: SimpleQueue[ThreadState | None] = SimpleQueue()
        # (element, None), (None, an exception), or None at the end
        self._answers: SimpleQueue[tuple[Any, BaseException | None] | None] = SimpleQueue()
        self._has_ended = False
        self._process = getpid()
        for _ in range(count):
            self._ask()
        # What the caller has set with np.errstate, and its strategy, hold here as well.
        run = contextvars.copy_context().run
        # A daemon: Python waits for other threads before it lets anybody tell them to end.
        self._thread = threading.Thread(
            target=run, args=(self._read, make), name="mpi_replica-prefetch", daemon=True
        )
        _readers.add(self)
        self._thread.start()

    def take(self) -> tuple[Any, BaseException | None] | None:
        """Returns the next element, and asks the thread for one more."""
        if getpid() != self._process:
            raise RuntimeError(
                "this iterator reads ahead and was begun before a fork: its thread stayed in the "
                "other process. Iterate the dataset anew here."
            )
        answer = self._answers.get()
        self._ask()
        return answer

    def _ask(self) -> None:
        self._wishes.put(ThreadState.of_this_thread().outside_of_inference())

    def end(self) -> None:
        """Ends the thread, and waits for its end."""
        if self._has_ended:  # by `_end_all`: Python may have taken its modules apart since
            return
        self._has_ended = True
        self._wishes.put(None)
        _readers.discard(self)
        is_elsewhere = getpid() == self._process and threading.current_thread() != self._thread
        if is_elsewhere and self._thread.is_alive():
            self._thread.join(SECONDS_TO_END)

    def _read(self, make: Callable[[], Iterator[Any]]) -> None:
        try:
            elements = make()
            while True:
                state = self._wishes.get()
                if self._has_ended or state is None:
                    return
                element = state.hold_in(functools.partial(next, elements, _END))
                self._answers.put(None if element is _END else (element, None))
        except BaseException as error:
            self._answers.put((None, error))


_readers: weakref.WeakSet[_Reader] = weakref.WeakSet()


@atexit.register
def _end_all() -> None:
    for reader in list(_readers):
        reader.end()
