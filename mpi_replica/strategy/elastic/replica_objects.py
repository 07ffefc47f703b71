"""Objects of replicas, such as modules: which a state holds, and those of replicas that move here.

A commit has their state. The objects themselves stay on their rank: for a replica that comes from
another one a copy is made of those that are here, and then gets its state.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

import numpy as np

from ...checkpoint.new_containers import refilled
from ...core import exceptions, object_state
from ...core.layout import Layout
from ...core.values import PerReplica, per_replica

#: Where a value is: the name of an object, and the keys that lead to it.
Place = tuple[Any, ...]

# Of the leaves of nests arrays are among the commonest, too.
_PLAIN_TYPES = object_state.LEAF_TYPES - {np.ndarray}

#: By the place of each `PerReplica` that holds objects: its components, by the replicas' ids.
Held = Mapping[Place, Mapping[int, Any]]


def held_in(objects: Mapping[str, Any]) -> Held:
    """Returns the objects of replicas that the objects of a program hold."""
    return {
        place: dict(zip(leaf.replica_ids, leaf.values, strict=True))
        for place, leaf in object_state.leaves_of(objects)
        if isinstance(leaf, PerReplica) and any(map(object_state.holds_objects, leaf.values))
    }


def for_another_rank(held: Held) -> Held:
    """Returns what a rank needs that has none: the objects of one replica.

    Raises
    ------
    Exception
        They can't be pickled.
    """
    sent = {place: dict([next(iter(parts.items()))]) for place, parts in held.items()}
    try:
        pickle.dumps(sent, 5)
    except Exception as error:
        places = ", ".join(object_state.place_text(name, keys) for name, *keys in sent)
        exceptions.add_note(
            error,
            f"What an ElasticState holds for each replica ({places}) is sent to a spare"
            " that takes a lost rank's place: its classes and functions must be importable, as"
            " lambdas and local functions are not.",
        )
        raise
    return sent


def moved(objects: Mapping[str, Any], held: Held, layout: Layout) -> dict[str, Any]:
    """Returns the objects of a program with those of the replicas that this rank hosts now.

    Parameters
    ----------
    objects : mapping
    held : mapping
        As `held_in` gave it before the replicas moved.
    layout : Layout
        The new one.
    """
    made: dict[Place, dict[int, Any]] = {place: {} for place in held}
    for i in layout.local_replica_ids:
        memo: dict[int, Any] = {}  # an optimizer's copy is that of the module's copy
        for place, parts in held.items():
            one = parts[i] if i in parts else copy.deepcopy(next(iter(parts.values())), memo)
            made[place][i] = one
    values = {place: per_replica(list(parts.values()), layout) for place, parts in made.items()}

    def moved_here(live: Any, place: Place) -> Any:
        return values.get(place, live) if isinstance(live, PerReplica) else live

    return {name: with_changes(value, (name,), moved_here) for name, value in objects.items()}


def values_in(live: Any, place: Place = ()) -> Iterator[tuple[Place, Any]]:
    """Returns the containers, arrays and objects in a nest, each with its place, outer ones first.

    Numbers, texts and the like are passed over.
    """
    yield place, live
    if isinstance(live, (Mapping, list, tuple)) and not object_state.has_state(live):
        items = live.items() if isinstance(live, Mapping) else enumerate(live)
        for key, item in items:
            if type(item) not in _PLAIN_TYPES:
                yield from values_in(item, (*place, key))


def can_be_sent(value: Any) -> bool:
    """Returns whether a value can be pickled."""
    try:
        pickle.dumps(value, 5)
    except Exception:  # each class may have its own
        return False
    return True


def with_changes(
    live: Any,
    place: Place,
    changed: Callable[[Any, Place], Any] = lambda live, place: live,
    *,
    before: Callable[[Any, Place], Any] = lambda live, place: live,
) -> Any:
    """Returns a nest with what `changed` returns for each value and its place, inner ones first.

    Dicts and lists in it are changed themselves. What `before` returns stands in the place of a
    value before those in it are changed.
    """

    def inside(key: Any, item: Any) -> Any:
        return with_changes(item, (*place, key), changed, before=before)

    live = before(live, place)
    if isinstance(live, MutableMapping) and not object_state.has_state(live):
        for key, item in list(live.items()):
            replaced = inside(key, item)
            if replaced is not item:
                live[key] = replaced
    elif isinstance(live, Mapping) and not object_state.has_state(live):
        of_keys = {key: inside(key, item) for key, item in live.items()}
        if any(of_keys[key] is not item for key, item in live.items()):
            make: Callable[[dict[Any, Any]], Any] = type(live)
            live = make(of_keys)  # as a restore makes it anew
    elif isinstance(live, (list, tuple)) and not object_state.has_state(live):
        items = [inside(i, item) for i, item in enumerate(live)]
        if any(new is not old for new, old in zip(items, live, strict=True)):
            live = refilled(live, items)
    return changed(live, place)
