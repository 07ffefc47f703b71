"""The end of a job: no rank waits for one that is gone.

While a strategy over several ranks is alive, an uncaught exception ends the job everywhere, and a
program that ends tells the ranks that still make collective calls.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
import time
import traceback
from types import TracebackType
from typing import TYPE_CHECKING

from .errors import ContextError
from .interrupts import gate

if TYPE_CHECKING:
    from .collectives.engine import Engine

__all__ = ["engines", "forget", "remember"]

# What ended the program here, and another rank prints.
_left_to_others: list[BaseException] = []

_DONE = object()
_POLL_SECONDS = 0.001

# In the order in which they were made, which is the same on every rank.
_engines: list[Engine] = []
_process = 0


def remember(engine: Engine) -> None:
    """Take care of the end of the job while `engine` is in use."""
    global _process
    if not _process:
        _process = os.getpid()
        atexit.register(_leave)
        os.register_at_fork(after_in_child=_disown)
        _install_hooks()
    _engines.append(engine)


def forget(engine: Engine) -> None:
    """`engine` was closed by all ranks."""
    if engine in _engines:
        _engines.remove(engine)


def engines() -> tuple[Engine, ...]:
    """Return those of the strategies in use, in the order in which they were made."""
    return tuple(_engines)


def _disown() -> None:
    """In a forked child: a message of its own would break into those of its parent."""
    for engine in _engines:
        engine.agreement.final = ContextError(
            "a strategy was used in a forked child: its connections are those of the parent."
            " Call collectives in the parent, or start children with the spawn method."
        )


def _leave() -> None:
    if os.getpid() != _process:  # a forked child shares nothing with MPI
        return
    for engine in _engines:
        if engine.agreement.has_message_in_flight:
            # MPI would wait for the message in flight, and so for a rank that may never come.
            engine.transport.abort(1)
    # All at once: another rank may be in a call of the second strategy, and leave the first later.
    left = [engine.agreement.leaving() for engine in _engines if engine.is_in_its_thread()]
    while left:
        left = [one for one in left if next(one, _DONE) is not _DONE]
        time.sleep(_POLL_SECONDS if left else 0)
    for error in _left_to_others:
        if any(engine.agreement.others_stay for engine in _engines):
            # The rank that would have printed it has caught it, and goes on.
            layout = _engines[-1].layout
            _print(error, layout.rank, layout.size)
    if gate.take() and _engines:  # Ctrl-C, held during the last exchange
        _engines[-1].transport.abort(128 + signal.SIGINT)


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
        error = arguments.exc_value
        communicates = any(engine.is_in_its_thread() for engine in _engines)
        if os.getpid() != _process or not communicates or error is None:
            previous_in_thread(arguments)
        elif not isinstance(error, SystemExit):  # which ends a thread without a word
            _end_alone(error)

    previous_in_thread = threading.excepthook
    sys.excepthook = hook
    threading.excepthook = thread_hook


def _end_agreed(error: BaseException, reporter: int) -> None:
    """Every rank ends by itself with this error: one of them prints it whole."""
    layout = _engines[-1].layout
    if layout.rank == reporter:
        _print(error, layout.rank, layout.size)
    else:
        _left_to_others.append(error)


def _end_alone(error: BaseException) -> None:
    """No other rank knows of this error, and some may wait for this one for ever."""
    engine = _engines[-1]
    _print(error, engine.layout.rank, engine.layout.size)
    engine.transport.abort(1)


def _print(error: BaseException, rank: int, size: int) -> None:
    text = "".join(traceback.format_exception(error))
    sys.stderr.write(f"[rank {rank} of {size}] {text}")
    sys.stderr.flush()
