"""Train a small network on handwritten digits, on all ranks at once.

    mpirun -n 4 python scripts/train_digits.py                  # 4 ranks with one replica each
    mpirun -n 2 python scripts/train_digits.py --replicas 4     # 2 ranks with two replicas each
    python scripts/train_digits.py                              # 1 process, without MPI

It needs scikit-learn, matplotlib and tqdm: pip install '.[examples]' in the checkout.

Every rank runs this whole program. A replica is one copy of the step functions below: it gets its
part of each batch, and meets the other replicas in the calls of `ctx`. The same number of replicas
gives the same bits on any number of ranks, as the hashes that are printed show.

    mpirun --with-ft ulfm -n 4 python scripts/train_digits.py --elastic    # with Open MPI 5
    python -m mpi_replica run -n 4 --elastic scripts/train_digits.py --elastic    # the same

goes on when a rank is killed: the other ranks take over its replicas, and the hashes stay the same.
"""

import argparse
import hashlib
import sys

import numpy as np
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from tqdm import tqdm

import mpi_replica as mr

HIDDEN, LEARNING_RATE, MOMENTUM = 128, 0.2, 0.9


def main():
    """Read the options, train, and show what came out."""
    parser = argparse.ArgumentParser(description="Train a network on handwritten digits.")
    parser.add_argument("--replicas", type=int, help="on all ranks together (default: one a rank)")
    parser.add_argument("--epochs", type=int, default=20, help="default: %(default)s")
    parser.add_argument("--batch-size", type=int, default=64, help="rows for all replicas together")
    parser.add_argument("--dtype", choices=["float32", "float64"], default="float64")
    parser.add_argument("--seed", type=int, default=0, help="for first weights and shuffling")
    parser.add_argument(
        "--checkpoint-dir", help="save here after each epoch and on a signal, and go on from there"
    )
    parser.add_argument(
        "--elastic", action="store_true", help="go on without a rank that is lost (Open MPI, ULFM)"
    )
    parser.add_argument(
        "--spares", type=int, default=0, help="ranks that wait to take the place of lost ones"
    )
    parser.add_argument("--out", default="digits.png", help="where to draw loss and accuracy")
    options = parser.parse_args()
    reproducible = mr.CommunicationOptions(reproducible=True)  # sums don't depend on the layout
    with mr.MPIStrategy(
        num_replicas=options.replicas,
        communication_options=reproducible,
        spares=options.spares,
    ) as strategy:
        losses, accuracies, weights = train(
            strategy,
            options.epochs,
            options.batch_size,
            options.seed,
            options.dtype,
            options.checkpoint_dir,
            options.elastic,
        )
        if strategy.rank == 0:  # no collective call in here: the other ranks would not make it
            draw(losses, accuracies, f"{strategy.num_replicas_in_sync} replicas", options.out)
            print(f"test accuracy {accuracies[-1]:.4f}")
            print(f"loss sha256 {sha256(losses)}")
            print(f"weights sha256 {sha256(*weights.values())}")


def train(strategy, epochs, batch_size, seed, dtype, checkpoint_dir=None, elastic=False):
    """Return the training loss and the test accuracy of each epoch, and the final weights."""
    images, labels = load_digits(return_X_y=True)  # 1797 rows of 64 pixels from 0 to 16
    images = images.astype(dtype)
    train_images, test_images, train_labels, test_labels = train_test_split(
        images / 16, labels, test_size=0.2, stratify=labels, random_state=1
    )
    # Every rank makes the same datasets of global batches. Distributing them cuts each batch into
    # a part for each replica. Of a small last batch some replicas may get no rows.
    train_set = mr.data.Dataset.from_tensor_slices((train_images, train_labels))
    test_set = mr.data.Dataset.from_tensor_slices((test_images, test_labels))
    train_batches = strategy.experimental_distribute_dataset(
        train_set.shuffle(seed=seed).batch(batch_size)
    )
    test_batches = strategy.experimental_distribute_dataset(test_set.batch(len(test_labels)))

    random = np.random.default_rng(seed)
    with strategy.scope():  # variables that are made in here are the same on all ranks
        weights = {
            "hidden": mr.Variable(random.normal(0, np.sqrt(2 / 64), (64, HIDDEN)), dtype=dtype),
            "hidden_bias": mr.Variable(np.zeros(HIDDEN), dtype=dtype),
            "scores": mr.Variable(random.normal(0, np.sqrt(2 / HIDDEN), (HIDDEN, 10)), dtype=dtype),
            "scores_bias": mr.Variable(np.zeros(10), dtype=dtype),
        }
        velocities = {name: mr.Variable(np.zeros(w.shape, dtype)) for name, w in weights.items()}
        hits = mr.Variable(  # a number for each replica, added up when all of them are read
            0,
            synchronization=mr.VariableSynchronization.ON_READ,
            aggregation=mr.VariableAggregation.SUM,
        )

    def train_step(images, labels, rate):  # runs on each replica, with its rows
        ctx = mr.get_replica_context()
        loss, gradients = loss_and_gradients(weights, images, labels)
        # Replicas can have different numbers of rows: in a mean of their means a row would count
        # more where there are few.
        mean = mr.mean_over_global_batch(gradients, rows=len(labels))

        def update_weights(strategy):  # runs once on each rank, above all replicas
            # `mean` may be used in here since every replica got the same. What differs between
            # replicas goes through merge_call's args.
            for name, weight in weights.items():
                force = -rate * mean[name]
                strategy.extended.update(weight, move, args=(velocities[name], force))

        ctx.merge_call(update_weights)
        return loss

    def test_step(images, labels):
        _, probabilities = predict(weights, images)
        hits.assign_add(np.sum(probabilities.argmax(axis=1) == labels))

    losses, accuracies = [], []
    # All that an interrupted program needs to go on, on any number of ranks.
    state = mr.ElasticState(
        step=0,
        loss_sum=0.0,  # of this epoch
        weights=weights,
        velocities=velocities,
        losses=losses,
        accuracies=accuracies,
        data=train_batches,
    )
    manager = None
    if checkpoint_dir is not None:
        manager = mr.CheckpointManager(state, checkpoint_dir, save_on_signal=True)
        manager.restore_or_initialize()

    def train_on():  # from where `state` is
        left = range(len(losses), epochs)
        # A bar on rank 0 alone. Under mpirun it goes through a pipe, and maybe to a log: few
        # updates.
        pause = 0.1 if sys.stderr.isatty() else 10
        for epoch in tqdm(left, unit="epoch", mininterval=pause, disable=strategy.rank > 0):
            rate = LEARNING_RATE * (1 - epoch / epochs)
            for images, labels in train_batches:  # shuffled anew in each epoch, on all ranks alike
                loss = strategy.run(train_step, args=(images, labels, rate))
                state.loss_sum += strategy.reduce("SUM", loss, axis=None)
                state.step += 1
                if elastic:  # after a loss all ranks go back to here
                    state.commit()
                if manager is not None:  # after SIGTERM or SIGUSR1 to any rank: exit status 75
                    manager.exit_if_signalled(state.step)
            losses.append(float(state.loss_sum) / len(train_labels))
            state.loss_sum = 0.0
            hits.assign(0)
            for images, labels in test_batches:
                strategy.run(test_step, args=(images, labels))
            accuracies.append(float(hits.value()) / len(test_labels))  # adds up: all ranks call it
            if manager is not None:
                manager.save(state.step)
        strategy.verify(weights)  # an error if any rank had others

    if elastic:
        strategy.run_elastic(train_on, state)  # calls it again whenever a rank was lost
    else:
        train_on()
    return losses, accuracies, weights


def predict(weights, images):
    """Return the activations of the hidden layer, and the probabilities of the ten digits."""
    hidden = np.maximum(images @ weights["hidden"] + weights["hidden_bias"], 0)
    scores = hidden @ weights["scores"] + weights["scores_bias"]
    powers = np.exp(scores - scores.max(axis=1, keepdims=True))
    return hidden, powers / powers.sum(axis=1, keepdims=True)


def loss_and_gradients(weights, images, labels):
    """Return the cross-entropy and its gradients, all of them summed over the rows."""
    hidden, probabilities = predict(weights, images)
    d_scores = probabilities - np.eye(10, dtype=images.dtype)[labels]
    d_hidden = d_scores @ np.transpose(weights["scores"]) * (hidden > 0)
    return -np.log(probabilities[np.arange(len(labels)), labels]).sum(), {
        "hidden": images.T @ d_hidden,
        "hidden_bias": d_hidden.sum(axis=0),
        "scores": hidden.T @ d_scores,
        "scores_bias": d_scores.sum(axis=0),
    }


def move(weight, velocity, force):
    """Go one step, with momentum."""
    velocity.assign(MOMENTUM * velocity + force)
    weight.assign_add(velocity)


def sha256(*arrays):
    """Return a hash of the bits of some arrays."""
    return hashlib.sha256(b"".join(np.asarray(array).tobytes() for array in arrays)).hexdigest()


def draw(losses, accuracies, title, path):
    """Draw both curves."""
    from matplotlib.figure import Figure  # draws with Agg, which needs no screen

    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    figure.suptitle(f"Handwritten digits, {title}")
    epochs = range(1, len(losses) + 1)
    left.semilogy(epochs, losses, ".-")
    left.set(title="training loss", xlabel="epoch", ylabel="cross-entropy per row")
    right.plot(epochs, accuracies, ".-", color="tab:green")
    right.set(title="test accuracy", xlabel="epoch", ylabel="fraction of rows")
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.xaxis.get_major_locator().set_params(integer=True)
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
