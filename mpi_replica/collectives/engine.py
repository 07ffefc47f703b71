"""What a strategy communicates with: transport, layout, options and the driver of its calls."""

from __future__ import annotations

import collections
import sys
import threading
import weakref
from _thread import get_ident
from collections.abc import Callable, Sequence
from typing import Any, Concatenate, NoReturn, ParamSpec

from ..core.context import NO_PART
from ..core.exceptions import ContextError, in_words
from ..core.layout import Layout
from ..core.options import CommunicationOptions
from ..core.thread_frames import current_frames
from ..core.thread_owners import owner_of_this_thread, thread_at_work
from ..ranks.transport import Transport
from ..ranks.watch.event_log import EventLog
from ..ranks.watch.recorder import FlightRecorder
from ..ranks.watch.strategy_watch import StrategyWatch
from ..ranks.watch.traced_calls import TracedCalls
from .agreement.agreement import Agreement
from .agreement.call import Call
from .agreement.driver import Driver
from .agreement.site import CallSite, call_site

P = ParamSpec("P")


class Engine:
    """Performs collective calls for the replicas of this rank."""

    def __init__(
        self,
        transport: Transport,
        layout: Layout,
        options: CommunicationOptions,
        log: EventLog | None = None,
    ) -> None:
        self.options = options
        #: In which its calls are noted, too.
        self.log = log
        #: While its strategy calls a function for a replica: that, the call, and how, in words.
        self.per_replica_call: tuple[str, str, str] | None = None
        #: How many "variables" and "datasets" were made; "losses" that there were.
        self.num_made: collections.Counter[str] = collections.Counter()
        #: The objects for variables that are in use, by their ``id``: replicas of a rank that make
        #: one together have an object each.
        self.variables: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        #: The distributed datasets that are in use, by the order in which they were made.
        self.datasets: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        self._thread = owner_of_this_thread()
        self._was_used = False
        self.move(transport, layout)

    def move(self, transport: Transport, layout: Layout) -> None:
        """Works over `transport` from now on, where all ranks stand alike. What was begun is over.

        Parameters
        ----------
        transport : Transport
        layout : Layout
            Of the same replicas.
        """
        self.transport = transport
        self.layout = layout
        self.agreement = Agreement(transport, layout)
        self._datasets = (0, 0)
        #: How often each place has called `verify`: ranks make the same calls, and count alike.
        self.verifications: collections.Counter[str | bytes] = collections.Counter()
        self.watch = StrategyWatch(
            transport,
            layout,
            lambda: thread_at_work(self._thread),
            self.agreement.local_meeting,
            self.agreement.give_up,
        )
        self.agreement.on_break = self.watch.tell_of_break
        self.driver = Driver(transport, layout, self.agreement, self.watch.recorder)
        self.driver.thread = self._thread
        self.record(self.log)
        self.group = self.driver.group
        self.perform = self.driver.perform
        self.report = self.driver.report

    def record(self, log: EventLog | None) -> None:
        """Notes the calls, in a log too, from now on: on all ranks, or on none."""
        self.log, recorder = log, FlightRecorder()
        if log is not None:
            recorder = TracedCalls(log, self.transport, self.layout)
        self.watch.recorder = self.driver.recorder = self.agreement.recorder = recorder

    @property
    def is_spare(self) -> bool:
        """Whether this rank hosts no replicas, and waits for another one to be lost."""
        return not self.layout.local_replica_ids

    def require_replicas(self, kind: str) -> None:
        """Raises where this rank is a spare.

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

    def require_open(self) -> None:
        """Raises where the strategy is over: a call that sends nothing does not find out.

        Raises
        ------
        BaseException
            Why it can't be used any more.
        """
        if self.agreement.final is not None:
            self.agreement.refuse(self.agreement.final)

    def name_of_next_variable(self, name: str) -> str:
        """Returns what tells a variable from all others. Making one is collective: ranks agree."""
        number = self.num_made["variables"]
        self.num_made["variables"] += 1
        return f"variable {number} {name!r}"

    def add_dataset(self, dataset: Any) -> str:
        """Knows a distributed dataset as long as it is used; returns a name, the same on all ranks.

        Making one is no collective call. It counts from the last run on, so that ranks that made
        different numbers of them are not apart for ever.
        """
        run, count = self._datasets
        last = self.agreement.last_run_ordinal
        count = count + 1 if run == last else 1
        self._datasets = (last, count)
        self.datasets[self.num_made["datasets"]] = dataset
        self.num_made["datasets"] += 1
        losses = self.num_made["losses"]  # runs are counted anew after each
        behind = f" behind loss {losses}" if losses else ""
        return f"distributed dataset {count} made after run {last}{behind}"

    def check_thread(self, kind: str) -> None:
        """Raises unless this is the thread that made the strategy, or that first used it.

        Raises
        ------
        ContextError
            On every rank, but for one in the middle of a run: this is the call that the others
            wait for.
        """
        self.require_replicas(kind)
        self.claim_thread()
        if owner_of_this_thread() != self._thread:
            where = f"{kind} in thread {threading.current_thread().name!r}"
            if self.agreement.runs:  # no rank waits for this call, but for those of the replicas
                raise ContextError(f"{where}, while the replicas run in another one. {NO_PART}")
            error = ContextError(
                f"{where}, but this strategy belongs to another thread, which made it or ran it"
                " first. Make one strategy for each thread that communicates, and call nothing"
                " where input is read ahead."
            )
            if self.transport.mailbox is None:  # no other ranks, or MPI is for one thread
                raise error
            self._tell(kind, error)

    def claim_thread(self) -> None:
        """Makes this thread the one that the strategy belongs to, if it was not used yet."""
        if not self._was_used:
            self._thread = self.driver.thread = owner_of_this_thread()
            self._was_used = True

    def is_in_its_thread(self) -> bool:
        """Returns whether `check_thread` would pass."""
        return not self._was_used or owner_of_this_thread() == self._thread

    def is_of_this_thread(self) -> bool:
        """Returns whether this thread has made it, or has used it first."""
        return owner_of_this_thread() == self._thread

    def may_end_here(self) -> bool:
        """Returns whether this thread may end it: it is its own one, or that has ended."""
        return self.is_in_its_thread() or self._thread not in current_frames()

    def make(
        self,
        kind: str,
        options: CommunicationOptions | None,
        make: Callable[Concatenate[CallSite, CommunicationOptions, P], Call],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> Call:
        """Returns the call that `make` makes of site, options and arguments.

        If it fails, return one that tells the other ranks.
        """
        if not self._was_used or get_ident() != self._thread:
            self.check_thread(kind)
        site = call_site(2)  # this function, and the one of the package that calls it
        merged, since = self.options, self.agreement.num_raised
        try:
            if options is not None:
                merged = merged.merge(options)
            call = make(site, merged, *args, **kwargs)
        except (Exception, SystemExit) as error:
            call = Call(site, merged)
            call.kind, call.error = kind, error
            call.is_told = self.agreement.was_told(error, since)
        if (handled := sys.exception()) is not None:
            call.handled = in_words(handled)
        return call

    def failed(self, kind: str, options: CommunicationOptions | None, error: Exception) -> Call:
        """Returns the call that tells of an error which came up before a call was made."""

        def make(site: CallSite, merged: CommunicationOptions) -> Call:
            raise error

        return self.make(kind, options, make)

    def cross_replica(self, call: Call) -> Any:
        """Performs a call made in cross-replica context, for all replicas of this rank."""
        call.replica_ids = self.layout.local_replica_ids
        if call.error is not None:
            self._raise_error_of(call, call.error)
        return self.perform([call])[0]

    def for_each_replica(self, calls: Sequence[Call]) -> list[Any]:
        """Performs calls made in cross-replica context, one for each replica of this rank."""
        for i, call in zip(self.layout.local_replica_ids, calls, strict=True):
            call.replica_ids = (i,)
            if call.error is not None:
                self._raise_error_of(call, call.error)
        return self.perform(calls)

    def _raise_error_of(self, call: Call, error: BaseException) -> NoReturn:
        if call.is_told:
            raise error
        self.driver.report_failure([call], error)

    def fail(self, kind: str, error: BaseException) -> NoReturn:
        """Raises `error` on every rank: it came up on this one before a cross-replica call."""
        self.check_thread(kind)
        self._tell(kind, error)

    def _tell(self, kind: str, error: BaseException) -> NoReturn:
        call = Call(call_site(), self.options)
        call.kind, call.replica_ids = kind, self.layout.local_replica_ids
        self.driver.report_failure([call], error)

    def share(self, kind: str, error: BaseException, since: int) -> NoReturn:
        """Raises `error` of a call that sends nothing: on every rank, where the others can hear.

        They hear at their next call. Inside of a run it ends the run, which tells them. It has
        begun when `num_raised` of the agreement was `since`.
        """
        if self.agreement.was_told(error, since):
            raise error
        is_heard = self.layout.size > 1 and not self.is_spare and self.is_in_its_thread()
        if is_heard and not self.agreement.runs:
            self.fail(kind, error)
        raise error
