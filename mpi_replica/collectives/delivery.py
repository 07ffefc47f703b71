"""Where the results of small leaves go, which share a pack."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..core.array_ways import Array
from .plan import Pack, Plan, Slot, cut


class PackDelivery:
    """The way from the totals of packs to results; what it needs is allocated when it is made.

    Parameters
    ----------
    results : sequence of list of array
        For each local replica, the memory of its results, or places for them.
    has_outputs : bool
        Whether it is memory.
    """

    def __init__(self, plan: Plan, results: Sequence[list[Any]], *, has_outputs: bool) -> None:
        self._results = results
        #: For each replica, memory for the chunks of each pack; None where the caller has it.
        self._memory: list[dict[Pack, list[Array]]] | None = None
        if not has_outputs:
            self._memory = [
                {
                    pack: [np.empty(chunk.stop - chunk.start, pack.dtype) for chunk in pack.chunks]
                    for pack in plan.packs
                }
                for _ in results
            ]

    def deliver(self, pack: Pack, totals: Array, chunks: slice = slice(None)) -> None:
        """Gives every local replica the results of some of the chunks; `totals` are theirs."""
        wanted = pack.chunks[chunks]
        first = wanted[0].start
        for position, results in enumerate(self._results):
            memory = None if self._memory is None else self._memory[position][pack][chunks]
            for index, chunk in enumerate(wanted):
                part = totals[chunk.start - first : chunk.stop - first]
                if memory is None:
                    _write(chunk.slots, part, results)
                else:
                    memory[index][...] = part
                    cut(chunk.slots, memory[index], results)


def _write(slots: Sequence[Slot], items: Array, results: Sequence[Array]) -> None:
    """Copies leaves of a pack to where they go."""
    for leaf, where, shape, _ in slots:
        part = items[where]
        results[leaf][...] = part if shape is None else part.reshape(shape)
