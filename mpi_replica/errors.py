"""Every exception of the package, for ``except``."""

from .core.exceptions import (
    CheckpointError,
    CollectiveMismatchError,
    CollectiveTimeoutError,
    ContextError,
    CorruptCheckpointError,
    DivergenceError,
    LaunchError,
    MPIReplicaError,
    RankLostError,
    RemoteReplicaError,
    ReplicaStopped,
    StructureMismatchError,
)

__all__ = [
    "CheckpointError",
    "CollectiveMismatchError",
    "CollectiveTimeoutError",
    "ContextError",
    "CorruptCheckpointError",
    "DivergenceError",
    "LaunchError",
    "MPIReplicaError",
    "RankLostError",
    "RemoteReplicaError",
    "ReplicaStopped",
    "StructureMismatchError",
]
