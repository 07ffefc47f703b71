"""Strategies that this process makes: it waits within MPI, for processes that may wait for it.

It has no watch for that wait yet, but those of its other strategies. The processes of a
communicator make strategies in one order. So one that has begun fewer of them than another one has
not come to the last one of that, wherever it is.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from time import monotonic
from typing import NamedTuple

from ...core.thread_owners import owner_of_this_thread


class NewStrategy(NamedTuple):
    """A strategy that is made, and by whom."""

    #: All that make it: their ranks in the world of MPI.
    processes: tuple[int, ...]
    #: How many strategies of these processes this one has begun to make, with this one.
    number: int
    #: The one of this process that makes it.
    thread: int
    #: File and line of the program.
    line: str
    since: float


class NewStrategies:
    """Those of one process; as they are made, by their threads."""

    def __init__(self) -> None:
        self.making: tuple[NewStrategy, ...] = ()
        self._numbers: dict[tuple[int, ...], int] = {}
        # None as long as it has made none together with other processes.
        self._rank: int | None = None
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def noted(self, processes: tuple[int, ...], rank: int, line: str) -> Iterator[None]:
        """Notes that this thread makes a strategy.

        Parameters
        ----------
        processes : tuple of int
            Their ranks in the world of MPI, ascending; empty where not all of them have one.
        rank : int
            That of this process.
        line : str
            Where the program makes it.
        """
        if not processes:
            yield
            return
        with self._lock:
            self._rank = rank
            number = self._numbers[processes] = self._numbers.get(processes, 0) + 1
            thread = owner_of_this_thread()
            new = NewStrategy(processes, number, thread, line, monotonic())
            self.making = (*self.making, new)
        try:
            yield
        finally:
            with self._lock:
                self.making = tuple(one for one in self.making if one is not new)

    def misses(self, processes: tuple[int, ...], number: int) -> bool:
        """Returns whether this process has to make that strategy of another one, and has not begun.

        A thread that waits can't begin; where the program has others, one of them may.
        """
        return self._rank in processes and self._numbers.get(processes, 0) < number


#: Those of the process.
new_strategies = NewStrategies()
