"""Simulate many epidemics, of which each has another length, on all ranks at once.

    mpirun -n 4 python scripts/ensemble.py                  # 4 ranks with one replica each
    mpirun -n 2 python scripts/ensemble.py --replicas 4     # 2 ranks with two replicas each
    python scripts/ensemble.py                              # 1 process, without MPI

Each replica simulates some members of the ensemble, and has a row for each infection and recovery:
another number of rows than the others. Random numbers belong to a member, so that the results do
not even depend on the number of replicas.
"""

import argparse
import sys

import numpy as np

import mpi_replica as mr

PEOPLE, CONTACTS = 150, 2.5  # how many one ill person infects while all others are healthy
CAUGHT = 0.893  # the part of all people who catch it in the end: z = 1 - exp(-CONTACTS * z)


def main():
    """Read the options, simulate, and compare with the theory."""
    parser = argparse.ArgumentParser(description="Simulate an ensemble of epidemics.")
    parser.add_argument("--replicas", type=int, help="on all ranks together (default: one a rank)")
    parser.add_argument("--members", type=int, default=41, help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    options = parser.parse_args()

    def step():  # runs on each replica
        ctx = mr.get_replica_context()
        shares = np.array_split(np.arange(options.members), ctx.num_replicas_in_sync)
        mine = shares[ctx.replica_id_in_sync_group]  # none, where there are more replicas
        runs = [simulate(np.random.default_rng([options.seed, member])) for member in mine]
        # Arrays of several replicas may have different lengths. A list would be a nest of numbers,
        # of which all replicas must have as many.
        lengths = ctx.all_gather(np.array([len(run) for run in runs], int), axis=0)
        peaks = np.array([run[:, 2].max() for run in runs])
        return np.concatenate([np.empty((0, 3)), *runs]), lengths, ctx.merge_call(worst, (peaks,))

    with mr.MPIStrategy(num_replicas=options.replicas) as strategy:
        rows, lengths, peak = strategy.run(step)
        rows = strategy.gather(rows, axis=0)  # those of all replicas, in their order
        lengths, (member, ill) = (
            strategy.experimental_local_results(each)[0] for each in (lengths, peak)
        )
    times, healthy, _ = rows[np.cumsum(lengths) - 1].T  # at the end of each member
    caught = PEOPLE - healthy
    spread = caught[caught > PEOPLE / 2]  # the other epidemics die out at once
    part = float(spread.sum()) / max(len(spread), 1) / PEOPLE
    if strategy.rank == 0:
        print(f"{len(rows)} rows of {options.members} members, the longest has {lengths.max()}")
        print(f"{len(spread)} epidemics spread, to {part!r} of all people")
        print(f"at most {ill:.0f} people are ill at once, in member {member}")
        print(f"the last person of all is well after {float(times.max())!r} weeks")
    # A row is a start, an infection or a recovery, and all who catch it get well.
    whole = len(rows) == lengths.sum() and np.array_equal(lengths, 2 * caught)
    if not whole or abs(part - CAUGHT) > 0.05:  # the same on all ranks
        wrong = f"wrong: {part} of all people catch it, not {CAUGHT}, or rows are lost: {lengths}"
        sys.exit(1 if strategy.rank else wrong)


def worst(strategy, peaks):
    """Return the member with most ill people at once, and how many; runs once on each rank."""
    peaks = np.concatenate(strategy.experimental_local_results(peaks))  # those of all replicas
    return int(peaks.argmax()), float(peaks.max())


def simulate(random):
    """Return time, number of healthy and of ill people after each event, by Gillespie's method."""
    time, healthy, ill = 0.0, PEOPLE - 1, 1
    rows = [(time, healthy, ill)]
    while ill:
        infections = CONTACTS * ill * healthy / PEOPLE  # a week; and each ill person recovers once
        time += random.exponential(1 / (infections + ill))
        if random.random() * (infections + ill) < infections:
            healthy, ill = healthy - 1, ill + 1
        else:
            ill -= 1
        rows.append((time, healthy, ill))
    return np.array(rows)


if __name__ == "__main__":
    main()
