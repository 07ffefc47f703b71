"""SIGUSR2: where it is free, every rank that gets it prints where it is.

Python runs a signal's handler in the main thread, when that comes back from C code. The byte that
its C handler writes to the wakeup file descriptor is there at once, whatever the main thread does.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from types import FrameType

_SIGNAL = getattr(signal, "SIGUSR2", None)


class StackSignal:
    """Tells the watcher that SIGUSR2 has come."""

    def __init__(self) -> None:
        self._is_installed = False
        # How often the handler has run, and how many of these times the pipe has told before.
        self._handled = 0
        self._heard_of = 0
        self._read = self._write = -1

    def install(self) -> None:
        """Takes the signal, unless the program or the batch system uses it."""
        if _SIGNAL is None or threading.current_thread() is not threading.main_thread():
            return
        if signal.getsignal(_SIGNAL) is not signal.SIG_DFL or _is_caught(_SIGNAL):
            return
        signal.signal(_SIGNAL, self._handle)
        self._is_installed = True
        self._read, self._write = os.pipe()
        os.set_blocking(self._read, False)
        os.set_blocking(self._write, False)
        before = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        if before != -1:  # an event loop's; the handler will do, if a little later
            signal.set_wakeup_fd(before)

    def remove(self) -> None:
        """Gives the signal back."""
        if not self._is_installed or threading.current_thread() is not threading.main_thread():
            return
        self._is_installed = False
        if signal.getsignal(_SIGNAL) == self._handle:  # type: ignore[arg-type]
            signal.signal(_SIGNAL, signal.SIG_DFL)  # type: ignore[arg-type]
        current = signal.set_wakeup_fd(-1)
        if current not in (-1, self._write):
            signal.set_wakeup_fd(current)
        os.close(self._read)
        os.close(self._write)
        self._read = self._write = -1

    def take(self) -> bool:
        """Returns whether the signal has come since the last time."""
        handled, self._handled = self._handled, 0
        bytes_read = b""
        if self._read != -1:
            with contextlib.suppress(OSError):  # nothing there
                bytes_read = os.read(self._read, 4096)  # a byte for each signal of any kind
        come = bytes_read.count(_SIGNAL or 0)
        if not self._is_installed or signal.getsignal(_SIGNAL) != self._handle:  # type: ignore[arg-type]
            return False  # the program has taken it since
        is_news = come > 0 or handled > self._heard_of
        self._heard_of = max(0, self._heard_of + come - handled)
        return is_news

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._handled += 1


def _is_caught(number: int) -> bool:
    """Returns whether C code handles the signal, as far as the system tells."""
    try:
        with open("/proc/self/status", encoding="ascii") as file:
            masks = dict(line.split(":", 1) for line in file if line.startswith("Sig"))
        return bool(int(masks["SigCgt"], 16) >> (number - 1) & 1)
    except (OSError, KeyError, ValueError):
        return False
