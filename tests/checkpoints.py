"""A program with a state of every kind, saved and restored by tests on several ranks."""

import os

import numpy as np

import mpi_replica as mr
from everywhere import gathered, holds_everywhere

ON_READ = mr.VariableSynchronization.ON_READ


def on_other_layouts(world, check):
    """Call `check` with strategies of other numbers of replicas and ranks, in all parts at once.

    It must make no calls of all ranks.
    """

    def checked(strategy):
        with strategy:
            check(strategy)

    def check_all():
        checked(mr.MPIStrategy(num_replicas=world.size + 3))
        for is_here in (world.rank == 0, world.rank % 2 == 0, world.rank < world.size - 1):
            part = world.Split(is_here)
            checked(mr.MPIStrategy(part, num_replicas=max(5, part.size)))
            part.Free()

    holds_everywhere(check_all)


def replica_id():
    return mr.get_replica_context().replica_id_in_sync_group


class Stateful:
    """An object with state, which counts how often it was loaded."""

    def __init__(self, **state):
        self.state = state
        self.loads = 0

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state
        self.loads += 1


def variable(strategy, value, **settings):
    with strategy.scope():
        return mr.Variable(value, **settings)


def on_read(strategy, aggregation, value=0.0):
    return variable(strategy, value, synchronization=ON_READ, aggregation=aggregation)


def program(strategy, fill=0.0):
    """The objects of a program; what `fill` gives tells their states apart."""
    return mr.Checkpoint(
        step=int(fill),
        kernel=variable(strategy, np.arange(12.0).reshape(3, 4) * fill),
        nest={
            "bias": np.full(3, fill, ">f4"),
            2: [np.full((2, 3), int(fill), order="F"), ("text", np.float32(fill))],
            "inner": variable(strategy, np.full(2, fill)),
        },
        optimizer=Stateful(momentum=np.full(5, fill), name=("sgd", int(fill))),
        mirrored=mr.Mirrored(np.float64(fill)),
    )


def content(checkpoint):
    """All that is in it, as text."""
    kernel, nest = np.asarray(checkpoint.kernel), checkpoint.nest
    state = checkpoint.optimizer.state
    rest = (checkpoint.step, kernel, nest["bias"], nest[2], np.asarray(nest["inner"]))
    return repr((*rest, state["momentum"], state["name"], checkpoint.mirrored.value))


def save(strategy, path, **objects):
    """Save; the objects need have no variable, which would tell the strategy."""
    with strategy.scope():
        mr.Checkpoint(**objects).save(path)


def restored(strategy, path, **objects):
    checkpoint = mr.Checkpoint(**objects)
    with strategy.scope():
        checkpoint.restore(path)
    return checkpoint


def listing(path):
    """The files in the folder of a checkpoint, as rank 0 sees them, on all ranks."""
    names = gathered(sorted(os.listdir(path.parent)) if path.parent.is_dir() else [])
    return names[0]
