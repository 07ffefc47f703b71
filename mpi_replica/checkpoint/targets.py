"""What each object of a program gets: one state, also where several names hold it."""

from __future__ import annotations

import copy
from collections.abc import Callable, MutableMapping
from typing import Any

import numpy as np

from ..core import object_state
from ..core.abstract_variable import AbstractVariable
from ..core.array_libraries import library_of
from ..core.array_ways import Array
from .encoder import array_name, replicas_name
from .index import Index


class Targets:
    """The objects that are changed by a checkpoint, and what they get.

    Parameters
    ----------
    index : Index
    read : callable
        Fills an array with one of it, given its name.
    """

    def __init__(self, index: Index, read: Callable[[str, Array], None]) -> None:
        self._index = index
        self._read = read
        #: By identity; with the object, which keeps that.
        self._found: dict[int, tuple[Any, Any, str]] = {}

    def place_of_another_state(self, live: Any, saved: Any, path: str) -> str | None:
        """Returns where `live` gets another state than this one; None where it gets no other.

        Equal states are one: whether names held one object when they were saved, nothing tells.
        """
        if not _is_changed(live):
            return None
        _, first, where = self._found.setdefault(id(live), (live, saved, path))
        return None if first is saved or self._are_same(first, saved) else where

    def drop_gradients(self) -> None:
        """Removes what torch has added up in them, as by a step that a loss has broken off."""
        for live, _, _ in self._found.values():
            object_state.drop_gradients(live)

    def _are_same(self, one: Any, other: Any) -> bool:
        """Returns whether two parts of the index stand for the same values."""
        names = [array_name(value) or "" for value in (one, other)]
        records = [self._index.arrays[name] for name in names if name in self._index.arrays]
        if len(records) == 2:
            about = {(record.dtype, record.shape, record.extent.crc32) for record in records}
            return len(about) == 1 and len({self._bytes(name) for name in names}) == 1
        parts = [self._index.of_replicas.get(replicas_name(value) or "") for value in (one, other)]
        if None not in parts:
            one, other = parts
        if isinstance(one, dict) and isinstance(other, dict):
            return list(one) == list(other) and self._are_same([*one.values()], [*other.values()])
        if isinstance(one, list) and isinstance(other, list):
            return len(one) == len(other) and all(map(self._are_same, one, other))
        return repr(one) == repr(other)  # True is not 1, and NaN is NaN

    def _bytes(self, name: str) -> bytes:
        record = self._index.arrays[name]
        array = np.empty(record.shape, record.dtype)
        self._read(name, array)
        return array.tobytes()


def _is_changed(live: Any) -> bool:
    """Returns whether a state is put into `live`, and not another object in its place."""
    if isinstance(live, np.ndarray):
        return live.flags.writeable
    kinds = (AbstractVariable, MutableMapping, list)
    return isinstance(live, kinds) or object_state.has_state(live) or library_of(live) is not None


def copied(live: Any) -> Any:
    """Returns an array, a dict or a list like this one; None for what can hold one state only."""
    if object_state.has_state(live):
        return None
    if isinstance(live, np.ndarray) or library_of(live) is not None:
        return copy.deepcopy(live)
    return copy.copy(live) if isinstance(live, (dict, list)) else None  # others may share theirs
