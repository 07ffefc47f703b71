"""What a strategy has that can lose a rank."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...collectives.strategy_base import StrategyBase
from ...core.layout import Layout
from ...ranks.survivors import Survivors
from ...ranks.transport import Transport

if TYPE_CHECKING:
    from .losses import Loss


class ElasticStrategy(StrategyBase):
    """A strategy whose ranks can change."""

    def __init__(self) -> None:
        super().__init__()
        #: What was lost so far, the oldest first.
        self.losses: tuple[Loss, ...] = ()
        #: The ranks that live; None without MPI.
        self.survivors: Survivors | None = None
        self._is_elastic = False
        self._num_elastic_calls = 0

    def move(self, transport: Transport, layout: Layout) -> None:
        """Work over `transport` from now on, with the same replicas."""
        raise NotImplementedError
