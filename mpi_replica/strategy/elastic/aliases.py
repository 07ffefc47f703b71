"""Which places of a state held one array, dict or list at a commit, where they do again.

Plain data has it once for each place, and on a spare nothing may stand there.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ...checkpoint.targets import copied, memory_of_changing, place_in_memory
from ...core.object_state import LEAF_TYPES, has_state
from .replica_objects import Place, can_be_sent, with_changes

# What neither is one of these nor holds any.
_OTHER_TYPES = LEAF_TYPES - {np.ndarray}

#: The places of each that stands in several.
Aliases = Sequence[Sequence[Place]]


def aliases_in(objects: Mapping[str, Any]) -> Aliases:
    """Returns which places in the objects of a program hold one array, dict or list."""
    found: dict[Hashable, list[Place]] = {}
    for place, identity in _identities_in(objects, ()):
        found.setdefault(identity, []).append(place)
    return [places for places in found.values() if len(places) > 1]


def _identities_in(live: Any, place: Place) -> Iterator[tuple[Place, Hashable]]:
    if place and (identity := _identity_of(live)) is not None:
        yield place, identity
    if isinstance(live, (Mapping, list, tuple)) and not has_state(live):
        items = live.items() if isinstance(live, Mapping) else enumerate(live)
        for key, item in items:
            if type(item) not in _OTHER_TYPES:
                yield from _identities_in(item, (*place, key))


def _identity_of(live: Any) -> Hashable:
    """Returns what tells an array, a dict or a list from others; None for what is none of these.

    Arrays that show the same memory in the same way are one.
    """
    memory = memory_of_changing(live)
    if memory is not None:
        return place_in_memory(memory)
    is_container = isinstance(live, (dict, list)) and not has_state(live)
    return id(live) if is_container else None


def with_aliases(objects: Mapping[str, Any], aliases: Aliases) -> dict[str, Any]:
    """Returns objects in which places hold one where they did, and else one each."""
    firsts = {place: places[0] for places in aliases for place in places}
    of_places: dict[Place, Any] = {}
    place_of: dict[Hashable, Place] = {}

    def alias(live: Any, place: Place) -> Any:
        identity = _identity_of(live)
        if identity is None:
            return live
        place = firsts.get(place, place)
        if place not in of_places:
            is_free = place_of.setdefault(identity, place) == place
            of_places[place] = live if is_free else copied(live)
        return of_places[place]

    return {
        name: with_changes(value, (name,), lambda live, _: live, before=alias)
        for name, value in objects.items()
    }


def aliases_for_another_rank(aliases: Aliases) -> Aliases:
    """Returns those aliases that can be sent."""
    return [places for places in aliases if can_be_sent(places)]
