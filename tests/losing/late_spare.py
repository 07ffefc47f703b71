"""The others come to the end of run_elastic, and the spare has not come to its begin.

It is in code of its own until a warning names it, or for some time.

Environment variables
---------------------
FOLDER
    Where a file is made when a warning names the spare.
"""

import logging
import os
import time
from pathlib import Path

import dying

import mpi_replica as mr

LIMIT_SECONDS = 8
reported = Path(os.environ["FOLDER"], "reported")
strategy = mr.MPIStrategy(num_replicas=2, spares=1)
spare = strategy.size


class Handler(logging.Handler):
    def emit(self, record):
        if f"rank {spare}" in record.getMessage():
            reported.touch()


logging.getLogger("mpi_replica").addHandler(Handler())
state = mr.ElasticState(strategy, step=0)
if not strategy.local_replica_ids:
    limit = time.monotonic() + LIMIT_SECONDS
    while not reported.exists() and time.monotonic() < limit:
        time.sleep(0.01)
strategy.run_elastic(lambda: None, state)
dying.tell("TOLD", reported.exists())
