"""A job that counts until a signal comes, to any rank; when it starts again it restores and ends.

    goes_on.py FOLDER WHO

It saves in FOLDER. WHO is "rank" where the last rank shall send the signal to itself; otherwise
somebody else does so when "waits for a signal" is printed.
"""

import os
import signal
import sys

import mpi_replica as mr

folder, who = sys.argv[1:]
with mr.MPIStrategy() as strategy:
    state = mr.Checkpoint(strategy, step=0)
    manager = mr.CheckpointManager(state, folder, save_on_signal=True)
    restored = manager.restore_or_initialize()
    while restored is None:
        state.step += 1
        if state.step == 3 and strategy.rank == strategy.size - 1:
            if who == "rank":
                os.kill(os.getpid(), signal.SIGUSR1)
            else:
                sys.stdout.write("waits for a signal\n")
                sys.stdout.flush()
        manager.exit_if_signalled(state.step)
    if strategy.rank == 0:
        set_for_ranks = [os.environ[name] for name in ("OMP_NUM_THREADS", "PYTHONHASHSEED")]
        sys.stdout.write(f"went on {strategy.size} {' '.join(set_for_ranks)}\n")
