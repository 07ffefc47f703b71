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
from .packing import Plan, Slot

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
        self._buffers = [(pack.length, pack.dtype) for pack in plan.packs]
        # of each pack, the contributions of the ranks, and its slots
        self._parts: list[tuple[Array, list[Array], tuple[Slot, ...]]] = []
        start = PAYLOAD_START
        for pack in plan.packs:
            stop = start + pack.size_bytes
            firsts = range(0, headers.size, HEADER_BYTES)
            rows = [headers[first + start : first + stop].view(pack.dtype) for first in firsts]
            self._parts.append((rows[0], rows[1:], pack.slots))
            start = stop

    def prepare(self, contributions: Sequence[Sequence[Array]]) -> tuple[bytes, list[Array]]:
        """Return what this rank sends, its replicas combined, and memory for `results`.

        Before the ranks agree: it may fail.
        """
        totals = [np.empty(length, dtype) for length, dtype in self._buffers]
        order = self._plan.plain_order
        if order is not None and len(contributions) == 1:
            leaves = contributions[0]
            return b"".join([leaves[leaf].tobytes() for leaf in order]), totals
        return self._quietly(self._combined_here, contributions), totals

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
        for total, (first, others, _) in zip(totals, self._parts, strict=True):
            if len(others) == 1:
                quietly(ufunc, first, others[0], out=total)
            else:
                total[...] = first
                for row in others:
                    quietly(ufunc, total, row, out=total)
            if self._scale != 1:
                quietly(np.divide, total, self._scale, out=total)
        return self._cut(totals)

    def copies(self, totals: Sequence[Array]) -> list[Any]:
        """Return the same leaves again, in memory of their own."""
        return self._cut([total.copy() for total in totals])

    def _cut(self, totals: Sequence[Array]) -> list[Any]:
        results: list[Any] = [None] * self._leaves
        for total, (_, _, slots) in zip(totals, self._parts, strict=True):
            for leaf, where, shape, dtype in slots:
                part = total[where]
                if shape is not None:
                    part = part.reshape(shape)
                results[leaf] = part if dtype is None else part.astype(dtype)
        return results
