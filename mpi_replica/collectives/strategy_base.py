"""A strategy, to all who communicate by it."""

from __future__ import annotations

from ..core.abstract_strategy import AbstractStrategy
from .engine import Engine


class StrategyBase(AbstractStrategy):
    """A strategy, and what it communicates with."""

    engine: Engine
    #: Whether each of several replicas of a rank has a thread, whatever is imported.
    replica_threads = False
