"""Ranks of which one is lost while they tell each other who they are, first and behind a loss.

Rank 2 dies where they make a world, in which rank 0 is lost later, and rank 3 where they make the
next one; each in the middle of that, when the others know how much it has to say.
"""

import os
import signal

import dying
import numpy as np

import mpi_replica as mr
from mpi_replica.ranks import mpi, survivors, ulfm


def lost(communicator, value):
    lengths = np.empty(communicator.Get_size(), np.int64)
    communicator.Iallgather(np.array([90]), lengths).Wait()
    os.kill(os.getpid(), signal.SIGKILL)


if dying.first_rank == 2:
    survivors.all_gather_objects = lost
num_met = 0


def lost_the_second_time(communicator, value):
    global num_met
    num_met += 1
    return (lost if num_met == 2 else ulfm.all_gather_objects)(communicator, value)


if dying.first_rank == 3:
    mpi.all_gather_objects = lost_the_second_time

strategy = mr.MPIStrategy()
state = mr.ElasticState(strategy, step=0)


def train():
    while state.step < 3:
        if state.step == 1 and dying.first_rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        strategy.run(lambda: mr.get_replica_context().all_reduce("SUM", 1.0))
        state.step += 1
        state.commit()
    return state.step


step = strategy.run_elastic(train, state)
dying.tell("TOLD", step, [list(loss.ranks) for loss in strategy.losses])
strategy.close()
