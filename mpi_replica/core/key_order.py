"""The order of the keys of mappings, which the structure of a nest does not tell.

A program goes through a dict in the order in which it was filled. Replicas may fill theirs in
several ones: what is made of these needs one that is the same on all ranks.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import optree

from .containers import NAMESPACE, is_mapping_opened_here, remade
from .nest import Structure, flatten

#: That of mappings whose keys are sorted.
SORTED = ""


def key_order(value: Any, structure: Structure | None = None) -> str:
    """Returns a text that tells the order of keys in `value`; who knows its structure gives it.

    Nests of one structure and one such text have their keys in the same order.
    """
    if structure is None:
        structure = flatten(value)[1]
    if structure.num_nodes == 1:
        return SORTED
    own = SORTED
    if type(value) in (dict, defaultdict) or is_mapping_opened_here(value):
        keys, in_order = [*value], structure.entries()
        if keys != in_order:
            places = {key: place for place, key in enumerate(in_order)}
            own = str([places[key] for key in keys])
    if structure.num_nodes == len(structure) + 1:  # all of its items are leaves
        return own
    items = optree.tree_flatten_one_level(value, none_is_leaf=True, namespace=NAMESPACE)[0]
    orders = [own, *map(key_order, items, structure.children())]
    return SORTED if all([order == SORTED for order in orders]) else f"({';'.join(orders)})"


def with_sorted_keys(value: Any, structure: Structure | None = None) -> Any:
    """Returns the nest `value` with the keys of mappings in order.

    Who knows its structure gives it.
    """
    if structure is None:
        structure = flatten(value)[1]
    if structure.num_nodes == 1:
        return value
    items, kept, keys, make = optree.tree_flatten_one_level(
        value, none_is_leaf=True, namespace=NAMESPACE
    )
    items = [*map(with_sorted_keys, items, structure.children())]
    if type(value) is dict:
        return dict(zip(keys, items, strict=True))
    if type(value) is defaultdict:
        return defaultdict(value.default_factory, zip(keys, items, strict=True))
    return remade(value, keys, items) if is_mapping_opened_here(value) else make(kept, items)
