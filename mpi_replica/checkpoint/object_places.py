"""Where the leaves of a program's objects are, and which of them are to be the same everywhere."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ..core import object_state
from ..core.array_libraries import COMMON_TYPES
from ..core.values import PerReplica

# What most leaves are.
_NO_OBJECTS = COMMON_TYPES | {str, bytes, type(None)}


def places_of(live: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Returns the leaves of a nest that may be objects, each with its place as errors name it."""
    if isinstance(live, (Mapping, list, tuple)) and not object_state.has_state(live):
        items = live.items() if isinstance(live, Mapping) else enumerate(live)
        for key, item in items:
            if type(item) not in _NO_OBJECTS:
                yield from places_of(item, f"{path}[{key!r}]")
    else:
        yield path, live


def saved_once(objects: Mapping[str, Any], root: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the objects of which one state is saved although there are several, by place.

    Returns
    -------
    of_replicas, of_ranks : dict
        Each `PerReplica` of objects; modules, optimizers and generators, of which each rank has
        one. Of other objects nothing is known: that of any rank is saved.
    """
    of_replicas, of_ranks = {}, {}
    for name, value in objects.items():
        for path, leaf in places_of(value, f"{root}.{name}"):
            if isinstance(leaf, PerReplica):
                if object_state.are_alike(leaf.values):
                    of_replicas[path] = leaf
            elif object_state.is_compared(leaf):
                of_ranks[path] = leaf
    return of_replicas, of_ranks
