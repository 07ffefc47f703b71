"""Watchers without MPI and without their threads: they look when a test says so, by its clock."""

import sys
import threading
from collections import deque

from mpi_replica.core.layout import Layout
from mpi_replica.ranks.single import SingleTransport
from mpi_replica.ranks.transport import Mailbox
from mpi_replica.ranks.watch.strategy_watch import StrategyWatch


class Clock:
    """The time of all watchers, in seconds."""

    def __init__(self, monkeypatch):
        self.now = 1000.0
        for name, module in sys.modules.items():
            if name.startswith("mpi_replica.ranks.watch.") and hasattr(module, "monotonic"):
                monkeypatch.setattr(module, "monotonic", lambda: self.now)


class Post(Mailbox):
    """The mailbox of a rank of this process."""

    is_slow = False

    def __init__(self, rank, boxes):
        self.rank = rank
        self.boxes = boxes

    def send(self, rank, data):
        self.boxes[rank].append((self.rank, data))

    def receive(self):
        box = self.boxes[self.rank]
        return box.popleft() if box and not self.is_slow else None

    def close(self):
        pass


class World:
    """The watches of a strategy over some ranks, all of them in this process.

    Without a clock it is for watchers in threads.
    """

    def __init__(self, size, clock=None):
        self.clock = clock
        self.errors = {}
        self.aborts = []
        self.local = {rank: ((rank,), "") for rank in range(size)}
        boxes = [deque() for _ in range(size)]
        self.transports = [SingleTransport() for _ in range(size)]
        self.watches = []
        for rank, transport in enumerate(self.transports):
            transport.hosts, transport.pids = ("n",) * size, tuple(range(size))
            transport.size, transport.mailbox = size, Post(rank, boxes)
            watch = StrategyWatch(
                transport,
                Layout((1,) * size, rank),
                threading.get_ident,
                lambda rank=rank: self.local[rank],
                lambda error, rank=rank: self.errors.setdefault(rank, error),
            )
            watch.is_watched = True
            watch.abort = lambda status, rank=rank: self.aborts.append(rank)
            self.watches.append(watch)

    def begin(self, *ranks, call="call of rank {}", timeout_seconds=None):
        """Let ranks come to an exchange."""
        for rank in ranks:
            self.watches[rank].recorder.begin(call.format(rank), timeout_seconds)
            self.transports[rank].steps += 1

    def end(self, *ranks):
        """End the exchange of ranks."""
        for rank in ranks:
            self.transports[rank].steps_ended = self.transports[rank].steps

    def look(self, *ranks, after=0.0):
        """Let the watchers of some ranks look, or of all."""
        self.clock.now += after
        for rank in ranks or range(len(self.watches)):
            self.watches[rank].tick(self.clock.now)

    def pass_time(self, seconds, *ranks):
        """Let the watchers look ten times a second."""
        for _ in range(round(10 * seconds)):
            self.look(*ranks, after=0.1)
