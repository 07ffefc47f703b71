"""misuse: how long a mistake takes until every rank has its error.

Mistakes that a program can catch are those of tests/mistakes.py. They are made one after another in
one run, by the first, a middle and the last replica, and after each the next collective must be
right. The time goes from the moment at which the culprit's rank begins with it, so with the right
calls that come first, to that at which the slowest rank has the error. All ranks are on one host,
where the clock is the same for all processes.

Mistakes that end a process have a run of their own, and the time goes to the end of the job.
"""

import os
import signal
import sys
import time

import numpy as np

import mpi_replica as mr

from .launching import Launch
from .measuring import spread
from .tables import Beside, Row

_GOAL_SECONDS = 2
_LIMIT_SECONDS = 60


def launches(settings):
    """Return what to start for one library."""
    times = settings.repeat or 1
    counts = settings.ranks or ([2] if settings.quick else [2, 3, 4])
    for ranks in counts:
        for replicas in [2] if settings.quick else [1, 2]:
            yield Launch("caught", ranks, {"replicas_per_rank": replicas, "times": times})
    for how in list(_ENDS)[: 1 if settings.quick else None]:
        for ranks in counts:
            # Each start of a job takes a second: all places for the culprit only once.
            for culprit in range(3) if ranks == 3 else range(1, ranks)[-1:]:
                arguments = {"how": how, "culprit": culprit}
                yield Launch("ends", ranks, arguments, limit_seconds=_LIMIT_SECONDS, may_fail=True)


def rows(outcomes):
    """Return a row for each mistake, the slowest first."""
    cases = {}
    for outcome in outcomes:
        found = outcome.records
        if outcome.launch.part == "ends":
            found = [_end(outcome)]
        for case in found:
            cases.setdefault(case["mistake"], []).append(case)
    return sorted(map(_row, cases.values()), key=_slowest, reverse=True)


def footer(rows):
    """Return the number of rows, and the slowest."""
    over = sum(row.is_over for row in rows)
    slowest = rows[0]
    text = f"{len(rows)} mistakes, {over} over {_GOAL_SECONDS} s. The slowest: {slowest.what!r}"
    return f"{text}, {_slowest(slowest):.3g} s on {slowest.ranks}."


def _slowest(row):
    return row.besides[0].value


def _row(cases):
    seconds = [case["seconds"] for case in cases]
    slowest = max(cases, key=lambda case: case["seconds"])
    problems = [f"{case['where']}: {case['problem']}" for case in cases if case["problem"]]
    return Row(
        slowest["mistake"],
        slowest["where"],
        float(np.median(seconds)),
        spread(seconds),
        besides=(Beside("the slowest", slowest["seconds"], goal=_GOAL_SECONDS),),
        problem="; ".join(problems),
    )


# Mistakes that are caught


def caught(world, replicas_per_rank, times):
    """Make all mistakes that fit the layout."""
    from mistakes import MISTAKES  # of the tests

    # Where it is ignored, as in a job of a shell's background, no interrupt would come.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with mr.MPIStrategy(replicas_per_rank=replicas_per_rank) as strategy:
        last = strategy.num_replicas_in_sync - 1
        culprits = sorted({0, (last + 1) // 2, last})
        for mistake in MISTAKES:
            if (world.size if mistake.outside else last + 1) == 1:
                continue  # a single one has nobody to disagree with
            for culprit in culprits * times:
                where = f"{world.size} x {replicas_per_rank}, replica {culprit}"
                seconds, problem = _made(world, strategy, mistake, culprit)
                yield {
                    "mistake": mistake.name,
                    "where": where,
                    "seconds": seconds,
                    "problem": problem,
                }


def _made(world, strategy, mistake, culprit):
    """Make a mistake; return the seconds that it took, and what was not as it should be."""
    expected = tuple(filter(None, (mistake.error, mistake.elsewhere)))
    world.comm.Barrier()
    start, problem = time.monotonic(), "no error was raised"
    try:
        mistake.make(strategy, culprit)
    except BaseException as error:
        end = time.monotonic()
        problem = "" if isinstance(error, expected) else f"{type(error).__name__}: {error}"
    else:
        end = time.monotonic()
    is_culprits = culprit in strategy.local_replica_ids
    begun, ended = world.greatest([start if is_culprits else 0, end])
    if not problem and not _is_right(strategy):
        problem = "the next collective gave a wrong number"
    problems = [f"rank {rank}: {text}" for rank, text in enumerate(world.comm.allgather(problem))]
    return ended - begun, ", ".join(text for text in problems if not text.endswith(": "))


def _is_right(strategy):
    """Return whether collectives give the right numbers."""

    def step():
        context = mr.get_replica_context()
        mine = context.replica_id_in_sync_group
        return context.all_reduce("SUM", mine), context.all_gather(np.full(mine + 1, mine), axis=0)

    count = strategy.num_replicas_in_sync
    ids = np.arange(count)
    return all(
        total == ids.sum() and np.array_equal(rows, np.repeat(ids, ids + 1))
        for total, rows in strategy.experimental_local_results(strategy.run(step))
    )


# Mistakes that end a process


class _Uncaught(Exception):
    """What nobody catches."""


def _raise_uncaught():
    raise _Uncaught


#: What the culprit does between two calls of `run`, while the others go on.
_ENDS = {
    "the script returns": lambda: None,
    "sys.exit(0) outside of run": lambda: sys.exit(0),
    "an uncaught exception outside of run": _raise_uncaught,
    "os._exit(3)": lambda: os._exit(3),
}


def ends(world, how, culprit):
    """End the process of one rank, while the others are in a collective."""
    strategy = mr.MPIStrategy()
    yield {"is_right": _is_right(strategy)}
    if world.rank == culprit:
        world.tell({"begun": time.monotonic()})
        _ENDS[how]()
        return
    while True:
        _is_right(strategy)


def _end(outcome):
    """Return how long the job went on after its process ended, as a case."""
    arguments, ranks = outcome.launch.arguments, outcome.launch.ranks
    found = {name: value for record in outcome.records for name, value in record.items()}
    problem = "the job's exit status is 0" if outcome.status == 0 else ""
    if "begun" not in found or not found.get("is_right"):
        problem = f"it did not come so far: {outcome.output}"
    return {
        "mistake": arguments["how"],
        "where": f"{ranks} x 1, replica {arguments['culprit']}",
        "seconds": outcome.ended - found.get("begun", outcome.ended),
        "problem": problem,
    }
