"""SIGTERM and SIGUSR1: batch systems send them some time before they end a program."""

from __future__ import annotations

import signal
import threading
import weakref
from os import getpid
from types import FrameType
from typing import Any

from ..core.exceptions import ContextError

#: The signals that are listened to.
SIGNALS = (signal.SIGTERM, signal.SIGUSR1)

# Who wants to know. Where nobody is left a signal does again what it did before.
_listeners: weakref.WeakSet[Any] = weakref.WeakSet()
_before: dict[int, Any] = {}
_process = 0
_arrived = 0
_is_ignored = False


def listen(listener: object) -> None:
    """Makes the signals do nothing but be remembered, for as long as `listener` lives.

    Raises
    ------
    ContextError
        This is not the main thread, which alone may ask for signals.
    """
    global _arrived, _process, _is_ignored
    if threading.current_thread() is not threading.main_thread():
        raise ContextError(
            "save_on_signal=True was asked for in another thread than the main one, which alone is"
            " told of signals. Make the CheckpointManager in the main thread."
        )
    if not _listeners:
        _arrived = 0
    _listeners.add(listener)
    _process = getpid()
    for number in SIGNALS:
        before = signal.signal(number, _remember)
        if before != _remember and not (_is_ignored and before is signal.SIG_IGN):
            _before[number] = before
    _is_ignored = False


def arrived() -> int:
    """Returns the number of the signal that has come; 0 where none has."""
    return _arrived


def ignore_more() -> None:
    """Ignores the signals from now on: the program ends, for one that has come.

    Python takes its own handlers away before the end, behind which another signal would end the
    process in another way, and cut its end short.
    """
    global _is_ignored
    if threading.current_thread() is threading.main_thread() and getpid() == _process:
        _is_ignored = True
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)


def _remember(number: int, frame: FrameType | None) -> None:
    global _arrived
    # Who forks has a child that can be ended, as those of multiprocessing are by this signal.
    if _listeners and getpid() == _process:
        _arrived = _arrived or number
        return
    before = _before.get(number)
    # None stands for a handler that is not Python's, which signal.signal can't put back.
    signal.signal(number, signal.SIG_DFL if before is None else before)
    signal.raise_signal(number)
