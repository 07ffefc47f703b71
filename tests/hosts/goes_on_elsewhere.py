"""A program with checkpoints, which waits in the middle of its first start until something is lost.

goes_on_elsewhere.py FOLDER SOCKET
"""

import hashlib
import os
import socket
import sys

import numpy as np

import mpi_replica as mr

folder, path = sys.argv[1:]
STEPS, WAITS_AT = 6, 4

reproducible = mr.CommunicationOptions(reproducible=True)
strategy = mr.MPIStrategy(communication_options=reproducible)
with strategy.scope():
    weights = mr.Variable(np.linspace(0, 1, 300))
state = mr.Checkpoint(weights=weights, step=0)
manager = mr.CheckpointManager(state, folder, max_to_keep=2)
manager.restore_or_initialize()


def step():
    context = mr.get_replica_context()
    weights.assign_sub(0.01 * context.all_reduce("MEAN", context.rng.normal(size=300)))


first = state.step
while state.step < STEPS:
    if state.step == WAITS_AT and "MPI_REPLICA_RESTART" not in os.environ and path:
        with socket.socket(socket.AF_UNIX) as line:
            line.connect(path)
            line.sendall(f"{socket.gethostname()}\n".encode())
            line.recv(1)
    strategy.run(step)
    state.step += 1
    manager.save(state.step)
places = strategy.cluster_resolver.cluster_spec()["worker"]
if strategy.rank == 0:
    found = hashlib.sha256(np.asarray(weights).tobytes()).hexdigest()
    sys.stdout.write(f"{found} {first} {strategy.num_replicas_in_sync} {','.join(places)}\n")
