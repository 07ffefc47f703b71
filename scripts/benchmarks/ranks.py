"""ranks: all_reduce on more ranks, beside one Allreduce of the same on as many.

Large arrays are held against that alone; small ones against the sum of it and of the agreement,
measured in the same rounds. Where ranks outnumber cores the numbers tell about the scheduler, too:
who waits must give its core to the one that it waits for.
"""

import numpy as np

import mpi_replica as mr

from .agreement import agreement_of
from .launching import Launch
from .measuring import beside, row

_SMALL = {"1 value": 1, "1 kB": 250, "64 kB": 16_000}  # float32
_LARGE = {"1 MB": 250_000, "16 MB": 4_000_000}

# Goals.
_MOST_RATIO = 1.3
_MOST_ADDED = 10e-6


def launches(settings):
    """Return what to start for one library."""
    batches = settings.repeat or (3 if settings.quick else 300)
    for ranks in settings.ranks or ([4] if settings.quick else [4, 8, 16]):
        arguments = {"batches": batches, "is_quick": settings.quick}
        yield Launch("reductions", ranks, arguments, limit_seconds=600)


def reductions(world, batches, is_quick):
    """Measure arrays of each size."""
    with mr.MPIStrategy() as strategy:
        agree = world.repeated(agreement_of(strategy))
        for size, count in _SMALL.items():
            ours, raw = _sides(world, strategy, count)
            mine, alone, others = world.in_turn([ours, agree, raw], batches)
            name = "agreement + Allreduce"
            against = beside(name, mine, alone + others, "difference", goal=_MOST_ADDED)
            yield row(f"ctx.all_reduce of {size}", world.size, mine, against)
        for size, count in list(_LARGE.items())[: 1 if is_quick else None]:
            mine, others = world.in_turn(_sides(world, strategy, count), batches)
            against = beside("Allreduce", mine, others, goal=_MOST_RATIO)
            yield row(f"ctx.all_reduce of {size}", world.size, mine, against)


def _sides(world, strategy, count):
    """Return the loops of ours and of a raw Allreduce, each with a fresh result."""
    value = np.full(count, world.rank + 1, np.float32)
    allreduce, op, expected = world.comm.Allreduce, world.mpi.SUM, sum(range(world.size + 1))

    def raw():
        result = np.empty_like(value)
        allreduce(value, result, op)
        return result

    def ours(context):
        return context.all_reduce("SUM", value)

    for what, result in {"this runtime": world.once(strategy, ours), "Allreduce": raw()}.items():
        world.require(np.all(result == expected), what)
    return world.in_replica(strategy, ours), world.repeated(raw)
