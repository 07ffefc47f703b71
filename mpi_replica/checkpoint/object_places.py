"""Which of a program's objects are to be the same everywhere, and where they are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..core import object_state
from ..core.values import PerReplica


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
        for path, leaf in object_state.places_of(value, f"{root}.{name}"):
            if isinstance(leaf, PerReplica):
                if object_state.are_alike(leaf.values):
                    of_replicas[path] = leaf
            elif object_state.is_compared(leaf):
                of_ranks[path] = leaf
    return of_replicas, of_ranks
