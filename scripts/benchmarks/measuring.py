"""Measure on several ranks: this runtime and other ways in turn, in many short batches.

What a call costs changes from run to run and within a run: other programs, the clock of the
cores, where pages lie. So nothing is compared that was not measured in the same run, and there a
batch of each side follows one of the side before it, many times (A B C A B C ...), so that what
disturbs one disturbs the others. A batch is as many calls as take about a millisecond, the same
number on all ranks: short enough that most batches see no disturbance, long enough for the clock.

All ranks meet at a barrier before each batch. What counts is the time from there until the last
rank has done its calls. What is reported of a side is the median of its batches, and the times
below which 10 and 90 % of them lie; of two sides the median of the differences, or of the ratios,
of batches of the same round. Before all that each side runs for some milliseconds to warm up:
connections, caches, memory.

A side is a *loop*: a function that makes as many calls as it is told to, after a barrier, and
returns the seconds. One that calls in replicas does all that within one `run`, whose own time does
not count.

Numbers mean something only on a machine that does nothing else, with a core for each rank; on more
ranks than cores they tell about the scheduler, too.
"""

import itertools
import json
import os
import platform
import time
from importlib.metadata import version
from importlib.util import find_spec

import numpy as np

import mpi_replica as mr

from .tables import Beside, Row

_BATCH_SECONDS = 4e-3
_WARM_UP_SECONDS = 20e-3
_TRIAL_WARM_UP_SECONDS = 5e-3
_MOST_CALLS = 1000
# What a measurement may take in all, and a sweep; where calls are slow there are fewer batches.
_LIMIT_SECONDS = 20
_SWEEP_SECONDS = 3


class World:
    """The ranks of this run, as a table's part sees them.

    Parameters
    ----------
    path : str
        The file that the launching process reads records from.

    Attributes
    ----------
    comm : mpi4py.MPI.Intracomm
        A duplicate of the world, for yardsticks.
    rank, size : int
    is_crowded : bool
        There are more ranks than cores.
    """

    def __init__(self, path):
        from mpi4py import MPI  # starts MPI, which the process that launches must not

        self.mpi = MPI
        self.comm = MPI.COMM_WORLD.Dup()
        self.rank, self.size = self.comm.rank, self.comm.size
        self._records = os.open(path, os.O_WRONLY | os.O_APPEND)
        self.is_crowded = self.size > (os.cpu_count() or 1)

    def tell(self, record):
        """Keep a record, from this rank."""
        # In one piece and at once: other ranks write, too, and this one may end soon.
        os.write(self._records, f"{json.dumps(record)}\n".encode())

    def facts(self):
        """Return in words what the numbers depend on."""
        library = self.mpi.Get_library_version().splitlines()[0].strip("\0, ").split(",")[0]
        library = " ".join(library.split())
        threads = os.environ.get("OMP_NUM_THREADS")
        load = ", ".join(f"{load:.1f}" for load in os.getloadavg())
        names = [name for name in ("mpi4py", "numpy", "torch") if find_spec(name)]
        versions = ", ".join(f"{name} {version(name)}" for name in names)
        python = f"Python {platform.python_version()}, {versions}"
        machine = f"{os.cpu_count()} cores, load {load}; OMP_NUM_THREADS={threads}"
        return f"{library}; {python}; {machine}"

    def greatest(self, values):
        """Return the greatest of each value over all ranks. Collective."""
        greatest = np.array(values, np.float64)
        self.comm.Allreduce(self.mpi.IN_PLACE, greatest, self.mpi.MAX)
        return greatest

    def require(self, is_right, what):
        """Raise if what somebody computed is not right."""
        if not is_right:
            raise RuntimeError(f"{what} gave a wrong result on rank {self.rank} of {self.size}")

    def in_turn(self, loops, batches, limit_seconds=_LIMIT_SECONDS):
        """Return the seconds that a call takes: a row for each side, a column for each batch.

        Collective.

        Parameters
        ----------
        loops : sequence of callable
            The sides: each makes as many calls as its argument says, and returns the seconds.
        batches : int
            How many of each side.
        limit_seconds : float
            What all batches may take, roughly: where calls are slow there are fewer.
        """
        counts, round_seconds = [], 0.0
        for loop in loops:
            seconds = self._warm_up(loop, batches)
            count = min(max(round(_BATCH_SECONDS / seconds), 1), _MOST_CALLS)
            counts.append(count)
            round_seconds += count * seconds
        batches = max(min(batches, int(limit_seconds / round_seconds)), 3)
        taken = np.empty((len(loops), batches))
        for batch in range(batches):
            for index, loop in enumerate(loops):
                taken[index, batch] = loop(counts[index])
        return self.greatest(taken) / np.array(counts)[:, np.newaxis]

    def beside_best(self, what, ours, ways, others, batches, goal=None, goals=None, **fields):
        """Return a `Row` of ours beside the best of several ways and others. Collective.

        A short sweep finds the two best ways; they are measured again in turn with all others, and
        the better one stands in the row.

        Parameters
        ----------
        what : str
        ours : callable
            A loop.
        ways, others : dict of str to callable
            Calls, by name.
        batches : int
            How many of each side.
        goal : float, optional
            For the ratio of ours and the best way.
        goals : dict of str to float, optional
            For ratios of ours and others.
        **fields
            More of the row.
        """
        loops = {name: self.repeated(call) for name, call in (ways | others).items()}
        swept = self.in_turn([loops[name] for name in ways], max(batches // 20, 3), _SWEEP_SECONDS)
        names = [*fastest(list(ways), swept)[:2], *others]
        mine, *taken = self.in_turn([ours, *(loops[name] for name in names)], batches)
        of_best = len(names) - len(others)
        best = names.index(fastest(names[:of_best], taken[:of_best])[0])
        besides = [beside(names[best], mine, taken[best], goal=goal)]
        for name, times in zip(names[of_best:], taken[of_best:], strict=True):
            besides.append(beside(name, mine, times, goal=(goals or {}).get(name)))
        return row(what, self.size, mine, *besides, **fields)

    def _warm_up(self, loop, batches):
        """Return what a call takes on the slowest rank, roughly, after some calls."""
        count, spent, seconds = 1, 0.0, 1.0
        # A few batches are a trial of the program, not of the machine.
        least = _WARM_UP_SECONDS if batches > 10 else _TRIAL_WARM_UP_SECONDS
        while spent < least:
            taken = float(self.greatest(loop(count)))
            spent += taken
            seconds = taken / count
            count = min(2 * count, _MOST_CALLS)
        return max(seconds, 1e-8)

    def begin(self):
        """Return the time, after all ranks have come here: what a loop does first. Collective."""
        self.comm.Barrier()
        return time.perf_counter()

    def repeated(self, call):
        """Return the loop that makes a call again and again."""

        def loop(count):
            start = self.begin()
            for _ in itertools.repeat(None, count):
                call()
            return time.perf_counter() - start

        return loop

    def in_replica(self, strategy, call):
        """Return the loop that makes ``call(context)`` again and again in each replica."""
        first, start = strategy.local_replica_ids[0], 0.0

        def step(count):
            nonlocal start
            context = mr.get_replica_context()
            if context.replica_id_in_sync_group == first:  # one barrier a rank; it runs first
                start = self.begin()
            for _ in itertools.repeat(None, count):
                call(context)
            return time.perf_counter() - start

        return self.of_step(strategy, step)

    def once(self, strategy, call):
        """Return what ``call(context)`` gives in this rank's first replica."""
        found = []
        self.in_replica(strategy, lambda context: found.append(call(context)))(1)
        return found[0]

    def of_step(self, strategy, step):
        """Return the loop that a step function is; the last replica of a rank ends it."""
        results = strategy.experimental_local_results
        return lambda count: results(strategy.run(step, args=(count,)))[-1]


def fastest(names, taken):
    """Return the names by the medians of their batches, the least first."""
    order = np.argsort(np.median(taken, axis=1), kind="stable")
    return [names[index] for index in order]


def row(what, ranks, ours, *besides, **fields):
    """Return a `Row` of batches of ours."""
    value = float(np.median(ours))
    return Row(what, str(ranks), value, spread(ours), besides=besides, **fields)


def beside(name, ours, others, comparison="ratio", goal=None):
    """Return what stands in a row beside ours: batches of the same rounds."""
    of_rounds = ours - others if comparison == "difference" else ours / others
    compared = float(np.median(of_rounds))
    return Beside(name, float(np.median(others)), spread(others), comparison, compared, goal)


def spread(values):
    """Return between what the middle of all values lies: 10 and 90 % are below."""
    low, high = np.percentile(values, [10, 90])
    return float(low), float(high)
