"""A thread for a replica: torch, JAX and others keep for a thread what belongs to a replica.

Such as ``torch.no_grad``, ``torch.autocast`` or asyncio's running loop. The threads of a rank
take turns: a turn is handed on by a lock, which costs some ten microseconds.
"""

from __future__ import annotations

import contextvars
import functools
import os
import sys
import threading
import weakref
from collections.abc import Callable
from os import getpid
from typing import Any

import greenlet

from ..core.thread_owners import forget_thread, owner_of_this_thread
from .turns import FORKED, Relay, Turns, is_forked
from .worker import Worker


class ReplicaThread(Worker):
    """A kept thread, in which one replica runs from run to run."""

    def __init__(self, replica_id: int) -> None:
        self._turns = Turns(Relay.of(owner_of_this_thread()))
        self._thread = threading.Thread(
            target=_serve, args=(self._turns, weakref.ref(self)), daemon=True
        )
        self._thread.name = f"replica {replica_id}"
        self._job: Callable[[], None] | None = None
        self._trace: Any = None
        self._answer: Any = None
        self._error: tuple[BaseException, Any] | None = None
        weakref.finalize(self, self._turns.end).atexit = False

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive() and not self._turns.are_over

    def begin(self, work: Callable[[], None]) -> None:
        self._job = functools.partial(contextvars.copy_context().run, work)
        self._trace = sys.gettrace()
        if self._thread.ident is None:
            self._turns.start(self._thread)
        self._turns.let_run()

    def resume(self, answer: Any) -> None:
        self._answer, self._error = answer, None
        self._turns.let_run()

    def throw(self, error: BaseException, trace: Any) -> None:
        self._answer, self._error = None, (error, trace)
        self._turns.let_run()

    def give_up(self) -> None:
        self.throw(greenlet.GreenletExit(), None)

    def is_here(self) -> bool:
        return threading.get_ident() == self._thread.ident

    def rest(self) -> None:
        self._job = self._trace = self._answer = self._error = None

    def wait(self) -> Any:
        self._turns.hand_back()
        if self._error is not None:
            (error, trace), self._error = self._error, None
            try:
                raise BaseException.with_traceback(error, trace)
            finally:
                del error, trace  # a traceback holds this frame
        answer, self._answer = self._answer, None
        return answer

    def work(self) -> None:
        """Runs the replica to its end; called in the thread."""
        job, self._job = self._job, None
        if job is None:
            return
        is_traced = self._trace is not None and sys.gettrace() is None
        if is_traced:  # as pdb does, which knows nothing of threads
            sys.settrace(self._trace)
        try:
            job()
        except greenlet.GreenletExit:  # the hub has given up this replica
            pass
        finally:
            if is_traced:
                sys.settrace(None)


def _serve(turns: Turns, worker: weakref.ref[ReplicaThread]) -> None:
    """Runs what a worker has to do, until it is no longer used; it must not be kept by this."""
    errors, process = turns.relay.errors, getpid()
    turns.enter()
    try:
        while True:
            try:
                while not turns.are_over and (mine := worker()) is not None:
                    mine.work()
                    del mine
                    if is_forked(process):
                        _end_child()
                    turns.hand_back()
                break
            except BaseException as error:  # of a signal's handler, before or behind the replica
                errors += (error,)
    except BaseException as error:
        errors += (error,)
    finally:
        forget_thread(threading.get_ident())
        turns.leave()


def _end_child() -> None:
    """Ends a forked child, in which nobody waits for this thread."""
    os.write(2, f"{FORKED}\n".encode())
    os._exit(1)
