"""A program that makes a call of another kind in each of its steps, and goes on without lost ranks.

It ends with the same hash on any number of ranks, whether some were lost or not. See dying.py.

Environment variables
---------------------
REPRODUCIBLE
    With ``1`` numbers are those for which the order of sums matters; otherwise they are whole.
SPARES
    How many ranks wait.
SWALLOW
    With ``1`` the program catches every error of a step, and goes on; with ``other`` it raises
    another one.
NAMED
    With ``1`` the state has the datasets: those of a checkpoint it does not know by itself.
FOLDER
    Where checkpoints are saved.
"""

import dataclasses
import hashlib
import logging
import os

import dying
import numpy as np

import mpi_replica as mr
from mpi_replica.core.layout import Layout

NUM_REPLICAS = 5
REPRODUCIBLE = os.environ.get("REPRODUCIBLE") == "1"
PER_REPLICA = mr.InputOptions(
    experimental_replication_mode=mr.InputReplicationMode.PER_REPLICA,
)
logging.basicConfig(format="%(message)s")

strategy = mr.MPIStrategy(
    num_replicas=NUM_REPLICAS,
    spares=int(os.environ.get("SPARES", 0)),
    communication_options=mr.CommunicationOptions(reproducible=REPRODUCIBLE),
    seed=5,
)
dying.watch_exchanges(strategy)
dying.tell("PID", os.getpid())


def numbers(*shape):
    """Draw numbers of this replica."""
    rng = mr.get_replica_context().rng
    return rng.normal(size=shape) if REPRODUCIBLE else rng.integers(-999, 999, shape) * 1.0


def of_steps(context):
    """Have replica i get the rows ``100 i + step``, however many pipelines there are."""
    layout = Layout.even(NUM_REPLICAS, context.num_input_pipelines, context.input_pipeline_id)
    ids = layout.local_replica_ids

    def elements():
        for step in range(4):
            for i in ids:
                yield np.full((2, 3), 100.0 * i + step)

    return mr.data.Dataset.from_generator(elements)


def of_shards(context):
    rows = mr.data.Dataset.range(70).shard(context.num_input_pipelines, context.input_pipeline_id)
    return rows.shuffle(seed=3).batch(4)


with strategy.scope():
    weights = mr.Variable(np.zeros(50), name="weights")
    seen = mr.Variable(
        0.0,
        name="seen",
        synchronization=mr.VariableSynchronization.ON_READ,
        aggregation=mr.VariableAggregation.SUM,
    )
    summed = mr.Variable(np.zeros(3), name="summed", aggregation=mr.VariableAggregation.SUM)
batches = strategy.experimental_distribute_dataset(
    mr.data.Dataset.range(103).shuffle(seed=3).batch(20)
)
pipelines = strategy.distribute_datasets_from_function(of_steps)
own_pipelines = strategy.distribute_datasets_from_function(of_shards, PER_REPLICA)
datasets = {"batches": batches, "pipelines": pipelines, "own_pipelines": own_pipelines}
state = mr.ElasticState(
    strategy,
    **(datasets if os.environ.get("NAMED") == "1" else {}),
    step=0,
    found=[],
    weights=weights,
    variables=[seen, summed],
    own=strategy.experimental_distribute_values_from_function(
        lambda context: {"id": context.replica_id_in_sync_group, "trace": np.zeros(4)}
    ),
    momentum={"of weights": np.zeros(50)},
)
manager = mr.CheckpointManager(state, os.environ.get("FOLDER", ""), max_to_keep=2)


def forever(dataset):
    while True:
        yield from dataset


def text(value):
    """Return the bits of a value that is the same on all ranks."""
    arrays = [np.asarray(part, order="C") for part in np.atleast_1d(value)]
    return hashlib.sha256(b"".join(array.tobytes() for array in arrays)).hexdigest()[:12]


def of_first(value):
    """Return what all replicas have alike."""
    return strategy.experimental_local_results(value)[0]


def reduced(*shape, op="SUM"):
    def call():
        return of_first(
            strategy.run(lambda: mr.get_replica_context().all_reduce(op, numbers(*shape)))
        )

    return call


def gathered():
    def step():
        context = mr.get_replica_context()
        return context.all_gather(numbers(context.replica_id_in_sync_group * 20000 + 1, 2), axis=0)

    return of_first(strategy.run(step))


def merged():
    def merge(strategy, small, large):
        total = strategy.reduce("SUM", small, axis=None)
        weights.assign_add(total[:50])
        return total, np.asarray(large.values[3])

    def step():
        return mr.get_replica_context().merge_call(merge, (numbers(60), numbers(40000)))

    total, large = strategy.run(step)
    return np.concatenate([of_first(total), of_first(large)])


def reduced_from_above():
    return strategy.reduce("MEAN", strategy.run(lambda: numbers(300)), axis=None)


def gathered_from_above():
    rows = strategy.run(lambda: numbers(mr.get_replica_context().replica_id_in_sync_group, 2))
    return strategy.gather(rows, axis=0)


def made_variable():
    with strategy.scope():
        made = mr.Variable(lambda: np.arange(2000.0) * state.step, name="made")
    return made.numpy()


def taken():
    def step(rows, others):
        return mr.get_replica_context().all_reduce("SUM", [rows.sum(), others.sum()])

    return of_first(strategy.run(step, args=(next(iters[1]), next(iters[2]))))


def run_alone():
    def step():
        seen.assign_add(5.0 * mr.get_replica_context().rng.integers(100))
        return numbers()

    strategy.run(step)
    return 0


def read():
    return seen.value()


def assigned():
    strategy.run(lambda: summed.assign(numbers(3)))
    return summed.numpy()


def verified():
    strategy.verify({"weights": weights, "found": state.found})
    return 1


CALLS = {
    "few": reduced(3),
    "1MB": reduced(125_000, op="MEAN"),
    "6MB": reduced(750_000),
    "all_gather": gathered,
    "merge_call": merged,
    "reduce": reduced_from_above,
    "gather": gathered_from_above,
    "Variable": made_variable,
    "save": lambda: 1,  # at the end of its step
    "next": taken,
    "run": run_alone,
    "read": read,
    "assign": assigned,
    "verify": verified,
    "commit": lambda: 2,  # at the end of its step
}
iters = []


def step_with_rows(rows, own):
    """Change all that belongs to replicas, and what does not."""
    context = mr.get_replica_context()
    seen.assign_add(5.0 * len(rows))  # a checkpoint gives each of 5 replicas a part of the sum
    total = context.all_reduce("SUM", numbers(50) + rows.sum())
    weights.assign_sub(total / 64)
    return {"id": own["id"], "trace": own["trace"] * 2 + numbers(4)}


def one_step():
    name = list(CALLS)[state.step]
    state.own = strategy.run(step_with_rows, args=(next(iters[0]), state.own))
    with dying.during("" if name in ("save", "commit") else name):
        state.found.append(text(CALLS[name]()))
    state.momentum["of weights"] *= 0.5
    state.momentum["of weights"] += weights
    state.step += 1
    if name == "save":
        with dying.during("save"):
            manager.save(state.step)
    with dying.during("commit" if name == "commit" else ""):
        state.commit()


def train():
    iters[:] = [forever(dataset) for dataset in datasets.values()]
    while state.step < len(CALLS):
        if "SWALLOW" not in os.environ:
            one_step()
            continue
        before = state.step
        try:
            one_step()
        except RuntimeError as error:
            if os.environ["SWALLOW"] == "other":
                raise ValueError("the step has failed") from error
            state.step = before + 1
    dying.enter("end")
    return "trained"


dying.enter("begin")
result = strategy.run_elastic(train, state)
dying.enter("")
if strategy.local_replica_ids:
    everyones = strategy.run(
        lambda own: mr.get_replica_context().all_gather(own["trace"] + own["id"], axis=0),
        args=(state.own,),
    )
    parts = [weights, state.momentum["of weights"], summed, seen, reduced(9)()]
    told = {
        "hash": text(np.concatenate([*map(np.ravel, parts), of_first(everyones)])),
        "found": state.found,
        "step": state.step,
        "result": result,
        "losses": [dataclasses.asdict(loss) for loss in strategy.losses],
        "texts": [str(loss) for loss in strategy.losses],
    }
    dying.tell("TOLD", told)
else:
    dying.tell("SPARE", result)
strategy.close()
