"""growth: what one call sends, with more replicas on the same ranks.

The transport counts the MPI calls that it begins, and the bytes of this rank that it hands to them:
exact numbers, which are the same in every run. A call sends no more when there are twice, four
times and eight times as many replicas on a rank. What is gathered is as large in all: each replica
gives its share. More ranks are in the table `scale`.
"""

import numpy as np

import mpi_replica as mr

from .launching import Launch
from .tables import Beside, Row

_REPLICAS = (1, 2, 4, 8)  # of each rank
_SMALL, _LARGE = 8, 100_000  # float32 of a replica
_FEW, _MANY = 1 << 11, 1 << 19  # float32 of all replicas together
_COUNTED = {"MPI calls": "", "bytes": "B"}


def launches(settings):
    """Return what to start for one library."""
    for ranks in settings.ranks or [2]:
        yield Launch("replicas", ranks)


def replicas(world):
    """Count what calls send, with more and more replicas on each rank."""
    counts = {}
    for number in _REPLICAS:
        with mr.MPIStrategy(replicas_per_rank=number) as strategy:
            for what, call in _calls(number * world.size).items():
                counts.setdefault(what, []).append(_of_one_call(world, strategy, call))
    layouts = f"{world.size} x {', '.join(map(str, _REPLICAS))}"
    for what, of_layouts in counts.items():
        for (name, unit), values in zip(
            _COUNTED.items(), np.transpose(of_layouts).tolist(), strict=True
        ):
            most = max(values)
            name_of_least, least = f"the least of the {len(values)}", min(values)
            against = Beside(name_of_least, least, None, "difference", most - least, goal=0)
            yield Row(f"{name} of {what}", layouts, most, unit=unit, besides=(against,))


def _calls(number):
    """Return the calls by name, for so many replicas; None is `run` alone."""

    def reduce(length):
        value = np.ones(length, np.float32)
        return lambda context: context.all_reduce("SUM", value)

    def gather(total):
        value = np.ones(total // number, np.float32)
        return lambda context: context.all_gather(value, axis=0)

    def merge(total):
        value = np.ones(total // number, np.float32)
        return lambda context: context.merge_call(_nothing, args=(value,))

    return {
        "run": None,
        "all_reduce, small": reduce(_SMALL),
        "all_reduce, large": reduce(_LARGE),
        "all_gather, small": gather(_FEW),
        "all_gather, large": gather(_MANY),
        "merge_call, small": merge(_FEW),
        "merge_call, large": merge(_MANY),
    }


def _nothing(*_):
    """Return None."""


def _of_one_call(world, strategy, call):
    """Return the MPI calls and the bytes of one call: of a run that makes two, without the run."""
    run = _counted(world, strategy, lambda: world.in_replica(strategy, _nothing)(0))
    if call is None:
        return run
    loop = world.in_replica(strategy, call)
    return (_counted(world, strategy, lambda: loop(2)) - run) / 2


def _counted(world, strategy, action):
    """Return how many MPI calls `action` begins, and their bytes, on the rank with the most."""
    transport = strategy.engine.transport
    calls, sent = transport.steps, transport.sent_bytes
    action()
    return world.greatest([transport.steps - calls, transport.sent_bytes - sent])
