"""What a strategy communicates with: transport, layout, agreement, options and scratch memory."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import numpy as np

from ..errors import ContextError
from ..interrupts import gate
from ..layout import Layout
from ..options import CommunicationOptions
from ..transport import Transport, TransportTimeoutError
from .agreement import Agreement, Promotion
from .call import Call, FailedCall
from .callsite import CallSite, call_site
from .standing import Stand

__all__ = ["Engine"]


class Engine:
    """Performs collective calls for the replicas of this rank."""

    def __init__(self, transport: Transport, layout: Layout, options: CommunicationOptions) -> None:
        self.transport = transport
        self.layout = layout
        self.options = options
        self.agreement = Agreement(transport, layout)
        self.variable_numbers = itertools.count()
        self.dataset_numbers = itertools.count()
        self._thread = threading.get_ident()
        self._was_used = False
        self._scratch = np.empty(0, np.uint8)

    def check_thread(self) -> None:
        """Raise unless this is the thread that made the strategy, or that first used it.

        Raises
        ------
        ContextError
            Here only: the other ranks can't be told from the wrong thread.
        """
        current = threading.get_ident()
        if current == self._thread:
            self._was_used = True
        elif not self._was_used:
            self._thread = current
            self._was_used = True
        else:
            raise ContextError(
                f"a collective call in thread {threading.current_thread().name!r}, but this"
                " strategy belongs to another thread, which made it or ran it first. Make one"
                " strategy for each thread that communicates."
            )

    def is_in_its_thread(self) -> bool:
        """Return whether `check_thread` would pass."""
        return not self._was_used or threading.get_ident() == self._thread

    def make(
        self,
        kind: str,
        options: CommunicationOptions | None,
        make: Callable[[CallSite, CommunicationOptions], Call],
    ) -> Call:
        """Return the call that `make` makes; if it fails, one that tells the other ranks."""
        self.check_thread()
        site = call_site()
        merged = self.options
        try:
            merged = self.options.merge(options)
            return make(site, merged)
        except Exception as error:
            return FailedCall(kind, error, site, merged)

    def cross_replica(self, call: Call) -> Any:
        """Perform a call made in cross-replica context, for all replicas of this rank."""
        call.replica_ids = self.layout.local_replica_ids
        if call.error is not None:
            self.agreement.fail([call], call.error)
        return self.perform([call])[0]

    def fail(self, kind: str, error: BaseException) -> NoReturn:
        """Raise `error` on every rank: it came up on this one before a cross-replica call."""
        self.check_thread()
        call = FailedCall(kind, error, call_site(), self.options)
        call.replica_ids = self.layout.local_replica_ids
        self.agreement.fail([call], error)

    def perform(self, calls: list[Call]) -> list[Any]:
        """Perform calls of the local replicas that agree, and return a result for each."""
        while True:
            try:
                first = calls[0].fingerprint
                if not all(call.agrees and call.fingerprint == first for call in calls):
                    self._report_apart(calls)
                with gate:
                    return calls[0].perform(self, calls)
            except Promotion as promotion:
                for call in calls:
                    call.promote(promotion.leaves)

    @contextmanager
    def moving(self, call: Call) -> Iterator[None]:
        """Guard the movement of data, as `irrevocable` does, and keep the limit of the wait."""
        with self.irrevocable():
            try:
                yield
            except TransportTimeoutError:
                self.agreement.time_out(call)

    @contextmanager
    def irrevocable(self) -> Iterator[None]:
        """Guard what every rank does once all have agreed to: a failure can't be told to them.

        It is raised here, now and at every later call; uncaught, it ends the job. The ranks would
        differ otherwise, or wait for each other.
        """
        try:
            yield
        except BaseException as error:
            if self.agreement.final is None:
                self.agreement.break_off(error)
            raise

    def _report_apart(self, calls: list[Call]) -> None:
        """Tell the others, replica by replica, what a call's components on this rank are."""
        ordinal = self.agreement.run_ordinal
        stands = [
            Stand((replica,), call.status, call.describe(position), None, ordinal)
            for call in calls
            for position, replica in enumerate(call.replica_ids)
        ]
        self.agreement.report(stands, {}, calls[0])

    def scratch(self, size_bytes: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """Return kept memory; valid until the next call of this method."""
        if self._scratch.size < size_bytes:
            self._scratch = np.empty(size_bytes, np.uint8)
        return self._scratch[:size_bytes]
