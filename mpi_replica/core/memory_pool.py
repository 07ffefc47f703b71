"""Memory of results that are gone, for results that come.

New memory is slow: the system clears each page of it, which takes as long as reducing what lies
there. A program that throws a result away in each step gets the memory of the last one again.
"""

from __future__ import annotations

import collections
import weakref
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

# The system gives pages of this size to who asks for them, as numpy does for 4 MiB and more, where
# memory begins at a multiple of it: MPI then takes two thirds of the time. Of less the last page
# would be too much.
_LARGE_PAGE_BYTES = 1 << 21
_LEAST_LARGE_BYTES = 3 << 20

# By so much may what is lent and what is spare be more than what was ever lent at once.
_SPARE_BYTES = 1 << 24
# What was of no use for so many calls is given back to the system.
_MOST_CALLS = 16


class Block(NamedTuple):
    """Memory, with what numpy asks for it."""

    memory: npt.NDArray[np.uint8]
    interface: dict[str, Any]


class Loan:
    """What the arrays on a lent block refer to: it dies with the last of them."""

    __slots__ = ("__array_interface__", "__weakref__", "block")

    def __init__(self, block: Block) -> None:
        self.block = block
        self.__array_interface__ = block.interface


class Return(weakref.ref[Loan]):
    """A reference that tells of the end of its loan."""

    __slots__ = ("block",)

    block: Block


class MemoryPool:
    """Lends memory, and keeps what comes back for a while. One thread at a time.

    Attributes
    ----------
    is_used : bool
        Whether there was anything to lend: calls end without `end_call` until then.
    """

    def __init__(self) -> None:
        self.is_used = False
        self._lent: set[Return] = set()
        self._lent_bytes = 0
        self._most_lent_bytes = 0
        #: What has come back, whenever and in whatever thread the last array died: no Python runs
        #: then, in which a signal's handler could raise for nobody.
        self._returned: collections.deque[Return] = collections.deque()
        #: How many calls had ended when it came back, and the block; the oldest first.
        self._spare: list[tuple[int, Block]] = []
        self._calls = 0

    def lend(self, size_bytes: int) -> npt.NDArray[np.uint8]:
        """Returns uninitialised memory, which comes back when no array refers to it any more."""
        self.is_used = True
        self._take_back()
        block = self._spare_of(size_bytes) or self._new(size_bytes)
        loan = Loan(block)
        back = Return(loan, self._returned.append)
        back.block = block
        self._lent.add(back)
        self._lent_bytes += size_bytes
        self._most_lent_bytes = max(self._most_lent_bytes, self._lent_bytes)
        return np.asarray(loan)

    def end_call(self) -> None:
        """Takes that a call has ended."""
        self._take_back()
        self._calls += 1
        spare = self._spare
        while spare and spare[0][0] + _MOST_CALLS < self._calls:
            del spare[0]

    def close(self) -> None:
        """Gives back to the system what is spare, and what is lent when its arrays have died."""
        self._lent.clear()
        self._returned.clear()
        self._spare.clear()

    def _take_back(self) -> None:
        returned = self._returned
        while returned:
            back = returned.popleft()
            self._lent.discard(back)
            self._lent_bytes -= back.block.memory.size
            self._spare.append((self._calls, back.block))

    def _spare_of(self, size_bytes: int) -> Block | None:
        """Returns the block of this size that came back last."""
        spare = self._spare
        for index in range(len(spare) - 1, -1, -1):
            if spare[index][1].memory.size == size_bytes:
                return spare.pop(index)[1]
        return None

    def _new(self, size_bytes: int) -> Block:
        """Returns a new block; the oldest ones go that are too much beside all that is lent."""
        spare = self._spare
        all_bytes = self._lent_bytes + size_bytes
        most_bytes = max(all_bytes, self._most_lent_bytes) + _SPARE_BYTES
        all_bytes += sum([block.memory.size for _, block in spare])
        while spare and all_bytes > most_bytes:
            all_bytes -= spare.pop(0)[1].memory.size
        try:
            memory = _allocated(size_bytes)
        except MemoryError:
            spare.clear()
            memory = _allocated(size_bytes)
        return Block(memory, memory.__array_interface__)


def _allocated(size_bytes: int) -> npt.NDArray[np.uint8]:
    if size_bytes < _LEAST_LARGE_BYTES:
        return np.empty(size_bytes, np.uint8)
    # What is not touched takes no memory.
    memory = np.empty(size_bytes + _LARGE_PAGE_BYTES, np.uint8)
    start = -memory.ctypes.data % _LARGE_PAGE_BYTES
    return memory[start : start + size_bytes]
