"""Ranks 0 and 1 die together, so that a checkpoint is gone back to that lacks a variable."""

import os

import dying
import numpy as np

import mpi_replica as mr

reproducible = mr.CommunicationOptions(reproducible=True)
strategy = mr.MPIStrategy(num_replicas=4, communication_options=reproducible)
dying.watch_exchanges(strategy)
with strategy.scope():
    weights, pace = mr.Variable(np.zeros(3), name="weights"), mr.Variable(1.0, name="pace")
state = mr.ElasticState(strategy, step=0, weights=weights)
manager = mr.CheckpointManager(state, os.environ["FOLDER"])


def step():
    noise = mr.get_replica_context().rng.normal(size=3)
    weights.assign_add(float(pace) * mr.get_replica_context().all_reduce("SUM", noise))
    pace.assign_add(1.0)


def train():
    if strategy.losses and os.environ["CASE"] == "assigned":
        pace.assign(1.0 + state.step)
    while state.step < 6:
        dying.enter(f"step{state.step}")
        strategy.run(step)
        state.step += 1
        if state.step == 2:
            manager.save(state.step)
        state.commit()


strategy.run_elastic(train, state)
dying.tell("TOLD", np.asarray(weights).tolist())
strategy.close()
