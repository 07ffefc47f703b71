"""Kept memory, handed out piece by piece."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..ranks.transport import ALIGNMENT, Bytes


class Scratch:
    """Memory from which arrays are taken, until all of it is given back at once.

    Parameters
    ----------
    memory : array of bytes
        Enough for all that is taken between two calls of `clear`, and `ALIGNMENT` for each array.
    """

    def __init__(self, memory: Bytes) -> None:
        self._memory = memory
        self._used_bytes = 0

    def clear(self) -> None:
        """Takes back everything."""
        self._used_bytes = 0

    def take(self, dtype: np.dtype[Any], length: int) -> np.ndarray[Any, Any]:
        """Returns memory behind what was taken since `clear`, at an address of its own.

        Also where it is empty: Open MPI takes two buffers at one address for one, in place.
        """
        start = self._used_bytes
        stop = start + length * dtype.itemsize
        self._used_bytes = stop + ALIGNMENT - stop % ALIGNMENT
        if start == stop:  # a slice of nothing would lie where the memory begins
            return np.ndarray(0, dtype, self._memory.data, start)
        return self._memory[start:stop].view(dtype)
