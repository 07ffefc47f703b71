"""What names of a state hold when rank 0 of three dies: one object each, or one together.

Behind the commit, and before the loss, those that held one are parted, and others hold one.

Environment variables
---------------------
SPARES
    How many ranks wait.
"""

import os
import signal

import dying
import numpy as np

import mpi_replica as mr

strategy = mr.MPIStrategy(num_replicas=3, spares=int(os.environ["SPARES"]))
names = dict.fromkeys(["array", "same_array", "nested", "own", "equal", "still_equal"])
state = mr.ElasticState(strategy, step=0, lists={}, seen=[], **names)


def train():
    while state.step < 4:
        strategy.barrier()
        if state.step == 0:
            state.array = state.same_array = np.ones(2)
            state.nested = [(state.array, 1)]
            state.lists["one"] = state.lists["same"] = [1.0]
            state.own, state.equal, state.still_equal = np.zeros(1), np.zeros(1), np.zeros(1)
        state.array += 1
        state.lists["one"][0] += 1
        state.own += state.step >= 2
        state.equal += state.step >= 2
        arrays = state.same_array, state.nested[0][0], state.own, state.equal, state.still_equal
        state.seen.append([*state.lists["same"], *(float(array[0]) for array in arrays)])
        state.step += 1
        state.commit()
        if state.step == 2 and not strategy.losses:
            state.same_array = state.array.copy()
            state.nested = [(state.array.copy(), 1)]
            state.lists["same"] = [*state.lists["same"]]
            state.own = state.still_equal = state.equal
            if dying.first_rank == 0:
                os.kill(os.getpid(), signal.SIGKILL)


strategy.run_elastic(train, state)
if strategy.local_replica_ids:
    dying.tell("TOLD", state.seen)
