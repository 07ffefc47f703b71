"""Small exchanges, each of which a rank ends for the others as soon as it is through itself."""

import dying
import numpy as np

from mpi_replica.errors import RankLostError
from mpi_replica.ranks.launch import open_survivors

NUM_EXCHANGES = 60
NUM_BYTES = 120

survivors = open_survivors()
num_wrong = 0
for _ in range(NUM_EXCHANGES):
    transport = survivors.come_together(lambda made: made)
    transport._blocks = True  # as where each rank has a core of its own
    wanted = np.repeat(np.arange(1, transport.size + 1, dtype=np.uint8), NUM_BYTES)
    received = np.zeros_like(wanted)
    mine = np.full(NUM_BYTES, transport.rank + 1, np.uint8)
    transport.communicator.allgather(transport.rank)  # all are here
    try:
        transport.all_gather_blocks(mine, received, [NUM_BYTES] * transport.size)
        transport.communicator.Revoke()
    except RankLostError:
        pass
    else:
        num_wrong += not np.array_equal(received, wanted)
    survivors.revoke()
dying.tell("TOLD", num_wrong)
