"""What the runs of a strategy leave for the next one."""

from __future__ import annotations

from ..core.thread_owners import is_stand_in
from .replica_thread import ReplicaThread
from .returned_values import RunEnd
from .worker import GreenletWorker, Worker

# A program that makes new functions all the time must not grow.
_MOST_ENDS = 256


class KeptByRuns:
    """What the runs of a strategy leave for the next one."""

    def __init__(self) -> None:
        self.greenlets: list[Worker] = []
        #: By replica: what a library or the program keeps for a thread, a replica finds again.
        self.threads: dict[int, list[Worker]] = {}
        #: Ends of runs in which all local replicas returned None, by call site and function.
        self.empty_ends: dict[tuple[bytes, bytes], RunEnd] = {}

    def worker(self, replica_id: int, *, is_thread: bool) -> Worker:
        """Returns what a replica may run in, which is kept here no longer."""
        if is_thread:
            kept = self.threads.get(replica_id, [])
        else:
            kept = [] if is_stand_in() else self.greenlets
        while kept:
            if (worker := kept.pop()).is_alive:
                return worker
        return ReplicaThread(replica_id) if is_thread else GreenletWorker()

    def keep(self, replica_id: int, worker: Worker, *, is_thread: bool) -> None:
        """Keeps what the replica has run in to its end."""
        worker.rest()
        if is_thread:
            self.threads.setdefault(replica_id, []).append(worker)
        elif not is_stand_in():  # the next run may be in another thread, where no greenlet goes on
            self.greenlets.append(worker)

    def keep_end(self, key: tuple[bytes, bytes], end: RunEnd) -> None:
        """Keeps the end of a run in which all local replicas returned None."""
        if len(self.empty_ends) >= _MOST_ENDS:
            self.empty_ends.clear()
        self.empty_ends[key] = end
