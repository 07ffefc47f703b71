"""Checkpoints: save and restore on any number of ranks."""

from ..core.doors import publish
from .checkpoint import Checkpoint
from .manager import CheckpointManager, latest_checkpoint

__all__ = ["Checkpoint", "CheckpointManager", "latest_checkpoint"]

publish("mpi_replica", Checkpoint, CheckpointManager, latest_checkpoint)
