"""What a checkpoint has, as values that are made anew where the program has nothing like them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ..core.array_libraries import of_library, require_library
from ..core.array_ways import Array
from ..core.exceptions import CheckpointError
from ..core.layout import Layout
from ..core.values import PerReplica, per_replica
from .array_kinds import ArrayKind, order_in_memory
from .decoder import ArrayOf, array_name, decoded, replicas_name, state_of
from .index import ArrayRecord, Index

#: Fills an array (given a name, and the array).
Reader = Callable[[str, Array], None]

#: Puts a value back, and returns what takes its place.
PutBack = Callable[[], Any]


class SavedValues:
    """The values of a checkpoint.

    Parameters
    ----------
    index : Index
        What the checkpoint has.
    read : callable
        See `Reader`.
    layout : Layout
        That of the program.
    variables : mapping
        Those that the index knows by their identity, and that there are.
    """

    def __init__(
        self, index: Index, read: Reader, layout: Layout, variables: Mapping[str, Any]
    ) -> None:
        self._index = index
        self._read = read
        self._layout = layout
        self._variables = variables

    def is_data(self, saved: Any) -> bool:
        """Returns whether `saved` stands for arrays, numbers and texts alone, also of replicas."""
        if isinstance(saved, list):
            return all(map(self.is_data, saved))
        if not isinstance(saved, dict):
            return True
        if (name := replicas_name(saved)) is not None:
            parts = self._index.of_replicas.get(name, {})
            has_all = parts.keys() >= set(map(str, self._layout.local_replica_ids))
            fits = self._index.num_replicas == self._layout.num_replicas
            return has_all and fits and all(map(self.is_data, parts.values()))
        return state_of(saved) is None and all(map(self.is_data, saved.values()))

    def decoding(self, saved: Any, path: str) -> PutBack:
        """Returns what makes a value anew: an array, a number, a nest of them."""

        def check(name: str, library: str = "") -> Any:
            try:
                require_library(library)
            except TypeError as error:
                raise CheckpointError(f"{path} can't be restored: {error}") from error
            return np.empty((), self._index.arrays[name].dtype)

        def make(array: ArrayOf) -> Any:
            return decoded(saved, array, self._replicas_by(array), self._variables)

        make(check)  # before anything has changed
        return lambda: make(self.load)

    def _replicas_by(self, array: ArrayOf) -> Callable[[str], PerReplica]:
        """Returns what makes a `PerReplica` anew, with arrays that `array` returns."""

        def make(name: str) -> PerReplica:
            parts, ids = self._index.of_replicas[name], self._layout.local_replica_ids
            return per_replica([decoded(parts[str(i)], array) for i in ids], self._layout)

        return make

    def kind(self, saved: Any) -> ArrayKind | None:
        """Returns the kind of the array that `saved` stands for; None where it stands for none."""
        record = self.record(saved)
        return None if record is None else ArrayKind(record.dtype, record.shape)

    def is_reordered(self, live: Array, saved: Any) -> bool:
        """Returns whether `live`, if it has no gaps, lies in memory as the array did not."""
        record = self.record(saved)
        return record is not None and live.flags.forc and order_in_memory(live) != record.order

    def record(self, saved: Any) -> ArrayRecord | None:
        """Returns the record of the array that `saved` stands for; None where it has none."""
        name = array_name(saved)
        return None if name is None else self._index.arrays.get(name)

    def load(self, name: str, library: str = "") -> Any:
        """Returns an array, as one of its library."""
        record = self._index.arrays[name]
        array = np.empty(record.shape, record.dtype, record.order)
        self._read(name, array)
        return of_library(array, library)
