"""What is written to stderr, where a program may have put anything."""

from __future__ import annotations

import contextlib
import sys
from typing import Any


def write_error(text: str) -> None:
    """Writes to the program's stderr; to Python's own where that is None, closed or takes no text.

    It never fails: what follows may be the end of the job, for which others wait.
    """
    streams: tuple[Any, ...] = (sys.stderr, sys.__stderr__)
    for stream in streams:
        with contextlib.suppress(Exception):
            stream.write(text)
            with contextlib.suppress(Exception):  # what takes texts for a logger may have none
                stream.flush()
            return
