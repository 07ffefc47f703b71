"""Ranks that come late, one situation after the other (see tests/test_watch.py).

Run with the path of a file for what came of it, and the names of the situations in the
environment. Nothing here depends on time but the limit itself:
a late rank goes on when it is released, which the rank does that has reported it.
"""

import ctypes
import json
import logging
import os
import signal
import sys
import threading
import warnings

from mpi4py import MPI

import mpi_replica as mr
from mpi_replica.ranks.transport import Mailbox

world = MPI.COMM_WORLD
rank = world.rank
pids = world.allgather(os.getpid())
GO_ON = 7  # a tag


class Reports(logging.Handler):
    """What is logged on this rank, and what is done then."""

    def __init__(self):
        super().__init__()
        self.begin()

    def begin(self, then=lambda: None, after=0):
        """Forget what was logged; call `then` once there are so many reports."""
        self.texts, self.then, self.after = [], then, after

    def emit(self, record):
        logging.lastResort.handle(record)  # to stderr, as without any handler
        self.texts.append(record.getMessage())
        if len(self.texts) == self.after:
            self.then()


reports = Reports()
logging.getLogger("mpi_replica").addHandler(reports)
signal.signal(signal.SIGUSR1, lambda *_: None)


def go_on(culprit):
    world.send(None, culprit, GO_ON)


def send(number):
    return lambda culprit: os.kill(pids[culprit], number)


def wait_to_go_on():
    world.recv(tag=GO_ON)  # late: it waits


def loop():
    while not world.iprobe(tag=GO_ON):  # late: it loops
        pass
    world.recv(tag=GO_ON)


def stop():
    os.kill(os.getpid(), signal.SIGSTOP)


def hold_the_gil():
    ctypes.PyDLL(None).sleep(1000)  # a signal ends it


def total():
    return mr.get_replica_context().all_reduce("SUM", 1.0)  # they wait


def check(strategy):
    found = set(strategy.experimental_local_results(strategy.run(total)))
    assert found == {strategy.num_replicas_in_sync}


def report(situation, *, after=1, replicas_per_rank=1):
    """Let a situation arise, wait for its reports, and return those of each rank.

    `situation` gets the strategy, and gives what ends it.
    """
    strategy = mr.MPIStrategy(replicas_per_rank=replicas_per_rank)
    check(strategy)
    world.Barrier()
    situation(strategy, lambda release: reports.begin(release, after))
    check(strategy)
    texts = world.allgather(reports.texts)
    reports.begin()
    strategy.close()
    return texts


def late(culprit, what, release=go_on):
    """A rank does something else before the call for which the others wait."""

    def situation(strategy, begin):
        begin(lambda: release(culprit))
        if rank == culprit:
            what()
        strategy.run(total)

    return situation


def late_replica(replica, what, release=go_on):
    """As `late`; the other replicas of its rank are at the call already."""
    culprit = replica // 2

    def situation(strategy, begin):
        begin(lambda: release(culprit))

        def step():
            if mr.get_replica_context().replica_id_in_sync_group == replica:
                what()
            total()

        strategy.run(step)

    return situation


def lock_over_a_collective(culprit):
    """A replica waits for a lock that another one of its rank holds while it waits for all."""

    def situation(strategy, begin):
        lock = threading.Lock()
        begin(lambda: go_on(culprit))

        def release():
            world.recv(tag=GO_ON)
            lock.release()

        def step():
            replica = mr.get_replica_context().replica_id_in_sync_group
            if replica == 2 * culprit:
                lock.acquire()
            elif replica == 2 * culprit + 1:
                with lock:  # late: it wants the lock
                    pass
            total()

        releaser = threading.Thread(target=release)
        if rank == culprit:
            releaser.start()
        strategy.run(step)
        if rank == culprit:
            releaser.join()

    return situation


def watchers():
    return [thread.name for thread in threading.enumerate() if "watch" in thread.name]


def fork(strategy, begin):
    """A child that ends by a signal which the watcher of its parent has taken."""
    begin(lambda: None)
    is_held, is_forked = threading.Event(), threading.Event()

    def hold():  # as the watcher may at this moment
        with Mailbox.lock:
            is_held.set()
            is_forked.wait()

    threading.Thread(target=hold).start()
    is_held.wait()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of threads: from Python 3.12 on
        child = os.fork()
    if child == 0:
        signal.alarm(30)
        strategy.close()
        if not watchers():
            os.kill(os.getpid(), signal.SIGUSR2)
        os._exit(0)
    is_forked.set()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status == -signal.SIGUSR2, status


def come_and_go(number):
    """Strategies, made and closed one after the other; return the watchers that are left."""
    found = [watchers()]
    for _ in range(number):
        with mr.MPIStrategy() as strategy:
            check(strategy)
            found += [watchers()]
    return [*found, watchers()]


last, middle = world.size - 1, world.size // 2
SITUATIONS = {
    "waits, first": lambda: report(late(0, wait_to_go_on), replicas_per_rank=2),
    "waits, middle": lambda: report(late(middle, wait_to_go_on)),
    "waits, last": lambda: report(late(last, wait_to_go_on), after=2),
    "waits, once more": lambda: report(late(0, wait_to_go_on)),
    "loops": lambda: report(late(middle, loop), replicas_per_rank=2),
    "stopped, first": lambda: report(late(0, stop, send(signal.SIGCONT))),
    "holds the GIL": lambda: report(late(middle, hold_the_gil, send(signal.SIGUSR1))),
    "lock": lambda: report(lock_over_a_collective(last), after=2, replicas_per_rank=2),
    "late replica": lambda: report(late_replica(1, wait_to_go_on), replicas_per_rank=2),
    "fork": lambda: report(fork),
    "come and go": lambda: world.allgather(come_and_go(50)),
}

found = {}
for name in os.environ["SITUATIONS"].split(";"):
    found[name] = SITUATIONS[name]()
unclosed = mr.MPIStrategy()
check(unclosed)
if rank == 0:
    with open(sys.argv[1], "w") as file:
        json.dump((found, pids), file)
