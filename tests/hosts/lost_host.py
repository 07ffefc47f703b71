"""A program that trains while ranks of one host kill themselves, and tells how it went.

    lost_host.py HOST RANKS

RANKS ranks of HOST die at the fifth step; none where it is 0.
"""

import hashlib
import os
import signal
import sys

import numpy as np

import mpi_replica as mr

host, dying = sys.argv[1], int(sys.argv[2])
STEPS = 12

reproducible = mr.CommunicationOptions(reproducible=True)
strategy = mr.MPIStrategy(num_replicas=7, communication_options=reproducible)
places = strategy.cluster_resolver.cluster_spec()["worker"]
doomed = [rank for rank, place in enumerate(places) if place == host][:dying]
must_die = strategy.rank in doomed
with strategy.scope():
    weights = mr.Variable(np.linspace(0, 1, 3000))
    rows = mr.Variable(
        0.0,
        synchronization=mr.VariableSynchronization.ON_READ,
        aggregation=mr.VariableAggregation.SUM,
    )
dataset = mr.data.Dataset.range(70).shuffle(seed=1).batch(10)
batches = strategy.experimental_distribute_dataset(dataset)
state = mr.ElasticState(step=0, losses=[], weights=weights, rows=rows, batches=batches)


def step(numbers):
    context = mr.get_replica_context()
    noise = context.rng.normal(size=3000)
    rows.assign_add(float(len(numbers)))
    weights.assign_sub(0.01 * context.all_reduce("MEAN", noise * numbers.sum()))
    return float(noise.sum())


def train():
    while state.step < STEPS:
        for numbers in batches:
            if must_die and state.step == 5:
                os.kill(os.getpid(), signal.SIGKILL)
            noise = strategy.run(step, args=(numbers,))
            state.losses.append(float(strategy.reduce("SUM", noise, axis=None)))
            state.step += 1
            state.commit()
            if state.step == STEPS:
                break


strategy.run_elastic(train, state)
bits = np.asarray(weights).tobytes() + np.asarray([*state.losses, rows.value()]).tobytes()
lost = sorted(loss_host for loss in strategy.losses for loss_host in loss.hosts)
outcome = f"{hashlib.sha256(bits).hexdigest()} without {','.join(lost) or 'loss'}"
sys.stdout.write(f"rank {strategy.rank} {outcome}\n")
strategy.close()
