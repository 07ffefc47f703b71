"""The order in which a reproducible reduction combines what the replicas contribute: pure.

One balanced binary tree over the ids of the replicas: its left half has the largest power of two
below the number of replicas. The layout only says who computes which part of it: a rank combines
the subtrees that it hosts whole, and what these give, its partials, is combined over the ranks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from .array_libraries import Array

#: A binary tree: the index of an array, or a left and a right half.
_Node = int | tuple[Any, Any]


class Order:
    """In which order arrays are combined: one of the binary trees over them.

    Attributes
    ----------
    temporaries : int
        How many arrays `combine` needs beside the target.
    """

    def __init__(self, count: int, root: _Node) -> None:
        self.count = count
        #: Each combines two registers into one: the arrays, then the target, then temporaries.
        self._steps: list[tuple[int, int, int]] = []
        self.temporaries = 0
        self._emit(root, count)

    def _emit(self, node: _Node, target: int) -> int:
        """Adds the steps that leave `node` in `target`; returns where it is: an array stays."""
        if isinstance(node, int):
            return node
        left = self._emit(node[0], target)
        right = self._emit(node[1], target + 1)
        if right == target + 1:
            self.temporaries = max(self.temporaries, right - self.count)
        self._steps.append((target, left, right))
        return target

    def combine(
        self,
        combine: Callable[..., Any],
        arrays: Sequence[Array],
        target: Array,
        temporaries: Sequence[Array] = (),
    ) -> None:
        """Combines `arrays` into `target`, in the dtype of `target`.

        `target` may be the memory of one of them where that is the first, or where they are one.
        `combine` is a ufunc, or has a signature like one.
        """
        dtype = target.dtype
        if len(arrays) == 1:
            np.copyto(target, arrays[0], casting="unsafe")
            return
        registers = [*arrays, target, *temporaries]
        for to, left, right in self._steps:
            out = registers[to]
            combine(registers[left], registers[right], out=out, dtype=dtype, casting="unsafe")


class Partial(NamedTuple):
    """A subtree that a rank hosts whole, as large as can be."""

    #: The replicas, counted from the first one of the rank.
    local: slice
    order: Order


class Tree:
    """The tree over the replicas of a layout.

    Parameters
    ----------
    counts : tuple of int
        How many replicas each rank hosts, in rank order.

    Attributes
    ----------
    partials : list of list of Partial
        What each rank combines for itself.
    order : Order
        How the partials of all ranks, one rank's after the other, are combined.
    """

    def __init__(self, counts: tuple[int, ...]) -> None:
        self._ranks = [rank for rank, count in enumerate(counts) for _ in range(count)]
        starts = [sum(counts[:rank]) for rank in range(len(counts))]
        self.partials: list[list[Partial]] = [[] for _ in counts]
        self._number = 0
        root = self._cut(0, sum(counts), starts)
        self.order = Order(self._number, root)

    def _cut(self, start: int, stop: int, starts: Sequence[int]) -> _Node:
        """Makes a partial of each subtree that one rank hosts; returns the tree above them."""
        rank = self._ranks[start]
        if rank == self._ranks[stop - 1]:
            first = starts[rank]
            order = Order(stop - start, _balanced(0, stop - start))
            self.partials[rank].append(Partial(slice(start - first, stop - first), order))
            self._number += 1
            return self._number - 1
        half = middle(start, stop)
        return self._cut(start, half, starts), self._cut(half, stop, starts)


@functools.lru_cache(maxsize=64)
def tree_of(counts: tuple[int, ...]) -> Tree:
    """Returns the tree over the replicas of a layout, by how many each rank hosts."""
    return Tree(counts)


@functools.lru_cache(maxsize=64)
def in_a_row(count: int) -> Partial:
    """Returns what combines all replicas of a rank one after the other.

    Examples
    --------
    >>> import numpy as np
    >>> total = np.empty(2)
    >>> in_a_row(3).order.combine(np.add, np.arange(6.0).reshape(3, 2), total)
    >>> total
    array([6., 9.])
    """
    root: _Node = 0
    for replica in range(1, count):
        root = (root, replica)
    return Partial(slice(0, count), Order(count, root))


def middle(start: int, stop: int) -> int:
    """Returns where the right half begins of the tree over some replicas.

    Examples
    --------
    >>> middle(0, 6)
    4
    """
    return start + (1 << ((stop - start - 1).bit_length() - 1))


def _balanced(start: int, stop: int) -> _Node:
    if stop - start == 1:
        return start
    half = middle(start, stop)
    return _balanced(start, half), _balanced(half, stop)
