"""What a replica runs in: a greenlet, or a thread of its own."""

from __future__ import annotations

import contextvars
import operator
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import greenlet
from greenlet import getcurrent

# Calls of C below each replica. The stack of a greenlet has no end that can be seen: behind its
# first frame is whatever the hub has left there, and who looks for a caller in it crashes. numpy
# looks at 10 frames, where it may write into a temporary array (`temp_elision.c`: of 256 KiB and
# more), torch at 64, for each of its errors (`c10/util/Backtrace.cpp`).
_FRAMES_BELOW = 64


class Worker(ABC):
    """What a replica runs in, kept from run to run; the hub is the code that called ``run``.

    One of them runs at a time: the hub, or a replica.
    """

    @property
    @abstractmethod
    def is_alive(self) -> bool:
        """Whether it can be used: not so where a signal's handler has raised in its own code."""

    @abstractmethod
    def begin(self, work: Callable[[], None]) -> None:
        """Calls `work`, and returns when that waits or ends; called by the hub, as `resume`."""

    @abstractmethod
    def resume(self, answer: Any) -> None:
        """Returns `answer` from `wait`, and runs the replica until it waits again or ends."""

    @abstractmethod
    def throw(self, error: BaseException, trace: Any) -> None:
        """Raises `error` from `wait`, with this traceback, and runs the replica as `resume`."""

    @abstractmethod
    def wait(self) -> Any:
        """Has the hub go on, and waits to be resumed; called by the replica."""

    @abstractmethod
    def is_here(self) -> bool:
        """Returns whether the code that calls runs in it, and so is part of its replica."""

    @abstractmethod
    def rest(self) -> None:
        """Holds nothing any more of the run that is over."""

    @abstractmethod
    def give_up(self) -> None:
        """Ends the replica where it waits; called by the hub, which then drops the worker."""


class GreenletWorker(Worker):
    """A kept greenlet: making one costs more than all its switches in a step."""

    def __init__(self) -> None:
        self._hub = getcurrent()
        self._greenlet = greenlet.greenlet(_begin)
        # Without a job: the first arguments are kept for as long as the greenlet is.
        self._greenlet.switch(self._hub)

    @property
    def is_alive(self) -> bool:
        return not self._greenlet.dead

    def begin(self, work: Callable[[], None]) -> None:
        self._hub = getcurrent()
        self._greenlet.gr_context = contextvars.copy_context()
        self._greenlet.switch(work, self._hub)

    def resume(self, answer: Any) -> None:
        self._greenlet.switch(answer)

    def throw(self, error: BaseException, trace: Any) -> None:
        # From Python 3.14 on None leaves the traceback that it has. By the base: the method of a
        # class of the program may do anything.
        error = BaseException.with_traceback(error, trace)
        self._greenlet.throw(type(error), error, trace)

    def wait(self) -> Any:
        return self._hub.switch()

    def give_up(self) -> None:
        """Does nothing: Python raises `GreenletExit` in a greenlet that is no longer used."""

    def is_here(self) -> bool:
        return getcurrent() is self._greenlet

    def rest(self) -> None:
        self._greenlet.gr_context = None


def _begin(hub: greenlet.greenlet) -> None:
    """Does the jobs of a greenlet, above what libraries may look at."""
    calls: list[Any] = [*[operator.call] * _FRAMES_BELOW, _do_jobs, hub]
    operator.call(*calls)


def _do_jobs(hub: greenlet.greenlet) -> None:
    """Does one job after the other; each comes with the hub that hands it over.

    It knows no worker: what a greenlet that waits refers to is never found to be garbage.
    """
    while True:
        job, hub = hub.switch()
        job()
        del job  # an idle worker must not keep what the last step used
