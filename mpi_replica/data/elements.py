"""Elements of a dataset: nests of numpy arrays and scalars, their specs, and how they stack."""

from __future__ import annotations

import reprlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import optree

from ..nest import flatten, leaf_paths, map_structure, structure_text, unflatten

__all__ = ["ArraySpec", "as_arrays", "at", "concatenate", "spec_of", "stack"]


@dataclass(frozen=True)
class ArraySpec:
    """Describe an array: its shape, with None for a length that is not fixed, and its dtype.

    Source: `tf.TensorSpec`.

    Parameters
    ----------
    shape : tuple of int or None
    dtype : numpy.dtype

    Examples
    --------
    >>> ArraySpec((None, 3), np.dtype("float32"))
    ArraySpec(shape=(None, 3), dtype=dtype('float32'))
    """

    shape: tuple[int | None, ...]
    dtype: np.dtype[Any]


def spec_of(element: Any) -> Any:
    """Return the nest of `ArraySpec` of an element."""
    return map_structure(lambda leaf: ArraySpec(leaf.shape, leaf.dtype), element)


def as_arrays(value: Any, where: str, *, copy: bool = False) -> Any:
    """Return the nest `value` with an array for each leaf; a list is one leaf, as in tf."""
    leaves, structure = optree.tree_flatten(
        value, is_leaf=lambda node: isinstance(node, list), none_is_leaf=True
    )
    arrays = []
    for path, leaf in zip(leaf_paths(structure), leaves, strict=True):
        try:
            array = np.array(leaf) if copy else np.asarray(leaf)
        except ValueError as error:
            raise ValueError(
                f"{where}: {reprlib.repr(leaf)}{at(path)} can't become an array: {error} Give all "
                "its rows one length, or a tuple where it is several arrays."
            ) from error
        if isinstance(leaf, np.ma.MaskedArray):
            raise TypeError(
                f"{where}: the leaf{at(path)} is a masked array, whose mask would be lost. Fill "
                "it first: array.filled(value)."
            )
        if array.dtype == object:
            raise TypeError(
                f"{where}: {reprlib.repr(leaf)}{at(path)} has dtype object as an array. "
                "Give numbers or strings: .astype(float) or .astype(str)."
            )
        arrays.append(array)
    return unflatten(structure, arrays)


def stack(elements: Sequence[Any], numbers: Sequence[int]) -> Any:
    """Return the elements stacked leaf by leaf; `numbers` are their names in an error."""
    first, structure = flatten(elements[0])
    rows = [first]
    for number, element in zip(numbers[1:], elements[1:], strict=True):
        leaves, other = flatten(element)
        if other != structure:
            raise ValueError(
                f"elements do not stack to a batch: element {numbers[0]} is "
                f"{structure_text(structure)}, element {number} is {structure_text(other)}. "
                "Give all elements one structure."
            )
        for place, (one, leaf) in enumerate(zip(first, leaves, strict=True)):
            if one.shape != leaf.shape or _kind(one) != _kind(leaf):
                raise ValueError(
                    f"elements do not stack to a batch: element {numbers[0]} has shape "
                    f"{one.shape} and dtype {one.dtype}, element {number} has shape {leaf.shape} "
                    f"and dtype {leaf.dtype}{at(leaf_paths(structure)[place])}. Give all elements "
                    "one shape and dtype, or use batch(1)."
                )
        rows.append(leaves)
    return unflatten(structure, [np.stack(column) for column in zip(*rows, strict=True)])


def concatenate(parts: Sequence[Any]) -> Any:
    """Return the parts, nests of one structure, joined leaf by leaf along axis 0."""
    structure = flatten(parts[0])[1]
    columns = zip(*(flatten(part)[0] for part in parts), strict=True)
    return unflatten(structure, [np.concatenate(column) for column in columns])


def at(path: str) -> str:
    """Return the words for a path in a message; a lone array has none."""
    return f" at {path}" if path else ""


def _kind(leaf: Any) -> str:
    # Numbers promote to one another; a number among texts would silently become a text.
    return "number" if leaf.dtype.kind in "biufc" else str(leaf.dtype.kind)
