"""Compiled functions of JAX that have collectives, while they run.

A compiled function comes to a collective in whatever thread XLA has for it, while that of the
replica waits for the function. Replicas of a rank run one at a time: so it is the call of the one
that waits, and has not called already.
"""

from __future__ import annotations

import threading
from _thread import get_ident
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

from ..collectives.agreement.site import call_site
from ..collectives.strategy_base import StrategyBase
from ..core import jax_internals
from ..core.context import current_state, current_strategy
from ..core.exceptions import ContextError
from ..core.thread_owners import forget_thread, owner_of_this_thread, stand_in_for
from ..ranks.interrupts import gate
from .replica import Replica
from .turns import error_that_arrived

T = TypeVar("T")


class _StopError(Exception):
    """Stops a compiled function: what came up is raised where the replica waits for it."""


class JaxExecution:
    """A run of a compiled function, which a replica waits for."""

    def __init__(self, context: Replica) -> None:
        self.context = context
        self.site = call_site()
        self.owner = owner_of_this_thread()
        self.thread = get_ident()
        #: Whether it is in a call.
        self.is_calling = False
        #: What came up in a call; there is none after it.
        self.error: BaseException | None = None
        # Held in a call.
        self._lock = threading.Lock()
        self._is_over = False

    def perform(self, call: Callable[[], T]) -> T:
        """Returns what `call` returns, called for the replica that waits."""
        with self._lock:
            if self.error is not None or self._is_over:
                raise _StopError
            ident = get_ident()
            is_elsewhere = ident != self.thread
            if is_elsewhere:
                stand_in_for(self.owner)
            self.is_calling = True
            try:
                return call()
            except BaseException as error:
                self.error = error
                raise _StopError from None
            finally:
                self.is_calling = False
                if is_elsewhere:
                    forget_thread(ident)

    def run(self, execute: Callable[[], T]) -> T:
        """Runs the function; an error of a call comes up here, where it belongs to the replica."""
        try:
            result = execute()
        except BaseException as error:
            self._end()
            if self.error is None:
                _raise_interrupt(error)
                raise
        else:
            self._end()
            if self.error is None:
                return result
        if self.context.place is not None:
            self.context.place.settle()
        try:
            raise self.error
        finally:
            self.error = None  # its traceback holds this frame

    def _end(self) -> None:
        """Lets no more calls begin, and waits for one that is under way."""
        with self._lock:
            self._is_over = True


def _raise_interrupt(error: BaseException) -> None:
    """Raises what a signal's handler has raised in a callback: JAX makes an error of its own of it.

    In a program's own callback, say, which runs in the thread of the replica.
    """
    if type(error).__name__ not in ("JaxRuntimeError", "XlaRuntimeError"):
        return
    if "\nKeyboardInterrupt" in str(error):
        raise KeyboardInterrupt from error
    if "\nCarrier" in str(error) and (arrived := error_that_arrived()) is not None:
        raise arrived from error


_under_way: list[JaxExecution] = []
# Held by who changes it.
_changes = threading.Lock()


def replica_here() -> Replica:
    """Returns the replica whose code runs a function with collectives."""
    state = current_state()
    if state is None:
        return Replica(cast("StrategyBase", current_strategy()), 0)
    if state.replica_context is None:
        raise ContextError(
            "a function with collectives of replicas, which JAX has traced, is called in"
            " cross-replica context. Call it in the function that is given to strategy.run."
        )
    return cast("Replica", state.replica_context)


def execution_under_way() -> JaxExecution:
    """Returns the execution that has come to a collective; called in whatever thread."""
    waiting = [execution for execution in _under_way if not execution.is_calling]
    here = [execution for execution in waiting if execution.thread == get_ident()]
    if len(here or waiting) == 0:
        raise _StopError  # a signal's handler has raised in the replica, which does not wait
    return (here or waiting)[-1]


def _run_compiled(execute: Callable[[], Any], devices: Sequence[Any]) -> Any:
    execution = JaxExecution(replica_here())
    place = execution.context.place
    if place is not None:
        place.check_devices(devices)
    with _changes:
        if any(other.owner != execution.owner for other in _under_way):
            raise ContextError(
                "compiled functions of JAX with collectives in them run in two threads, for two"
                " strategies, at the same time: each may hold the device that the other one needs."
                " Run them one after the other."
            )
        _under_way.append(execution)
    if place is not None:
        gate.close()
    try:
        return execution.run(execute)
    finally:
        if place is not None:
            gate.open()
        with _changes:
            _under_way.remove(execution)


jax_internals.run_compiled = _run_compiled
