"""Ranks that wait for each other in different strategies.

Each strategy alone looks as if a rank were late. A rank that waits sends a probe to the others of
the strategy; one that has not come there because it waits in a second strategy sends it on to the
others of that one. A probe that comes back has found a cycle of waits, which nothing can end
(K. M. Chandy, J. Misra, L. M. Haas: Distributed deadlock detection, 1983).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias
from weakref import WeakKeyDictionary

from .strategy_watch import StrategyWatch, head_start_seconds

_SECONDS_BEFORE_SEARCH = 1.0

# Host, process and thread.
_Address: TypeAlias = tuple[str, int, int]


class _Search(NamedTuple):
    """What a rank has done about one of its waits."""

    step: int
    #: Seconds of waiting after which it searches again.
    due_seconds: float
    number: int
    #: Whether another rank that waits at the same call finds the cycle, if there is one.
    is_left_to_another: bool


class _Wait(NamedTuple):
    """A thread of a process, and where it waits."""

    host: str
    pid: int
    thread: int
    text: str

    @property
    def address(self) -> _Address:
        return self.host, self.pid, self.thread


class _Origin(NamedTuple):
    """The identity of a probe."""

    address: _Address
    #: Counts the probes of a process.
    number: int
    step: int


class CycleSearch:
    """Sends and follows the probes of one process."""

    def __init__(self, host: str, pid: int) -> None:
        self._host = host
        self._pid = pid
        # The number of the last probe that came to a watch, by who sent it first: neither it
        # nor an older one need be followed again.
        self._seen: WeakKeyDictionary[StrategyWatch, dict[_Address, int]] = WeakKeyDictionary()
        self._searches: WeakKeyDictionary[StrategyWatch, _Search] = WeakKeyDictionary()
        self._number = 0

    def tick(self, watches: Sequence[StrategyWatch], now: float) -> None:
        """Sends probes for waits that are long enough; `watches` are those of the process."""
        if len(watches) < 2:  # a cycle goes through two strategies of each process
            return
        for watch in watches:
            waited = 0.0 if watch.is_over else watch.waits_for(now)
            search = self._search(watch)
            if waited >= search.due_seconds:
                step, number = watch.step, search.number + 1
                self._searches[watch] = _Search(step, 2 * waited, number, False)
                self._number += 1
                wait = self._wait(watch)
                origin = _Origin(wait.address, self._number, step)
                watch.tell(("probe", origin, step, (wait,)))

    def _search(self, watch: StrategyWatch) -> _Search:
        search = self._searches.get(watch)
        if search is None or search.step != watch.step:
            # Of the ranks that wait at one call, each leaves the first search to those below it:
            # two that find cycles at once would tell the others of different ones.
            due = _SECONDS_BEFORE_SEARCH + head_start_seconds(watch.layout.rank)
            return _Search(watch.step, due, 0, False)
        return search

    def _leave_to(self, sender: _Wait, watch: StrategyWatch) -> None:
        """Keeps still, once: another rank, which waits where this one does, has begun to search."""
        search = self._search(watch)
        if search.number == 0:
            due = 2 * _SECONDS_BEFORE_SEARCH
            self._searches[watch] = _Search(watch.step, due, 1, True)
        elif search.number == 1 and sender.address < self._wait(watch).address:
            self._searches[watch] = search._replace(is_left_to_another=True)

    def receive(self, watches: Sequence[StrategyWatch], watch: StrategyWatch, message: Any) -> None:
        """Deals with a message that came to `watch`."""
        kind, *contents = message
        if kind == "probe":
            self._follow(watches, watch, *contents)
        else:
            self._end(watches, watch, *contents)

    def _wait(self, watch: StrategyWatch) -> _Wait:
        strategy = f"a strategy of {watch.layout.num_replicas} replicas"
        text = f"{watch.who()} of {strategy}: {watch.call()}"
        return _Wait(self._host, self._pid, watch.thread(), text)

    def _follow(
        self,
        watches: Sequence[StrategyWatch],
        watch: StrategyWatch,
        origin: _Origin,
        step: int,
        path: tuple[_Wait, ...],
    ) -> None:
        if watch.step >= step:  # this rank came there itself
            if len(path) == 1 and watch.step == step:
                self._leave_to(path[0], watch)
            return
        seen = self._seen.setdefault(watch, {})
        if origin.number <= seen.get(origin.address, 0):
            return
        seen[origin.address] = origin.number
        for other in watches:
            if other is watch or not other.is_waiting or other.thread() != watch.thread():
                continue
            wait = self._wait(other)
            if wait.address == origin.address:
                # It has waited there all the time, and so each of the path still waits. Every
                # process of a cycle finds it, and may be in several: one of them speaks.
                is_same = wait == path[0] and other.step == origin.step
                if is_same and wait.address == min(known.address for known in path):
                    other.read()  # others that wait there may have begun to search, or be done
                    if not self._search(other).is_left_to_another:
                        self._end_cycle(watch, other, path)
            elif wait.address not in [known.address for known in path]:
                other.tell(("probe", origin, other.step, (*path, wait)))

    def _end_cycle(
        self, missed: StrategyWatch, waited: StrategyWatch, path: tuple[_Wait, ...]
    ) -> None:
        texts = sorted({wait.text for wait in path})  # the same, wherever the cycle is found
        text = (
            f"strategies wait for each other, for ever. {'; '.join(texts)}. Call the collectives"
            " of several strategies in the same order on all ranks. These strategies can't be used"
            " any more: end the program, or make new ones."
        )
        if not waited.is_over:
            missed.give_up("cycle", text)  # before the wait ends, and this rank comes there
            self._end_wait(waited, text, [wait.address for wait in path])

    def _end(
        self,
        watches: Sequence[StrategyWatch],
        watch: StrategyWatch,
        text: str,
        addresses: list[_Address],
    ) -> None:
        watch.give_up("cycle", text)
        mine = (self._host, self._pid)
        for other in watches:
            if other.is_over or not other.is_waiting or other is watch:
                continue
            if (*mine, other.thread()) in addresses:
                self._end_wait(other, text, addresses)

    def _end_wait(self, watch: StrategyWatch, text: str, addresses: list[_Address]) -> None:
        """Ends the wait of this rank in `watch`, and tells its other ranks."""
        watch.tell(("cycle", text, addresses))
        watch.give_up("cycle", text)
