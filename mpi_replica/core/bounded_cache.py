"""What is worked out once for all calls that are alike, within bounds."""

from __future__ import annotations

from collections.abc import Hashable
from typing import TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

# Of each leaf some 300 bytes are kept. A few calls stay, however large: they would drive each other
# out at each turn of a loop.
_MOST_LEAVES = 1 << 18
_FEW = 16


class BoundedCache(dict[K, V]):
    """A dict that forgets all where it becomes too much.

    The same few calls come again and again. A program that makes new ones all the time, of uneven
    shapes or other keys, must not grow, nor look for what it used least.

    Parameters
    ----------
    most_entries : int
    """

    def __init__(self, most_entries: int) -> None:
        super().__init__()
        self._most_entries = most_entries
        self._leaves = 0

    def keep(self, key: K, value: V, leaves: int) -> V:
        """Keeps and returns what was worked out, for a nest of so many leaves."""
        has_too_many_leaves = len(self) >= _FEW and self._leaves + leaves > _MOST_LEAVES
        if has_too_many_leaves or len(self) >= self._most_entries:
            self.clear()
            self._leaves = 0
        self[key] = value
        self._leaves += leaves
        return value
