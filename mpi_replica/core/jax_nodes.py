"""Containers that JAX knows and optree does not: modules of equinox and flax, classes of programs.

A node is opened one level, by the public functions of ``jax.tree_util``: what is inside may be of
any kind.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any, NamedTuple

from .imported_libraries import imported_library


class JaxNode(NamedTuple):
    """A container, opened."""

    children: list[Any]
    make: MadeByJax
    #: Whether the children are attributes, named by the keys.
    has_attributes: bool


def opened_by_jax(value: Any) -> JaxNode | None:
    """Returns what is in a container that JAX knows; None where it is none, or JAX not imported.

    For JAX a None in it is nothing: it is no child, and is there when it is made anew.
    """
    tree_util: Any = getattr(imported_library("jax"), "tree_util", None)
    if not hasattr(tree_util, "tree_flatten_with_path"):
        return None
    one_level = {"is_leaf": lambda node: node is not value and node is not None}
    pairs, structure = tree_util.tree_flatten_with_path(value, **one_level)
    # Not `treedef_is_leaf`: that takes a module without fields for a leaf, too.
    if value is None or any([child is value for _, child in pairs]):
        return None
    keys = [path[0] for path, _ in pairs]
    has_attributes = all(isinstance(key, tree_util.GetAttrKey) for key in keys)
    names = tuple([key.name if has_attributes else i for i, key in enumerate(keys)])
    return JaxNode([child for _, child in pairs], MadeByJax(structure, names), has_attributes)


def is_function_in_node(child: Any) -> bool:
    """Returns whether a child of a container is a function, such as an activation: it is code."""
    return callable(child) and opened_by_jax(child) is None


class MadeByJax:
    """Makes a container anew, with other children: what optree keeps of it."""

    def __init__(self, structure: Any, keys: tuple[Any, ...]) -> None:
        self._structure = structure
        self.keys = keys

    def __eq__(self, other: object) -> bool:
        return isinstance(other, MadeByJax) and bool(self._structure == other._structure)

    def __hash__(self) -> int:
        return hash(self.keys)

    def __repr__(self) -> str:
        return repr(list(self.keys))[1:-1]

    def __call__(self, children: Iterable[Any]) -> Any:
        """Returns the container with these children."""
        return sys.modules["jax"].tree_util.tree_unflatten(self._structure, list(children))
