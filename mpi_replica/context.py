"""The context machine, for all who communicate: a strategy has an engine."""

from __future__ import annotations

from typing import Protocol

from .caller import (
    BareStrategy,
    ReplicaContextLike,
    Scope,
    State,
    current_state,
    current_strategy,
    enter_open_strategy,
    entered,
    experimental_set_strategy,
    has_strategy,
    in_cross_replica_context,
    open_strategies,
    register_default_strategy,
    require_cross_replica,
    require_default,
    restore_state,
    swap_state,
)
from .collectives.engine import Engine

__all__ = [
    "ReplicaContextLike",
    "Scope",
    "State",
    "StrategyLike",
    "current_state",
    "current_strategy",
    "enter_open_strategy",
    "entered",
    "experimental_set_strategy",
    "has_strategy",
    "in_cross_replica_context",
    "open_strategies",
    "register_default_strategy",
    "require_cross_replica",
    "require_default",
    "restore_state",
    "swap_state",
]


class StrategyLike(BareStrategy, Protocol):
    """What the floors below know of a `Strategy`."""

    #: What it communicates with.
    engine: Engine
