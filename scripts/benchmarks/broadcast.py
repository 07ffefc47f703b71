"""broadcast: rank 0's value to all ranks, beside Bcast written with mpi4py.

By hand, all ranks know shape and dtype, as the runtime does of a variable, and each gets an array
of its own. Most people write the pickled ``comm.bcast``, and a copy on rank 0.
"""

import numpy as np

import mpi_replica as mr

from .launching import Launch
from .tables import quantity

_SIZES = (1000, 64_000, 1_000_000, 16_000_000, 100_000_000)  # bytes


def launches(settings):
    """Return what to start for one library."""
    for ranks in settings.ranks or [2]:
        arguments = {"sizes": _SIZES[:3] if settings.quick else _SIZES}
        arguments["batches"] = settings.repeat or (3 if settings.quick else 300)
        yield Launch("broadcasts", ranks, arguments, limit_seconds=600)


def broadcasts(world, sizes, batches):
    """Measure a fresh array, and an assignment to a variable, of each size."""
    with mr.MPIStrategy() as strategy, strategy.scope():
        for nbytes in sizes:
            value = np.arange(nbytes // 4, dtype=np.float32) + world.rank
            yield _fresh(world, strategy, value, batches)
            yield _assigned(world, value, batches)


def _fresh(world, strategy, value, batches):
    bcast, is_first = world.comm.Bcast, world.rank == 0

    def ours():
        return strategy.extended.broadcast_to(value)

    def sent_from_where_it_is():
        if is_first:
            bcast(value)
            return value.copy()
        result = np.empty_like(value)
        bcast(result)
        return result

    def copied_first():
        result = value.copy() if is_first else np.empty_like(value)
        bcast(result)
        return result

    def pickled():
        result = world.comm.bcast(value)
        return result.copy() if is_first else result

    ways = {"by hand, Bcast, copy": sent_from_where_it_is, "by hand, copy, Bcast": copied_first}
    others = {"naive: bcast": pickled}
    return _row(world, "extended.broadcast_to", value, ours, ways, others, batches)


def _assigned(world, value, batches):
    bcast, is_first = world.comm.Bcast, world.rank == 0
    variable = mr.Variable(np.zeros_like(value))
    kept = np.zeros_like(value)

    def ours():
        variable.assign(value)
        return variable.numpy()

    def by_hand():
        if is_first:
            np.copyto(kept, value)
        bcast(kept)
        return kept

    def pickled():
        np.copyto(kept, world.comm.bcast(value))
        return kept

    ways, others = {"by hand, Bcast into it": by_hand}, {"naive: bcast": pickled}
    return _row(world, "variable.assign", value, ours, ways, others, batches)


def _row(world, name, value, ours, ways, others, batches):
    expected = np.arange(value.size, dtype=value.dtype)
    for what, call in {"this runtime": ours, **ways, **others}.items():
        world.require(np.array_equal(call(), expected), f"{name}, {what}")
    what = f"{name} of {quantity(value.nbytes, 'B')}"
    return world.beside_best(what, world.repeated(ours), ways, others, batches)
