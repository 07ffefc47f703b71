"""Train a convolutional network of torch on handwritten digits, with batch norm over all replicas.

    mpirun -n 4 python scripts/train_torch.py                  # 4 ranks with one replica each
    mpirun -n 2 python scripts/train_torch.py --replicas 4     # 2 ranks with two replicas each
    python scripts/train_torch.py                              # 1 process, without MPI

It needs scikit-learn beside torch: pip install torch '.[examples]' in the checkout.

Each replica has a module and an optimizer of its own, and goes torch's ordinary way: loss,
backward, step. In between, `mr.mean_over_global_batch` makes one gradient of those of all replicas,
so that all take the same step. The same number of replicas gives the same bits on any number of
ranks, as the hash that is printed shows; also where the job is killed and started again with
--checkpoint-dir, and

    mpirun --with-ft ulfm -n 4 python scripts/train_torch.py --elastic    # with Open MPI 5
    python -m mpi_replica run -n 4 --elastic scripts/train_torch.py --elastic    # the same

where a rank is killed, and the other ranks take over its replicas.
"""

import argparse
import hashlib
import sys

import torch
from sklearn.datasets import load_digits
from torch.nn.functional import cross_entropy

import mpi_replica as mr

TRAIN_ROWS = 1500


def main():
    """Read the options, train, and check that the network has learnt."""
    parser = argparse.ArgumentParser(description="Train a torch network on handwritten digits.")
    parser.add_argument("--replicas", type=int, help="on all ranks together (default: one a rank)")
    parser.add_argument("--epochs", type=int, default=6, help="default: %(default)s")
    parser.add_argument("--batch-size", type=int, default=64, help="rows for all replicas together")
    parser.add_argument(
        "--checkpoint-dir", help="save here after each epoch and on a signal, and go on from there"
    )
    parser.add_argument(
        "--elastic", action="store_true", help="go on without a rank that is lost (Open MPI, ULFM)"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)  # the order in which threads add up would move bits
    reproducible = mr.CommunicationOptions(reproducible=True)  # sums don't depend on the layout
    with mr.MPIStrategy(
        num_replicas=options.replicas, communication_options=reproducible
    ) as strategy:
        model, test_images, test_labels = train(strategy, options)
        model.eval()  # batch norm takes the statistics that it kept: no collective call
        with torch.no_grad():
            found = model(test_images).argmax(dim=1)
        accuracy = float((found == test_labels).float().mean())
        if strategy.rank == 0:
            print(f"test accuracy {accuracy:.4f}")
            print(f"weights sha256 {sha256(model)}")
    if accuracy < 0.9:
        sys.exit(f"the network has learnt too little: {accuracy:.4f} of the rows are right")


def make(context):
    """Return a module and an optimizer for one replica: all replicas start alike."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(1, 16, 3, padding=1),
        mr.torch.SyncBatchNorm(16),  # of the rows of all replicas
        torch.nn.ReLU(),
        torch.nn.MaxPool2d(2),
        torch.nn.Conv2d(16, 32, 3, padding=1),
        mr.torch.SyncBatchNorm(32),
        torch.nn.ReLU(),
        torch.nn.MaxPool2d(2),
        torch.nn.Flatten(),
        torch.nn.Linear(128, 10),
    )
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)


def step(model, optimizer, images, labels):  # runs on each replica, with its rows
    """Go one step, and return the loss of this replica's rows, added up."""
    optimizer.zero_grad()
    loss = cross_entropy(model(images), labels, reduction="sum")
    loss.backward()
    weights = list(model.parameters())
    gradients = [weight.grad for weight in weights]
    # Replicas can have different numbers of rows: in a mean of their means a row would count more
    # where there are few.
    mean = mr.mean_over_global_batch(gradients, rows=len(labels))
    for weight, gradient in zip(weights, mean, strict=True):
        weight.grad = gradient
    optimizer.step()
    return loss.detach()


def train(strategy, options):
    """Return the module as a replica of this rank has it, and what it was not trained with."""
    images, labels = load_digits(return_X_y=True)  # 1797 rows of 64 pixels from 0 to 16
    images = torch.from_numpy(images.astype("float32") / 16).reshape(-1, 1, 8, 8)
    labels = torch.from_numpy(labels)
    train_set = mr.data.Dataset.from_tensor_slices((images[:TRAIN_ROWS], labels[:TRAIN_ROWS]))
    # Every rank makes the same global batches; distributing them cuts each into a part a replica.
    batches = strategy.experimental_distribute_dataset(
        train_set.shuffle(seed=0).batch(options.batch_size)
    )
    models, optimizers = strategy.experimental_distribute_values_from_function(make)
    # All that an interrupted program needs to go on, on any number of ranks.
    state = mr.ElasticState(
        strategy, step=0, epoch=0, loss=0.0, models=models, optimizers=optimizers, data=batches
    )
    manager = None
    if options.checkpoint_dir is not None:
        manager = mr.CheckpointManager(state, options.checkpoint_dir, save_on_signal=True)
        manager.restore_or_initialize()

    def train_on():  # from where `state` is: a replica that moved here has new objects in there
        while state.epoch < options.epochs:
            for batch in batches:  # shuffled anew in each epoch, on all ranks alike
                loss = strategy.run(step, args=(state.models, state.optimizers, *batch))
                state.loss += float(strategy.reduce("SUM", loss, axis=None))
                state.step += 1
                if options.elastic:  # after a loss all ranks go back to here
                    state.commit()
                if manager is not None:  # after SIGTERM or SIGUSR1 to any rank: exit status 75
                    manager.exit_if_signalled(state.step)
            state.epoch += 1
            if strategy.rank == 0:
                print(f"epoch {state.epoch}: loss {state.loss / TRAIN_ROWS:.4f}")
            state.loss = 0.0
            if manager is not None:
                manager.save(state.step)
        strategy.verify(state.models)  # an error if any replica had others

    if options.elastic:
        strategy.run_elastic(train_on, state)  # calls it again whenever a rank was lost
    else:
        train_on()
    model = strategy.experimental_local_results(state.models)[0]
    return model, images[TRAIN_ROWS:], labels[TRAIN_ROWS:]


def sha256(model):
    """Return a hash of the bits of all that a module has learnt."""
    tensors = model.state_dict().values()
    return hashlib.sha256(b"".join(tensor.numpy().tobytes() for tensor in tensors)).hexdigest()


if __name__ == "__main__":
    main()
