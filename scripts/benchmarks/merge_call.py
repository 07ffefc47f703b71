"""merge_call: a merge_fn that only reduces, as an optimizer does, beside all_reduce of the same.

The arguments need not be gathered where nobody looks at them.
"""

import mpi_replica as mr

from . import nests
from .launching import Launch
from .measuring import beside, row
from .tables import quantity

# The goal, for 2 ranks: the most against all_reduce.
_MOST_RATIO = 1.2


def launches(settings):
    """Return what to start for one library."""
    arguments = {"width": 8 if settings.quick else 64}
    arguments["batches"] = settings.repeat or (3 if settings.quick else 300)
    for ranks in settings.ranks or [2]:
        yield Launch("optimizer", ranks, arguments)


def optimizer(world, width, batches):
    """Measure the reduction of ResNet-50's gradients in a merge_fn, and without one."""
    gradients = nests.leaves_of(nests.arrays_of(nests.resnet50(width)))

    def merged(context):
        context.merge_call(_reduce, args=(gradients,))

    def reduced(context):
        context.all_reduce("SUM", gradients)

    with mr.MPIStrategy() as strategy:
        _check(world, strategy, gradients)
        sides = [world.in_replica(strategy, side) for side in (merged, reduced)]
        ours, others = world.in_turn(sides, batches)
    size = quantity(sum(gradient.nbytes for gradient in gradients), "B")
    yield row(
        f"merge_call that reduces {len(gradients)} gradients, {size}",
        world.size,
        ours,
        beside("ctx.all_reduce", ours, others, goal=_MOST_RATIO if world.size == 2 else None),
    )


def _reduce(strategy, gradients):
    strategy.extended.batch_reduce_to("SUM", [(gradient, None) for gradient in gradients])


def _check(world, strategy, gradients):
    """Raise unless a merge_fn gets the sums."""
    mine = nests.contribution(gradients, world.rank)
    sums = world.once(strategy, lambda context: context.merge_call(_sums, args=(mine,)))
    world.require(nests.are_equal(sums, nests.total(mine, world.size)), "merge_call")


def _sums(strategy, gradients):
    pairs = [(gradient, None) for gradient in gradients]
    return [total.value for total in strategy.extended.batch_reduce_to("SUM", pairs)]
