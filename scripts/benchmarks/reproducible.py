"""reproducible: all_reduce with the same bits on every layout, beside the one that is not.

Each row is a strategy with ``reproducible=True``, beside a default one with as many replicas, from
the same rounds: ``AUTO``, which on one host takes a window of shared memory, and ``ALLTOALL``. The
results are *fresh* or *in place* (see by_hand.py). Ranks have one replica each, or some have more
than others ("3 on 2"). Where the replicas of a rank are no whole subtree of the order in which all
are combined, the rank has several partial sums, and the goal for large values is for each of them.

The last rows are the memory that all ranks together take beside inputs and results: how far their
peaks lie above their resident sizes before the calls (see memory.py). Pages that ranks share, as
those of the window, count once.
"""

import contextlib
from pathlib import Path

import numpy as np

import mpi_replica as mr
from mpi_replica.core.tree import tree_of

from . import nests
from .by_hand import FRESH, IN_PLACE
from .launching import Launch
from .measuring import beside, row
from .memory import growth_bytes
from .tables import Row, quantity

_WAYS = {
    "default": mr.CommunicationOptions(reproducible=False),
    "AUTO": mr.CommunicationOptions(reproducible=True),
    "ALLTOALL": mr.CommunicationOptions(reproducible=True, implementation="ALLTOALL"),
}

# How many replicas there are for two ranks. Of five neither rank hosts a whole subtree: 3 and 2.
_ONE_EACH, *_SEVERAL = 2, 3, 5

#: What is reduced: shapes, a dtype, and contracts.
_EACH, _LARGE = (FRESH,), (FRESH, IN_PLACE)
_VALUES = {
    "4 B": ([(1,)], np.float32, _EACH),
    "100 B": ([(25,)], np.float32, _EACH),
    "4 kB": ([(1000,)], np.float32, _EACH),
    "64 kB": ([(16_000,)], np.float32, _EACH),
    "1 MB": ([(250_000,)], np.float32, _EACH),
    "16 MB": ([(4_000_000,)], np.float32, _EACH),
    "102 MB": ([(25_600_000,)], np.float32, _LARGE),
    "ResNet-50": (nests.resnet50(), np.float32, _LARGE),
    "2 kB of float16": ([(1000,)], np.float16, _EACH),
    "51 MB of float16": ([(25_600_000,)], np.float16, _EACH),
}
# Where some ranks have several replicas, each of which has a value and a result.
_OF_SEVERAL = ("4 B", "4 kB", "1 MB", "16 MB", "ResNet-50")
# Of one replica on each rank, and of several.
_TAKING_MEMORY = ("102 MB", "ResNet-50", "51 MB of float16")
_TAKING_MEMORY_OF_SEVERAL = ("16 MB",)

# Goals: the most against the default of values that are large, for each partial sum of a rank, and
# of those that are small; and memory of all ranks together.
_LARGE_BYTES, _MOST_OF_LARGE = 1e6, 1.1
_SMALL_BYTES, _MOST_OF_SMALL = 4e3, 1.3
_GOAL_BYTES = 32e6

# What the rounds of a value may take.
_LIMIT_SECONDS = 10


def launches(settings):
    """Return what to start for one library."""
    batches = settings.repeat or (3 if settings.quick else 300)
    counts = settings.ranks or ([2] if settings.quick else [2, 4])
    for ranks in counts:
        for number in (_ONE_EACH, *_SEVERAL):
            names = list(_VALUES) if number == _ONE_EACH else _OF_SEVERAL
            arguments = {"replicas": ranks * number // 2, "is_quick": settings.quick}
            arguments |= {"names": names, "batches": batches}
            yield Launch("sums", ranks, arguments, limit_seconds=600)
    for ranks in counts:
        names = [(name, _ONE_EACH) for name in _TAKING_MEMORY]
        names += [(name, _SEVERAL[-1]) for name in _TAKING_MEMORY_OF_SEVERAL]
        for name, number in names[:: 3 if settings.quick else 1]:
            for way in _WAYS:
                arguments = {"replicas": ranks * number // 2, "is_quick": settings.quick}
                yield Launch("growth", ranks, {"name": name, "way": way, **arguments})


def sums(world, replicas, names, batches, is_quick):
    """Measure values, each in its contracts, with so many replicas on all ranks."""
    with contextlib.ExitStack() as stack:
        strategies = {
            way: stack.enter_context(_strategy(replicas, options)) for way, options in _WAYS.items()
        }
        for name in names:
            values = _values(strategies["default"], name, is_quick)
            for contract in _VALUES[name][-1]:
                yield from _rows(world, strategies, contract, values, batches)


def _rows(world, strategies, contract, values, batches):
    """Return the rows of one value in one contract: a row for each way but the default."""
    for way, strategy in strategies.items():
        _check(world, strategy, contract, values, way)
    loops = [
        world.in_replica(strategy, _call(contract, values)) for strategy in strategies.values()
    ]
    default, *taken = world.in_turn(loops, batches, _LIMIT_SECONDS)
    what, strategy = f"{_described(values)}, {contract}", strategies["default"]
    for way, ours in zip(list(_WAYS)[1:], taken, strict=True):
        goal = _goal(strategy, _size(values)) if way == "AUTO" else None
        against = beside("default", ours, default, goal=goal)
        yield row(f"{what}, {way}", _layout(world, strategy), ours, against)


def growth(world, replicas, name, way, is_quick):
    """Measure the memory of one value, with a fresh result."""
    with _strategy(replicas, _WAYS[way]) as strategy:
        values, results = _values(strategy, name, is_quick), []
        call = _call(FRESH, values)

        def counted(context):
            result = call(context)
            results.append(sum(leaf.nbytes for leaf in nests.leaves_of(result)))

        twice = world.in_replica(strategy, counted)
        world.comm.Barrier()  # all ranks are there, which share what the libraries are
        shared = _shared_bytes()
        extra = growth_bytes(lambda: twice(2))
        world.comm.Barrier()  # no rank has ended, and given back what it shares
        extra -= _shared_bytes() - shared + sum(results) // 2
        of_host = world.comm.allreduce(extra)
        yield Row(
            f"memory: {_described(values)}, {way}",
            _layout(world, strategy),
            of_host,
            unit="B",
            goal=None if way == "default" else _GOAL_BYTES,
        )


def _strategy(replicas, options):
    return mr.MPIStrategy(num_replicas=replicas, communication_options=options)


def _values(strategy, name, is_quick):
    """Return a nest of zeros for each replica of this rank, by its id."""
    shapes, dtype, _ = _VALUES[name]
    if is_quick:
        is_nest = isinstance(shapes, dict)
        shapes = nests.resnet50(width=8) if is_nest else [(min(shapes[0][0], 400_000),)]
    return {replica: nests.arrays_of(shapes, dtype) for replica in strategy.local_replica_ids}


def _call(contract, values):
    """Return the call that a replica makes."""

    def fresh(context):
        return context.all_reduce("SUM", values[context.replica_id_in_sync_group])

    def in_place(context):
        value = values[context.replica_id_in_sync_group]
        return context.all_reduce("SUM", value, out=value)

    return fresh if contract == FRESH else in_place


def _check(world, strategy, contract, values, way):
    """Raise unless each replica of this rank gets the sums; leave zeros, which stay so."""
    leaves = {replica: nests.leaves_of(value) for replica, value in values.items()}
    for replica, arrays in leaves.items():
        for array, numbers in zip(arrays, nests.contribution(arrays, replica), strict=True):
            np.copyto(array, numbers)
    found, call = [], _call(contract, values)
    world.in_replica(strategy, lambda context: found.append(call(context)))(1)
    expected = nests.total(next(iter(leaves.values())), strategy.num_replicas_in_sync)
    for result in found:
        world.require(nests.are_equal(nests.leaves_of(result), expected), way)
    world.require(len(found) == len(values), way)
    for arrays in leaves.values():
        for array in arrays:
            array.fill(0)


def _goal(strategy, size_bytes):
    """Return the most against the default, of shared memory."""
    if size_bytes >= _LARGE_BYTES:
        tree = tree_of(strategy.engine.layout.counts)
        return _MOST_OF_LARGE * max(map(len, tree.partials))
    return _MOST_OF_SMALL if size_bytes <= _SMALL_BYTES else None


def _size(values):
    """Return the bytes of what one replica contributes."""
    return sum(leaf.nbytes for leaf in nests.leaves_of(next(iter(values.values()))))


def _described(values):
    leaves, size = nests.leaves_of(next(iter(values.values()))), quantity(_size(values), "B")
    if len(leaves) > 1:
        return f"{len(leaves)} gradients of ResNet-50, {size}"
    return f"{size} of {leaves[0].dtype}"


def _layout(world, strategy):
    replicas = strategy.num_replicas_in_sync
    return str(world.size) if replicas == world.size else f"{replicas} on {world.size}"


def _shared_bytes():
    """Return how much of this process's resident size counts for others that share it.

    A page that n processes have is 1/n of a page to each: all of them together have it once.
    """
    try:
        lines = Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]
    except OSError:  # only Linux has it; elsewhere each rank counts all that it has
        return 0
    sizes = {line.split()[0]: int(line.split()[1]) << 10 for line in lines}
    return sizes["Rss:"] - sizes["Pss:"]
