"""What a strategy communicates with: transport, layout, agreement, options and scratch memory."""

from __future__ import annotations

import contextvars
import functools
import itertools
import pickle
import sys
import threading
import weakref
from _thread import get_ident
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, TypeVar

import numpy as np

from ..errors import ContextError, text_of
from ..interrupts import gate
from ..layout import Layout
from ..options import CommunicationOptions
from ..transport import Transport, WaitGivenUpError
from ..watch import Channel
from . import travel
from .agreement import INLINE_BYTES, Agreement
from .call import Call, FailedCall
from .callsite import call_site
from .guards import Irrevocable, Moving
from .inline import InlineReductions
from .judgement import Promotion
from .ordered.choosing import Exchanges
from .ordered.exchanges import Exchange
from .standing import Stand

__all__ = ["Engine"]

T = TypeVar("T")


class Engine:
    """Performs collective calls for the replicas of this rank."""

    def __init__(self, transport: Transport, layout: Layout, options: CommunicationOptions) -> None:
        self.options = options
        #: How many variables were made, and the objects for them that are in use, by their ``id``:
        #: replicas of a rank that make one together have an object each.
        self.num_variables = 0
        self.variables: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        #: The distributed datasets that are in use, by the order in which they were made.
        self.datasets: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        self._dataset_numbers = itertools.count()
        self._thread = get_ident()
        self._was_used = False
        self._scratch = np.empty(0, np.uint8)
        self._reserve = np.empty(0, np.uint8)
        # Held from a header to the end of its call: another thread may only tell of its mistake
        # between two calls.
        self._lock = threading.RLock()
        context = contextvars.copy_context()
        context.run(np.seterr, all="ignore")
        #: Calls a function without warnings of numpy's about overflow or NaN: those of a reduction
        #: are no mistake of the program. A fifth of the price of ``np.errstate``.
        self.quietly: Callable[..., Any] = context.run
        self.move(transport, layout)

    def move(self, transport: Transport, layout: Layout) -> None:
        """Work over `transport` from now on, where all ranks stand alike. What was begun is over.

        Parameters
        ----------
        transport : Transport
        layout : Layout
            Of the same replicas.
        """
        self.transport = transport
        self.layout = layout
        self.agreement = Agreement(transport, layout)
        #: The most bytes that travel with the agreement, and so cost no message of their own.
        self.inline_bytes = INLINE_BYTES if self.agreement.carries_payload else -1
        self._datasets = (0, 0)
        self._failure: Exception | None = None
        self.channel = Channel(
            transport,
            layout,
            lambda: self._thread,
            self.agreement.local_meeting,
            self.agreement.give_up,
        )
        self._recorder = self.channel.recorder
        #: What reduces leaves in the header, by their plan.
        self.inline = InlineReductions(transport.headers, layout, self.quietly, self.inline_bytes)
        #: What combines parts of large leaves over the ranks.
        self.exchanges = Exchanges(transport, layout, self.carry)
        self.agreement.on_break = self.channel.tell_of_break
        self.agreement.carry, self.agreement.take_failure = self.carry, self.take_failure

    @property
    def is_spare(self) -> bool:
        """Whether this rank hosts no replicas, and waits for another one to be lost."""
        return not self.layout.local_replica_ids

    def require_replicas(self, kind: str) -> None:
        """Raise where this rank is a spare.

        Raises
        ------
        ContextError
            It is.
        """
        if self.is_spare:
            raise ContextError(
                f"{kind} on rank {self.layout.rank}, which is a spare: it hosts no replicas until"
                " another rank is lost, and may only wait in strategy.run_elastic. Move the call"
                " into the function that is given to run_elastic, or make it where"
                " strategy.local_replica_ids is not empty."
            )

    def name_of_next_variable(self, name: str) -> str:
        """Return what tells a variable from all others. Making one is collective: ranks agree."""
        self.num_variables += 1
        return f"variable {self.num_variables - 1} {name!r}"

    def add_dataset(self, dataset: Any) -> str:
        """Know a distributed dataset as long as it is used; return a name, the same on all ranks.

        Making one is no collective call. It counts from the last run on, so that ranks that made
        different numbers of them are not apart for ever.
        """
        run, count = self._datasets
        last = self.agreement.last_run_ordinal
        count = count + 1 if run == last else 1
        self._datasets = (last, count)
        self.datasets[next(self._dataset_numbers)] = dataset
        return f"distributed dataset {count} made after run {last}"

    def check_thread(self, kind: str) -> None:
        """Raise unless this is the thread that made the strategy, or that first used it.

        Raises
        ------
        ContextError
            On every rank: this is the call that the others wait for.
        """
        self.require_replicas(kind)
        self.claim_thread()
        if get_ident() != self._thread:
            error = ContextError(
                f"{kind} in thread {threading.current_thread().name!r}, but this"
                " strategy belongs to another thread, which made it or ran it first. Make one"
                " strategy for each thread that communicates."
            )
            if self.transport.mailbox is None:  # no other ranks, or MPI is for one thread
                raise error
            call = FailedCall(kind, error, call_site(), self.options)
            call.replica_ids = self.layout.local_replica_ids
            self._tell([call], error)

    def claim_thread(self) -> None:
        """Have the strategy belong to this thread, if it was not used yet."""
        if not self._was_used:
            self._thread = get_ident()
            self._was_used = True

    def is_in_its_thread(self) -> bool:
        """Return whether `check_thread` would pass."""
        return not self._was_used or get_ident() == self._thread

    def make(
        self,
        kind: str,
        options: CommunicationOptions | None,
        make: Callable[..., Call],
        *arguments: Any,
    ) -> Call:
        """Return the call that `make` makes of site, options and arguments.

        If it fails, return one that tells the other ranks.
        """
        if not self._was_used or get_ident() != self._thread:
            self.check_thread(kind)
        site = call_site(2)  # this function, and the one of the package that calls it
        merged = self.options
        try:
            if options is not None:
                merged = merged.merge(options)
            call = make(site, merged, *arguments)
        except Exception as error:
            return FailedCall(kind, error, site, merged)
        if (handled := sys.exception()) is not None:
            call.handled = f"{type(handled).__name__}: {text_of(handled)}"
        return call

    def cross_replica(self, call: Call) -> Any:
        """Perform a call made in cross-replica context, for all replicas of this rank."""
        call.replica_ids = self.layout.local_replica_ids
        if call.error is not None:
            self._tell([call], call.error)
        return self.perform([call])[0]

    def fail(self, kind: str, error: BaseException) -> NoReturn:
        """Raise `error` on every rank: it came up on this one before a cross-replica call."""
        self.check_thread(kind)
        call = FailedCall(kind, error, call_site(), self.options)
        call.replica_ids = self.layout.local_replica_ids
        self._tell([call], error)

    def share(self, kind: str, error: BaseException) -> NoReturn:
        """Raise `error` of a call that sends nothing: on every rank, where the others can hear.

        They hear at their next call. Inside of a run it ends the run, which tells them.
        """
        is_heard = self.layout.size > 1 and not self.is_spare and self.is_in_its_thread()
        if is_heard and not self.agreement.runs:
            self.fail(kind, error)
        raise error

    def _tell(self, calls: Sequence[Call], error: BaseException) -> NoReturn:
        self._begin(calls[0])
        try:
            self.agreement.fail(calls, error)
        finally:
            self._end()

    def report(
        self, stands: Sequence[Stand], originals: Mapping[int, BaseException], first: Call
    ) -> NoReturn:
        """Tell the other ranks where the local replicas stand; see `Agreement.report`."""
        self._begin(first)
        try:
            self.agreement.report(stands, originals, first)
        finally:
            self._end()

    def perform(self, calls: Sequence[Call]) -> list[Any]:
        """Perform calls of the local replicas that agree, and return a result for each."""
        first = calls[0]
        # As `_begin` and `_end` do, without calls of them.
        is_held = self._thread == gate.main_thread
        gate.depth += is_held
        self._lock.acquire()
        recorder = self._recorder
        recorder.begin(first.text or first.title, first.options.timeout_seconds)
        try:
            if len(calls) > 1 or not first.agrees:
                self._require_one_call(calls)
            return first.perform(self, calls)
        except Promotion as promotion:
            return self._perform_promoted(calls, promotion)
        finally:
            recorder.end()
            self._lock.release()
            gate.depth -= is_held

    def _require_one_call(self, calls: Sequence[Call]) -> None:
        """Tell the other ranks where the local replicas are at different calls."""
        first = calls[0]
        for call in calls:
            if not call.agrees or call.fingerprint != first.fingerprint:
                self._report_apart(calls)

    def _perform_promoted(self, calls: Sequence[Call], promotion: Promotion) -> list[Any]:
        while True:
            for call in calls:
                call.promote(promotion.leaves)
            try:
                self._require_one_call(calls)
                return calls[0].perform(self, calls)
            except Promotion as further:
                promotion = further

    def _begin(self, call: Call) -> None:
        """Keep interrupts and other threads out, and record the call, until `_end`."""
        gate.close()
        self._lock.acquire()
        self._recorder.begin(call.title, call.options.timeout_seconds)

    def _end(self) -> None:
        self._recorder.end()
        self._lock.release()
        gate.open()

    def carry(self, exchange: Callable[..., T], *arguments: Any) -> T:
        """Do one exchange of the data phase; where it fails here, no other rank waits for it.

        The others are told first. Then this rank comes to the exchange nonetheless: what it gives
        there does not matter, since `moving` raises the error on all ranks.
        """
        step = self.transport.steps + 1
        try:
            return exchange(*arguments)
        except WaitGivenUpError:
            raise
        except Exception as error:
            # Begun, or even ended: no way back. And those who can't be told would go on.
            is_begun = self.transport.is_in_flight or self.transport.steps >= step
            if is_begun or (self.transport.mailbox is None and self.layout.size > 1):
                self.agreement.break_off(error)
                raise
            if self._failure is None:
                self._failure = error
                packed = travel.pack(error, self.layout.describe(self.layout.local_replica_ids))
                self.channel.tell(("failure", step, pickle.dumps(packed, 5)))
            return exchange(*arguments)

    def moving(self, call: Call) -> Moving:
        """Guard the movement of data, as `irrevocable` does, and keep the limit of the wait.

        An exchange that failed on a rank (see `carry`) is raised on all ranks at the end.
        """
        time_out = functools.partial(self.agreement.time_out, call)
        return Moving(self._give_up, self._raise_told_failure, time_out)

    def _give_up(self, error: BaseException) -> None:
        if self.agreement.final is None:
            self.agreement.break_off(error)

    def _raise_told_failure(self) -> None:
        failure = self.take_failure()
        if failure is not None:
            self.agreement.raise_failure(failure)

    def take_failure(self) -> BaseException | None:
        """Return why an exchange failed that has ended now, if it did: on all ranks the same."""
        # What a rank told before it came to the exchange has come when the exchange has ended.
        self.channel.read()
        mine, self._failure = self._failure, None
        told = self.channel.take_failures()
        rank, data = min(told, default=(self.layout.size, b""))
        if not told or (mine is not None and self.layout.rank < rank):
            return mine
        traveller = pickle.loads(data)
        return travel.load(traveller) or travel.stand_in(traveller)

    def irrevocable(self) -> Irrevocable:
        """Guard what every rank does once all have agreed to: a failure can't be told to them.

        It is raised here, now and at every later call; uncaught, it ends the job. The ranks would
        differ otherwise, or wait for each other.
        """
        return Irrevocable(self._give_up)

    def _report_apart(self, calls: Sequence[Call]) -> None:
        """Tell the others, replica by replica, what a call's components on this rank are."""
        ordinal = self.agreement.run_ordinal
        stands = [
            Stand((replica,), call.status, call.describe(position), None, ordinal)
            for call in calls
            for position, replica in enumerate(call.replica_ids)
        ]
        self.agreement.report(stands, {}, calls[0])

    def ordered_exchange(self, calls: Sequence[Call]) -> Exchange:
        """Return what combines parts in order over the ranks, as the options of the call say.

        Where there is none yet, the ranks agree, and make it.
        """
        implementation = calls[0].options.implementation
        found = self.exchanges.get(implementation)
        if found is not None:
            return found
        self.agreement.agree(calls)
        try:
            return self.exchanges.open(implementation)
        except ValueError as error:
            self.agreement.fail(calls, error)
        except WaitGivenUpError:
            self.agreement.time_out(calls[0])
        except BaseException as error:
            self._give_up(error)
            raise

    def with_reserve(self, allocate: Callable[[], T]) -> T:
        """Return what `allocate` gives: memory that is needed after all ranks have agreed.

        It must not fail any more then, so some memory was laid by, which is given up for it.
        """
        try:
            return allocate()
        except MemoryError:
            self._reserve = np.zeros(0, np.uint8)
        with self.irrevocable():
            return allocate()

    def lay_by_reserve(self, size_bytes: int) -> None:
        """Have so much memory for `with_reserve`; before the ranks agree."""
        if self._reserve.size < size_bytes:
            self._reserve = np.empty(size_bytes, np.uint8)

    def scratch(self, size_bytes: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """Return kept memory; valid until the next call of this method."""
        if self._scratch.size < size_bytes:
            self._scratch = np.empty(size_bytes, np.uint8)
        return self._scratch[:size_bytes]
