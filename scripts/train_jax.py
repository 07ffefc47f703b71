"""Train a small JAX network on handwritten digits, with gradients from JAX.

    mpirun -n 4 python scripts/train_jax.py                  # 4 ranks with one replica each
    mpirun -n 2 python scripts/train_jax.py --replicas 4     # 2 ranks with two replicas each
    python scripts/train_jax.py                              # 1 process, without MPI

A compiled function computes the gradients of each replica's rows; `mr.mean_over_global_batch`,
called between compiled functions, makes one gradient of them, the same on all replicas; a second
compiled function goes one step with it.
"""

import argparse
import hashlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
from sklearn.datasets import load_digits

import mpi_replica as mr

LEARNING_RATE = 0.5


def main():
    """Train, and check that the network has learnt."""
    parser = argparse.ArgumentParser(description="Train a JAX network on handwritten digits.")
    parser.add_argument("--replicas", type=int, help="on all ranks together (default: one a rank)")
    parser.add_argument("--epochs", type=int, default=10, help="default: %(default)s")
    parser.add_argument("--batch-size", type=int, default=64, help="rows for all replicas together")
    options = parser.parse_args()
    images, labels = load_digits(return_X_y=True)
    images = images.astype("float32") / 16
    train_set = mr.data.Dataset.from_tensor_slices((images[:1500], labels[:1500]))
    random = np.random.default_rng(0)  # the same first weights on all ranks
    weights = {
        "hidden": jnp.asarray(random.normal(0, 0.18, (64, 64)), "float32"),
        "scores": jnp.asarray(random.normal(0, 0.18, (64, 10)), "float32"),
    }

    reproducible = mr.CommunicationOptions(reproducible=True)
    with mr.MPIStrategy(
        num_replicas=options.replicas, communication_options=reproducible
    ) as strategy:
        batches = strategy.experimental_distribute_dataset(
            train_set.shuffle(seed=0).batch(options.batch_size)
        )

        def step(weights, images, labels):  # runs on each replica, with its rows
            loss, gradients = loss_and_gradients(weights, images, labels)
            mean = mr.mean_over_global_batch(gradients, rows=len(labels))
            return loss, moved(weights, mean)

        for epoch in range(options.epochs):
            losses = []
            for images_of, labels_of in batches:
                loss, new = strategy.run(step, args=(weights, images_of, labels_of))
                weights = strategy.experimental_local_results(new)[0]  # all replicas' are the same
                losses.append(loss)
            loss = sum(strategy.reduce("SUM", losses, axis=None)) / 1500
            if strategy.rank == 0:
                print(f"epoch {epoch + 1}: loss {loss:.4f}")
        strategy.verify(weights)  # an error if ranks differ
        accuracy = float((scores(weights, images[1500:]).argmax(axis=1) == labels[1500:]).mean())
        if strategy.rank == 0:
            bits = b"".join(np.asarray(weight).tobytes() for weight in weights.values())
            print(f"test accuracy {accuracy:.4f}")
            print(f"weights sha256 {hashlib.sha256(bits).hexdigest()}")
    if accuracy < 0.85:
        sys.exit(f"the network has learnt too little: {accuracy:.4f} of the rows are right")


def scores(weights, images):
    """Return a score for each digit."""
    return jax.nn.relu(images @ weights["hidden"]) @ weights["scores"]


def loss_sum(weights, images, labels):
    """Return the cross-entropy, summed over the rows."""
    logarithms = jax.nn.log_softmax(scores(weights, images))
    return -jnp.take_along_axis(logarithms, labels[:, None], axis=1).sum()


loss_and_gradients = jax.jit(jax.value_and_grad(loss_sum))


@jax.jit
def moved(weights, gradients):
    """Return the weights one step further."""
    return jax.tree.map(lambda w, g: w - LEARNING_RATE * g, weights, gradients)


if __name__ == "__main__":
    main()
