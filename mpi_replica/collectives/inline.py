"""Reductions whose contributions fit into the header: they cost one message.

Every rank has the contributions of all, and combines them in rank order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..options import ReduceOp
from ..transport import HEADER_BYTES
from .engine import Engine
from .header import PAYLOAD_START
from .packing import Plan

__all__ = ["UFUNCS", "InlineReduction"]

Array = np.ndarray[Any, Any]

#: What combines two contributions.
UFUNCS: dict[ReduceOp, np.ufunc] = {
    ReduceOp.SUM: np.add,
    ReduceOp.MEAN: np.add,
    ReduceOp.MIN: np.minimum,
    ReduceOp.MAX: np.maximum,
    ReduceOp.PROD: np.multiply,
}


class InlineReduction:
    """A plan without streams, and where its packs stand in the headers of an engine.

    Made once for each plan, since the views of the headers stay the same.
    """

    def __init__(self, engine: Engine, plan: Plan) -> None:
        self._quietly = engine.quietly
        self._ufunc = UFUNCS[plan.op]
        self._plan = plan
        # of each pack, the contribution of each rank
        self._rows: list[list[Array]] = []
        headers, start = engine.transport.headers, PAYLOAD_START
        for pack in plan.packs:
            stop = start + pack.size_bytes
            firsts = range(0, headers.size, HEADER_BYTES)
            self._rows.append(
                [headers[first + start : first + stop].view(pack.dtype) for first in firsts]
            )
            start = stop

    def payload(self, contributions: Sequence[Sequence[Array]]) -> bytes:
        """Return what this rank sends: the leaves of its replicas, combined."""
        order = self._plan.plain_order
        if order is not None and len(contributions) == 1:
            leaves = contributions[0]
            return b"".join([leaves[leaf].tobytes() for leaf in order])
        return self._quietly(self._combined_here, contributions)  # type: ignore[no-any-return]

    def _combined_here(self, contributions: Sequence[Sequence[Array]]) -> bytes:
        parts = []
        for pack in self._plan.packs:
            dtype = pack.dtype
            for slot in pack.slots:
                total = contributions[0][slot.leaf].astype(dtype, copy=False)
                for leaves in contributions[1:]:
                    total = self._ufunc(total, leaves[slot.leaf], dtype=dtype, casting="unsafe")
                parts.append(total.tobytes())
        return b"".join(parts)

    def totals(self, scale: int) -> list[Array]:
        """Return the items of each pack, combined over the ranks; `scale` divides them."""
        return [self._total(rows, scale) for rows in self._rows]

    def _total(self, rows: Sequence[Array], scale: int) -> Array:
        quietly = self._quietly
        if len(rows) == 1:
            total = rows[0].copy()
        else:
            total = quietly(self._ufunc, rows[0], rows[1])
            for row in rows[2:]:
                quietly(self._ufunc, total, row, total)
        if scale != 1:
            quietly(np.divide, total, scale, total)
        return total

    def results(self, totals: Sequence[Array]) -> list[Any]:
        """Return the leaves: views of `totals` that share no item, and numpy scalars."""
        results: list[Any] = [None] * len(self._plan.results)
        for pack, total in zip(self._plan.packs, totals, strict=True):
            for slot in pack.slots:
                results[slot.leaf] = slot.cut(total)
        return results
