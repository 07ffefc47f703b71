"""Signals while other ranks rely on this one: what their handlers do, and raise, comes later."""

from __future__ import annotations

import functools
import signal
from _thread import get_ident
from collections.abc import Callable
from types import FrameType
from typing import Any

from .interrupts import gate

_PACKAGE = __name__.partition(".")[0]


class HeldSignals:
    """Keeps the handlers that a program has set from running, until they are let through.

    A handler may raise on any line, of which the others would never hear. Those of this package do
    not, and are put back meanwhile. Only the main thread runs handlers; in others it does nothing.
    """

    def __init__(self) -> None:
        self._handlers: dict[int, Callable[[int, FrameType | None], Any]] = {}
        self._came: list[Callable[[], Any]] = []

    def hold(self) -> None:
        """Holds them from now on, until `release`."""
        if get_ident() != gate.main_thread:
            return
        for number in signal.valid_signals():
            handler = signal.getsignal(number)
            if callable(handler) and not _is_own(handler):
                self._handlers[number] = handler  # first: one may come now
                signal.signal(number, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._came.append(functools.partial(self._handlers[number], number, frame))

    def let_through(self) -> None:
        """Runs the handlers of those that came; what one raises comes up here."""
        if self._came:
            try:
                self._came.pop(0)()
            finally:
                self.let_through()

    def release(self) -> None:
        """Holds them no more, and lets through what came."""
        try:
            for number in [*self._handlers]:
                if signal.getsignal(number) == self._note:  # the handler may have set another
                    signal.signal(number, self._handlers[number])
                del self._handlers[number]
        finally:
            if self._handlers:  # one has come, and raised
                self.release()
            self.let_through()


def _is_own(handler: object) -> bool:
    return str(getattr(handler, "__module__", "")).partition(".")[0] == _PACKAGE
