"""What the tests of mr.data share: short ways to make and to read datasets."""

import threading

import numpy as np

from mpi_replica.data import Dataset
from mpi_replica.data.plans.random_order import RandomOrder


def lists(iterable):
    return [value.tolist() for value in iterable]


def generated(*values):
    """A dataset whose length nobody knows."""
    return Dataset.from_generator(lambda: iter(values))


def order(length, seed, epoch):
    """Where the elements of a shuffle come from."""
    return (
        RandomOrder(length, seed=seed, epoch=epoch)(np.arange(length)) if length else np.arange(0)
    )


class WatchedRows:
    """Rows that write down when they were read, and in which thread."""

    def __init__(self, count):
        self.read = []
        self.threads = set()
        self.events = [threading.Event() for _ in range(count)]

    def __len__(self):
        return len(self.events)

    def __getitem__(self, row):
        self.read.append(row)
        self.threads.add(threading.current_thread())
        self.events[row].set()
        return row


def readers_since(before):
    """Return the threads that read ahead, of those that are not in the set `before`."""
    return [thread for thread in set(threading.enumerate()) - before if "prefetch" in thread.name]
