"""The end of a job: no rank waits for one that is gone.

While a strategy over several ranks is alive, an uncaught exception ends the job everywhere, and a
program that ends tells the ranks that still make collective calls.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import traceback
from types import TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .collectives.engine import Engine

__all__ = ["forget", "remember"]

# In the order in which they were made, which is the same on every rank.
_engines: list[Engine] = []
_process = 0


def remember(engine: Engine) -> None:
    """Take care of the end of the job while `engine` is in use."""
    global _process
    if not _process:
        _process = os.getpid()
        atexit.register(_leave)
        _install_hooks()
    _engines.append(engine)


def forget(engine: Engine) -> None:
    """`engine` was closed by all ranks."""
    if engine in _engines:
        _engines.remove(engine)


def _leave() -> None:
    if os.getpid() != _process:  # a forked child shares nothing with MPI
        return
    for engine in _engines:
        if engine.agreement.has_message_in_flight:
            # MPI would wait for the message in flight, and so for a rank that may never come.
            engine.transport.abort(1)
        engine.agreement.leave()


def _install_hooks() -> None:
    previous = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if os.getpid() != _process or not _engines:
            previous(kind, error, trace)
        elif reporter := getattr(error, "_mpi_replica_rank_that_reports", None):
            _end_agreed(error, reporter[0])
        else:
            _end_alone(error)

    def thread_hook(arguments: threading.ExceptHookArgs) -> None:
        if os.getpid() != _process or not _engines or arguments.exc_value is None:
            previous_in_thread(arguments)
        else:
            _end_alone(arguments.exc_value)

    previous_in_thread = threading.excepthook
    sys.excepthook = hook
    threading.excepthook = thread_hook


def _end_agreed(error: BaseException, reporter: int) -> None:
    """Every rank ends by itself with this error: one of them prints it."""
    layout = _engines[-1].layout
    if layout.rank == reporter:
        _print(error, layout.rank, layout.size)


def _end_alone(error: BaseException) -> None:
    """No other rank knows of this error, and some may wait for this one for ever."""
    engine = _engines[-1]
    _print(error, engine.layout.rank, engine.layout.size)
    engine.transport.abort(1)


def _print(error: BaseException, rank: int, size: int) -> None:
    text = "".join(traceback.format_exception(error))
    sys.stderr.write(f"[rank {rank} of {size}] {text}")
    sys.stderr.flush()
