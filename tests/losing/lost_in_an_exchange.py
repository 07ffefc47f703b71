"""A rank is lost in a small exchange, where each rank has a core of its own."""

import os
import signal

import dying
import numpy as np

from mpi_replica.errors import RankLostError
from mpi_replica.ranks.launch import open_survivors

NUM_BYTES = 240

transport = open_survivors().come_together(lambda made: made)
transport._blocks = True  # as where each rank has a core of its own
received = np.zeros(NUM_BYTES * transport.size, np.uint8)
mine = np.full(NUM_BYTES, transport.rank + 1, np.uint8)
transport.barrier()
if transport.rank == 0:
    os.kill(os.getpid(), signal.SIGKILL)
try:
    transport.all_gather_blocks(mine, received, [NUM_BYTES] * transport.size)
except RankLostError:
    dying.tell("TOLD", "a loss")
else:
    dying.tell("TOLD", received[::NUM_BYTES].tolist())
