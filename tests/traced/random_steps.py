"""Steps that are drawn by chance, the same on all ranks (see tests/test_traced_jobs.py).

Run with a seed and the path of a checkpoint; the strategies have 1 replica a rank, 2, and 1.
"""

import random
import sys

import numpy as np

import mpi_replica as mr

NUM_STEPS = 25
draw = random.Random(sys.argv[1])


def reduce_a_float():
    mr.get_replica_context().all_reduce("SUM", 1.0)


def reduce_a_large_array():
    mr.get_replica_context().all_reduce("MEAN", np.ones((300, 200)))


def gather():
    with mr.span("gather"):
        mr.get_replica_context().all_gather(np.ones((2, 3)), axis=0)


def merge():
    def of_all(strategy, value):
        with mr.span("of all"):
            with mr.span("all rows"):
                strategy.gather(value, axis=0)
            return strategy.reduce("SUM", value, axis=None)

    mr.get_replica_context().merge_call(of_all, args=(np.ones(5),))


def nothing():
    pass


IN_REPLICAS = [reduce_a_float, reduce_a_large_array, gather, merge, nothing]


@mr.span("step")
def step(functions):
    for function in functions:
        with mr.span(function.__name__):
            function()


def run(strategy):
    functions = draw.choices(IN_REPLICAS, k=draw.randint(0, 3))
    strategy.run(step, args=(functions,))


def verify(strategy):
    with mr.span("verify"):
        strategy.verify(7.0)


def barrier(strategy):
    strategy.barrier()


def take_a_batch(strategy):
    rows = mr.data.Dataset.range(4 * strategy.num_replicas_in_sync)
    batches = rows.batch(2 * strategy.num_replicas_in_sync)
    for batch in strategy.experimental_distribute_dataset(batches):
        with mr.span("batch"):
            strategy.run(lambda rows: rows.sum(), args=(batch,))


def save_and_restore(strategy):
    saved = mr.Checkpoint(strategy, step=draw.randint(0, 9), rows=np.ones(100))
    with mr.span("state"):
        saved.save(sys.argv[2])
        saved.restore(sys.argv[2])


def fail_alike(strategy):
    def mistake():
        raise KeyError("no such row")

    try:
        strategy.run(mistake)
    except KeyError:
        pass
    else:
        raise AssertionError("no rank has raised")


STEPS = [run, run, run, verify, barrier, take_a_batch, save_and_restore, fail_alike]


def main():
    size = mr.MPIStrategy().size
    for replicas in (size, 2 * size, size):
        strategy = mr.MPIStrategy(num_replicas=replicas)
        for function in draw.choices(STEPS, k=NUM_STEPS):
            with mr.span(function.__name__):
                function(strategy)
        if replicas > size:
            strategy.close()


if __name__ == "__main__":
    main()
