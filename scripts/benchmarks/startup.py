"""startup: what a program waits for before its first step.

Importing the package is measured in processes of its own, behind `import numpy`; a first one, which
compiles what is not compiled, does not count. Making the first strategy is measured on ranks that
start anew each time, after MPI_Init; beside it stands the duplicate of the world's communicator,
which every library that communicates makes.
"""

import json
import os
import subprocess
import sys
import time

import numpy as np

import mpi_replica as mr

from .launching import ROOT, Launch
from .measuring import beside, row

_GOALS = {"import": 60e-3, "strategy": 20e-3}

# What one process measures.
_IMPORTS = """
import json, time
start = time.perf_counter()
import numpy
middle = time.perf_counter()
import mpi_replica
print(json.dumps([middle - start, time.perf_counter() - middle]))
"""


def launches(settings):
    """Return what to start for one library."""
    times = settings.repeat or (1 if settings.quick else 15)
    yield Launch("imports", 1, {"times": times})
    for ranks in settings.ranks or [2]:
        for _ in range(times):
            yield Launch("first_strategy", ranks)


def rows(outcomes):
    """Return a row for the import, and one for the strategy on each number of ranks."""
    found = {}
    for outcome in outcomes:
        for record in outcome.records:
            key = (outcome.launch.part, outcome.launch.ranks)
            found.setdefault(key, []).append((record["ours"], record["beside"]))
    for (part, ranks), seconds in found.items():
        ours, others = np.array(seconds).T
        if part == "imports":
            against = beside("import numpy", ours, others)
            yield row("import mpi_replica", ranks, ours, against, goal=_GOALS["import"])
        else:
            against = beside("COMM_WORLD.Dup()", ours, others)
            yield row("MPIStrategy()", ranks, ours, against, goal=_GOALS["strategy"])


def imports(world, times):
    """Import the package in several processes."""
    # They compile what they import, if need be: as programs do.
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    environment["PYTHONPATH"] = str(ROOT)
    for index in range(times + 1):
        done = subprocess.run(
            [sys.executable, "-c", _IMPORTS],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        )
        numpy_alone, package = json.loads(done.stdout)
        if index:
            yield {"ours": package, "beside": numpy_alone}


def first_strategy(world):
    """Make a strategy."""
    communicator = world.mpi.COMM_WORLD
    world.comm.Barrier()
    start = time.perf_counter()
    communicator.Dup().Free()
    middle = time.perf_counter()
    with mr.MPIStrategy():
        end = time.perf_counter()
    duplicate, ours = world.greatest([middle - start, end - middle])
    yield {"ours": ours, "beside": duplicate}
