"""The end of a job: no rank waits for one that is gone.

While a strategy over several ranks is alive, an uncaught exception ends the job everywhere, and a
program that ends tells the ranks that still make collective calls.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import math
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from os import getpid
from time import monotonic, sleep
from types import TracebackType
from typing import TYPE_CHECKING, cast

from ..collectives.agreement.agreement import Life
from ..collectives.agreement.last_values import require_same_last_values
from ..core.context import open_strategies
from ..core.exceptions import ContextError, RankLostError, in_words, is_reported_here
from ..core.standard_error import write_error
from ..core.tracebacks import printed
from ..ranks.early_end import leave_to_strategies
from ..ranks.held_signals import HeldSignals
from ..ranks.interrupts import gate
from ..ranks.launcher_connection import note_end, tell_end
from ..ranks.survivors import Survivors
from ..ranks.watch.watcher import watcher

if TYPE_CHECKING:
    from ..collectives.engine import Engine
    from ..collectives.strategy_base import StrategyBase

# What ended the program here, and another rank prints.
_left_to_others: list[BaseException] = []
# At the end handlers of signals run only while this rank waits for others; what they have raised.
_signals = HeldSignals()
_held: list[BaseException] = []

_DONE = object()
_POLL_SECONDS = 0.001

# How long a rank that failed waits for the others to hear of it, before it ends them.
_SECONDS_TO_LEAVE = 2.0
# For the others, to write where they are before they are ended.
_SECONDS_TO_WRITE = 0.3

# In the order in which they were made, which is the same on every rank.
_engines: list[Engine] = []
_survivors: list[Survivors] = []
_process = 0
_has_left = False
# Whether an error was printed here that the program has not caught.
_has_printed = False


def shorten_tracebacks() -> None:
    """Has what ends a program of one process printed by the program's frames, too."""
    if sys.excepthook is sys.__excepthook__:  # whoever has put another one there wants that one
        sys.excepthook = _print_alone


def _print_alone(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    write_error(printed(error))


def add_engine(engine: Engine) -> None:
    """Takes care of the end of the job while `engine` is in use."""
    _set_up()
    if engine not in _engines:
        _engines.append(engine)


def add_survivors(survivors: Survivors) -> None:
    """Tells the ranks that may need this one when its program ends."""
    _set_up()
    _survivors.append(survivors)


def _set_up() -> None:
    global _process
    if not _process:
        _process = getpid()
        leave_to_strategies()
        atexit.register(_leave)
        os.register_at_fork(after_in_child=_disown)
        _install_hooks()


def remove_engine(engine: Engine) -> None:
    """Takes care of `engine` no more: all ranks have closed it."""
    if engine in _engines:
        _engines.remove(engine)
    watcher.remove(engine.watch)


def engines() -> tuple[Engine, ...]:
    """Returns those of the strategies in use, in the order in which they were made."""
    return tuple(_engines)


def _disown() -> None:
    """Gives up the strategies in a forked child: its messages would break into its parent's."""
    watcher.forget()
    for engine in _engines:
        engine.agreement.final = ContextError(
            "a strategy was used in a forked child: its connections are those of the parent."
            " Call collectives in the parent, or start children with the spawn method."
        )


def abort(status: int) -> None:
    """Ends the processes of all ranks, after each has written what it called last."""
    watcher.write_flight_records("the job is aborted")
    sleep(_SECONDS_TO_WRITE)
    if not _engines:
        note_end("abort", status)
        tell_end()
        os._exit(status)
    _engines[-1].transport.abort(status)


@functools.cache
def end_with_mpi() -> None:
    """Has all strategies end where the program calls ``MPI.Finalize``: MPI has started."""
    from ..ranks.mpi import call_before_end

    call_before_end(_leave_before_mpi_ends)


def _leave_before_mpi_ends() -> None:
    try:
        _leave()
    finally:  # also where a signal's handler has raised
        for strategy in open_strategies:
            engine = cast("StrategyBase", strategy).engine
            if engine.transport.communicator is not None:
                engine.agreement.final = ContextError(
                    "a strategy was used after MPI.Finalize(), with which it ended. Leave that call"
                    " out: mpi4py makes it at the end of the program."
                )


def _leave() -> None:
    """Leaves, once: at the end of the program, or of MPI, if that comes first."""
    global _has_left
    if _has_left or getpid() != _process:  # a forked child shares nothing with MPI
        return
    _has_left = True
    gate.close()  # Ctrl-C in between would leave without a word
    try:
        _signals.hold()
        _leave_undisturbed()
    finally:
        gate.open()
        _signals.release()
    if _held:
        raise _held[0]


def _leave_undisturbed() -> None:
    broken = [e.agreement for e in _engines if e.agreement.life is Life.BROKEN]
    if broken:
        # MPI would wait for the message in flight, and so for a rank that may never come.
        if _left_to_others:
            sleep(_SECONDS_TO_LEAVE)  # the rank that prints it ends the job
            _print_what_was_left()
        elif not _has_printed and broken[0].final is not None:  # the program has caught it
            _write(
                "the job ends, since a strategy can't be used any more:"
                f" {in_words(broken[0].final)}\n"
            )
        abort(1)
    _tell_that_it_ends()
    _compare_clocks()
    if any(engine.agreement.others_stay for engine in _engines):
        # The rank that would have printed it has caught it, and goes on.
        _print_what_was_left()
    _go_through([one.part() for one in _survivors])
    if gate.take() and _engines:  # Ctrl-C, held during the last exchange
        abort(128 + signal.SIGINT)
    watcher.stop()


def _compare_clocks() -> None:
    """Compares the clocks of traced ranks a last time, where all of them end."""
    for engine in _engines:
        if engine.agreement.all_have_left and engine.agreement.are_clocks_due:
            with contextlib.suppress(RankLostError):
                engine.watch.recorder.compare_clocks()


def _tell_that_it_ends(cause: str = "", seconds: float = math.inf) -> bool:
    """Tells the other ranks that this one ends; returns whether all of them know in time."""
    limit = monotonic() + seconds
    for survivors in _survivors:
        survivors.say_farewell(cause)
    # All at once: another rank may be in a call of the second strategy, and leave the first later.
    ending = [engine for engine in _engines if engine.may_end_here()]
    largest = max(ending, key=lambda engine: engine.layout.size, default=None)
    left = [_leaving(engine, cause, is_seen=engine is largest) for engine in ending]
    try:
        all_know = _go_through(left, limit)
        for engine in ending:  # in one order, since a rank waits here
            require_same_last_values(engine.agreement, engine.transport, engine.layout)
    except Exception as error:
        # Of one that all ranks have, one prints it and ends the job; others give it time for that.
        # Of any other one nobody else can be told: they would wait for ever.
        if is_reported_here(error) is False:
            sleep(_SECONDS_TO_LEAVE)
        _print(error)
        abort(1)
    return all_know


def _leaving(engine: Engine, cause: str, *, is_seen: bool) -> Iterator[None]:
    """Leaves a strategy; in one of them the watchers see how long this rank waits."""
    engine.watch.is_leaving, engine.watch.leaves_in_time = is_seen, bool(cause)
    try:
        yield from engine.agreement.leaving(cause)
    finally:
        engine.watch.is_leaving = False


def _go_through(waits: list[Iterator[None]], limit: float = math.inf) -> bool:
    """Comes to the end of all waits; returns whether that was before the time `limit`."""
    while waits:
        waits = [one for one in waits if next(one, _DONE) is not _DONE]
        if waits and monotonic() > limit:
            return False
        try:
            _signals.let_through()
            sleep(_POLL_SECONDS if waits else 0)
        except BaseException as error:  # of a signal's handler: others wait for this rank
            _held.append(error)
    return True


def _print_what_was_left() -> None:
    for error in _left_to_others:
        _print(error)


def _install_hooks() -> None:
    previous, previous_in_thread = sys.excepthook, threading.excepthook
    is_own = previous not in (sys.__excepthook__, _print_alone)

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if getpid() != _process or not _engines or _is_called_by_program():
            previous(kind, error, trace)
            return
        gate.close()  # Ctrl-C in between would cut short what is printed
        try:
            is_here = is_reported_here(error)
            if is_own:  # what a program has put there does more than to print: on each rank
                _call_own(error, lambda: previous(kind, error, trace))
            elif is_here is not False:
                _print(error)
            if is_here is None:
                _end_alone(error)
            elif not is_here:
                _left_to_others.append(error)
        finally:
            gate.open()

    def thread_hook(arguments: threading.ExceptHookArgs) -> None:
        error = arguments.exc_value
        communicates = any(engine.is_of_this_thread() for engine in _engines)
        if getpid() != _process or not communicates or error is None:
            previous_in_thread(arguments)
        elif not isinstance(error, SystemExit):  # which ends a thread without a word
            if is_reported_here(error) is False:
                sleep(_SECONDS_TO_LEAVE)  # the rank that prints it ends the job
            if previous_in_thread is threading.__excepthook__:
                _print(error)
            else:
                _call_own(error, lambda: previous_in_thread(arguments))
            _end_alone(error)

    sys.excepthook = hook
    threading.excepthook = thread_hook


def _is_called_by_program() -> bool:
    """Returns whether a program calls the hook itself, with an error that it has caught.

    As a console does, and a loop of events. Python calls it where the program runs no more, and so
    does what runs a program for it, as ``coverage run``.
    """
    if threading.current_thread() is not threading.main_thread():
        return True
    names, frame = vars(sys.modules["__main__"]), sys._getframe()
    while frame.f_globals is not names:
        if frame.f_back is None:
            return False
        frame = frame.f_back
    return True


def _call_own(error: BaseException, hook: Callable[[], object]) -> None:
    """Calls the hook that the program had put there before."""
    global _has_printed
    _has_printed = True
    try:
        hook()
    except BaseException as failure:  # code of the program
        _print(failure)
        _print(error)


def _end_alone(error: BaseException) -> None:
    """Ends with an error that only this rank has; others may wait for it for ever."""
    all_know = _tell_that_it_ends(in_words(error), _SECONDS_TO_LEAVE)
    if any(engine.is_spare for engine in _engines):  # the others would wait for it after a loss
        all_know = False
    if not all_know or threading.current_thread() is not threading.main_thread():
        abort(128 + signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1)  # as Python ends


def _print(error: BaseException) -> None:
    global _has_printed
    _has_printed = True
    _write(printed(error))


def _write(text: str) -> None:
    # Ranks are named as in the strategy of most of them, and so alike, whoever prints.
    layout = max((engine.layout for engine in _engines), key=lambda layout: layout.size)
    write_error(f"[rank {layout.rank} of {layout.size}] {text}")
