"""elastic: commits, beside a copy of the state and an agreement by hand.

By hand: `np.copyto` of each array into memory that is kept, `MPIX_Comm_iagree`, and where replicas
have something of their own a message of the same bytes to the next rank. The last rows are a step
that reduces a number, in a job that can go on without a lost rank and in one that can't: two
launches, so that the numbers of one may differ from the other's by the machine's mood.
"""

import os
from functools import partial

import numpy as np

import mpi_replica as mr

from . import nests
from .launching import Launch
from .measuring import beside, row

# What the launcher's --with-ft ulfm sets for the ranks. MPICH does not know it, and has no rows.
_FAULT_TOLERANT = {"OMPI_MCA_mpi_ft_enable": "1"}
_MOST_RATIO = 1.3


def launches(settings):
    """Return what to start for one library."""
    arguments = {"batches": settings.repeat or (3 if settings.quick else 25)}
    for ranks in settings.ranks or [2, 4]:
        quick = {"is_quick": settings.quick}
        yield Launch("commits", ranks, arguments | quick, environment=_FAULT_TOLERANT)
        for environment in (_FAULT_TOLERANT, {}):
            yield Launch("steps", ranks, arguments, environment=environment)


def commits(world, batches, is_quick):
    """Measure commits of each state."""
    strategy = mr.MPIStrategy()
    if not strategy.survivors.is_fault_tolerant:
        return
    arrays = [
        np.ones(shape, np.float32)
        for shape in nests.leaves_of(nests.resnet50(width=8 if is_quick else 64))
    ]
    with strategy.scope():
        variables = [mr.Variable(array) for array in arrays]
    states = {
        "a number": ({"step": 0}, [], 0),
        "161 variables of ResNet-50": ({"variables": variables}, arrays, 0),
        "161 arrays of ResNet-50": ({"arrays": arrays}, arrays, 0),
        "random numbers of the replicas": ({}, [], 1),
    }
    for name, (objects, copied, draws) in states.items():
        if draws:
            strategy.run(lambda: mr.get_replica_context().rng.normal())
        state, found = mr.ElasticState(strategy, **objects), []
        loops = [
            world.repeated(state.commit),
            world.repeated(_ByHand(world, copied, bool(draws)).commit),
        ]
        strategy.run_elastic(
            partial(lambda loops, found: found.extend(world.in_turn(loops, batches)), loops, found),
            state,
        )
        ours, others = found
        goal = _MOST_RATIO if copied else None
        yield row(f"commit of {name}", world.size, ours, beside("by hand", ours, others, goal=goal))


def steps(world, batches):
    """Measure steps that reduce a number."""
    strategy = mr.MPIStrategy()
    tolerant = strategy.survivors.is_fault_tolerant
    if not tolerant and os.environ.get("OMPI_MCA_mpi_ft_enable"):
        return
    reduce = world.in_replica(strategy, lambda context: context.all_reduce("SUM", 1.0))
    by_hand = world.repeated(lambda: world.comm.allreduce(1.0))
    ours, others = world.in_turn([reduce, by_hand], batches)
    can = "can" if tolerant else "can't"
    what = f"all_reduce of a number, where the job {can} go on without a rank"
    yield row(what, world.size, ours, beside("comm.allreduce(1.0)", ours, others))


class _ByHand:
    """How a program keeps its state by hand."""

    def __init__(self, world, arrays, has_own):
        self._world, self._arrays = world, arrays
        self._copies = [np.empty_like(array) for array in arrays]
        self._word = np.ones(1, np.int32)
        # What the state of a generator of random numbers takes.
        self._own = np.zeros(400 if has_own else 0, np.uint8)
        self._kept = np.zeros_like(self._own)

    def commit(self):
        """Copy, agree, and send what is this rank's own."""
        for copy, array in zip(self._copies, self._arrays, strict=True):
            np.copyto(copy, array)
        comm, rank, size = self._world.comm, self._world.rank, self._world.size
        if self._own.size:
            comm.Sendrecv(self._own, (rank + 1) % size, recvbuf=self._kept)
        self._word[0] = 1
        request = comm.Iagree(self._word)
        while not request.Test():
            os.sched_yield()
