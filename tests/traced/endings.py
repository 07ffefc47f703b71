"""A job that ends in the way that is asked for (see tests/test_traced_jobs.py).

Run with the name of a way and a folder for checkpoints.
"""

import os
import signal
import sys

import mpi_replica as mr

NUM_STEPS = 10
way, folder = sys.argv[1:]


def add_up():
    mr.get_replica_context().all_reduce("SUM", 1.0)


def fail():
    raise KeyError("no such row")


def train(strategy):
    for _ in range(NUM_STEPS):
        strategy.run(add_up)


def kill(strategy):
    if strategy.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    strategy.run(add_up)


def exit_at_once(strategy):
    if strategy.rank == 1:
        os._exit(3)
    strategy.run(add_up)


def fail_on_one_rank(strategy):
    if strategy.rank == 1:
        fail()
    strategy.run(add_up)


def wait(strategy):
    os.write(1, f"ready {os.getpid()}\n".encode())
    if strategy.rank == 1:
        signal.pause()
    strategy.run(add_up)


def restart(strategy):
    manager = mr.CheckpointManager(mr.Checkpoint(strategy, step=1), folder)
    if manager.restore_or_initialize() is None:
        manager.save(1)
        kill(strategy)


def lose(strategy):
    state = mr.ElasticState(strategy, step=0)

    def steps():
        while state.step < NUM_STEPS:
            if state.step == NUM_STEPS // 2 and strategy.size == 3:
                kill(strategy)
            strategy.run(add_up)
            state.step += 1
            state.commit()

    strategy.run_elastic(steps, state)


WAYS = {
    "fails on all ranks": lambda strategy: strategy.run(fail),
    "exits": lambda strategy: sys.exit(3),
    "fails on one rank": fail_on_one_rank,
    "is killed": kill,
    "exits at once": exit_at_once,
    "waits": wait,
    "is killed once": restart,
    "loses a rank": lose,
}

if way != "has no strategy":
    strategy = mr.MPIStrategy()
    train(strategy)
    WAYS[way](strategy)
