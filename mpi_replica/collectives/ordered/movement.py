"""The movement of an ordered reduction's data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ...options import ReduceOp
from ..delivery import PackDelivery
from ..engine import Engine
from ..inline import UFUNCS
from ..packing import Plan
from ..scratch import Scratch
from .exchanges import Exchange
from .parts import parts_of

__all__ = ["OrderedMovement"]

Array = np.ndarray[Any, Any]


class OrderedMovement:
    """The movement of one reduction's data; all that it needs is allocated when it is made.

    Parameters
    ----------
    contributions, results : sequence of sequence of array
        The leaves of each local replica, and where their results go.
    has_outputs : bool
        Whether `results` has memory for the small leaves, too.
    """

    def __init__(
        self,
        engine: Engine,
        exchange: Exchange,
        plan: Plan,
        contributions: Sequence[Sequence[Array]],
        results: Sequence[list[Array]],
        timeout_seconds: float | None,
        *,
        has_outputs: bool,
    ) -> None:
        self._quietly = engine.quietly
        self._exchange = exchange
        delivery = PackDelivery(plan, results, has_outputs=has_outputs)
        self._parts = parts_of(plan, contributions, results, delivery, exchange.part_bytes)
        scratch = Scratch(engine.scratch(exchange.scratch_bytes))
        scale = engine.layout.num_replicas if plan.op is ReduceOp.MEAN else 1
        self._about = UFUNCS[plan.op], scale, scratch, timeout_seconds

    def run(self) -> None:
        """Move everything; called where all ranks have agreed to."""
        self._quietly(self._exchange.run, self._parts, *self._about)
