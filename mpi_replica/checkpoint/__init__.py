"""Checkpoints: save and restore on any number of ranks."""

from .checkpoint import Checkpoint

__all__ = ["Checkpoint"]
