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
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from benchmarks.launching import START, find_interpreter

BATCH_SECONDS = 0.02
# In which the ranks of a job must have made their strategy.
START_SECONDS = 60


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
    old, new = np.median(taken, axis=0) * 1e6
    low, middle, high = np.percentile(taken[:, 1] / taken[:, 0], [10, 50, 90])
    print(f"{name:50} {old:9.2f} {new:9.2f} µs   {middle:.3f}   {low:.3f}-{high:.3f}", flush=True)


class Side:
    """A job of one checkout: its ranks wait for their turn at a socket."""

    def __init__(self, checkout, settings, folder):
        path = folder / f"side-{len(list(folder.iterdir()))}"
        python = find_interpreter(settings.mpi)
        command = ["bash", "-c", START, Path(__file__).with_name("environment.sh")]
        command += [2 * settings.ranks, Path(python).with_name("mpiexec"), "-n", settings.ranks]
        command += [python, __file__, "--rank", path]
        env = os.environ | {"PYTHONPATH": str(checkout.resolve())}
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(path))
            listener.listen()
            listener.settimeout(START_SECONDS)  # a job that fails at its start comes to no socket
            self.job = subprocess.Popen([*map(str, command)], env=env)
            self.ranks = [listener.accept()[0].makefile("rw") for _ in range(settings.ranks)]
        told = {rank.readline().strip() for rank in self.ranks}
        if told != {str(checkout.resolve())}:
            raise SystemExit(f"{checkout} was to be measured, and the ranks have {told}")

    def turn(self, name, times):
        """Have all ranks call it so often; return the seconds of one call."""
        for rank in self.ranks:
            print(name, times, sep="\t", file=rank, flush=True)
        return max(float(rank.readline()) for rank in self.ranks)

    def end(self):
        """End the job."""
        for rank in self.ranks:
            rank.close()
        self.job.wait()


def wait_for_turns(path):
    """Do what comes by the socket of this job, until it is closed."""
    import mpi_replica as mr

    strategy = mr.MPIStrategy()
    reproducible = mr.CommunicationOptions(reproducible=True)
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(path)
        turns = connection.makefile("rw")
        print(Path(mr.__file__).parents[1], file=turns, flush=True)
        while turn := turns.readline():
            name, times = turn.strip().split("\t")
            measure, made = KINDS[name]
            value = made(np.random.default_rng(strategy.rank))
            seconds = measure(mr, strategy, value, int(times), reproducible)
            print(seconds / int(times), file=turns, flush=True)
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
        called(strategy, value)
        start = time.perf_counter()
        for _ in range(times):
            called(strategy, value)
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


def column(bytes_):
    """Return what makes one column, as long on all ranks."""
    return lambda random: floats(bytes_)(random).reshape(-1, 1)


def nothing(random):
    """Stands for what makes a value, where a call takes none."""


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
        above(lambda strategy, x: strategy.run(lambda: None)),
        nothing,
    ),
    "merge_call of a float": (MERGE, lambda random: 1.5),
    "merge_call of 1 MB, not looked at": (MERGE, floats(1 << 20)),
    "strategy.reduce of what run returned": (
        above(lambda strategy, x: strategy.reduce("SUM", strategy.run(lambda: 1.5), axis=None)),
        nothing,
    ),
    "strategy.barrier": (above(lambda strategy, x: strategy.barrier()), nothing),
    "strategy.verify of 1 kB": (
        above(lambda strategy, x: strategy.verify(np.ones(256, np.float32))),
        nothing,
    ),
    "broadcast_to of 1 kB": (
        above(lambda strategy, x: strategy.extended.broadcast_to(x)),
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
    "all_gather of 1 kB": (GATHER, column(1000)),
    "all_gather of 64 kB": (GATHER, column(64_000)),
    "all_gather of 1 MB": (GATHER, column(1_000_000)),
    "all_gather of 16 MB": (GATHER, column(16_000_000)),
    "all_gather of 64 kB, axis 1": (GATHER_1, column(64_000)),
    "commit of 161 arrays, 16 MB": (commits, arrays(161, 100_000)),
    "checkpoint of 161 arrays, 16 MB, and back": (saves, arrays(161, 100_000)),
}


if __name__ == "__main__":
    if sys.argv[1] == "--rank":
        wait_for_turns(sys.argv[2])
    else:
        main()
