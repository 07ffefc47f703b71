"""Where the threads of this process are."""

from __future__ import annotations

import gc
import sys
from types import FrameType


def current_frames() -> dict[int, FrameType]:
    """Returns the innermost frame of each thread, by its id.

    Before Python 3.12 garbage is collected while they are listed, under a lock that threads take
    when they begin and end. Code of the program that runs then, a finalizer say, may give way to
    such a thread, and both wait for ever (CPython's issue 106883).
    """
    if sys.version_info >= (3, 12) or not gc.isenabled():
        return sys._current_frames()
    gc.disable()
    try:
        return sys._current_frames()
    finally:
        gc.enable()
