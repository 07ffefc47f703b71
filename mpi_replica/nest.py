"""Nested structures, as in tf.nest: flatten, rebuild, name the leaves.

Lists, tuples, named tuples and mappings are structure; everything else is a leaf, ``None``
included. Keys of a dict are visited in sorted order. The work is done by optree.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import optree

from .errors import StructureMismatchError

__all__ = [
    "Structure",
    "are_plain",
    "flatten",
    "key",
    "leaf_paths",
    "map_structure",
    "structure_text",
    "transposed",
    "unflatten",
]

Structure = optree.PyTreeSpec

_LEAF: Structure = optree.treespec_leaf(none_is_leaf=True)

# Asking optree about a value that can't be a nest costs a microsecond; this does not.
_LEAF_TYPES = frozenset(
    {np.ndarray, float, int, bool, str, bytes, type(None), np.float32, np.float64, np.int64}
)

_ADDRESS = re.compile(" at 0x[0-9a-f]+>")

_texts: dict[Structure, str] = {_LEAF: "*"}
_paths: dict[Structure, tuple[str, ...]] = {_LEAF: ("",)}
# Structures of a program are few; a program that makes new ones all the time must not grow.
_CACHE_SIZE = 4096


def are_plain(leaves: Iterable[Any]) -> bool:
    """Return whether all leaves are arrays, numbers, strings or None: of no class of this package.

    Quick; some plain leaves of rarer types are not known to be.
    """
    return _LEAF_TYPES.issuperset(map(type, leaves))


def flatten(value: Any) -> tuple[list[Any], Structure]:
    """Return the leaves of `value`, in a fixed order, and its structure."""
    if type(value) in _LEAF_TYPES:
        return [value], _LEAF
    return optree.tree_flatten(value, none_is_leaf=True)


def key(structure: Structure) -> Structure | None:
    """Return what stands for `structure` in keys of a cache: None for that of a leaf.

    optree hashes and compares all of a structure each time.
    """
    return None if structure is _LEAF else structure


def unflatten(structure: Structure, leaves: Iterable[Any]) -> Any:
    """Return the nest of `structure` with `leaves` in it: the inverse of `flatten`."""
    if structure is _LEAF:
        (leaf,) = leaves
        return leaf
    return optree.tree_unflatten(structure, leaves)


def map_structure(function: Callable[[Any], Any], value: Any) -> Any:
    """Return the nest `value` with `function` applied to each leaf; containers are new."""
    leaves, structure = flatten(value)
    return unflatten(structure, [function(leaf) for leaf in leaves])


def transposed(values: Sequence[Any], join: Callable[[list[Any]], Any], caller: str) -> Any:
    """Return one nest out of several of the same structure: `join` makes each leaf.

    Raises
    ------
    StructureMismatchError
        They differ in structure; the text names `caller`.
    """
    rows, structures = zip(*(flatten(value) for value in values), strict=True)
    for index, structure in enumerate(structures):
        if structure != structures[0]:
            raise StructureMismatchError(
                f"{caller} got different structures: {structure_text(structures[0])} first, and"
                f" {structure_text(structure)} as value {index}. Return the same nest each time."
            )
    return unflatten(structures[0], [join(list(column)) for column in zip(*rows, strict=True)])


def structure_text(structure: Structure) -> str:
    """Return a text that tells `structure` from every other one, the same in every process.

    Examples
    --------
    >>> structure_text(flatten({"b": [1, 2], "a": None})[1])
    "{'a': *, 'b': [*, *]}"
    """
    text = _texts.get(structure)
    if text is None:
        if len(_texts) >= _CACHE_SIZE:
            _texts.clear()
        text = str(structure).removeprefix("PyTreeSpec(").removesuffix(", NoneIsLeaf)")
        text = _ADDRESS.sub(">", text)  # that of a defaultdict's function, say
        _texts[structure] = text
    return text


def leaf_paths(structure: Structure) -> tuple[str, ...]:
    """Return where each leaf is, as Python writes it.

    Examples
    --------
    >>> leaf_paths(flatten({"b": [1, 2], "a": None})[1])
    ("['a']", "['b'][0]", "['b'][1]")
    """
    paths = _paths.get(structure)
    if paths is None:
        if len(_paths) >= _CACHE_SIZE:
            _paths.clear()
        paths = tuple(accessor.codify("") for accessor in structure.accessors())
        _paths[structure] = paths
    return paths
