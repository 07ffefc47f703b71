"""SIGTERM and SIGUSR1: batch systems send them some time before they end a program."""

from __future__ import annotations

import atexit
import signal
import threading
import weakref
from os import getpid
from types import FrameType
from typing import Any

from ..core.exceptions import ContextError

#: The signals that are listened to.
SIGNALS = (signal.SIGTERM, signal.SIGUSR1)

# Who wants to know. Where nobody is left a signal does again what it did before, but for one that
# comes while the program ends for another.
_listeners: weakref.WeakSet[Any] = weakref.WeakSet()
_before: dict[int, Any] = {}
_process = 0
_arrived = 0
# Whether it has been answered: the program ends.
_is_answered = False


def listen(listener: object) -> None:
    """Makes the signals do nothing but be remembered, for as long as `listener` lives.

    Raises
    ------
    ContextError
        This is not the main thread, which alone may ask for signals.
    """
    global _arrived, _process, _is_answered
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
        if before != _remember:
            _before[number] = before
    _is_answered = False


def arrived() -> int:
    """Returns the number of the signal that has come; 0 where none has."""
    return _arrived


def answer() -> None:
    """Has further signals do nothing in this process: it ends, for the one that has come."""
    global _is_answered
    _is_answered = True


def _ignore_more() -> None:
    """Ignores the signals at the very end, before which Python takes its own handlers away.

    Not sooner: what the program starts meanwhile would ignore them, too.
    """
    if _is_answered and getpid() == _process:
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)


# Behind what the strategies do at the end, and the program, if it has registered that behind its
# import of this package: the last registered is called first.
atexit.register(_ignore_more)


def _remember(number: int, frame: FrameType | None) -> None:
    global _arrived
    # Who forks has a child that can be ended, as those of multiprocessing are by this signal.
    if (_listeners or _is_answered) and getpid() == _process:
        _arrived = _arrived or number
        return
    before = _before.get(number)
    # None stands for a handler that is not Python's, which signal.signal can't put back.
    signal.signal(number, signal.SIG_DFL if before is None else before)
    signal.raise_signal(number)
