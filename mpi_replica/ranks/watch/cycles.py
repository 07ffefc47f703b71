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

from .channel import Channel, head_start_seconds

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
        # The number of the last probe that came over a channel, by who sent it first: neither it
        # nor an older one need be followed again.
        self._seen: WeakKeyDictionary[Channel, dict[_Address, int]] = WeakKeyDictionary()
        self._searches: WeakKeyDictionary[Channel, _Search] = WeakKeyDictionary()
        self._number = 0

    def tick(self, channels: Sequence[Channel], now: float) -> None:
        """Sends probes for waits that are long enough; `channels` are those of the process."""
        if len(channels) < 2:  # a cycle goes through two strategies of each process
            return
        for channel in channels:
            waited = 0.0 if channel.is_over else channel.waits_for(now)
            search = self._search(channel)
            if waited >= search.due_seconds:
                step, number = channel.step, search.number + 1
                self._searches[channel] = _Search(step, 2 * waited, number, False)
                self._number += 1
                wait = self._wait(channel)
                origin = _Origin(wait.address, self._number, step)
                channel.tell(("probe", origin, step, (wait,)))

    def _search(self, channel: Channel) -> _Search:
        search = self._searches.get(channel)
        if search is None or search.step != channel.step:
            # Of the ranks that wait at one call, each leaves the first search to those below it:
            # two that find cycles at once would tell the others of different ones.
            due = _SECONDS_BEFORE_SEARCH + head_start_seconds(channel.layout.rank)
            return _Search(channel.step, due, 0, False)
        return search

    def _leave_to(self, sender: _Wait, channel: Channel) -> None:
        """Keeps still, once: another rank, which waits where this one does, has begun to search."""
        search = self._search(channel)
        if search.number == 0:
            due = 2 * _SECONDS_BEFORE_SEARCH
            self._searches[channel] = _Search(channel.step, due, 1, True)
        elif search.number == 1 and sender.address < self._wait(channel).address:
            self._searches[channel] = search._replace(is_left_to_another=True)

    def receive(self, channels: Sequence[Channel], channel: Channel, message: Any) -> None:
        """Deals with a message that came over `channel`."""
        kind, *contents = message
        if kind == "probe":
            self._follow(channels, channel, *contents)
        else:
            self._end(channels, channel, *contents)

    def _wait(self, channel: Channel) -> _Wait:
        strategy = f"a strategy of {channel.layout.num_replicas} replicas"
        text = f"{channel.who()} of {strategy}: {channel.call()}"
        return _Wait(self._host, self._pid, channel.thread(), text)

    def _follow(
        self,
        channels: Sequence[Channel],
        channel: Channel,
        origin: _Origin,
        step: int,
        path: tuple[_Wait, ...],
    ) -> None:
        if channel.step >= step:  # this rank came there itself
            if len(path) == 1 and channel.step == step:
                self._leave_to(path[0], channel)
            return
        seen = self._seen.setdefault(channel, {})
        if origin.number <= seen.get(origin.address, 0):
            return
        seen[origin.address] = origin.number
        for other in channels:
            if other is channel or not other.is_waiting or other.thread() != channel.thread():
                continue
            wait = self._wait(other)
            if wait.address == origin.address:
                # It has waited there all the time, and so each of the path still waits. Every
                # process of a cycle finds it, and may be in several: one of them speaks.
                is_same = wait == path[0] and other.step == origin.step
                if is_same and wait.address == min(known.address for known in path):
                    other.read()  # others that wait there may have begun to search, or be done
                    if not self._search(other).is_left_to_another:
                        self._end_cycle(channel, other, path)
            elif wait.address not in [known.address for known in path]:
                other.tell(("probe", origin, other.step, (*path, wait)))

    def _end_cycle(self, missed: Channel, waited: Channel, path: tuple[_Wait, ...]) -> None:
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
        self, channels: Sequence[Channel], channel: Channel, text: str, addresses: list[_Address]
    ) -> None:
        channel.give_up("cycle", text)
        mine = (self._host, self._pid)
        for other in channels:
            if other.is_over or not other.is_waiting or other is channel:
                continue
            if (*mine, other.thread()) in addresses:
                self._end_wait(other, text, addresses)

    def _end_wait(self, channel: Channel, text: str, addresses: list[_Address]) -> None:
        """Ends the wait of this rank in `channel`, and tell its other ranks."""
        channel.tell(("cycle", text, addresses))
        channel.give_up("cycle", text)
