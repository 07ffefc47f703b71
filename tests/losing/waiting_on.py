"""Rank 0 of three dies, one of two spares takes its place, and the other one waits on."""

import os
import signal

import dying

import mpi_replica as mr

strategy = mr.MPIStrategy(num_replicas=5, spares=2)
state = mr.ElasticState(strategy, step=0)
first = strategy.size, strategy.rank


def train():
    if dying.first_rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    strategy.run(lambda: mr.get_replica_context().all_reduce("SUM", 1.0))


strategy.run_elastic(train, state)
counts = [loss.replicas_per_rank for loss in strategy.losses]
now = strategy.size, strategy.rank
dying.tell("TOLD", first, now, strategy.local_replica_ids, counts, repr(strategy))
