"""tf.distribute's replica model for any numpy program, on MPI.

Each MPI rank hosts one or more replicas of a step function; collectives combine their values; a
mistake is an error on every rank. ``import mpi_replica as mr`` starts no MPI.

The public names, of which ``help(mr.Variable)`` and the like tell all:

The strategy
    MPIStrategy                     replicas on the ranks of a communicator
    Strategy                        its base: run, reduce, gather, verify, datasets and more
    StrategyExtended                strategy.extended, for library code: update, reduce_to

Inside a step (the function that is given to strategy.run)
    get_replica_context             the context of the replica that runs
    ReplicaContext                  its type: id, rng, all_reduce, all_gather, merge_call
    compute_average_loss            this replica's part of the mean loss, as tf has it
    mean_over_global_batch          sums of all replicas, divided by the rows of all

Values of replicas
    PerReplica                      a value for each replica: what run and distributed datasets give
    Mirrored                        one value that is the same on all replicas
    DistributedValues               the base of both, and of variables
    IndexedSlices                   some rows of a larger array, for sparse gradients

Variables
    Variable                        an array that replicas share and assign to

Input
    data                            a module: mr.data.Dataset and what belongs to it
    data.Dataset                    the source of batches: tf.data's verbs over arrays
    data.ArraySpec                  shape and dtype of an element
    data.AUTOTUNE                   leaves a number of map or prefetch to the dataset
    data.INFINITE_CARDINALITY       the length of a dataset without end
    data.UNKNOWN_CARDINALITY        the length of a dataset that can't be told
    DistributedDataset              what strategy.experimental_distribute_dataset gives
    DistributedIterator             one pass over it, which can be saved and gone on with
    InputContext                    for which pipeline a dataset_fn makes its dataset
    ValueContext                    for which replica a value_fn makes its value

torch (imported when it is looked at)
    torch                           a module: what is for torch alone
    torch.SyncBatchNorm             batch norm over the rows of all replicas
    torch.convert_sync_batchnorm    puts it in the place of each batch norm of a module

State in files, and lost ranks
    Checkpoint                      objects that are saved and restored together, on any ranks
    CheckpointManager               a folder of checkpoints: the newest are kept; saves on a signal
    latest_checkpoint               the path of the newest one in a folder
    ElasticState                    what strategy.run_elastic goes on with when a rank is lost

Options and enumerations
    CommunicationOptions            of collectives: timeout_seconds, reproducible, name and more
    CommunicationImplementation     who moves the data of sums
    InputOptions                    of distributed datasets: how many steps are made ahead
    InputReplicationMode            a dataset_fn is called for each rank, or for each replica
    ReduceOp                        SUM, MEAN, MIN, MAX, PROD
    VariableAggregation             how what replicas assign is combined
    VariableSynchronization         when a variable's copies are brought together

Contexts, as in tf
    get_strategy                    the current strategy
    has_strategy                    whether it is another one than the default strategy
    in_cross_replica_context        whether the code stands above all replicas
    experimental_set_strategy       makes a strategy the current one, without a ``with``

Errors
    errors                          a module: ``except mr.errors.RankLostError``
    errors.MPIReplicaError          the base of all of them
    errors.ContextError             a call in a context, or from a thread, where it is not legal
    errors.CollectiveMismatchError  replicas are at different calls
    errors.StructureMismatchError   their values differ in structure, shape or dtype
    errors.DivergenceError          what should be the same on all ranks is not
    errors.RemoteReplicaError       stands for an exception that can't be pickled
    errors.ReplicaStopped           ends a replica whose partners failed; let it pass
    errors.RankLostError            a rank died, or its program ended
    errors.CollectiveTimeoutError   timeout_seconds have passed
    errors.CheckpointError          a checkpoint can't be written, or does not fit
    errors.CorruptCheckpointError   a file of a checkpoint is missing or torn
    errors.LaunchError              launcher and MPI library do not fit

Beside these
    span                            names a part of the program for the trace
    experimental                    a module: the names that are under tf.distribute.experimental
    mpi_replica.testing             a pytest plugin for tests on several ranks; import it by itself
    python -m mpi_replica           ``run`` starts a program on ranks; ``doctor`` tells of troubles
"""

import importlib
import sys
from typing import TYPE_CHECKING, Any

from . import errors
from .core.context import experimental_set_strategy, has_strategy, in_cross_replica_context
from .core.doors import publish
from .core.indexed_slices import IndexedSlices
from .core.options import (
    CommunicationImplementation,
    CommunicationOptions,
    InputOptions,
    InputReplicationMode,
    ReduceOp,
    VariableAggregation,
    VariableSynchronization,
)
from .core.values import DistributedValues, Mirrored, PerReplica
from .ranks.launch import set_up_rank as _set_up_rank
from .ranks.launcher_connection import tell as _tell
from .ranks.watch.span import span
from .replicas.batch_mean import compute_average_loss, mean_over_global_batch
from .replicas.replica_context import ReplicaContext, get_replica_context
from .replicas.variables import Variable
from .strategy.default_strategy import get_strategy
from .strategy.extended import StrategyExtended
from .strategy.mpi_strategy import MPIStrategy
from .strategy.strategy import Strategy

if TYPE_CHECKING:
    from . import data, experimental
    from .checkpoint import Checkpoint, CheckpointManager, latest_checkpoint
    from .data import DistributedDataset, DistributedIterator, InputContext, ValueContext
    from .strategy.elastic.state import ElasticState

__all__ = [
    "Checkpoint",
    "CheckpointManager",
    "CommunicationImplementation",
    "CommunicationOptions",
    "DistributedDataset",
    "DistributedIterator",
    "DistributedValues",
    "ElasticState",
    "IndexedSlices",
    "InputContext",
    "InputOptions",
    "InputReplicationMode",
    "MPIStrategy",
    "Mirrored",
    "PerReplica",
    "ReduceOp",
    "ReplicaContext",
    "Strategy",
    "StrategyExtended",
    "ValueContext",
    "Variable",
    "VariableAggregation",
    "VariableSynchronization",
    "compute_average_loss",
    "data",
    "errors",
    "experimental",
    "experimental_set_strategy",
    "get_replica_context",
    "get_strategy",
    "has_strategy",
    "in_cross_replica_context",
    "latest_checkpoint",
    "mean_over_global_batch",
    "span",
]

publish(errors.__name__, *(getattr(errors, _name) for _name in errors.__all__))
publish(__name__, *(globals()[_name] for _name in __all__ if _name in globals()))

# A launcher does not start a program again by itself that does without it.
_tell(package=True)
# Now: the program may import mpi4py.MPI next, with which MPI starts.
_set_up_rank()

# What most programs do without is imported when it is looked at: all of it takes a quarter of the
# time. torch imports torch.
_MODULES = ("data", "experimental", "torch")
_LATER = {
    "Checkpoint": "checkpoint",
    "CheckpointManager": "checkpoint",
    "DistributedDataset": "data",
    "DistributedIterator": "data",
    "ElasticState": "strategy.elastic.state",
    "InputContext": "data",
    "ValueContext": "data",
    "latest_checkpoint": "checkpoint",
}


def __getattr__(name: str) -> Any:
    """Imports modules, and classes with theirs, when they are looked at, and not before."""
    if name in _MODULES:
        return importlib.import_module(f"{__name__}.{name}")
    if name in _LATER:
        thing = getattr(importlib.import_module(f"{__name__}.{_LATER[name]}"), name)
        return globals().setdefault(name, thing)
    text = f"module {__name__!r} has no attribute {name!r}"
    if name.endswith("Strategy"):
        text += ": its one strategy is MPIStrategy"
    raise AttributeError(text, name=name, obj=sys.modules[__name__])  # Python may know a near one


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
