"""What differs between hosts; each rank writes what it found to a folder that all hosts see.

between_hosts.py FOLDER
"""

import json
import os
import sys
from pathlib import Path

import numpy as np

import mpi_replica as mr

folder = Path(sys.argv[1])
reproducible = mr.CommunicationOptions(reproducible=True, timeout_seconds=60)
strategy = mr.MPIStrategy(num_replicas=7, communication_options=reproducible, seed=1)
rank = strategy.rank
found = {"hosts": strategy.cluster_resolver.cluster_spec()["worker"]}
found["crowded"] = strategy.engine.transport.is_crowded


def values_of(value):
    return strategy.experimental_local_results(value)


def large():
    context = mr.get_replica_context()
    mine = context.rng.normal(size=300_000).astype(np.float32)
    return context.all_reduce("SUM", mine).tobytes().hex()[:4096]


def small():
    context = mr.get_replica_context()
    return context.all_reduce("SUM", context.rng.normal(size=3)).tolist()


def gathered():
    context = mr.get_replica_context()
    i = context.replica_id_in_sync_group
    return context.all_gather(np.full((i, 30_000), i), axis=0)[:, 0].tolist()


def by_shared_memory():
    options = mr.CommunicationOptions(implementation="SHARED_MEMORY")
    return mr.get_replica_context().all_reduce("SUM", np.ones(300_000), options)


def own_error():
    if mr.get_replica_context().replica_id_in_sync_group == 6:
        raise KeyError("six")
    return mr.get_replica_context().all_reduce("SUM", 1)


for fn in (large, small, gathered):
    found[fn.__name__] = list(values_of(strategy.run(fn)))
for fn in (by_shared_memory, own_error):
    try:
        strategy.run(fn)
    except (ValueError, KeyError) as error:
        found[fn.__name__] = [repr(error)]

for replicas in (1, 2):
    plain = mr.MPIStrategy(replicas_per_rank=replicas)
    steps = plain.engine.transport.steps
    plain.run(lambda: mr.get_replica_context().all_reduce("SUM", np.ones(10**6, np.float32)))
    found[f"steps of 4 MB, {replicas} a rank"] = plain.engine.transport.steps - steps
    plain.close()


def packets_sent():
    """Return how many packets this host has sent; 0 where it has no network."""
    with open("/proc/net/dev") as file:
        return sum(int(line.split()[10]) for line in file if line.lstrip().startswith("eth0: "))


def packets_of_a_small_call():
    context = mr.get_replica_context()
    sent = packets_sent()
    for _ in range(100):
        context.all_reduce("SUM", 1.0)
    return (packets_sent() - sent) / 100


plain = mr.MPIStrategy()
plain.run(packets_of_a_small_call)  # makes connections
found["packets of a small call"] = values_of(plain.run(packets_of_a_small_call))[0]
plain.close()

with strategy.scope():
    weights = mr.Variable(np.arange(200_000.0))
data = strategy.experimental_distribute_dataset(mr.data.Dataset.range(28).shuffle(seed=1).batch(7))
manager = mr.CheckpointManager(mr.Checkpoint(weights=weights, data=data), folder / "kept")
left = []
for step, batch in enumerate(data):
    weights.assign_add(np.ones(200_000))
    if step == 1:
        manager.save(step)
    elif step > 1:
        left.append([rows.tolist() for rows in values_of(batch)])
manager.restore_or_initialize()
found["first weight"] = float(weights[0])
found["goes on"] = left == [[rows.tolist() for rows in values_of(batch)] for batch in data]
strategy.verify({"weights": weights})
strategy.close()
(folder / f"found-{rank}.json").write_text(json.dumps(found | {"pid": os.getpid()}))
