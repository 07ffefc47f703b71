"""What each object of a program gets: one state, also where several names hold it."""

from __future__ import annotations

import copy
from collections.abc import Callable, MutableMapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from numpy.lib.array_utils import byte_bounds

from ..core import object_state
from ..core.abstract_variable import AbstractVariable
from ..core.array_libraries import memory_of, values_of
from ..core.array_ways import Array, TorchWay, way_of
from ..core.exceptions import CheckpointError
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

    def check_shared_memory(self) -> None:
        """Raises where arrays share a part of their memory, and can't all get what was saved.

        Takes as much memory as these arrays do, and once more the largest of them.

        Raises
        ------
        CheckpointError
            Names two of them.
        """
        fitting = []
        for array, saved, path in self._in_memory.values():
            name = array_name(saved) or ""
            record = self._index.arrays.get(name)
            if record is not None and (record.dtype, record.shape) == (array.dtype, array.shape):
                fitting.append(_ArrayPlace(*byte_bounds(array), array, name, path))
        for places in _in_shared_memory(fitting):
            self._check_shared_memory_of(places)

    def _check_shared_memory_of(self, places: Sequence[_ArrayPlace]) -> None:
        """Puts into other memory what these arrays would get, and raises where it is not that."""
        first = min(place.first for place in places)
        memory = np.empty(max(place.end for place in places) - first, np.uint8)
        tried = [
            np.ndarray(a.shape, a.dtype, memory, a.ctypes.data - first, a.strides)
            for a in (place.array for place in places)
        ]
        for place, array in zip(places, tried, strict=True):
            self._read(place.name, array)
        for place, array in zip(places, tried, strict=True):
            if not _are_equal(array, self._array(place.name)):
                other = next(one for one in reversed(places) if one.shares_memory(place))
                raise CheckpointError(
                    f"{place.path} and {other.path} share memory here, and the checkpoint has"
                    " values of them that it can't hold. Give each an array of its own."
                )

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
        return bool(np.array_equal(_bytes(self._array(name)), _bytes(self._array(other_name))))

    def _array(self, name: str) -> Array:
        record = self._index.arrays[name]
        array = np.empty(record.shape, record.dtype)
        self._read(name, array)
        return array


class _ArrayPlace(NamedTuple):
    """An array in memory: its first byte, the one behind its last, and what it gets."""

    first: int
    end: int
    array: Array
    name: str
    path: str

    def shares_memory(self, other: _ArrayPlace) -> bool:
        """Returns whether it has bytes of another one, or may have where that is hard to tell."""
        try:
            return other is not self and np.shares_memory(self.array, other.array, _MOST_WORK)
        except np.exceptions.TooHardError:
            return True


_MOST_WORK: Any = 10_000  # of numpy, where it looks for bytes that two arrays share


def _in_shared_memory(places: list[_ArrayPlace]) -> list[list[_ArrayPlace]]:
    """Returns groups of places that share memory with others of their group."""
    groups: list[list[_ArrayPlace]] = []
    end = 0
    for place in sorted(places, key=lambda place: place.first):
        if not groups or place.first >= end:
            groups.append([])
        groups[-1].append(place)
        end = max(end, place.end)
    shared = ([one for one in group if any(map(one.shares_memory, group))] for group in groups)
    return [group for group in shared if group]


def _memory_of(live: Any) -> Array | None:
    """Returns an array, or what a tensor has in the memory of the host; None for other things."""
    if not (isinstance(live, np.ndarray) or _is_tensor(live)):
        return None
    try:
        array: Array = memory_of(values_of(live))
    except Exception:  # torch has several for what has no such memory
        return None
    return array if array.nbytes else None


def _are_equal(one: Array, other: Array) -> bool:
    if one.dtype.names is not None:  # what is between fields is nobody's
        return repr(one.tolist()) == repr(other.tolist())
    return bool(np.array_equal(_bytes(one), _bytes(other)))


def _bytes(array: Array) -> npt.NDArray[np.uint8]:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


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
