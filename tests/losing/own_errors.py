"""A program with a mistake of its own, which MISTAKE names; perhaps rank 1 dies before.

Environment variables
---------------------
KILLS
    See dying.py: rank 1 may die in step 2.
MISTAKE
    What happens in step 5, on rank 2 alone or in a replica; or before run_elastic.
"""

import os
import sys

import dying

import mpi_replica as mr

strategy = mr.MPIStrategy(num_replicas=5)
state = mr.ElasticState(strategy, step=0)
mistake = os.environ["MISTAKE"]
is_alone = dying.first_rank == 2


def total():
    context = mr.get_replica_context()
    if mistake == "replica" and state.step == 5 and context.replica_id_in_sync_group == 4:
        raise ValueError("the mistake")
    return context.all_reduce("SUM", 1.0)


def train():
    while state.step < 8:
        if state.step == 2:
            dying.enter("step2")
        if state.step == 5 and is_alone and mistake == "rank":
            raise ValueError("the mistake")
        if state.step == 5 and is_alone and mistake == "exit":
            sys.exit(3)
        if state.step == 5 and is_alone and mistake == "early":
            return
        strategy.run(total)
        state.step += 1
        state.commit()


if mistake == "outside" and is_alone:
    strategy.run(total)
if mistake == "object" and is_alone:
    state.step = object()
strategy.run_elastic(train, state)
dying.tell("NOT REACHED")
