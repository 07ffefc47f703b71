"""What each rank of a trial of the whole command runs: the job that goes on from checkpoints.

Each rank that comes to the end writes what came out to a folder.
"""

import argparse
import json
import os
import time
from pathlib import Path

import mpi_replica as mr
from kills.job import outcome, training
from kills.moments import Moments

# So that a job trains about as long as it takes to start.
_SECONDS_OF_STEP = 0.05


def main():
    """Train on from the last checkpoint, and tell what came out."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--replicas", type=int, required=True)
    options = parser.parse_args()
    nobody_dies = Moments(0, [], None)
    with mr.MPIStrategy(
        num_replicas=options.replicas,
        communication_options=mr.CommunicationOptions(reproducible=True),
    ) as strategy:
        state, train = training(strategy, options.folder / "kept", nobody_dies, _SECONDS_OF_STEP)
        train.manager.restore_or_initialize()
        start = time.monotonic()
        strategy.run_elastic(train, state)  # without --elastic it trains, and a loss ends the job
        told = outcome(strategy, state, time.monotonic() - start, nobody_dies)
        # Ranks may be numbered anew by a loss, and jobs are started again: no two write one file.
        file = options.folder / f"result-{os.uname().nodename}-{os.getpid()}"
        file.with_suffix(".new").write_text(json.dumps(told))
        file.with_suffix(".new").rename(file)


if __name__ == "__main__":
    main()
