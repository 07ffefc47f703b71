"""trace: what a trace of where the time goes costs the job.

A strategy that is traced beside one that is not, in the same processes.
"""

import contextlib
import io
import itertools
import os
import tempfile
import time
from functools import partial

import mpi_replica as mr
from mpi_replica.ranks.watch import event_log

from .launching import Launch
from .measuring import beside, row

# Goals: seconds, and the most against the same without a trace.
_MOST_OF_CALL, _MOST_OF_SPAN = 1e-6, 0.5e-6
_DIGITS_RATIO = 1.02


def launches(settings):
    """Return what to start for one library."""
    batches = settings.repeat or (3 if settings.quick else 300)
    for ranks in settings.ranks or [1, 2]:
        yield Launch("traced", ranks, {"batches": batches})
    for ranks in settings.ranks or [2]:
        yield Launch("digits", ranks, {"batches": 3 if settings.quick else 40})


def traced(world, batches):
    """Measure a small call and an empty run with and without a trace, and a span."""
    yield row(
        "mr.span without a trace", world.size, _span_seconds(world, batches), goal=_MOST_OF_SPAN
    )
    with mr.MPIStrategy() as plain, _traced_strategy(world) as strategy:
        sides = [world.of_step(one, partial(_reduce, world.begin)) for one in (strategy, plain)]
        ours, others = world.in_turn([sides[0], _untraced(sides[1])], batches)
        against = beside("without a trace", ours, others, "difference", goal=_MOST_OF_CALL)
        yield row("ctx.all_reduce of a float, traced", world.size, ours, against)
        sides = [world.repeated(partial(one.run, _nothing)) for one in (strategy, plain)]
        ours, others = world.in_turn([sides[0], _untraced(sides[1])], batches)
        against = beside("without a trace", ours, others, "difference")
        yield row("strategy.run of nothing, traced", world.size, ours, against)
        yield row("mr.span, traced", world.size, _span_seconds(world, batches))


def digits(world, batches):
    """Measure the training of scripts/train_digits.py, two epochs at a time."""
    from train_digits import train

    def once(strategy):
        with contextlib.redirect_stderr(io.StringIO()):  # its bar of progress
            train(strategy, 2, 64, 0, "float64")

    with mr.MPIStrategy() as plain, _traced_strategy(world) as strategy:
        sides = [world.repeated(partial(once, one)) for one in (strategy, plain)]
        ours, others = world.in_turn([sides[0], _untraced(sides[1])], batches)
        against = beside("without a trace", ours, others, goal=_DIGITS_RATIO)
        yield row("train_digits.py, 2 epochs, traced", world.size, ours, against)


def _untraced(loop):
    """Return the loop in a process that is not traced: runs and spans note it otherwise."""

    def untraced(count):
        log, event_log.current = event_log.current, None
        try:
            return loop(count)
        finally:
            event_log.current = log

    return untraced


def _span_seconds(world, batches):
    def span():
        with mr.span("a part"):
            pass

    (seconds,) = world.in_turn([world.repeated(span)], batches)
    return seconds


@contextlib.contextmanager
def _traced_strategy(world):
    """Give a strategy that is traced, with samples, until all have left it."""
    folder = world.comm.bcast(tempfile.mkdtemp() if world.rank == 0 else None)
    with mr.MPIStrategy() as strategy, strategy.trace(os.path.join(folder, "trace.json")):
        yield strategy


def _reduce(begin, count):
    all_reduce = mr.get_replica_context().all_reduce
    start = begin()
    for _ in itertools.repeat(None, count):
        all_reduce("SUM", 1.0)
    return time.perf_counter() - start


def _nothing():
    pass
