"""A program with a mistake of its own, which MISTAKE names; perhaps rank 1 dies, too.

Environment variables
---------------------
KILLS
    See dying.py: rank 1 may die in step 2, or in step 5, at the time of the mistake.
MISTAKE
    What happens in step 5, on rank 2 alone or in a replica; with ``once`` and ``merge_fn`` it comes
    up there, and not again when the step is done again; with ``another`` all ranks use another
    strategy; or before run_elastic, for ``at once`` on rank 0.
CAUGHT
    With ``1`` the program catches whatever comes out of run_elastic, and tells it.
SPARES
    How many ranks wait.
"""

import os
import sys

import dying

import mpi_replica as mr

strategy = mr.MPIStrategy(num_replicas=5, spares=int(os.environ.get("SPARES", 0)))
dying.watch_exchanges(strategy)
state = mr.ElasticState(strategy, step=0)
mistake = os.environ["MISTAKE"]
another = mr.MPIStrategy(num_replicas=5) if mistake == "another" else None
is_alone = dying.first_rank == 2
made = []


def fail_once():
    if state.step == 5 and not made:
        made.append(mistake)
        dying.enter("once")
        if is_alone:
            raise ValueError("the mistake")


def total():
    context = mr.get_replica_context()
    if mistake == "replica" and state.step == 5 and context.replica_id_in_sync_group == 4:
        raise ValueError("the mistake")
    if mistake == "once":
        fail_once()
    if mistake == "merge_fn":
        context.merge_call(lambda strategy: fail_once())
    return context.all_reduce("SUM", 1.0)


def train():
    while state.step < 8:
        if state.step == 2:
            dying.enter("step2")
        if state.step == 5:
            dying.enter("step5")
        if state.step == 5 and is_alone and mistake == "late":
            from mpi4py import MPI  # behind mpi_replica, which has told Open MPI how to end

            while not strategy.communicator.Is_revoked():  # the others have met the loss
                MPI.COMM_SELF.Iprobe()  # in which what comes from the others is heard
            raise ValueError("the mistake")
        if state.step == 5 and another is not None:
            another.run(total)
        if state.step == 5 and is_alone and mistake in ("rank", "again"):
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
if mistake == "at once" and dying.first_rank == 0:
    raise ValueError("the mistake")
if mistake == "object" and is_alone:
    state.step = object()
try:
    try:
        strategy.run_elastic(train, state)
    except ValueError:
        if mistake != "again":
            raise
        strategy.run_elastic(train, state)
    dying.tell("NOT REACHED")
except BaseException as error:
    if os.environ.get("CAUGHT") != "1":
        raise
    dying.tell("TOLD", type(error).__name__, str(error))
