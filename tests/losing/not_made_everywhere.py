"""Rank 2 dies, and what ranks make to come together anew is not made on rank 1 alone.

Environment variables
---------------------
CASE
    ``split``: rank 1 alone is told of a loss when the ranks are divided into those that host
    replicas and those that wait, as ULFM may tell some ranks alone. ``memory``: rank 1 has no
    memory for the headers of its new transport.
"""

import os
import signal

import dying

import mpi_replica as mr
from mpi_replica.ranks import mpi, survivors

strategy = mr.MPIStrategy(num_replicas=3, spares=1)
MPI = strategy.survivors._mpi
state = mr.ElasticState(strategy, step=0)
failures = ["once"]
shrink, headers = survivors.shrink, mpi.HeaderExchanges


class World(MPI.Intracomm):
    """Those that live after rank 2."""

    def Split(self, color=0, key=0):
        made = super().Split(color, key)
        if dying.first_rank == 1 and failures:
            failures.pop()
            raise MPI.Exception(MPI.ERR_PROC_FAILED)
        return made


def headers_without_memory(*arguments):
    if dying.first_rank == 1:
        raise MemoryError("no memory for headers")
    return headers(*arguments)


if os.environ["CASE"] == "split":
    survivors.shrink = lambda world: World(shrink(world))
else:
    mpi.HeaderExchanges = headers_without_memory


def train():
    while state.step < 3:
        if state.step == 1 and dying.first_rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        strategy.barrier()
        state.step += 1
        state.commit()
    return state.step


result = strategy.run_elastic(train, state)
dying.tell("TOLD", result, [rank for loss in strategy.losses for rank in loss.ranks])
strategy.close()
