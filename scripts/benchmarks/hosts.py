"""hosts: all_reduce between hosts, beside the Allreduce of the MPI library.

The hosts are namespaces of this machine's kernel, joined by a switch of it, and speak TCP: see
tests/hosts/namespaces.py. Only root may make them. They share the cores of the machine, which the
ranks don't know: where ranks outnumber cores, the numbers tell about the scheduler, too.

Beside ours stand the library's own call, which blocks, and the one that does not, asked again and
again with the core given away in between. And for one value: the library's call behind one of ours
in a world of one rank, which is all the Python of ours, and sends nothing.
"""

import dataclasses
import os
from functools import partial

import numpy as np

import mpi_replica as mr

from .launching import Launch
from .measuring import beside, row

_SIZES = {"1 value": 1, "64 kB": 16_000, "4 MB": 1_000_000, "100 MB": 25_000_000}  # float32
_RANKS = ((2, 1), (2, 2), (3, 2))  # hosts, and ranks on each

# Goal: the most against the library's own call.
_MOST_RATIO = 1.0


def launches(settings):
    """Return what to start for one library."""
    batches = settings.repeat or (3 if settings.quick else 100)
    sizes = dict(list(_SIZES.items())[: 2 if settings.quick else None])
    for hosts, ranks in _RANKS[: 1 if settings.quick else None]:
        if not settings.ranks or hosts * ranks in settings.ranks:
            arguments = {"hosts": hosts, "sizes": sizes, "batches": batches}
            yield Launch("reductions", hosts * ranks, arguments, hosts=hosts, limit_seconds=600)


def reductions(world, hosts, sizes, batches):
    """Measure an array of each size."""
    ranks = f"{hosts} x {world.size // hosts}"
    with mr.MPIStrategy() as strategy, mr.MPIStrategy(world.mpi.COMM_SELF) as alone:
        for size, count in sizes.items():
            value = np.full(count, world.rank + 1, np.float32)
            ways = _ways_of_the_library(world, value)
            _check(world, strategy, value, ways)
            loops = {name: world.repeated(way) for name, way in ways.items()}
            if count == 1:
                behind = partial(_reduce_then, value, ways["Allreduce"])
                loops["ctx.all_reduce of 1 rank, Allreduce"] = world.in_replica(alone, behind)
            ours = world.in_replica(strategy, partial(_reduce, value))
            mine, *others = world.in_turn([ours, *loops.values()], batches)
            goals = {"Allreduce": _MOST_RATIO}
            besides = [
                beside(name, mine, times, goal=goals.get(name))
                for name, times in zip(loops, others, strict=True)
            ]
            found = row(f"ctx.all_reduce of {size}", world.size, mine, *besides)
            yield dataclasses.replace(found, ranks=ranks)


def _reduce(value, context):
    return context.all_reduce("SUM", value)


def _reduce_then(value, call, context):
    context.all_reduce("SUM", value)
    call()


def _ways_of_the_library(world, value):
    """Return calls of the library's, each with a fresh result."""
    op = world.mpi.SUM

    def blocking():
        result = np.empty_like(value)
        world.comm.Allreduce(value, result, op)
        return result

    def polled():
        result = np.empty_like(value)
        request = world.comm.Iallreduce(value, result, op)
        while not request.Test():
            os.sched_yield()
        return result

    return {"Allreduce": blocking, "Iallreduce, polled": polled}


def _check(world, strategy, value, ways):
    """Raise unless this runtime and the library give the sums."""
    expected = sum(range(world.size + 1))
    found = {"this runtime": world.once(strategy, partial(_reduce, value))}
    found |= {name: way() for name, way in ways.items()}
    for what, result in found.items():
        world.require(np.all(result == expected), what)
