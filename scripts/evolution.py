"""Learn to balance a pole on a cart by an evolution strategy, on all ranks at once.

    mpirun -n 4 python scripts/evolution.py                  # 4 ranks with one replica each
    mpirun -n 2 python scripts/evolution.py --replicas 4     # 2 ranks with two replicas each
    python scripts/evolution.py                              # 1 process, without MPI

Each replica tries changes of the policy, which it draws from random numbers of its own. Rewards and
one gradient travel, the changes do not, and all replicas make the same update.
"""

import argparse
import sys

import numpy as np

import mpi_replica as mr

NOISE, RATE, STEPS, ENOUGH = 0.5, 1.0, 100, 0.95


def main():
    """Read the options, learn, and try the policy on new starts."""
    parser = argparse.ArgumentParser(description="Balance a pole by an evolution strategy.")
    parser.add_argument("--replicas", type=int, help="on all ranks together (default: one a rank)")
    parser.add_argument("--population", type=int, default=24, help="policies of each replica")
    parser.add_argument("--generations", type=int, default=20, help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    options = parser.parse_args()

    reproducible = mr.CommunicationOptions(reproducible=True)  # sums don't depend on the layout
    with mr.MPIStrategy(
        num_replicas=options.replicas, communication_options=reproducible, seed=options.seed
    ) as strategy:
        with strategy.scope():
            policy = mr.Variable(-np.ones(4))  # of position, speed, angle, its speed: all wrong

        def generation():  # runs on each replica
            ctx = mr.get_replica_context()
            changes = ctx.rng.normal(size=(options.population, 4))
            mine = rewards(policy.value() + NOISE * changes, ctx.rng)
            everyone = ctx.all_gather(mine, axis=0)
            scores = (mine - everyone.mean()) / (everyone.std() + 1e-6)
            gradient = ctx.all_reduce("SUM", (scores[:, None] * changes).sum(axis=0))
            policy.assign_add(RATE / len(everyone) * gradient)
            return everyone.mean()

        for _ in range(options.generations):
            mean = strategy.experimental_local_results(strategy.run(generation))[0]
        strategy.verify(policy)  # an error if any rank had another
    starts = np.random.default_rng(options.seed)  # the same on all ranks
    reward = float(rewards(np.tile(policy.numpy(), (100, 1)), starts).mean())
    if strategy.rank == 0:
        print(f"rewards of the last generation {float(mean)!r}, on new starts {reward!r}")
        print(f"policy {policy.numpy().tolist()}")
    if reward < ENOUGH:  # the same on all ranks
        sys.exit(1 if strategy.rank else f"wrong: the pole is up for {reward:.0%} of the time only")


def rewards(policies, random):
    """Return for which part of the time each policy, of shape (policies, 4), keeps its pole up."""
    position, speed, angle, turning = random.uniform(-0.05, 0.05, (4, len(policies)))
    up, total = np.ones(len(policies), bool), np.zeros(len(policies))
    for _ in range(STEPS):  # of 0.02 s; the cart has 1 kg, the pole 0.1 kg and 1 m
        state = np.stack([position, speed, angle, turning], axis=1)
        force = np.where((state * policies).sum(axis=1) > 0, 10.0, -10.0)  # full left or right
        push = (force + 0.05 * turning**2 * np.sin(angle)) / 1.1
        lever = 0.5 * (4 / 3 - 0.1 * np.cos(angle) ** 2 / 1.1)
        swing = (9.8 * np.sin(angle) - np.cos(angle) * push) / lever
        position, angle = position + 0.02 * speed, angle + 0.02 * turning
        speed += 0.02 * (push - 0.05 * swing * np.cos(angle) / 1.1)
        turning += 0.02 * swing
        up &= (np.abs(position) < 2.4) & (np.abs(angle) < 0.21)  # m and radians
        total += up
    return total / STEPS


if __name__ == "__main__":
    main()
