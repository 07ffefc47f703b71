"""Memory for fresh results.

Large ones lie in blocks that come back, several in one, so that a block has large pages; a result
that is kept keeps its block.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..core.array_ways import Array
from ..core.gpu_tensors import Lend

_BLOCK_BYTES = 1 << 24
# Of results that have less together each has a block of its own.
_LEAST_BLOCK_BYTES = 1 << 22
#: Of a result in a block: a smaller one that is kept would keep many times its size.
LEAST_BYTES = 1 << 19

_ALIGNMENT = 64


# Index of a result, from where to where it lies in its block, dtype and shape.
_Place = tuple[int, int, int, np.dtype[Any], tuple[int, ...]]


class Allocation:
    """Where results of these dtypes and shapes lie: a plan, which `make` follows each time.

    For None there is no memory: the caller has it.
    """

    def __init__(self, results: Sequence[tuple[np.dtype[Any], tuple[int, ...]] | None]) -> None:
        self._count = len(results)
        #: Bytes of each block, and what lies in it.
        self._blocks: list[tuple[int, list[_Place]]] = []
        #: Results of their own, of less: index, dtype and shape.
        self._small: list[tuple[int, np.dtype[Any], tuple[int, ...]]] = []
        places: list[_Place] = []
        used = 0
        for index, about in enumerate(results):
            if about is None:
                continue
            dtype, shape = about
            size = math.prod(shape) * dtype.itemsize
            if size < LEAST_BYTES:
                self._small.append((index, dtype, shape))
                continue
            if used + size > _BLOCK_BYTES:
                self._close(places, used)
                places, used = [], 0
            places.append((index, used, used + size, dtype, shape))
            used += size + -size % _ALIGNMENT
        self._close(places, used)

    def _close(self, places: list[_Place], used: int) -> None:
        if used >= _LEAST_BLOCK_BYTES:
            self._blocks.append((used, places))
            return
        for index, start, stop, dtype, shape in places:
            size = stop - start
            self._blocks.append((size, [(index, 0, size, dtype, shape)]))

    def make(self, lend: Lend) -> list[Array]:
        """Returns an uninitialised C-contiguous array for each result."""
        made: list[Any] = [None] * self._count
        for index, dtype, shape in self._small:
            made[index] = np.empty(shape, dtype)
        for size, places in self._blocks:
            block = lend(size)
            for index, start, stop, dtype, shape in places:
                made[index] = block[start:stop].view(dtype).reshape(shape)
        return made
