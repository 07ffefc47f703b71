"""all_reduce: this runtime beside reductions written with mpi4py.

A row for each value and contract (see by_hand.py): a *fresh* result, one in *kept* arrays
(``out=``), one *in place* (``out=value``). Beside it stand the fastest that an expert writes, of
all that were tried in the same run; the way that is written first; one copy of the value in each
rank, which is the floor; and peers that are installed.
"""

import numpy as np

import mpi_replica as mr

from . import by_hand, nests
from .by_hand import IN_PLACE, KEPT
from .launching import Launch
from .peers import gloo_way
from .tables import quantity

#: What is reduced: shapes in full, and fewer or smaller ones for a trial.
_VALUES = {
    "{count} gradients of ResNet-50": (nests.resnet50(), nests.resnet50(width=8)),
    "one large array": ([(25_600_000,)], [(400_000,)]),
    "one small array": ([(250_000,)], [(25_000,)]),
    "{count} arrays of 1 kB": ([(250,)] * 1000, [(250,)] * 100),
}

# Goals: the most against the best by hand, and for gradients against what is written first.
_MOST_RATIO = 1.15
_MOST_OF_NAIVE = 1 / 3


def launches(settings):
    """Return what to start for one library."""
    for ranks in settings.ranks or [2]:
        for name in _VALUES:
            arguments = {"name": name, "is_quick": settings.quick}
            arguments["batches"] = settings.repeat or (3 if settings.quick else 300)
            yield Launch("reductions", ranks, arguments, limit_seconds=600)


def reductions(world, name, is_quick, batches):
    """Measure one value, in each contract."""
    goals = {}
    if world.size == 2:
        goals["goal"] = _MOST_RATIO
        goals["goal_of_naive"] = _MOST_OF_NAIVE if "gradients" in name else None
    shapes = _VALUES[name][is_quick]
    with mr.MPIStrategy() as strategy:
        for contract in by_hand.CONTRACTS:
            yield measured(world, strategy, name, contract, shapes, batches, **goals)


def measured(world, strategy, name, contract, shapes, batches, *, goal=None, goal_of_naive=None):
    """Return the row of one value in one contract, with all that stands beside it. Collective."""
    value = nests.arrays_of(shapes)
    leaves = nests.leaves_of(value)
    out = value if contract == IN_PLACE else nests.arrays_of(shapes) if contract == KEPT else None
    results = None if out is None else nests.leaves_of(out)

    def ours(context):
        if out is None:
            return context.all_reduce("SUM", value)
        return context.all_reduce("SUM", value, out=out)

    ways = by_hand.expert_ways(world, contract, leaves, results)
    naive, naive_way = by_hand.naive_way(world, contract, leaves, results)
    gloo = gloo_way(world, contract, leaves, results)
    others = {naive: naive_way} if gloo is None else {naive: naive_way, "gloo": gloo}
    _check(world, strategy, ours, ways | others, leaves, results or [])
    others["memcpy"] = by_hand.memcpy_way(contract, leaves, results)

    size = sum(leaf.nbytes for leaf in leaves)
    return world.beside_best(
        f"{name.format(count=len(leaves))}, {quantity(size, 'B')}, {contract}",
        world.in_replica(strategy, ours),
        ways,
        others,
        batches,
        goal=goal,
        goals={naive: goal_of_naive},
        size_bytes=size,
    )


def _check(world, strategy, ours, ways, leaves, results):
    """Raise unless this runtime and all others give the sums; leave zeros, which stay so."""
    mine = nests.contribution(leaves, world.rank)
    sums = nests.total(leaves, world.size)

    def restore():
        for result in results:
            result.fill(-1)
        for leaf, numbers in zip(leaves, mine, strict=True):
            np.copyto(leaf, numbers)

    restore()
    found = nests.leaves_of(world.once(strategy, ours))
    world.require(nests.are_equal(found, sums), "this runtime")
    del found
    for what, way in ways.items():
        restore()
        world.require(nests.are_equal(way(), sums), what)
    for leaf in leaves:
        leaf.fill(0)
