"""calls: what a small call costs, where nearly all of it is Python.

Each is made again and again by a loop in the step function (`run` itself: by a loop around it),
as programs do. The other side is the call of mpi4py that does what is asked for without a check.
"""

import itertools
import time
from functools import partial

import numpy as np

import mpi_replica as mr

from .launching import Launch
from .measuring import beside, row
from .peers import gloo_way

# Goals, for 2 ranks: seconds, and the most against what stands beside it.
_MOST_SCALAR, _SCALAR_RATIO = 8e-6, 3
_NEST_RATIO = 1.5
_MOST_RUN = {1: 8e-6, 4: 20e-6}
_MOST_MERGE = 25e-6


def launches(settings):
    """Return what to start for one library."""
    batches = settings.repeat or (3 if settings.quick else 1000)
    for ranks in settings.ranks or [2]:
        yield Launch("small_calls", ranks, {"batches": batches})


def small_calls(world, batches):
    """Measure calls in a replica, then `run` itself."""

    def goal(most):
        return most if world.size == 2 else None

    by_hand = {
        name: world.repeated(call)
        for name, call in {
            "comm.allreduce(1.0)": lambda: world.comm.allreduce(1.0),
            "comm.allgather(1.0)": lambda: world.comm.allgather(1.0),
            "comm.Barrier()": world.comm.Barrier,
        }.items()
    }
    with mr.MPIStrategy() as strategy:
        scalar, nest, merge = (
            world.of_step(strategy, partial(step, world.begin))
            for step in (_reduce_scalar, _reduce_nest, _merge)
        )
        _check(world, strategy)
        value = np.ones(1, np.float32)
        gloo = gloo_way(world, "in place", [value], [value])
        sides = [scalar, nest, by_hand["comm.allreduce(1.0)"]]
        sides += [] if gloo is None else [world.repeated(gloo)]
        ours, of_nest, others, *peers = world.in_turn(sides, batches)
        yield row(
            "ctx.all_reduce of a float32",
            world.size,
            ours,
            beside("comm.allreduce(1.0)", ours, others, goal=goal(_SCALAR_RATIO)),
            *(beside("gloo", ours, peer) for peer in peers),
            goal=goal(_MOST_SCALAR),
        )
        yield row(
            "ctx.all_reduce of a dict of 4 small arrays",
            world.size,
            of_nest,
            beside("ctx.all_reduce of a float32", of_nest, ours, goal=goal(_NEST_RATIO)),
        )
        ours, others = world.in_turn([merge, by_hand["comm.allgather(1.0)"]], batches)
        against = beside("comm.allgather(1.0)", ours, others)
        yield row("merge_call of a float", world.size, ours, against, goal=goal(_MOST_MERGE))
        verify = world.repeated(partial(strategy.verify, value))
        ours, others = world.in_turn([verify, by_hand["comm.allgather(1.0)"]], batches)
        against = beside("comm.allgather(1.0)", ours, others)
        yield row("strategy.verify of a float32", world.size, ours, against)

    for replicas, most in _MOST_RUN.items():
        with mr.MPIStrategy(replicas_per_rank=replicas) as strategy:
            empty = _runs(world, strategy)
            ours, others = world.in_turn([empty, by_hand["comm.Barrier()"]], batches)
        against = beside("comm.Barrier()", ours, others)
        ranks = f"{world.size} x {replicas}"
        yield row("run of an empty function", ranks, ours, against, goal=goal(most))


# The loops stand in the steps themselves: each frame between a call and the step costs time.


def _reduce_scalar(begin, count):
    all_reduce, value = mr.get_replica_context().all_reduce, np.float32(1)
    start = begin()
    for _ in itertools.repeat(None, count):
        all_reduce("SUM", value)
    return time.perf_counter() - start


def _reduce_nest(begin, count):
    all_reduce = mr.get_replica_context().all_reduce
    value = {name: np.ones(10, np.float32) for name in ("loss", "norm", "hits", "rows")}
    start = begin()
    for _ in itertools.repeat(None, count):
        all_reduce("SUM", value)
    return time.perf_counter() - start


def _merge(begin, count):
    merge_call = mr.get_replica_context().merge_call
    start = begin()
    for _ in itertools.repeat(None, count):
        merge_call(_nothing, args=(1.0,))
    return time.perf_counter() - start


def _nothing(*_):
    """Return None."""


def _runs(world, strategy):
    run = strategy.run

    def loop(count):
        start = world.begin()
        for _ in itertools.repeat(None, count):
            run(_nothing)
        return time.perf_counter() - start

    return loop


def _check(world, strategy):
    """Raise unless the calls give what they should."""

    def step():
        context = mr.get_replica_context()
        summed = context.all_reduce("SUM", np.float32(world.rank + 1))
        merged = context.merge_call(
            lambda strategy, value: sum(strategy.experimental_local_results(value)),
            args=(world.rank + 1.0,),
        )
        return summed, merged

    expected = world.size * (world.size + 1) / 2
    for result in strategy.experimental_local_results(strategy.run(step)):
        world.require(result == (expected, expected), "a call in a replica")
