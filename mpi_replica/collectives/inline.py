"""Reductions whose contributions fit into the header: they cost one message.

Every rank has the contributions of all, and combines them in rank order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..options import ReduceOp
from ..transport.base import HEADER_BYTES, Bytes
from .header import PAYLOAD_START
from .packing import Plan, Slot, cut

__all__ = ["UFUNCS", "InlineReduction", "InlineReductions"]

Array = np.ndarray[Any, Any]

# A program that makes new shapes all the time must not grow.
_CACHE_SIZE = 1024

#: What combines two contributions.
UFUNCS: dict[ReduceOp, np.ufunc] = {
    ReduceOp.SUM: np.add,
    ReduceOp.MEAN: np.add,
    ReduceOp.MIN: np.minimum,
    ReduceOp.MAX: np.maximum,
    ReduceOp.PROD: np.multiply,
}


class InlineReduction:
    """A plan without streams, and where its packs stand in the headers.

    Made once for each plan.

    Parameters
    ----------
    headers : array of bytes
        Where the transport always puts the headers of all ranks.
    quietly : callable
        Calls a function without numpy's warnings.
    """

    def __init__(
        self, plan: Plan, headers: Bytes, num_replicas: int, quietly: Callable[..., Any]
    ) -> None:
        self._quietly = quietly
        self._ufunc = UFUNCS[plan.op]
        self._plan = plan
        self._scale = num_replicas if plan.op is ReduceOp.MEAN else 1
        self._leaves = len(plan.results)
        self._order = plan.plain_order
        slots = [slot for pack in plan.packs for slot in pack.slots]
        # Where results are rounded, numpy would warn of overflow, too.
        self._is_rounded = any(slot.dtype is not None for slot in slots)
        self._buffers = [(pack.length, pack.dtype) for pack in plan.packs]
        # of each pack, the contributions of the ranks, and its slots
        self._parts: list[tuple[Array, Array | None, list[Array], tuple[Slot, ...]]] = []
        start = PAYLOAD_START
        for pack in plan.packs:
            stop = start + pack.size_bytes
            firsts = range(0, headers.size, HEADER_BYTES)
            rows = [headers[first + start : first + stop].view(pack.dtype) for first in firsts]
            second = rows[1] if len(rows) > 1 else None
            self._parts.append((rows[0], second, rows[2:], pack.slots))
            start = stop

    def prepare(self, contributions: Sequence[Sequence[Array]]) -> tuple[bytes, list[Array]]:
        """Return what this rank sends, its replicas combined, and memory for `results`.

        Before the ranks agree: it may fail.
        """
        totals = []
        for length, dtype in self._buffers:
            totals.append(np.empty(length, dtype))
        order = self._order
        if order is None or len(contributions) > 1:
            return self._quietly(self._combined_here, contributions), totals
        leaves = contributions[0]
        if len(order) == 1:
            return leaves[order[0]].tobytes(), totals
        return b"".join([leaves[leaf].tobytes() for leaf in order]), totals

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

    def results(self, totals: Sequence[Array]) -> list[Any]:
        """Return the leaves, combined over the ranks in their order.

        They are views of `totals` that share no item, and numpy scalars.
        """
        quietly, ufunc = self._quietly, self._ufunc
        results: list[Any] = [None] * self._leaves
        place = 0
        for first, second, others, slots in self._parts:
            total = totals[place]
            place += 1
            if second is None:
                total[...] = first
            else:
                quietly(ufunc, first, second, out=total)
                for row in others:
                    quietly(ufunc, total, row, out=total)
            if self._scale != 1:
                quietly(np.divide, total, self._scale, out=total)
            if self._is_rounded:
                quietly(cut, slots, total, results)
            else:
                cut(slots, total, results)
        return results

    def copies(self, totals: Sequence[Array]) -> list[Any]:
        """Return the same leaves again, in memory of their own."""
        results: list[Any] = [None] * self._leaves
        for total, (_, _, _, slots) in zip(totals, self._parts, strict=True):
            self._quietly(cut, slots, total.copy(), results)
        return results


class InlineReductions(dict[Plan, InlineReduction]):
    """The `InlineReduction` of each plan; made when it is asked for.

    Parameters as those of `InlineReduction`.
    """

    def __init__(self, headers: Bytes, num_replicas: int, quietly: Callable[..., Any]) -> None:
        super().__init__()
        self._about = headers, num_replicas, quietly

    def __missing__(self, plan: Plan) -> InlineReduction:
        if len(self) >= _CACHE_SIZE:
            self.clear()
        reduction = self[plan] = InlineReduction(plan, *self._about)
        return reduction
