"""A strategy, to all who communicate by it."""

from __future__ import annotations

from typing import Protocol

from ..core.context import BareStrategy
from .engine import Engine


class StrategyLike(BareStrategy, Protocol):
    """What the floors below know of a `Strategy`."""

    #: What it communicates with.
    engine: Engine
