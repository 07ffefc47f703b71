"""What was made before a loss, and is used after it; and states that are lost.

Environment variables
---------------------
CASE
    ``values``: rank 1 dies, and what was made before is used. ``gone``: ranks 1 and 2 die
    together, whose replicas are lost; ``unsaved``: the same with a manager that has not saved;
    ``torn``: with one whose only checkpoint, in FOLDER, is torn.
    ``beginning``: rank 1 dies before the first commit. ``unloadable``: rank 2, which keeps the
    copies of rank 1, has no memory to load them. ``partly``: something belongs to one replica of a
    rank alone.
    ``drawn``: one replica alone has drawn random numbers before run_elastic.
    ``outside``: rank 1 dies where nobody is in run_elastic.
"""

import gc
import os
import pickle
import types

import dying
import numpy as np

import mpi_replica as mr
from mpi_replica.strategy.elastic import commit

strategy = mr.MPIStrategy(num_replicas=5)
dying.watch_exchanges(strategy)
case = os.environ["CASE"]


def replica_id():
    return mr.get_replica_context().replica_id_in_sync_group


own = strategy.experimental_distribute_values_from_function(
    lambda context: np.full(2, context.replica_id_in_sync_group)
)
batches = strategy.experimental_distribute_dataset(mr.data.Dataset.range(50).batch(10))
state = mr.ElasticState(strategy, step=0, own=None if case in ("partly", "drawn") else own)
folder = {"unsaved": "/nonexistent", "torn": os.environ.get("FOLDER")}.get(case)
manager = None if folder is None else mr.CheckpointManager(state, folder)
if case == "torn":
    open(manager.save(1) + ".index", "w").close()
before = {
    "of a run": strategy.run(replica_id),
    "from a function": own,
    "of a dataset": next(iter(batches)),
    "in a nest": {"a": [strategy.run(replica_id)]},
}
iterators = {
    "iterator": iter(batches),
    "iterator of unknown length": iter(
        strategy.experimental_distribute_dataset([np.arange(10.0)] * 5)
    ),
    "iterator that has ended": iter(batches),
}
next(iterators["iterator"])
list(iterators["iterator that has ended"])
uses = {
    "reduce": lambda value: strategy.reduce("SUM", value, axis=None),
    "gather": lambda value: strategy.gather(value, axis=0),
    "run": lambda value: strategy.run(lambda given: None, args=(value,)),
    "local results": lambda value: strategy.experimental_local_results(value),
}
if case == "unloadable" and dying.first_rank == 2:

    def refuse(data):
        raise MemoryError("no memory for the copies")

    commit.pickle = types.SimpleNamespace(dumps=pickle.dumps, loads=refuse)
told = {}
still_there = {}
if case == "values":
    # What no loss of this strategy takes away: it is of another one, or of no layout.
    from mpi4py import MPI  # behind mpi_replica, which has told Open MPI how to end

    alone = mr.MPIStrategy(MPI.COMM_SELF, num_replicas=5)
    still_there = {
        "of another strategy": (alone, alone.run(replica_id)),
        "made by hand": (strategy, mr.PerReplica(range(5))),
    }
    gc.freeze()  # as programs do that fork: nothing is found among all objects then


def sum_up():
    return mr.get_replica_context().all_reduce("SUM", 1.0)


def draw_in_replica_2():
    """Replica 3 is on the same rank, and nothing belongs to it."""
    context = mr.get_replica_context()
    return context.all_reduce("SUM", context.rng.random() if replica_id() == 2 else 0.0)


def use_again():
    for name, value in before.items():
        for how, use in uses.items():
            try:
                use(value)
            except mr.errors.RankLostError as error:
                told[f"{name}, {how}"] = str(error)
            else:
                told[f"{name}, {how}"] = "no error"
    for name, iterator in iterators.items():
        try:
            told[name] = repr(next(iterator, None))
        except mr.errors.RankLostError as error:
            told[name] = str(error)


def train():
    while state.step < 4:
        if state.step == 2:
            dying.tell("STEP2")
            dying.enter("step2")
        strategy.run(draw_in_replica_2 if case == "partly" else sum_up)
        if case == "values" and strategy.losses and not told:
            use_again()
        state.step += 1
        state.commit()
    if case in ("partly", "drawn"):
        return strategy.extended.broadcast_to(0).value
    kept = strategy.reduce("SUM", state.own, axis=None).tolist()
    theirs = [owner.reduce("SUM", value, axis=None) for owner, value in still_there.values()]
    return kept, repr(before["of a run"]), list(map(int, theirs))


if case == "drawn":
    strategy.run(draw_in_replica_2)
dying.enter("beginning")
if case == "outside":
    strategy.run(sum_up)
result = strategy.run_elastic(train, state)
dying.tell("TOLD", [told, result])
strategy.close()
