"""The types that values of a state had at a commit, which keeps them as plain data.

What stands in their place at a loss may be of another type, and on a spare nothing may stand there.
"""

from __future__ import annotations

import collections
import enum
import functools
import operator
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

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


def kinds_of(values: Iterable[tuple[Place, Any]]) -> dict[Place, ValueKind]:
    """Returns the kinds of those values, of `values_in`, whose types plain data does not tell."""
    return {
        place: ValueKind(type(value), make)
        for place, value in values
        if (make := _maker_of(value)) is not None
    }


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
