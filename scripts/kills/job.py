"""What each rank of a trial runs: a small job that trains on, whoever is killed.

The ranks that are left write what came out to a folder, and how often they met what.
"""

import argparse
import dataclasses
import hashlib
import json
import os
import time
from pathlib import Path

import numpy as np

import mpi_replica as mr
from kills.moments import Kill, Moments
from mpi_replica.checkpoint import files
from mpi_replica.ranks.open_mpi import set_up_open_mpi
from mpi_replica.ranks.survivors import Survivors
from mpi_replica.strategy.elastic.keeper import Keeper

ROWS, BATCH, STEPS = 103, 10, 24
COMMIT_EVERY, SAVE_EVERY = 2, 6
# As an array it goes beside the agreement, in pieces over all ranks.
SIZE = 12_000


def main():
    """Train, and tell what came out."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--replicas", type=int, required=True)
    parser.add_argument("--spares", type=int, default=0)
    parser.add_argument("--kills", type=Kill.of, nargs="*", default=[])
    options = parser.parse_args()
    # Of the start: ranks may be numbered anew later, and that of a strategy, too.
    rank = int(os.environ.get("OMPI_COMM_WORLD_RANK", "0"))

    def tell(kind, text):
        """Write at once: this rank may be killed in the next moment."""
        file = options.folder / f"{kind}-{rank}"
        file.with_suffix(".new").write_text(text)
        file.with_suffix(".new").rename(file)

    tell("pid", str(os.getpid()))
    moments = Moments(rank, options.kills, lambda kill: tell("killed", kill))
    if os.environ.get("MPI_REPLICA_TRANSPORT") != "single":
        watch(moments)
    moments.count("make")
    with mr.MPIStrategy(
        num_replicas=options.replicas,
        spares=options.spares,
        communication_options=mr.CommunicationOptions(reproducible=True),
    ) as strategy:
        moments.count()
        state, train = training(strategy, options.folder / "kept", moments)
        if strategy.local_replica_ids:  # no spare
            # For a rank that is lost with its copy before the next checkpoint.
            train.manager.save(0)
        # Between the two a loss ends the job: nobody dies before all have come here.
        tell("ready", "")
        members = [] if strategy.survivors is None else strategy.survivors.members
        while len(list(options.folder.glob("ready-?"))) < len(members):
            time.sleep(0.001)
        moments.count("any")
        start = time.monotonic()
        moments.enter("begin")
        strategy.run_elastic(train, state)
        moments.leave("end")
        tell("result", json.dumps(outcome(strategy, state, time.monotonic() - start, moments)))


def training(strategy, folder, moments, seconds_of_step=0.0):
    """Return the state of the job, and the function that trains on from it.

    Parameters
    ----------
    strategy : mpi_replica.MPIStrategy
    folder : Path
        For checkpoints.
    moments : Moments
    seconds_of_step : float
        How long a step takes at least.
    """
    on_read = {
        "synchronization": mr.VariableSynchronization.ON_READ,
        "aggregation": mr.VariableAggregation.SUM,
    }
    with strategy.scope():
        weights = mr.Variable(np.linspace(0, 1, SIZE), name="weights")
        bias = mr.Variable(np.zeros(3), name="bias")
        seen = mr.Variable(0, **on_read, name="seen")  # a checkpoint has the sum of them
        of_step = mr.Variable(0.0, **on_read, name="of_step")  # not kept: assigned in each step
    rows = strategy.experimental_distribute_dataset(
        mr.data.Dataset.range(ROWS).shuffle(seed=3).batch(BATCH)
    )
    state = mr.ElasticState(
        strategy, step=0, losses=[], total=0.0, weights=weights, bias=bias, seen=seen, rows=rows
    )
    manager = mr.CheckpointManager(state, folder, max_to_keep=2)

    def step(mine):
        ctx = mr.get_replica_context()
        drawn = ctx.rng.normal(size=SIZE) * (1 + ctx.replica_id_in_sync_group) + mine.sum()
        seen.assign_add(len(mine))
        of_step.assign_add(float(drawn[0]))
        everyone = ctx.all_gather(mine, axis=0)
        bias.assign_add(ctx.all_reduce("SUM", drawn[:3]) / (1 + everyone.sum()))
        weights.assign_sub(0.01 * ctx.all_reduce("MEAN", drawn))
        return float(drawn.sum())

    def train():
        moments.leave("begin")
        moments.leave("end")  # a rank was lost there
        while state.step < STEPS:
            for batch in rows:
                time.sleep(seconds_of_step)
                of_step.assign(0.0)
                loss = strategy.reduce("SUM", strategy.run(step, args=(batch,)), axis=None)
                state.losses.append(float(loss) + float(of_step.value()))
                state.step += 1
                if state.step % COMMIT_EVERY == 0:
                    state.commit()
                if state.step % SAVE_EVERY == 0:
                    manager.save(state.step)
                if state.step == STEPS:
                    break
        state.total = float(seen.value())
        moments.enter("end")

    train.manager = manager  # kept as long as it is trained
    return state, train


def watch(moments):
    """Count what the package does from now on."""
    set_up_open_mpi()
    from mpi_replica.ranks.mpi import MPITransport  # starts MPI, as a strategy does otherwise

    exchanges = "exchange maximum all_gather_bytes all_gather_blocks all_reduce all_to_all barrier"
    moments.watch(MPITransport, f"{exchanges} pass_on agree revoke")
    moments.watch(MPITransport, "open_shared_memory", "window")
    moments.watch(Survivors, "come_together _renew _agree revoke dismiss")
    moments.watch(Keeper, "commit", "commit")
    moments.watch(Keeper, "recover", "recover")
    moments.watch(Keeper, "restore_checkpoint", "restore")
    moments.watch(mr.CheckpointManager, "save", "save")
    moments.watch(files, "write_new")
    moments.watch(files.NewFile, "write")


def outcome(strategy, state, seconds, moments):
    """Return what a rank tells at the end."""
    told = {"seconds": seconds, "counts": dict(moments.counts), "hash": None}
    told["losses"] = [dataclasses.asdict(loss) for loss in strategy.losses]
    if strategy.local_replica_ids:  # no spare that was not needed
        numbers = np.array([*state.losses, state.total])
        bits = b"".join(np.asarray(x).tobytes() for x in (state.weights, state.bias, numbers))
        told["hash"] = hashlib.sha256(bits).hexdigest()[:16]
    return told


if __name__ == "__main__":
    main()
