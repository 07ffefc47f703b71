"""narrow: all_reduce of float16 and bfloat16, which add up in float32.

MPI knows neither everywhere, and their own sums lose digits. Beside it stand two ways by hand: the
array goes to float32 and back as a whole, or in pieces that stay in the processor's cache.
"""

from functools import partial

import numpy as np

import mpi_replica as mr

from . import nests
from .by_hand import pieces_of
from .launching import Launch
from .tables import quantity

_COUNT = 25_600_000
_PIECES = tuple(1 << power for power in (18, 19, 20, 21, 22))  # bytes of float32

# The goal, for 2 ranks: the most against the array as a whole.
_MOST_RATIO = 1 / 1.4


def launches(settings):
    """Return what to start for one library."""
    arguments = {"count": _COUNT // 64 if settings.quick else _COUNT}
    arguments["batches"] = settings.repeat or (3 if settings.quick else 300)
    for ranks in settings.ranks or [2]:
        for name in ("float16", "bfloat16"):
            yield Launch("reductions", ranks, {"name": name, **arguments})


def reductions(world, name, count, batches):
    """Measure an array of a dtype, if it is known here."""
    dtype = _dtype(name)
    if dtype is None:
        return
    (value,) = nests.contribution([np.empty(count, dtype)], world.rank)
    expected = nests.total([value], world.size)
    naive = "by hand, as a whole"
    ways = {
        f"by hand, {pieces_of(piece)}": _in_pieces(world, value, piece // 4)
        for piece in _PIECES
        if piece < 4 * count
    }
    others = {naive: partial(_as_a_whole, world, value), "memcpy": value.copy}

    def ours(context):
        return context.all_reduce("SUM", value)

    with mr.MPIStrategy() as strategy:
        ours_once = partial(world.once, strategy, ours)
        for what, way in {"this runtime": ours_once, **ways, naive: others[naive]}.items():
            world.require(nests.are_equal([way()], expected), f"{what}, {name}")
        yield world.beside_best(
            f"{count:,} of {name}, {quantity(value.nbytes, 'B')}",
            world.in_replica(strategy, ours),
            ways,
            others,
            batches,
            goals={naive: _MOST_RATIO if world.size == 2 else None},
        )


def _dtype(name):
    """Return a dtype by its name, or None for one of ml_dtypes where that is not installed."""
    if name == "float16":
        return np.dtype(np.float16)
    try:
        import ml_dtypes
    except ImportError:
        return None
    return np.dtype(getattr(ml_dtypes, name))


def _as_a_whole(world, value):
    wide = value.astype(np.float32)
    total = np.empty_like(wide)
    world.comm.Allreduce(wide, total, world.mpi.SUM)
    return total.astype(value.dtype)


def _in_pieces(world, value, length):
    allreduce, in_place, op = world.comm.Allreduce, world.mpi.IN_PLACE, world.mpi.SUM
    wide, bounds = np.empty(length, np.float32), range(0, value.size, length)
    parts = [(slice(start, start + length), value[start : start + length]) for start in bounds]
    parts = [(place, part, wide[: part.size]) for place, part in parts]

    def call():
        result = np.empty_like(value)
        for place, part, staged in parts:
            np.copyto(staged, part)
            allreduce(in_place, staged, op)
            np.copyto(result[place], staged, casting="same_kind")
        return result

    return call
