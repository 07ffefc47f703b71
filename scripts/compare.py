#!/usr/bin/env python
"""Measure what calls cost in two checkouts of the package, in turn, on the ranks of one library.

    scripts/compare.py OLD NEW [--ranks 2] [--mpi openmpi] [--rounds 25] [--only 'of 1 kB']

OLD and NEW are folders of checkouts. Both jobs are started once, and stay; of each kind of call one
of them does a batch of some milliseconds while the other sleeps, then the other one. So a machine
that is slower for a while is so for both, and the ratio of two batches in turn tells what the
difference is. `scripts/bench.py` measures one checkout beside other ways to write the same.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from benchmarks.launching import find_interpreter

BATCH_SECONDS = 0.02

START = 'source "$0"; open_mpi_environment "$((2 * $1))"; shift; exec "$@"'


def main():
    """Start both jobs, have them take turns, and print a line for each kind of call."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--mpi", default="openmpi")
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--only", default="", help="kinds of calls that have these words in them")
    settings = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        sides = [Side(path, settings, Path(folder)) for path in (settings.old, settings.new)]
        try:
            print(f"{'':58} old        new    new/old   10-90 %")
            for name in KINDS:
                if settings.only in name:
                    compare(name, sides, settings.rounds)
        finally:
            for side in sides:
                side.end()


def compare(name, sides, rounds):
    """Print what one kind of call costs on both sides."""
    for side in sides:  # how many calls a batch has: as many on both sides
        side.turn(name, 3)
    seconds = max(side.turn(name, 3) for side in sides)
    times = max(1, int(BATCH_SECONDS / seconds))
    taken = np.array([[side.turn(name, times) for side in sides] for _ in range(rounds)])
    ratios = taken[:, 1] / taken[:, 0]
    old, new = np.median(taken, axis=0) * 1e6
    low, high = np.percentile(ratios, [10, 90])
    middle = statistics.median(ratios)
    print(f"{name:50} {old:9.2f} {new:9.2f} µs   {middle:.3f}   {low:.3f}-{high:.3f}", flush=True)


class Side:
    """A job of one checkout: its ranks wait for their turn at pipes."""

    def __init__(self, checkout, settings, folder):
        folder = folder / f"side-{len(list(folder.iterdir()))}"
        folder.mkdir()
        for rank in range(settings.ranks):
            os.mkfifo(folder / f"turn-{rank}")
            os.mkfifo(folder / f"done-{rank}")
        python = find_interpreter(settings.mpi)
        launcher = Path(python).with_name("mpiexec")
        command = ["bash", "-c", START, Path(__file__).with_name("environment.sh"), settings.ranks]
        command += [launcher, "-n", settings.ranks, python, __file__, "--rank", folder]
        env = os.environ | {"PYTHONPATH": str(checkout.resolve())}
        self.job = subprocess.Popen([*map(str, command)], env=env)
        self.turns = [open(folder / f"turn-{rank}", "w") for rank in range(settings.ranks)]
        self.done = [open(folder / f"done-{rank}") for rank in range(settings.ranks)]
        told = {line.readline().strip() for line in self.done}
        if told != {str(checkout.resolve())}:
            raise SystemExit(f"{checkout} was to be measured, and the ranks have {told}")

    def turn(self, name, times):
        """Have all ranks call it so often; return the seconds of one call."""
        for line in self.turns:
            print(name, times, sep="\t", file=line, flush=True)
        return max(float(line.readline()) for line in self.done)

    def end(self):
        """End the job."""
        for line in self.turns:
            line.close()
        self.job.wait()


def wait_for_turns(folder):
    """Do what the pipe of this rank says, until it is closed."""
    import mpi_replica as mr

    strategy = mr.MPIStrategy()
    reproducible = mr.CommunicationOptions(reproducible=True)
    turns, done = (
        open(folder / f"turn-{strategy.rank}"),
        open(folder / f"done-{strategy.rank}", "w"),
    )
    print(Path(mr.__file__).parents[1], file=done, flush=True)
    for turn in turns:
        name, times = turn.strip().split("\t")
        call, made = KINDS[name]
        value = made(np.random.default_rng(strategy.rank))
        seconds = call(mr, strategy, value, int(times), reproducible)
        print(seconds / int(times), file=done, flush=True)
        del value
    strategy.close()


def in_step(called):
    """Return what measures a call in a step, after one that nobody measures."""

    def measure(mr, strategy, value, times, reproducible):
        def step():
            ctx = mr.get_replica_context()
            out = [np.empty_like(x) for x in value] if isinstance(value, list) else None
            called(ctx, value, out, reproducible)
            start = time.perf_counter()
            for _ in range(times):
                called(ctx, value, out, reproducible)
            return time.perf_counter() - start

        return strategy.experimental_local_results(strategy.run(step))[0]

    return measure


def above(called):
    """Return what measures a call above the replicas."""

    def measure(mr, strategy, value, times, reproducible):
        called(mr, strategy, value)
        start = time.perf_counter()
        for _ in range(times):
            called(mr, strategy, value)
        return time.perf_counter() - start

    return measure


def floats(bytes_, dtype=np.float32):
    """Return what makes one array of so many bytes."""
    return lambda random: random.normal(size=bytes_ // np.dtype(dtype).itemsize).astype(dtype)


def arrays(count, bytes_):
    """Return what makes a list of arrays."""
    return lambda random: [floats(bytes_)(random) for _ in range(count)]


SUM = in_step(lambda ctx, x, out, options: ctx.all_reduce("SUM", x))
SUM_OUT = in_step(lambda ctx, x, out, options: ctx.all_reduce("SUM", x, out=out))
SUM_REPRODUCIBLE = in_step(lambda ctx, x, out, options: ctx.all_reduce("SUM", x, options))
MAX = in_step(lambda ctx, x, out, options: ctx.all_reduce("MAX", x))
GATHER = in_step(lambda ctx, x, out, options: ctx.all_gather(x, axis=0))
GATHER_1 = in_step(lambda ctx, x, out, options: ctx.all_gather(x, axis=1))
MERGE = in_step(lambda ctx, x, out, options: ctx.merge_call(lambda strategy, x: None, (x,)))


def uneven(bytes_):
    """Return what makes a block of another length on each rank."""

    def make(random):
        length = bytes_ // 4 + 1
        return random.normal(size=(length, 1)).astype(np.float32)

    return make


def commits(mr, strategy, state, times, reproducible):
    """Measure commits of an `ElasticState`."""
    state = mr.ElasticState(strategy, weights=state, step=0)
    taken = []

    def train():
        state.commit()
        start = time.perf_counter()
        for _ in range(times):
            state.commit()
        taken.append(time.perf_counter() - start)

    strategy.run_elastic(train, state)
    return taken[-1]


def saves(mr, strategy, state, times, reproducible):
    """Measure checkpoints, saved and restored."""
    checkpoint = mr.Checkpoint(strategy, state=state)
    with tempfile.TemporaryDirectory() as folder:
        path = strategy.gather_objects(folder)[0] + "/saved"
        start = time.perf_counter()
        for _ in range(times):
            checkpoint.restore(checkpoint.save(path))
        taken = time.perf_counter() - start
        strategy.barrier()
    return taken


KINDS = {
    "all_reduce of one number": (SUM, lambda random: 1.5),
    "all_reduce of a dict of 4 small arrays": (
        SUM,
        lambda random: {key: np.ones(3, np.float32) for key in "abcd"},
    ),
    "run of an empty function": (
        above(lambda mr, strategy, x: strategy.run(lambda: None)),
        lambda random: None,
    ),
    "merge_call of a float": (MERGE, lambda random: 1.5),
    "merge_call of 1 MB, not looked at": (MERGE, floats(1 << 20)),
    "strategy.reduce of what run returned": (
        above(lambda mr, strategy, x: strategy.reduce("SUM", strategy.run(lambda: 1.5), axis=None)),
        lambda random: None,
    ),
    "strategy.barrier": (above(lambda mr, strategy, x: strategy.barrier()), lambda random: None),
    "strategy.verify of 1 kB": (
        above(lambda mr, strategy, x: strategy.verify(np.ones(256, np.float32))),
        lambda random: None,
    ),
    "broadcast_to of 1 kB": (
        above(lambda mr, strategy, x: strategy.extended.broadcast_to(x)),
        floats(1000),
    ),
    "all_reduce of 1 kB": (SUM, floats(1000)),
    "all_reduce of 64 kB": (SUM, floats(64_000)),
    "all_reduce of 1 MB": (SUM, floats(1_000_000)),
    "all_reduce of 16 MB": (SUM, floats(16_000_000)),
    "all_reduce of 102 MB": (SUM, floats(102_000_000)),
    "all_reduce of 64 kB, out=": (SUM_OUT, arrays(1, 64_000)),
    "all_reduce of 1 MB, out=": (SUM_OUT, arrays(1, 1_000_000)),
    "all_reduce of 102 MB, out=": (SUM_OUT, arrays(1, 102_000_000)),
    "all_reduce of 10 arrays of 1 kB": (SUM, arrays(10, 1000)),
    "all_reduce of 1000 arrays of 1 kB": (SUM, arrays(1000, 1000)),
    "all_reduce of 1000 arrays of 1 kB, out=": (SUM_OUT, arrays(1000, 1000)),
    "all_reduce of 160 arrays of 640 kB": (SUM, arrays(160, 640_000)),
    "all_reduce MAX of 64 kB": (MAX, floats(64_000)),
    "all_reduce of 2 kB of float16": (SUM, floats(2000, np.float16)),
    "all_reduce of 1 MB of float16": (SUM, floats(1_000_000, np.float16)),
    "all_reduce of 51 MB of float16": (SUM, floats(51_000_000, np.float16)),
    "reproducible, one number": (SUM_REPRODUCIBLE, lambda random: 1.5),
    "reproducible, 64 kB": (SUM_REPRODUCIBLE, floats(64_000)),
    "reproducible, 1 MB": (SUM_REPRODUCIBLE, floats(1_000_000)),
    "reproducible, 16 MB": (SUM_REPRODUCIBLE, floats(16_000_000)),
    "all_gather of 1 kB": (GATHER, uneven(1000)),
    "all_gather of 64 kB": (GATHER, uneven(64_000)),
    "all_gather of 1 MB": (GATHER, uneven(1_000_000)),
    "all_gather of 16 MB": (GATHER, uneven(16_000_000)),
    "all_gather of 64 kB, axis 1": (GATHER_1, uneven(64_000)),
    "commit of 161 arrays, 16 MB": (commits, arrays(161, 100_000)),
    "checkpoint of 161 arrays, 16 MB, and back": (saves, arrays(161, 100_000)),
}


if __name__ == "__main__":
    if sys.argv[1] == "--rank":
        wait_for_turns(Path(sys.argv[2]))
    else:
        main()
