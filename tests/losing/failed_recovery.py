"""Rank 2 of four dies, and rank 3 has ended: the others catch that they can't go on alone."""

import os
import signal
import sys

import dying

import mpi_replica as mr

strategy = mr.MPIStrategy(num_replicas=4)
state = mr.ElasticState(strategy, step=0)


def train():
    while state.step < 3:
        if state.step == 1 and dying.first_rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        if state.step == 1 and dying.first_rank == 3:
            sys.exit(0)
        strategy.run(lambda: mr.get_replica_context().all_reduce("SUM", 1.0))
        state.step += 1
        state.commit()


try:
    strategy.run_elastic(train, state)
except mr.errors.RankLostError as error:
    dying.tell("TOLD", "the program has ended" in str(error), strategy.engine.watch.is_waiting)
