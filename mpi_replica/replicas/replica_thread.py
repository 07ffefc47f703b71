"""A thread for a replica: torch, JAX and others keep for a thread what belongs to a replica.

Such as ``torch.no_grad``, ``torch.autocast`` or asyncio's running loop. The threads of a rank
take turns: a turn is handed on by a lock, which costs some ten microseconds.
"""

from __future__ import annotations

import contextvars
import ctypes
import functools
import signal
import threading
import weakref
from collections.abc import Callable
from typing import Any, cast

from ..core.thread_owners import StandIn, forget_thread, owner_of_this_thread
from ..ranks.interrupts import gate
from .worker import Worker


class ReplicaThread(Worker):
    """A kept thread, in which one replica runs from run to run."""

    def __init__(self, replica_id: int) -> None:
        self._turns = _Turns()
        self._thread = threading.Thread(
            target=_serve, args=(self._turns, weakref.ref(self)), daemon=True
        )
        self._thread.name = f"replica {replica_id}"
        self._stand_in = StandIn(owner_of_this_thread())
        self._job: Callable[[], None] | None = None
        self._answer: Any = None
        self._error: tuple[BaseException, Any] | None = None
        weakref.finalize(self, self._turns.end).atexit = False

    @property
    def is_alive(self) -> bool:
        """Whether it can be used again: not so in a forked child, which has no such thread."""
        return self._thread.is_alive()

    def begin(self, work: Callable[[], None]) -> None:
        self._job = functools.partial(contextvars.copy_context().run, work)
        if self._thread.ident is None:
            self._thread.start()
        self._let_run()

    def resume(self, answer: Any) -> None:
        self._answer = answer
        self._let_run()

    def throw(self, error: BaseException, trace: Any) -> None:
        self._error = error, trace
        self._let_run()

    def is_here(self) -> bool:
        return threading.get_ident() == self._thread.ident

    def rest(self) -> None:
        self._job = self._answer = self._error = None

    def wait(self) -> Any:
        self._turns.hand_back()
        if self._error is not None:
            (error, trace), self._error = self._error, None
            try:
                raise error.with_traceback(trace)
            finally:
                del error, trace  # a traceback holds this frame
        answer, self._answer = self._answer, None
        return answer

    def work(self) -> None:
        """Runs the replica to its end; called in the thread."""
        job, self._job = self._job, None
        if job is not None:
            job()

    def _let_run(self) -> None:
        before = self._stand_in.begin(cast("int", self._thread.ident))
        try:
            self._turns.let_run(cast("int", self._thread.ident))
        finally:
            self._stand_in.end(before)


def _serve(turns: _Turns, worker: weakref.ref[ReplicaThread]) -> None:
    """Runs what a worker has to do, until it is no longer used; it must not be kept by this."""
    turns.await_first()
    while not turns.are_over and (mine := worker()) is not None:
        mine.work()
        del mine
        turns.hand_back()
    forget_thread(threading.get_ident())


class _Turns:
    """Whose turn it is: the hub's, or that of the thread.

    A signal's handler may raise in the hub at any place, since signals go to the main thread, which
    mostly is the hub. What it raises belongs to the code that runs, as where there is no thread: it
    is raised in the thread, or, where that has handed back meanwhile, by the hub. That is why the
    locks only wake: what counts is how many turns were begun, and how many have ended.
    """

    def __init__(self) -> None:
        self._begun = 0
        self._ended = 0
        self._go = threading.Lock()
        self._back = threading.Lock()
        self._go.acquire()
        self._back.acquire()
        self.are_over = False

    def let_run(self, ident: int) -> None:
        """Gives the thread `ident` its turn, and waits for the end of it."""
        interrupt: _Interrupt | None = None
        self._begun += 1
        while True:
            try:
                _wake(self._go)
                while self._ended < self._begun:
                    self._back.acquire()
                break
            except BaseException as error:
                if self._ended == self._begun:
                    raise
                if interrupt is not None and not interrupt.is_delivered and gate.abort is not None:
                    gate.abort(128 + signal.SIGINT)  # it sits in code that is not Python's
                interrupt = _Interrupt(error)
                interrupt.send(ident)
        if interrupt is not None and not interrupt.is_delivered:
            _set_async_error(ident, None)
            if not interrupt.is_delivered:
                raise interrupt.error

    def hand_back(self) -> None:
        """Ends the turn of this thread, and waits for its next one."""
        late: BaseException | None = None
        turn = self._begun
        self._ended = turn
        while True:
            try:
                _wake(self._back)
                while self._begun == turn:
                    self._go.acquire()
                break
            except BaseException as error:  # an interrupt that was sent before
                late = error
        if late is not None:
            raise late

    def await_first(self) -> None:
        """Waits for the first turn of this thread."""
        while not self._begun:
            self._go.acquire()

    def end(self) -> None:
        """Lets the thread end."""
        self.are_over = True
        self._begun += 1
        _wake(self._go)


def _wake(lock: threading.Lock) -> None:
    """Releases a lock, unless it is free: then who waits for it is awake already."""
    if lock.locked():
        lock.release()


class _Interrupt:
    """An error that is to be raised in another thread, at its next instruction of Python."""

    def __init__(self, error: BaseException) -> None:
        self.error = error
        self.is_delivered = False

    def send(self, ident: int) -> None:
        """Has it raised in the thread `ident`."""
        interrupt = self

        # Python takes a class, of which it makes the error that it raises.
        class Carrier(BaseException):
            def __new__(cls) -> BaseException:  # type: ignore[misc]
                interrupt.is_delivered = True
                return interrupt.error

        _set_async_error(ident, Carrier)


def _set_async_error(ident: int, kind: type[BaseException] | None) -> None:
    ctypes.pythonapi.PyThreadState_SetAsyncExc(
        ctypes.c_ulong(ident), None if kind is None else ctypes.py_object(kind)
    )
