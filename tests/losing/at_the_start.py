"""A strategy that comes together although ranks die before it does, and while it does.

Rank 3 dies before, rank 1 behind the first exchanges, and rank 0 in the agreement that all have
come. Later rank 4 dies in the training.
"""

import os
import signal

import dying

import mpi_replica as mr
from mpi_replica.ranks.launch import open_survivors
from mpi_replica.ranks.survivors import Survivors


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def killed_around(method, rank, *, late):
    def call(self, *arguments):
        found = method(self, *arguments) if late else None
        if dying.first_rank == rank:
            die()
        return found if late else method(self, *arguments)

    return call


Survivors._renew = killed_around(Survivors._renew, 1, late=True)
Survivors._agree = killed_around(Survivors._agree, 0, late=False)
if dying.first_rank == 3:
    open_survivors()  # starts MPI
    die()

strategy = mr.MPIStrategy()
state = mr.ElasticState(strategy, step=0)
at_start = strategy.local_replica_ids


def train():
    while state.step < 4:
        totals = strategy.run(lambda: mr.get_replica_context().all_reduce("SUM", 1.0))
        if state.step == 2 and dying.first_rank == 4:
            die()
        state.step += 1
        state.commit()
    return float(strategy.experimental_local_results(totals)[0])


total = strategy.run_elastic(train, state)
told = {
    "total": total,
    "replicas": [at_start, strategy.local_replica_ids],
    "losses": [loss.ranks for loss in strategy.losses],
}
dying.tell("TOLD", told)
strategy.close()
