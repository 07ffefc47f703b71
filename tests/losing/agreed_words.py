"""A strategy whose living ranks agree while another thread looks for messages without a pause.

Each rank tells which words came out where all had given 1, and how many ranks were found alive.
"""

import json
import sys
import threading

import mpi_replica as mr
from mpi_replica.ranks.ulfm import shrink

AGREEMENTS, SHRINKS = 10_000, 200

with mr.MPIStrategy() as strategy:
    engine, is_over = strategy.engine, threading.Event()

    def look():
        while not is_over.is_set():
            engine.watch.read()

    thread = threading.Thread(target=look)
    thread.start()
    try:
        words = {engine.transport.agree(1) for _ in range(AGREEMENTS)}
        alive = {shrink(strategy.communicator).Get_size() for _ in range(SHRINKS)}
    finally:
        is_over.set()
        thread.join()
    sys.stdout.write(f"TOLD {json.dumps([strategy.rank, sorted(words), sorted(alive)])}\n")
