"""Does what calls want of the other ranks, and says what becomes of an error.

================================  ============================  ==================================
where                             an error of the call's code   an error of an exchange
================================  ============================  ==================================
`prepare`, also in an `Agree`     all ranks raise it, and the   (none stands there)
                                  strategy works on
`steps`                           the strategy is over here;    the same
                                  the waits of others end, or
                                  the job, where MPI blocks
`answer`                          the replica's own             (none stands there)
================================  ============================  ==================================

It alone knows transport, limits, Ctrl-C and the recorder, and it knows no kind of call.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Mapping, Sequence
from types import GeneratorType
from typing import Any, NoReturn

from ...core.exceptions import ContextError
from ...core.layout import Layout
from ...ranks import Transport, WaitGivenUpError
from ...ranks.interrupts import gate
from ...ranks.watch.recorder import FlightRecorder
from .agreement import Agreement
from .call import Call
from .group import Group
from .judgement import Promotion, Verdict
from .stand import Stand
from .steps import Agree, Raise

_AGREED = -1  # which no count of exchanges is


class Driver:
    """Performs the calls of this rank's replicas, one after the other.

    Parameters
    ----------
    transport : Transport
    layout : Layout
    agreement : Agreement
        Of the same ranks.
    recorder : FlightRecorder
        Keeps the last calls.
    """

    def __init__(
        self, transport: Transport, layout: Layout, agreement: Agreement, recorder: FlightRecorder
    ) -> None:
        self._transport = transport
        self.recorder = recorder
        self.agreement = agreement
        self.group = Group(
            layout,
            transport.hosts,
            agreement.sizes,
            is_crowded=transport.is_crowded,
            is_between_hosts=transport.is_between_hosts,
            notes=agreement.notes,
        )
        #: The thread that performs calls.
        self.thread = 0
        # Held from a header to the end of its call: another thread may only tell of its mistake
        # between two calls.
        self._lock = threading.RLock()

    def perform(self, calls: Sequence[Call]) -> list[Any]:
        """Performs calls of the local replicas, and returns a result for each.

        A signal's handler may raise on any line: that is why all of them stand in a ``try``.
        """
        first = calls[0]
        agreement, transport, recorder = self.agreement, self._transport, self.recorder
        if recorder.latest[2] is None:
            self._require_idle()
        # How many exchanges were begun when this rank came to the agreement that is the next, or
        # was the last one; None before. `_AGREED`: the ranks have agreed, and none can be told.
        begun: int | None = None
        is_second, undo = False, None  # whether the ranks have agreed once: the others wait then
        is_main = self.thread == gate.main_thread
        gate.depth += is_main
        try:
            with self._lock:
                try:
                    transport.timeout_seconds = first.options.timeout_seconds
                    recorder.begin(first.text or first.title, transport.timeout_seconds)
                    if len(calls) > 1 or not first.agrees:
                        self._require_one_call(calls)
                    prepared = first.prepare(self.group, calls)
                    if prepared is None:  # nothing travels
                        agreement.refuse_if_over()
                    else:
                        payload, prepared = prepared
                        begun = transport.steps
                        agreement.agree(calls, payload)
                        begun = _AGREED
                        if recorder.is_clock_due and agreement.are_clocks_due:
                            recorder.compare_clocks()
                    results = first.steps(self.group, calls, prepared)
                    if type(results) is GeneratorType:
                        steps, answer = results, None
                        while True:
                            try:
                                step = steps.send(answer)
                            except StopIteration as end:
                                results = end.value
                                break
                            if type(step) is Agree:
                                begun, is_second, undo = None, True, step.undo
                                payload, answer = step.prepare()
                                begun = transport.steps
                                agreement.agree(calls, payload, is_begun=True)
                                begun, undo = _AGREED, None
                            elif type(step) is Raise:
                                agreement.raise_agreed(step.error, Verdict("raise", step.error))
                            else:
                                answer = step.exchange(transport)
                except Promotion as promotion:
                    recorder.end()  # it is another call from here on
                    for call in calls:
                        call.promote(promotion.change)
                    return self.perform(calls)
                except BaseException as error:
                    try:
                        recorder.note_error(error)
                        self._tell_or_break_off(error, calls, begun, is_second)
                    except BaseException as other:  # a signal's handler, where it was to be told
                        if self._is_dealt_with(other, error):
                            raise
                        self._tell_or_break_off(other, calls, begun, is_second)
                    finally:
                        if undo is not None and agreement.final is None:
                            undo()
                finally:
                    if self.group.pool.is_used:
                        self.group.pool.end_call()
                    recorder.end()
                    transport.timeout_seconds = None
                return first.answer(calls, results)
        finally:
            gate.depth -= is_main

    def _tell_or_break_off(
        self, error: BaseException, calls: Sequence[Call], begun: int | None, is_second: bool
    ) -> NoReturn:
        """Raises `error`: on all ranks, where they can be told; else the strategy is over.

        What is no `Exception` is told only where the ranks have agreed once: before that nobody
        knows of the call, which this rank may make again.
        """
        agreement, transport = self.agreement, self._transport
        if agreement.is_agreed(error):
            raise error
        if isinstance(error, WaitGivenUpError):
            agreement.time_out(calls[0])
        is_untold = begun is None or (begun == transport.steps and not transport.is_in_flight)
        if not is_untold and transport.size > 1:
            agreement.break_off(error)
        elif is_second or isinstance(error, Exception):
            self._report_failure(calls, error)
        raise error

    def report_failure(self, calls: Sequence[Call], error: BaseException) -> NoReturn:
        """Raises `error` on every rank: it came up here in the calls, before their header."""
        self._require_idle()
        self._report_failure(calls, error)

    def _report_failure(self, calls: Sequence[Call], error: BaseException) -> NoReturn:
        begun = self._transport.steps
        try:
            self._tell(calls, error)
        except BaseException as other:  # a signal's handler: the others still wait
            if self._is_dealt_with(other, error) or self._transport.steps > begun:
                raise
            self._tell(calls, other)

    def _tell(self, calls: Sequence[Call], error: BaseException) -> NoReturn:
        self._report(*self.agreement.failure(calls, error))

    def _is_dealt_with(self, other: BaseException, error: BaseException) -> bool:
        """Returns whether `other` is what came of `error`, and not of a signal's handler."""
        return other is error or self.agreement.is_agreed(other)

    def report(
        self, stands: Sequence[Stand], originals: Mapping[int, BaseException], first: Call
    ) -> NoReturn:
        """Tells the other ranks where the local replicas stand; see `Agreement.report`."""
        self._require_idle()
        self._report(stands, originals, first)

    def _report(
        self, stands: Sequence[Stand], originals: Mapping[int, BaseException], first: Call
    ) -> NoReturn:
        agreement, transport = self.agreement, self._transport
        begun = transport.steps
        is_main = self.thread == gate.main_thread
        gate.depth += is_main
        try:
            with self._lock:
                try:
                    transport.timeout_seconds = first.options.timeout_seconds
                    self.recorder.end()  # the call that is reported
                    self.recorder.begin(first.title, transport.timeout_seconds)
                    self.recorder.errors = [one.error.told for one in stands if one.error]
                    agreement.report(stands, originals, first)
                except Promotion:
                    raise
                except WaitGivenUpError:
                    agreement.time_out(first, next(iter(originals.values()), None))
                except BaseException as error:
                    is_begun = transport.steps > begun or transport.is_in_flight
                    if is_begun and not agreement.is_agreed(error):
                        agreement.break_off(error)
                    if error is transport.loss:
                        agreement.untold = next(iter(originals.values()), None)
                    raise
                finally:
                    self.recorder.end()
                    self.recorder.errors = ()
                    transport.timeout_seconds = None
        finally:
            gate.depth -= is_main

    def _require_one_call(self, calls: Sequence[Call]) -> None:
        """Tells the other ranks where the local replicas are at different calls."""
        first = calls[0]
        for call in calls:
            if not call.agrees or call.fingerprint != first.fingerprint:
                self._report_apart(calls)

    def _report_apart(self, calls: Sequence[Call]) -> NoReturn:
        """Tells the others, replica by replica, what a call's components on this rank are."""
        ordinal = self.agreement.run_ordinal
        stands = [
            Stand((replica,), call.status, call.describe(position), None, ordinal)
            for call in calls
            for position, replica in enumerate(call.replica_ids)
        ]
        self._report(stands, {}, calls[0])

    def _require_idle(self) -> None:
        """Raises where this is called by what has interrupted a call: that uses the same memory.

        Raises
        ------
        ContextError
            It is.
        """
        if self.recorder.latest[2] is not None:
            return
        frame = sys._getframe(1).f_back
        while frame is not None:  # a handler that raised may have kept a call from its end
            if frame.f_code in _OF_CALLS and frame.f_locals["self"] is self:
                raise in_the_middle_of(self.recorder.latest[0])
            frame = frame.f_back


#: The code whose frames are there while a call goes on.
_OF_CALLS = {Driver.perform.__code__, Driver._report.__code__}


def in_the_middle_of(call: str) -> ContextError:
    """Returns the error for a call that is made by what has interrupted another one."""
    return ContextError(
        f"a collective was called in the middle of {call}, as by a handler of a signal, a __del__,"
        " a callback of the garbage collector, or an object that is packed for it: both would take"
        " what the other one gets. Note there what is to be done, and do it before that call or"
        " after it."
    )
