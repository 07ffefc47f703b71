"""A job that adds random numbers, and saves at each step; its last rank may be killed on the way.

    once.py FOLDER [MARK [TEXT]]

It saves in FOLDER. With MARK the last rank writes this file, with TEXT, and is killed, once.
"""

import os
import signal
import sys
from pathlib import Path

import numpy as np

import mpi_replica as mr

folder, *mark = sys.argv[1:]
options = mr.CommunicationOptions(reproducible=True)
with mr.MPIStrategy(num_replicas=2, communication_options=options) as strategy:
    with strategy.scope():
        total = mr.Variable(np.zeros(2))
    state = mr.Checkpoint(total=total, step=0)
    manager = mr.CheckpointManager(state, folder)
    manager.restore_or_initialize()

    def add(step):
        context = mr.get_replica_context()
        numbers = np.random.default_rng([step, context.replica_id_in_sync_group]).normal(size=2)
        total.assign_add(context.all_reduce(mr.ReduceOp.SUM, numbers))

    while state.step < 6:
        strategy.run(add, args=(state.step,))
        state.step += 1
        manager.save(state.step)
        is_last = strategy.rank == strategy.size - 1
        if mark and is_last and state.step == 3 and "MPI_REPLICA_RESTART" not in os.environ:
            Path(mark[0]).write_text("".join(mark[1:]))
            os.kill(os.getpid(), signal.SIGKILL)
    if strategy.rank == 0:
        sys.stdout.write(f"{strategy.size} of 2 ranks: {total.numpy().tolist()}\n")
