"""Exchanges that a rank begins when another one has ended them all."""

import dying
import numpy as np

from mpi_replica.errors import RankLostError
from mpi_replica.ranks import HEADER_BYTES
from mpi_replica.ranks.launch import open_survivors

header, words = bytes(HEADER_BYTES), np.zeros(3, np.uint64)
transport = open_survivors().come_together(lambda made: made)
transport.communicator.allgather(transport.rank)  # all are here
if transport.rank == 0:
    transport.communicator.Revoke()
while not transport.communicator.Is_revoked():
    transport.communicator.Iprobe()
found = []
for begin in (
    lambda: transport.exchange(header),
    lambda: transport.maximum(words),
    lambda: transport.begin_exchange(header)(),
    lambda: transport.begin_maximum(words)(),
):
    try:
        begin()
    except RankLostError as error:
        found.append(error is transport.loss)
dying.tell("TOLD", found)
