"""Signals while other ranks rely on this one: what their handlers do, and raise, comes later."""

from __future__ import annotations

import functools
import signal
from _thread import get_ident
from collections.abc import Callable
from types import FrameType
from typing import Any, NoReturn

from .interrupts import gate

_PACKAGE = __name__.partition(".")[0]


class HeldSignals:
    """Keeps the handlers that a program has set from running, until they are let through.

    A handler may raise on any line, of which the others would never hear. Those of this package do
    not, and are put back meanwhile. Only the main thread runs handlers; in others it does nothing.
    What `faulthandler.register` has put before a handler of Python's does not come back.
    """

    def __init__(self) -> None:
        self._handlers: dict[int, Callable[[int, FrameType | None], Any]] = {}
        self._came: list[Callable[[], Any]] = []

    def hold(self) -> None:
        """Holds them from now on, until `release`."""
        if get_ident() != gate.main_thread:
            return
        is_whole = False
        while not is_whole:
            try:
                for number in signal.valid_signals():
                    handler = signal.getsignal(number)
                    if callable(handler) and not _is_own(handler):
                        self._handlers[number] = handler  # first: one may come now
                        signal.signal(number, self._note)
                is_whole = True
            except BaseException as error:  # of a handler that is not held yet
                self._came.append(functools.partial(_raise, error))

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._came.append(functools.partial(self._handlers[number], number, frame))

    def let_through(self) -> None:
        """Runs the handlers of those that came; what the first one raises comes up here."""
        raised = None
        while self._came:
            try:
                self._came.pop(0)()
            except BaseException as error:
                raised = raised or error
        if raised is not None:
            try:
                raise raised
            finally:
                del raised  # its traceback holds this frame

    def release(self) -> None:
        """Holds them no more, and lets through what came."""
        while self._handlers:
            try:
                for number in [*self._handlers]:
                    if signal.getsignal(number) == self._note:  # the handler may have set another
                        signal.signal(number, self._handlers[number])
                    del self._handlers[number]
            except BaseException as error:  # of a handler that is held no more
                self._came.append(functools.partial(_raise, error))
        self.let_through()


def _is_own(handler: object) -> bool:
    return str(getattr(handler, "__module__", "")).partition(".")[0] == _PACKAGE


def _raise(error: BaseException) -> NoReturn:
    raise error
