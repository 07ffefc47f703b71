"""Train a network of flax on handwritten digits: one compiled step, with its collectives inside.

    mpirun -n 4 python scripts/train_jax.py                  # 4 ranks with one replica each
    mpirun -n 2 python scripts/train_jax.py --replicas 4     # 2 ranks with two replicas each
    python scripts/train_jax.py                              # 1 process, without MPI

It needs scikit-learn, flax and optax beside JAX: pip install flax optax '.[jax,examples]' in the
checkout.

Batch norm takes the rows of all replicas, `mr.mean_over_global_batch` makes one gradient of those
of all, and it is clipped by the norm that they have together. The same number of replicas gives the
same bits on any number of ranks, as the hash that is printed shows; also where the job is killed
and started again with --checkpoint-dir.
"""

import argparse
import hashlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen
from sklearn.datasets import load_digits

import mpi_replica as mr

TRAIN_ROWS = 1500


class SyncBatchNorm(linen.Module):
    """Normalize with the rows of all replicas; with the statistics that were kept, for a test."""

    momentum: float = 0.9
    epsilon: float = 1e-5

    @linen.compact
    def __call__(self, x, train):
        """Return the rows, normalized, scaled and shifted."""
        size = x.shape[-1:]
        scale = self.param("scale", linen.initializers.ones, size)
        bias = self.param("bias", linen.initializers.zeros, size)
        kept_mean = self.variable("statistics", "mean", jnp.zeros, size)
        kept_variance = self.variable("statistics", "variance", jnp.ones, size)
        mean, variance = kept_mean.value, kept_variance.value
        if train and not self.is_initializing():
            sums = {"x": x.sum(0), "squares": (x * x).sum(0), "rows": jnp.float32(len(x))}
            total = mr.get_replica_context().all_reduce("SUM", sums)
            mean = total["x"] / total["rows"]
            variance = total["squares"] / total["rows"] - mean**2
            kept_mean.value += (1 - self.momentum) * (mean - kept_mean.value)
            kept_variance.value += (1 - self.momentum) * (variance - kept_variance.value)
        return (x - mean) * jax.lax.rsqrt(variance + self.epsilon) * scale + bias


class Network(linen.Module):
    """A score for each digit."""

    @linen.compact
    def __call__(self, images, train):
        """Return the scores of each row."""
        hidden = linen.relu(SyncBatchNorm()(linen.Dense(64)(images), train))
        return linen.Dense(10)(hidden)


NETWORK = Network()
OPTIMIZER = optax.chain(optax.clip_by_global_norm(0.5), optax.sgd(0.2, momentum=0.9))


def main():
    """Read the options, train, and check that the network has learnt."""
    parser = argparse.ArgumentParser(description="Train a JAX network on handwritten digits.")
    parser.add_argument("--replicas", type=int, help="on all ranks together (default: one a rank)")
    parser.add_argument("--epochs", type=int, default=10, help="default: %(default)s")
    parser.add_argument("--batch-size", type=int, default=64, help="rows for all replicas together")
    parser.add_argument(
        "--checkpoint-dir", help="save here after each epoch and on a signal, and go on from there"
    )
    options = parser.parse_args()
    reproducible = mr.CommunicationOptions(reproducible=True)  # sums don't depend on the layout
    # Before JAX starts: with several replicas on a rank it gets a device of the CPU for each.
    with mr.MPIStrategy(
        num_replicas=options.replicas, communication_options=reproducible
    ) as strategy:
        model, test_images, test_labels = train(strategy, options)
        found = NETWORK.apply(model, test_images, train=False).argmax(axis=1)
        accuracy = float((found == test_labels).mean())
        if strategy.rank == 0:
            print(f"test accuracy {accuracy:.4f}")
            print(f"weights sha256 {sha256(model)}")
    if accuracy < 0.9:
        sys.exit(f"the network has learnt too little: {accuracy:.4f} of the rows are right")


@jax.jit
def step(model, optimizer, images, labels):  # runs on each replica, with its rows
    """Return the loss of this replica's rows, added up, and all that one step has changed."""

    def loss_sum(weights):
        variables = {**model, "params": weights}
        scores, kept = NETWORK.apply(variables, images, train=True, mutable=["statistics"])
        losses = optax.softmax_cross_entropy_with_integer_labels(scores, labels)
        return losses.sum(), kept

    (loss, kept), gradients = jax.value_and_grad(loss_sum, has_aux=True)(model["params"])
    # Replicas can have different numbers of rows: in a mean of their means a row would count more
    # where there are few.
    mean = mr.mean_over_global_batch(gradients, rows=len(labels))
    updates, optimizer = OPTIMIZER.update(mean, optimizer)
    return loss, {"params": optax.apply_updates(model["params"], updates), **kept}, optimizer


def train(strategy, options):
    """Return the network as all replicas have it, and what it was not trained with."""
    images, labels = load_digits(return_X_y=True)  # 1797 rows of 64 pixels from 0 to 16
    images = images.astype("float32") / 16
    train_set = mr.data.Dataset.from_tensor_slices((images[:TRAIN_ROWS], labels[:TRAIN_ROWS]))
    # Every rank makes the same global batches; distributing them cuts each into a part a replica.
    batches = strategy.experimental_distribute_dataset(
        train_set.shuffle(seed=0).batch(options.batch_size)
    )
    model = NETWORK.init(jax.random.key(0), images[:1], train=True)  # the same on all ranks
    # All that an interrupted program needs to go on, on any number of ranks.
    state = mr.ElasticState(
        strategy,
        step=0,
        epoch=0,
        loss=0.0,
        model=model,
        optimizer=OPTIMIZER.init(model["params"]),
        data=batches,
    )
    manager = None
    if options.checkpoint_dir is not None:
        manager = mr.CheckpointManager(state, options.checkpoint_dir, save_on_signal=True)
        manager.restore_or_initialize()
    while state.epoch < options.epochs:
        for batch in batches:  # shuffled anew in each epoch, on all ranks alike
            loss, *new = strategy.run(step, args=(state.model, state.optimizer, *batch))
            # those of all replicas are the same
            state.model, state.optimizer = strategy.experimental_local_results(new)[0]
            state.loss += float(strategy.reduce("SUM", loss, axis=None))
            state.step += 1
            if manager is not None:  # after SIGTERM or SIGUSR1 to any rank: exit status 75
                manager.exit_if_signalled(state.step)
        state.epoch += 1
        if strategy.rank == 0:
            print(f"epoch {state.epoch}: loss {state.loss / TRAIN_ROWS:.4f}")
        state.loss = 0.0
        if manager is not None:
            manager.save(state.step)
    strategy.verify(state.model)  # an error if ranks differ
    return state.model, images[TRAIN_ROWS:], labels[TRAIN_ROWS:]


def sha256(model):
    """Return a hash of all weights and statistics."""
    bits = b"".join(np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(model))
    return hashlib.sha256(bits).hexdigest()


if __name__ == "__main__":
    main()
