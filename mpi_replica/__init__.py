"""tf.distribute's replica model for any numpy program, on MPI.

Each MPI rank hosts one or more replicas of a step function; collectives combine their values; a
mistake is an error on every rank. ``import mpi_replica as mr`` starts no MPI.
"""

from . import data, errors, experimental
from .checkpoint import Checkpoint, CheckpointManager, latest_checkpoint
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
from .data import DistributedDataset, DistributedIterator, InputContext, ValueContext
from .replicas.batch_mean import compute_average_loss, mean_over_global_batch
from .replicas.replica_context import ReplicaContext, get_replica_context
from .replicas.variables import Variable
from .strategy.default_strategy import get_strategy
from .strategy.elastic.state import ElasticState
from .strategy.extended import StrategyExtended
from .strategy.mpi_strategy import MPIStrategy
from .strategy.strategy import Strategy

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
]

for _door in (data.__name__, errors.__name__, __name__):
    publish(_door)
