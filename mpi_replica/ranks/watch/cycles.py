"""Ranks that wait for each other in different strategies.

Each strategy alone looks as if a rank were late. A rank that waits sends a probe to the others of
the strategy; one that has not come there because it waits in a second strategy sends it on to the
others of that one. A probe that comes back has found a cycle of waits, which nothing can end
(K. M. Chandy, J. Misra, L. M. Haas: Distributed deadlock detection, 1983).

A rank that makes a strategy waits for all that have to make it, too. It tells the others of its
strategies: one that waits for it there, and has not begun to make that one, is a cycle with it.

Several ranks may find cycles at once, each another one: rank 0 of a strategy says with which it
ends, to all others, so that all ranks have the same error.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias
from weakref import WeakKeyDictionary, WeakValueDictionary

from ...core.thread_frames import current_frames
from ...core.thread_owners import OWN_THREADS, owner_of
from .new_strategies import NewStrategies, NewStrategy, new_strategies
from .strategy_watch import StrategyWatch, head_start_seconds

_log = logging.getLogger("mpi_replica")

_SECONDS_BEFORE_SEARCH = 1.0


# Host, process and thread.
_Address: TypeAlias = tuple[str, int, int]


class _Search(NamedTuple):
    """What a rank has done about one of its waits."""

    step: int
    #: Seconds of waiting after which it searches again.
    due_seconds: float
    is_first: bool


class _Wait(NamedTuple):
    """A thread of a process, and where it waits."""

    host: str
    pid: int
    thread: int
    replicas: str
    call: str

    @property
    def address(self) -> _Address:
        return self.host, self.pid, self.thread


class _Origin(NamedTuple):
    """The identity of a probe."""

    address: _Address
    #: Counts the probes of a process.
    number: int
    step: int


class _Cycle(NamedTuple):
    """A cycle that was found."""

    text: str
    #: Of its processes; the first one has found it.
    addresses: list[_Address]


class CycleSearch:
    """Sends and follows the probes of one process."""

    def __init__(self, host: str, pid: int, new: NewStrategies = new_strategies) -> None:
        self._host = host
        self._pid = pid
        self._new = new
        # By those that are made: after how many seconds of it this is told again.
        self._told: dict[NewStrategy, float] = {}
        # The number of the last probe that came to a watch, by who sent it first: neither it
        # nor an older one need be followed again.
        self._seen: WeakKeyDictionary[StrategyWatch, dict[_Address, int]] = WeakKeyDictionary()
        self._searches: WeakKeyDictionary[StrategyWatch, _Search] = WeakKeyDictionary()
        # By a wait of this process: the strategy that misses it, by who sent the probe.
        self._missed: WeakKeyDictionary[
            StrategyWatch, WeakValueDictionary[_Address, StrategyWatch]
        ] = WeakKeyDictionary()
        self._number = 0

    def tick(self, watches: Sequence[StrategyWatch], now: float) -> None:
        """Sends probes for waits that are long enough, and tells of strategies that are made.

        `watches` are those of the process.
        """
        self._tell_of_new(watches, now)
        if len(watches) < 2:  # a cycle of probes goes through two strategies of each process
            return
        for watch in watches:
            waited = 0.0 if watch.is_over or watch.is_leaving else watch.waits_for(now)
            if waited >= self._search(watch).due_seconds:
                step = watch.step
                self._searches[watch] = _Search(step, 2 * waited, False)
                self._number += 1
                wait = self._wait(watch)
                origin = _Origin(wait.address, self._number, step)
                watch.tell(("probe", origin, step, (wait,)))

    def _tell_of_new(self, watches: Sequence[StrategyWatch], now: float) -> None:
        """Tells that this process makes strategies, where that takes long enough."""
        making = self._new.making
        self._told = {new: due for new, due in self._told.items() if new in making}
        for new in making:
            waited = now - new.since
            if waited < self._told.get(new, _SECONDS_BEFORE_SEARCH) or not _is_alone(new.thread):
                continue
            self._told[new] = 2 * waited
            for watch in watches:
                if watch.thread() == new.thread and not watch.is_over:
                    call = f"{_members(watch)}: MPIStrategy() at {new.line}"
                    wait = _Wait(self._host, self._pid, new.thread, watch.who(), call)
                    watch.tell(("new", watch.step, new.processes, new.number, wait))

    def _search(self, watch: StrategyWatch) -> _Search:
        search = self._searches.get(watch)
        if search is None or search.step != watch.step:
            # Mostly one search is enough: of the ranks that wait at one call, each leaves the first
            # one to those below it.
            due = _SECONDS_BEFORE_SEARCH + head_start_seconds(watch.layout.rank)
            return _Search(watch.step, due, True)
        return search

    def receive(self, watches: Sequence[StrategyWatch], watch: StrategyWatch, message: Any) -> None:
        """Deals with a message that came to `watch`."""
        kind, *contents = message
        if kind == "probe":
            self._follow(watches, watch, *contents)
        elif kind == "new":
            self._end_if_missed(watches, watch, *contents)
        elif kind == "found":
            self._propose(watches, watch, *contents)
        else:
            self._end(watches, watch, *contents)

    def _wait(self, watch: StrategyWatch) -> _Wait:
        call = f"{_members(watch)}: {watch.call()}"
        return _Wait(self._host, self._pid, watch.thread(), watch.who(), call)

    def _end_if_missed(
        self,
        watches: Sequence[StrategyWatch],
        watch: StrategyWatch,
        step: int,
        processes: tuple[int, ...],
        number: int,
        maker: _Wait,
    ) -> None:
        """Ends a strategy in which this rank waits for one that needs it to make another one.

        That one had begun `step` exchanges of this strategy, and can't come to the next one before
        it has made the other.
        """
        waits_for_maker = watch.is_waiting and watch.step > step
        is_missed = waits_for_maker and self._new.misses(processes, number)
        if not is_missed or not _is_alone(watch.thread()):
            return
        path = [self._wait(watch), maker]
        if watch.is_leaving:  # its program has ended, and can raise nothing any more
            if watch.leaves_in_time:
                return
            try:
                _log.error("the job ends: %s", _in_words(path))
            finally:  # logging fails where stderr is closed
                watch.abort(1)
        else:
            self._propose(watches, watch, _cycle(path))

    def _follow(
        self,
        watches: Sequence[StrategyWatch],
        watch: StrategyWatch,
        origin: _Origin,
        step: int,
        path: tuple[_Wait, ...],
    ) -> None:
        if watch.step >= step:  # this rank came there itself
            if len(path) == 1 and watch.step == step and self._search(watch).is_first:
                self._searches[watch] = _Search(step, 2 * _SECONDS_BEFORE_SEARCH, False)
            return
        seen = self._seen.setdefault(watch, {})
        if origin.number <= seen.get(origin.address, 0):
            return
        seen[origin.address] = origin.number
        for other in watches:
            if other is watch or not other.is_waiting or other.thread() != watch.thread():
                continue
            wait = self._wait(other)
            missed = self._missed.setdefault(other, WeakValueDictionary())
            missed[origin.address] = watch
            if wait.address == origin.address:
                # It has waited there all the time, and so each of the path still waits. Every
                # process of a cycle finds it, and one of them tells. It is one that waits in the
                # same strategy for all cycles through two of them, which so come to one rank 0.
                is_same = wait == path[0] and other.step == origin.step
                if is_same and wait == min(path, key=lambda known: (known.call, known.address)):
                    self._propose(watches, other, _cycle(path))
            elif wait.address not in [known.address for known in path]:
                other.tell(("probe", origin, other.step, (*path, wait)))

    def _propose(
        self, watches: Sequence[StrategyWatch], watch: StrategyWatch, cycle: _Cycle
    ) -> None:
        """Has rank 0 of a strategy end it."""
        if watch.layout.rank != 0:
            watch.tell(("found", cycle), 0)
        elif not watch.is_over:  # by another cycle
            watch.tell(("end", cycle))
            self._end(watches, watch, cycle)

    def _end(self, watches: Sequence[StrategyWatch], watch: StrategyWatch, cycle: _Cycle) -> None:
        """Ends a strategy on this rank, where all others hear it from its rank 0.

        In a cycle this process waits in one strategy, and another one misses it. That ends first:
        then no call of it can be completed by the program, which goes on when its wait ends.
        """
        if watch.is_over:
            return
        here = (self._host, self._pid, watch.thread())
        if here not in cycle.addresses:
            watch.give_up("cycle", cycle.text)
        elif watch.is_waiting:
            by_probe = self._missed.setdefault(watch, WeakValueDictionary())
            missed = by_probe.get(cycle.addresses[0])
            if missed is not None and not missed.is_over:
                self._propose(watches, missed, cycle)
                missed.give_up("cycle", cycle.text)
            if not watch.is_over:  # by what follows from that
                watch.give_up("cycle", cycle.text)
        else:
            watch.give_up("cycle", cycle.text)
            for other in watches:
                if other.is_waiting and not other.is_over and other.thread() == watch.thread():
                    self._propose(watches, other, cycle)


def _members(watch: StrategyWatch) -> str:
    return f"a strategy of {watch.layout.num_replicas} replicas"


def _is_alone(thread: int) -> bool:
    """Returns whether no other thread of the program runs here: it may make a strategy."""
    own = [one.ident for one in threading.enumerate() if one.name.startswith(OWN_THREADS)]
    return all(one in own or owner_of(one) == thread for one in current_frames())


def _cycle(path: Sequence[_Wait]) -> _Cycle:
    text = (
        f"{_in_words(path)} These strategies can't be used any more: end the program, or make new"
        " ones."
    )
    return _Cycle(text, [wait.address for wait in path])


def _in_words(path: Sequence[_Wait]) -> str:
    texts = sorted({f"{wait.replicas} of {wait.call}" for wait in path})
    return (
        f"strategies wait for each other, for ever. {'; '.join(texts)}. Make strategies, and call"
        " the collectives of several ones, in the same order on all ranks."
    )
