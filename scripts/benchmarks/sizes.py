"""sizes: all_reduce of one array, from one value to 102 MB, for the plot.

Rows as those of all_reduce, with a fresh result and without goals.
"""

import mpi_replica as mr

from .all_reduce import measured
from .by_hand import FRESH
from .launching import Launch

_COUNTS = (1, 250, 16_000, 250_000, 4_000_000, 25_600_000)  # float32: 4 B to 102 MB


def launches(settings):
    """Return what to start for one library."""
    counts = _COUNTS[:4] if settings.quick else _COUNTS
    arguments = {"counts": counts}
    arguments["batches"] = settings.repeat or (3 if settings.quick else 300)
    for ranks in settings.ranks or [2]:
        yield Launch("reductions", ranks, arguments, limit_seconds=600)


def reductions(world, counts, batches):
    """Measure an array of each size."""
    with mr.MPIStrategy() as strategy:
        for count in counts:
            yield measured(world, strategy, "one array", FRESH, [(count,)], batches)
