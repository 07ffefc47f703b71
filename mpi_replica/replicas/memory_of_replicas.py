"""Whose memory an array is in, among the replicas of a rank, which share one process."""

from __future__ import annotations

import collections
from typing import Any

import numpy as np

from ..core.array_libraries import library_of


class MemoryOfReplicas:
    """The arrays that replicas hold."""

    def __init__(self) -> None:
        # By what the memory belongs to: the arrays in it, and the replicas that hold them.
        self._held: collections.defaultdict[Any, list[tuple[Any, int]]] = collections.defaultdict(
            list
        )

    def add(self, value: Any, replica_id: int) -> None:
        """Notes that a replica holds a value, which may be no array."""
        owner = _owner(value)
        if owner is not None:
            self._held[owner].append((value, replica_id))

    def is_of_another(self, value: Any, replica_id: int) -> bool:
        """Returns whether a value is in memory of another replica than this one."""
        owner = _owner(value)
        return owner is not None and any(
            holder != replica_id and _may_overlap(value, held)
            for held, holder in self._held.get(owner, ())
        )


def _owner(value: Any) -> Any:
    """Returns what tells which block of memory an array is in; None for no array."""
    if isinstance(value, np.ndarray):
        while isinstance(value.base, np.ndarray):
            value = value.base
        return id(value if value.base is None else value.base)
    library = library_of(value)
    if library == "torch":
        return library, value.untyped_storage().data_ptr()
    return None if library is None else (library, id(value))


def _may_overlap(one: Any, other: Any) -> bool:
    is_numpys = isinstance(one, np.ndarray) and isinstance(other, np.ndarray)
    return not is_numpys or np.may_share_memory(one, other)
