"""Which places of a state hold one array, dict or list at a commit: behind a loss they do again.

Plain data has it once for each place; and the program may have put others there since.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ...checkpoint.targets import copied
from ...core.array_ways import TorchWay, way_of
from ...core.object_state import has_state
from .replica_objects import Place, can_be_sent, values_in, with_changes


class Aliases(NamedTuple):
    """The places of an array, a dict or a list that stands in several."""

    places: list[Place]
    #: Itself; None on a rank that has not committed.
    value: Any


def aliases_of(values: Iterable[tuple[Place, Any]]) -> list[Aliases]:
    """Returns those of values, of `values_in`, that stand in several places."""
    # With itself: a mapping may make its items when it is asked for them, and ids come again.
    found: dict[int, Aliases] = {}
    for place, value in values:
        if _is_changing(value):
            found.setdefault(id(value), Aliases([], value)).places.append(place)
    return [one for one in found.values() if len(one.places) > 1]


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
        for place, live in values_in(objects)
        if place in firsts and live is values[place]
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
