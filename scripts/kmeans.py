"""Find clusters of points by k-means, on all ranks at once.

    mpirun -n 4 python scripts/kmeans.py                  # 4 ranks with one replica each
    mpirun -n 2 python scripts/kmeans.py --replicas 4     # 2 ranks with two replicas each
    python scripts/kmeans.py                              # 1 process, without MPI

Each replica finds the nearest centre of its own points. Sums and numbers of points are added up
over all replicas before they are divided: a mean of the replicas' means would weigh points
unevenly, and a replica may have no point of a cluster at all.
"""

import argparse
import sys

import numpy as np

import mpi_replica as mr

CLUSTERS, SPREAD = 6, 1.5


def main():
    """Read the options, find the clusters, and compare them with the true ones."""
    parser = argparse.ArgumentParser(description="Find clusters by k-means.")
    parser.add_argument("--replicas", type=int, help="on all ranks together (default: one a rank)")
    parser.add_argument("--points", type=int, default=3001, help="default: %(default)s")
    parser.add_argument("--rounds", type=int, default=50, help="at most; default: %(default)s")
    options = parser.parse_args()

    random = np.random.default_rng(1)  # every rank makes the same points, around corners of a cube
    truth = random.permutation(np.array([*np.ndindex(2, 2, 2)]))[:CLUSTERS] * 8.0
    points = random.normal(random.choice(truth, options.points), SPREAD)

    reproducible = mr.CommunicationOptions(reproducible=True)  # sums don't depend on the layout
    with mr.MPIStrategy(
        num_replicas=options.replicas, communication_options=reproducible
    ) as strategy:
        centres, inertias = find(strategy, points, options.rounds)
    if strategy.rank == 0:
        print(f"{len(inertias)} rounds, inertia {inertias[0]!r} and then {inertias[-1]!r}")
        print(*centres.tolist(), sep="\n")
    away = distances(truth, centres).min(axis=1).max()
    if away > SPREAD / 5 or np.any(np.diff(inertias) > 0):  # the same on all ranks
        wrong = f"wrong: a cluster is {away:.3f} away from its true centre, inertias {inertias}"
        sys.exit(1 if strategy.rank else wrong)


def find(strategy, points, rounds):
    """Return the centres, and after each round the sum of the points' squared distances."""
    batches = mr.data.Dataset.from_tensor_slices(points).batch(len(points))
    (rows,) = strategy.experimental_distribute_dataset(batches)  # a part for each replica
    with strategy.scope():
        centres = mr.Variable(points[:CLUSTERS])

    def step(rows):  # runs on each replica, with its rows
        away = distances(rows, centres.value())
        member = away.argmin(axis=1)[:, None] == np.arange(CLUSTERS)  # of shape (rows, clusters)
        mine = {
            "sums": (member[:, :, None] * rows[:, None]).sum(axis=0),
            "sizes": member.sum(axis=0)[:, None],
            "inertia": np.sum(away.min(axis=1) ** 2),
        }
        total = mr.get_replica_context().all_reduce("SUM", mine)
        means = total["sums"] / np.maximum(total["sizes"], 1)
        # A cluster that has no point on any replica stays where it is.
        moved = np.where(total["sizes"] > 0, means, centres.value())
        centres.assign(moved)  # the same on all replicas: made of what all have added up
        return total["inertia"]

    inertias = []
    while len(inertias) < rounds and (len(inertias) < 2 or inertias[-1] < inertias[-2]):
        inertia = strategy.run(step, args=(rows,))
        inertias.append(float(strategy.experimental_local_results(inertia)[0]))
    return centres.numpy(), inertias


def distances(points, centres):
    """Return the distance of each point to each centre."""
    return np.linalg.norm(points[:, None] - centres, axis=2)


if __name__ == "__main__":
    main()
