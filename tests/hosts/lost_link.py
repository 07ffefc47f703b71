"""A program that waits at a certain point of a step until the network has been cut.

    lost_link.py SOCKET WHERE TIMEOUT_SECONDS

It speaks with the test by a socket in a folder, which needs no network. WHERE is what the cut
comes before: a call, or the data of one when the ranks have agreed on it.
"""

import socket
import sys

import numpy as np

import mpi_replica as mr
from mpi_replica.ranks.mpi import MPITransport

path, where, timeout_seconds = sys.argv[1:]
line = socket.socket(socket.AF_UNIX)
line.connect(path)


def wait_for_the_cut():
    line.sendall(b"ready\n")
    line.recv(1)


def reduce_after_the_cut(self, *arguments, true=MPITransport.all_reduce):
    wait_for_the_cut()
    return true(self, *arguments)


def step():
    context = mr.get_replica_context()
    large = np.ones(1 << 19)  # too much to travel in the agreement
    for _ in range(3):
        context.all_reduce("SUM", 1.0)
        context.all_reduce("SUM", large)
    if where == "call":
        wait_for_the_cut()
    else:
        MPITransport.all_reduce = reduce_after_the_cut
    context.all_reduce("SUM", large)


seconds = float(timeout_seconds) or None
options = mr.CommunicationOptions(timeout_seconds=seconds)
strategy = mr.MPIStrategy(communication_options=options)
try:
    strategy.run(step)
except BaseException as error:
    line.sendall(f"rank {strategy.rank} {type(error).__name__}: {error}".encode())
    raise
