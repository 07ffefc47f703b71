"""Ctrl-C while the ranks agree: held, and told to all of them at the next call.

An interrupt in the middle of an exchange would leave a message in flight that can't be taken
back, and the other ranks waiting. Where no call follows for a while, it comes up as any other.
"""

from __future__ import annotations

import math
import os
import signal
import threading
from _thread import get_ident  # looked up at every collective
from collections.abc import Callable
from os import getpid
from types import FrameType
from typing import Any

from ..core.thread_owners import owner_of_this_thread

_SECONDS_TO_NEXT_CALL = 1.0


class InterruptGate:
    """Holds SIGINT back while it is closed; nests. Only the main thread gets signals."""

    def __init__(self) -> None:
        #: How often it was closed without being opened. Changed by the main thread alone.
        self.depth = 0
        #: Whether an interrupt was held back, for `take`.
        self.is_pending = False
        #: The ident of the main thread.
        self.main_thread = threading.main_thread().ident
        self._installed = False
        #: When one that is held comes up.
        self._due = math.inf
        #: Called for a second interrupt while one is held.
        self.abort: Callable[[int], Any] | None = None

    def install(self, abort: Callable[[int], Any]) -> None:
        """Puts the gate before Python's own handler of SIGINT; a program's own handler stays."""
        self.abort = abort
        if self._installed or get_ident() != self.main_thread:
            return
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, self._handle)
            self._installed = True

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.depth == 0:
            self.is_pending = False
            raise KeyboardInterrupt
        if self.is_pending and self.abort is not None:
            self.abort(128 + number)
        self.is_pending = True

    def close(self) -> None:
        """Holds interrupts back from now on, until `open` was called as often as this."""
        if get_ident() == self.main_thread:
            self.depth += 1

    def open(self) -> None:
        """Lets interrupts through; one that was held back waits for `take`."""
        if get_ident() == self.main_thread:
            self.depth -= 1

    def take(self) -> bool:
        """Returns whether an interrupt was held back, and forgets it."""
        is_main = owner_of_this_thread() == self.main_thread
        # No call in between: the watcher's thread would have its turn there.
        if is_main and self.is_pending:
            self.is_pending = False
            return True
        return False

    def let_through(self, now: float) -> None:
        """Has one that is held come up in the program, where no call takes it; by the watcher."""
        if not self.is_pending or self.depth:
            self._due = math.inf
        elif self._due == math.inf:
            self._due = now + _SECONDS_TO_NEXT_CALL
        elif now >= self._due and self.is_pending:
            self.is_pending = False
            # Which the main thread gets: it ends a sleep, too.
            os.kill(getpid(), signal.SIGINT)


#: The one gate of the process, since a process has one handler of SIGINT.
gate = InterruptGate()


def is_of_signal_handler(error: BaseException, caller: str) -> bool:
    """Returns whether a signal's handler has raised `error` during a call of MPI.

    Parameters
    ----------
    error : BaseException
        With its traceback.
    caller : str
        The file of the code that called MPI.
    """
    step = error.__traceback__
    while step is not None and step.tb_next is not None:
        step = step.tb_next
    file = "" if step is None else step.tb_frame.f_code.co_filename
    return file != caller and not file.endswith((".pyx", ".pxi"))  # mpi4py's own frames
