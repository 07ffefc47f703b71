"""The types that values of a state had at a commit, which keeps them as plain data.

What stands in their place at a loss may be of another type, and on a spare nothing may stand there.
"""

from __future__ import annotations

import collections
import enum
import functools
import operator
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from ...core.object_state import LEAF_TYPES, has_state
from ...core.values import Mirrored
from .replica_objects import Place, can_be_sent, with_changes

# These are made by their constructors of what they were as plain data.
_CONSTRUCTED = {collections.OrderedDict, bytearray, Mirrored}


class ValueKind(NamedTuple):
    """The type of a value, and what makes one of it of plain data."""

    type: type
    make: Callable[[Any], Any]


#: By the places of the values.
_Kinds = Mapping[Place, ValueKind]


def kinds_in(live: Any, place: Place = ()) -> Iterator[tuple[Place, ValueKind]]:
    """Returns the values in a nest whose types plain data does not tell, each with its place."""
    make = _maker_of(live)
    if make is not None:
        yield place, ValueKind(type(live), make)
    if isinstance(live, (Mapping, list, tuple)) and not has_state(live):
        items = live.items() if isinstance(live, Mapping) else enumerate(live)
        for key, item in items:
            if type(item) not in LEAF_TYPES:
                yield from kinds_in(item, (*place, key))


def _maker_of(live: Any) -> Callable[[Any], Any] | None:
    """Returns what makes a value like this one of plain data; None where that tells its type."""
    if type(live) in _CONSTRUCTED or (isinstance(live, enum.Enum) and live.value == live):
        return type(live)
    if type(live) is collections.defaultdict:
        return functools.partial(collections.defaultdict, live.default_factory)
    if type(live) is np.matrix:
        return operator.methodcaller("view", np.matrix)
    return getattr(live, "_make", None) if isinstance(live, tuple) else None  # named tuples have it


def of_kinds(objects: Mapping[str, Any], kinds: _Kinds) -> dict[str, Any]:
    """Returns objects in which each value is of its kind."""

    def changed(live: Any, place: Place) -> Any:
        kind = kinds.get(place)
        return live if kind is None or type(live) is kind.type else kind.make(live)

    return {name: with_changes(value, (name,), changed) for name, value in objects.items()}


def kinds_for_another_rank(kinds: _Kinds) -> _Kinds:
    """Returns those kinds that can be sent: that of a local class, say, a spare does without."""
    return {place: kind for place, kind in kinds.items() if can_be_sent((place, kind))}
