"""Train a small torch network on handwritten digits, with gradients from torch.

    mpirun -n 4 python scripts/train_torch.py                  # 4 ranks with one replica each
    mpirun -n 2 python scripts/train_torch.py --replicas 4     # 2 ranks with two replicas each
    python scripts/train_torch.py                              # 1 process, without MPI

torch computes the gradients of each replica's rows; `mr.mean_over_global_batch` makes one gradient
of them, the same on all replicas; torch's optimizer goes one step with it, once on each rank.
"""

import argparse
import hashlib
import sys

import torch
from sklearn.datasets import load_digits

import mpi_replica as mr


def main():
    """Train, and check that the network has learnt."""
    parser = argparse.ArgumentParser(description="Train a torch network on handwritten digits.")
    parser.add_argument("--replicas", type=int, help="on all ranks together (default: one a rank)")
    parser.add_argument("--epochs", type=int, default=10, help="default: %(default)s")
    parser.add_argument("--batch-size", type=int, default=64, help="rows for all replicas together")
    options = parser.parse_args()
    torch.set_num_threads(1)  # the order in which threads add up would move bits
    torch.manual_seed(0)  # the same first weights on all ranks
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
    weights = list(model.parameters())
    optimizer = torch.optim.SGD(weights, lr=0.2, momentum=0.9)

    images, labels = load_digits(return_X_y=True)
    images = images.astype("float32") / 16
    images, labels = torch.from_numpy(images), torch.from_numpy(labels)
    train_set = mr.data.Dataset.from_tensor_slices((images[:1500], labels[:1500]))
    reproducible = mr.CommunicationOptions(reproducible=True)
    with mr.MPIStrategy(
        num_replicas=options.replicas, communication_options=reproducible
    ) as strategy:
        batches = strategy.experimental_distribute_dataset(
            train_set.shuffle(seed=0).batch(options.batch_size)
        )

        def step(images, labels):  # runs on each replica, with its rows
            loss = torch.nn.functional.cross_entropy(model(images), labels, reduction="sum")
            gradients = torch.autograd.grad(loss, weights)
            mean = mr.mean_over_global_batch(gradients, rows=len(labels))

            def update(strategy):  # runs once on each rank: all its replicas share the model
                for weight, gradient in zip(weights, mean, strict=True):
                    weight.grad = gradient
                optimizer.step()

            mr.get_replica_context().merge_call(update)
            return loss.detach()

        for epoch in range(options.epochs):
            losses = [strategy.run(step, args=batch) for batch in batches]
            loss = sum(strategy.reduce("SUM", losses, axis=None)) / 1500
            if strategy.rank == 0:
                print(f"epoch {epoch + 1}: loss {loss:.4f}")
        strategy.verify([weight.detach() for weight in weights])  # an error if ranks differ
        with torch.no_grad():
            found = model(images[1500:]).argmax(dim=1)
        accuracy = float((found == labels[1500:]).float().mean())
        if strategy.rank == 0:
            bits = b"".join(weight.detach().numpy().tobytes() for weight in weights)
            print(f"test accuracy {accuracy:.4f}")
            print(f"weights sha256 {hashlib.sha256(bits).hexdigest()}")
    if accuracy < 0.85:
        sys.exit(f"the network has learnt too little: {accuracy:.4f} of the rows are right")


if __name__ == "__main__":
    main()
