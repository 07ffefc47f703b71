"""What each object of a program gets: one state, also where several names hold it."""

from __future__ import annotations

import copy
from collections.abc import Callable, MutableMapping
from typing import Any

import numpy as np
import numpy.typing as npt

from ..core import object_state
from ..core.abstract_variable import AbstractVariable
from ..core.array_libraries import memory_of, values_of
from ..core.array_ways import Array, TorchWay, way_of
from .decoder import array_name, replicas_name
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
        #: Arrays and tensors by what they show of which memory: several objects may do the same.
        self._in_memory: dict[tuple[Any, ...], tuple[Array, Any, str]] = {}
        #: Whether two arrays are the same: of those in several dicts it is asked for each of these.
        self._compared: dict[tuple[str, str], bool] = {}

    def place_of_another_state(self, live: Any, saved: Any, path: str) -> str | None:
        """Returns where `live` gets another state than this one; None where it gets no other.

        Equal states are one: whether names held one object when they were saved, nothing tells.
        """
        if not _is_changed(live):
            return None
        first, where = saved, path
        if (array := _memory_of(live)) is not None:
            place = (array.ctypes.data, array.dtype, array.shape, array.strides)
            _, first, where = self._in_memory.setdefault(place, (array, saved, path))
        _, first, where = self._found.setdefault(id(live), (live, first, where))
        return None if first is saved or self._are_same(first, saved) else where

    def drop_gradients(self) -> None:
        """Removes what torch has added up in them, as by a step that a loss has broken off."""
        for live, _, _ in self._found.values():
            object_state.drop_gradients(live)

    def _are_same(self, one: Any, other: Any) -> bool:
        """Returns whether two parts of the index stand for the same values."""
        names = array_name(one) or "", array_name(other) or ""
        if self._index.arrays.keys() >= {*names}:
            if names not in self._compared:
                self._compared[names] = self._are_same_arrays(*names)
            return self._compared[names]
        parts = [self._index.of_replicas.get(replicas_name(value) or "") for value in (one, other)]
        if None not in parts:
            one, other = parts
        if isinstance(one, dict) and isinstance(other, dict):
            return list(one) == list(other) and self._are_same([*one.values()], [*other.values()])
        if isinstance(one, list) and isinstance(other, list):
            return len(one) == len(other) and all(map(self._are_same, one, other))
        return repr(one) == repr(other)  # True is not 1, and NaN is NaN

    def _are_same_arrays(self, name: str, other_name: str) -> bool:
        if name == other_name:
            return True
        records = self._index.arrays[name], self._index.arrays[other_name]
        if len({(record.dtype, record.shape, record.extent.crc32) for record in records}) > 1:
            return False
        return bool(np.array_equal(self._bytes(name), self._bytes(other_name)))

    def _bytes(self, name: str) -> npt.NDArray[np.uint8]:
        record = self._index.arrays[name]
        array = np.empty(record.shape, record.dtype)
        self._read(name, array)
        return array.reshape(-1).view(np.uint8)


def _memory_of(live: Any) -> Array | None:
    """Returns an array, or what a tensor has in the memory of the host; None for other things."""
    if not (isinstance(live, np.ndarray) or _is_tensor(live)):
        return None
    try:
        array: Array = memory_of(values_of(live))
    except Exception:  # torch has several for what has no such memory
        return None
    return array if array.nbytes else None


def _is_changed(live: Any) -> bool:
    """Returns whether a state is put into `live`, and not another object in its place."""
    if isinstance(live, np.ndarray):
        return live.flags.writeable
    kinds = (AbstractVariable, MutableMapping, list)
    return isinstance(live, kinds) or object_state.has_state(live) or _is_tensor(live)


def _is_tensor(live: Any) -> bool:
    """Returns whether it is one of torch: arrays of other libraries are replaced."""
    return way_of(type(live)) is TorchWay


def copied(live: Any) -> Any:
    """Returns an array, a dict or a list like this one; None for what can hold one state only."""
    if object_state.has_state(live):
        return None
    if _is_tensor(live) and not live.is_leaf:  # torch copies no graph: what is restored has none
        return copy.deepcopy(live.detach())
    if isinstance(live, np.ndarray) or _is_tensor(live):
        return copy.deepcopy(live)
    return copy.copy(live) if isinstance(live, (dict, list)) else None  # others may share theirs
