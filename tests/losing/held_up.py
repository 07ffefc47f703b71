"""Rank 1 of three dies, and rank 0 is in a receive of its own while rank 2 recovers from the loss.

Rank 0 gets what it waits for when rank 2 has reported where it is: the job then goes on.

Environment variables
---------------------
CASE
    ``unknown``: rank 0 does not know of the loss; ``met``: it has met it before it receives.
"""

import logging
import os
import signal

import dying
from mpi4py import MPI

import mpi_replica as mr

world = MPI.COMM_WORLD
strategy = mr.MPIStrategy(num_replicas=4)
state = mr.ElasticState(strategy, step=0)


class Handler(logging.Handler):
    def emit(self, record):
        if " has waited " in record.getMessage():
            dying.tell("REPORT", record.getMessage(), strategy.engine.transport.pids)
            world.isend(None, 0).Wait()


if dying.first_rank == 2:
    logging.getLogger("mpi_replica").addHandler(Handler())


def receive():
    if dying.first_rank == 0:
        world.recv(source=2)


def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)


def end_the_commit_by_a_loss():
    """Rank 1 dies at its end, and rank 2 has met that already."""
    transport = strategy.engine.transport
    if dying.first_rank == 1:
        transport.agree = die
    if dying.first_rank == 2:
        transport.agree = lambda _: type(transport).agree(transport, 0)


def train():
    while state.step < 3:
        is_time = state.step == 1 and not strategy.losses
        if is_time and os.environ["CASE"] == "unknown":
            if dying.first_rank == 1:
                die()
            receive()
        strategy.run(lambda: mr.get_replica_context().all_reduce("SUM", 1.0))
        state.step += 1
        if is_time:
            end_the_commit_by_a_loss()
        try:
            state.commit()
        except mr.errors.RankLostError:
            receive()
            raise


strategy.run_elastic(train, state)
dying.tell("TOLD", state.step)
