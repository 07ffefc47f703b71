"""What two threads of a rank do at the same time (see tests/test_traced_jobs.py)."""

import threading

import mpi_replica as mr

NUM_STEPS = 20
first, second = mr.MPIStrategy(), mr.MPIStrategy()


@mr.span("load")
def load(row):
    sum(range(10_000))
    return row


def work(strategy):
    rows = mr.data.Dataset.range(NUM_STEPS * strategy.num_replicas_in_sync).map(load)
    batches = rows.batch(strategy.num_replicas_in_sync).prefetch(2)
    for batch in strategy.experimental_distribute_dataset(batches):
        with mr.span("step"):
            strategy.run(step, args=(batch,))


def step(row):
    return mr.get_replica_context().all_reduce("SUM", float(row.sum()))


other = threading.Thread(target=work, args=(second,))
other.start()
work(first)
other.join()
