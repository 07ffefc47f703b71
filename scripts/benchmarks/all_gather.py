"""all_gather: blocks of unequal lengths, beside Allgatherv written with mpi4py.

By hand, as in `ctx.all_gather`, the ranks tell each other how long their blocks are, and then make
a fresh result. Where the axis is not the first, what arrives is copied once more: all of it after
one Allgatherv, or some rows at a time, which are still in the processor's cache then. A message may
also be cut, so that it stays there. All that is tried, and the best is what counts.
"""

from functools import partial

import numpy as np

import mpi_replica as mr

from .by_hand import pieces_of
from .launching import Launch
from .tables import quantity

_TOTALS = (250, 16_000, 250_000, 4_000_000, 25_000_000)  # float32 of all ranks: 1 kB to 100 MB
_PIECES = tuple(1 << power for power in (18, 20, 22))
_WIDTH = 50  # items across the axis

# The goal, for 2 ranks: the most against the best by hand.
_MOST_RATIO = 1.15


def launches(settings):
    """Return what to start for one library."""
    for ranks in settings.ranks or [2]:
        for axis in (0, 1):
            arguments = {"totals": _TOTALS[:3] if settings.quick else _TOTALS, "axis": axis}
            arguments["batches"] = settings.repeat or (3 if settings.quick else 300)
            yield Launch("gathers", ranks, arguments, limit_seconds=600)


def gathers(world, totals, axis, batches):
    """Measure results of each size along an axis."""
    with mr.MPIStrategy() as strategy:
        for total in totals:
            yield _measured(world, strategy, total, axis, batches)


def _measured(world, strategy, total, axis, batches):
    # Rank 1 has twice as much as rank 0, rank 2 three times as much, and so on.
    ends = np.arange(world.size + 1).cumsum() * (total // _WIDTH) // sum(range(world.size + 1))
    length = int(ends[world.rank + 1] - ends[world.rank])
    shape = (length, _WIDTH) if axis == 0 else (_WIDTH, length)
    block = np.full(shape, world.rank + 1, np.float32)
    result = np.concatenate(world.comm.allgather(block), axis)
    size = quantity(result.nbytes, "B")

    def ours(context):
        return context.all_gather(block, axis=axis)

    ways = (_along_first if axis == 0 else _along_second)(world, block, result.nbytes)
    ours_once = partial(world.once, strategy, ours)
    for what, way in {"this runtime": ours_once, **ways}.items():
        world.require(np.array_equal(way(), result), f"{what}, axis {axis}")

    def pickled():
        return np.concatenate(world.comm.allgather(block), axis)

    return world.beside_best(
        f"blocks of unequal lengths, {size} in all, axis {axis}",
        world.in_replica(strategy, ours),
        ways,
        {"naive: allgather, concatenate": pickled, "memcpy": result.copy},
        batches,
        goal=_MOST_RATIO if world.size == 2 else None,
    )


def _along_first(world, block, whole):
    """Return ways to gather along axis 0."""
    gather, lengths_of = world.comm.Allgatherv, _lengths(world, block.shape[0])
    width, dtype, float32 = block.shape[1], block.dtype, world.mpi.FLOAT
    flat = block.reshape(-1)

    def one():
        lengths = lengths_of()
        result = np.empty((sum(lengths), width), dtype)
        gather(block, [result, [length * width for length in lengths]])
        return result

    def cut(piece):
        lengths = lengths_of()
        result = np.empty((sum(lengths), width), dtype)
        counts = [length * width for length in lengths]
        starts = _starts(counts)
        for start in range(0, max(counts), piece):
            parts = [min(max(count - start, 0), piece) for count in counts]
            gather(
                flat[start : start + piece],
                [result, parts, [first + start for first in starts], float32],
            )
        return result

    ways = {"by hand, one Allgatherv": one}
    for piece in _PIECES:
        if piece < whole // world.size:
            ways[f"by hand, {pieces_of(piece)}"] = partial(cut, piece // block.itemsize)
    return ways


def _along_second(world, block, whole):
    """Return ways to gather along axis 1."""
    gather, lengths_of = world.comm.Allgatherv, _lengths(world, block.shape[1])
    height, dtype = block.shape[0], block.dtype
    scratch = np.empty(whole // block.itemsize, dtype)

    def by_rows(step):
        lengths = lengths_of()
        starts, row = _starts(lengths), sum(lengths)
        result = np.empty((height, row), dtype)
        for top in range(0, height, step):
            rows = min(step, height - top)
            gather(block[top : top + rows], [scratch[: rows * row], [rows * n for n in lengths]])
            for start, length in zip(starts, lengths, strict=True):
                part = scratch[rows * start : rows * (start + length)]
                result[top : top + rows, start : start + length] = part.reshape(rows, length)
        return result

    ways = {"by hand, one Allgatherv and a copy": partial(by_rows, height)}
    for piece in _PIECES:
        step = max(piece * height // whole, 1)
        if step < height:
            ways[f"by hand, Allgatherv of {step} rows and a copy"] = partial(by_rows, step)
    return ways


def _lengths(world, length):
    """Return what makes the ranks tell each other their lengths."""
    mine, every = np.array([length]), np.empty(world.size, int)
    allgather = world.comm.Allgather

    def exchange():
        allgather(mine, every)
        return every.tolist()

    return exchange


def _starts(lengths):
    starts = [0]
    for length in lengths[:-1]:
        starts.append(starts[-1] + length)
    return starts
