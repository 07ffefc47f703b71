"""Which places of a state hold one array, dict or list at a commit: behind a loss they do again.

Plain data has it once for each place; and the program may have put others there since.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ...checkpoint.targets import copied
from ...core.array_ways import TorchWay, way_of
from ...core.object_state import LEAF_TYPES, has_state
from .replica_objects import Place, can_be_sent, with_changes

# Those of leaves that are none of these: arrays are among the leaves.
_PLAIN_TYPES = LEAF_TYPES - {np.ndarray}


class Aliases(NamedTuple):
    """The places of an array, a dict or a list that stands in several."""

    places: list[Place]
    #: Itself; None on a rank that has not committed.
    value: Any


def aliases_in(objects: Mapping[str, Any]) -> list[Aliases]:
    """Returns what stands in several places in the objects of a program."""
    # With itself: a mapping may make its items when it is asked for them, and ids come again.
    found: dict[int, Aliases] = {}
    for place, value in _changing_values(objects, ()):
        found.setdefault(id(value), Aliases([], value)).places.append(place)
    return [one for one in found.values() if len(one.places) > 1]


def _changing_values(live: Any, place: Place) -> Iterator[tuple[Place, Any]]:
    """Returns the arrays, dicts and lists in a nest, each with its place."""
    if place and _is_changing(live):
        yield place, live
    if isinstance(live, (Mapping, list, tuple)) and not has_state(live):
        items = live.items() if isinstance(live, Mapping) else enumerate(live)
        for key, item in items:
            if type(item) not in _PLAIN_TYPES:
                yield from _changing_values(item, (*place, key))


def _is_changing(live: Any) -> bool:
    """Returns whether it is an array that can be written into, a dict or a list."""
    if isinstance(live, np.ndarray):
        return live.flags.writeable
    is_container = isinstance(live, (dict, list)) and not has_state(live)
    return is_container or way_of(type(live)) is TorchWay


def with_aliases(objects: Mapping[str, Any], aliases: Sequence[Aliases]) -> dict[str, Any]:
    """Returns objects in which places hold one where they did, and else one each."""
    firsts = {place: one.places[0] for one in aliases for place in one.places}
    values = {place: one.value for one in aliases for place in one.places}
    # What stands in each place, by the first of its places: what stood there, where it still does.
    standing = {
        firsts[place]: live
        for place, live in _changing_values(objects, ())
        if live is values.get(place)
    }
    owners = {id(live): first for first, live in standing.items()}

    def one_of_place(live: Any, place: Place) -> Any:
        if not _is_changing(live):
            return live
        first = firsts.get(place, place)
        if first not in standing:
            is_free = owners.setdefault(id(live), first) == first
            standing[first] = live if is_free else copied(live)
        return standing[first]

    return {
        name: with_changes(value, (name,), before=one_of_place) for name, value in objects.items()
    }


def aliases_for_another_rank(aliases: Sequence[Aliases]) -> list[Aliases]:
    """Returns those aliases that can be sent."""
    return [one._replace(value=None) for one in aliases if can_be_sent(one.places)]
