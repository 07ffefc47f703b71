"""The order in which a reproducible reduction combines what the replicas contribute: pure.

One balanced binary tree over the ids of the replicas: its left half has the largest power of two
below the number of replicas. The layout only says who computes which part of it: a rank combines
the subtrees that it hosts whole, and what these give, its partials, is combined over the ranks.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from .array_ways import Array

# Of so many arrays a call of numpy for each takes less time than one for each level.
_FEW = 16

#: A binary tree: the index of an array, or a left and a right half.
_Node = int | tuple[Any, Any]


#: Combines two registers into one: where it goes, left, right. The arrays come first, then the
#: target, then temporaries.
_Step = tuple[int, int, int]


class Order:
    """In which order arrays are combined: one of the binary trees over them.

    Parameters
    ----------
    count : int
        How many arrays.
    steps : sequence of _Step
    has_levels : bool
        Whether `combine_rows` can do it, and takes less time.

    Attributes
    ----------
    temporaries : int
        How many arrays `combine` needs beside the target.
    """

    def __init__(self, count: int, steps: Sequence[_Step], *, has_levels: bool = False) -> None:
        self.count = count
        self.has_levels = has_levels
        self._steps = steps
        self.temporaries = max([0, *(right - count for _, _, right in steps)])

    @classmethod
    def of_tree(cls, count: int, root: _Node) -> Order:
        """Returns the order of a tree that is not deep."""
        steps: list[_Step] = []

        def emit(node: _Node, target: int) -> int:
            """Adds the steps that leave `node` in `target`; returns where it is: an array stays."""
            if isinstance(node, int):
                return node
            left, right = emit(node[0], target), emit(node[1], target + 1)
            steps.append((target, left, right))
            return target

        emit(root, count)
        return cls(count, steps, has_levels=count > _FEW and root == _balanced(0, count))

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
        if len(arrays) == 2:  # as it is mostly
            combine(*arrays, out=target, dtype=dtype, casting="unsafe")
            return
        registers = [*arrays, target, *temporaries]
        for to, left, right in self._steps:
            out = registers[to]
            combine(registers[left], registers[right], out=out, dtype=dtype, casting="unsafe")

    def combined(
        self, combine: Callable[..., Any], arrays: Sequence[Array], dtype: np.dtype[Any]
    ) -> Array:
        """Returns what `combine` does with `arrays`; with many small ones in few calls of numpy."""
        total, *temporaries = [
            np.empty(arrays[0].shape, dtype) for _ in range(1 + self.temporaries)
        ]
        is_small = total.nbytes <= self.count  # else a copy of all of them takes longer
        is_row = not self.temporaries  # one after the other: each is combined with the total
        if is_small and self.has_levels:
            self.combine_rows(combine, np.array(arrays, dtype), total)
        elif is_small and is_row and isinstance(combine, np.ufunc):
            np.copyto(total, combine.accumulate(np.array(arrays, dtype), dtype=dtype)[-1])
        else:
            self.combine(combine, arrays, total, temporaries)
        return total

    def combine_rows(self, combine: Callable[..., Any], rows: Array, target: Array) -> None:
        """Combines arrays into `target`, as `combine` does, level by level of the tree.

        Only where it `has_levels`: it is the tree over so many replicas. That takes a call of numpy
        for each level, and not for each array.

        Parameters
        ----------
        combine : callable
        rows : array
            They lie one behind the other along its first axis. All but the last two that are left
            are combined in it.
        target : array
            Of the same dtype. It may be the first row.
        """
        while len(rows) > 2:
            # A row without another one stays the last one of its level.
            pairs = len(rows) // 2 * 2
            combine(rows[0:pairs:2], rows[1:pairs:2], out=rows[0:pairs:2])
            rows = rows[::2]
        if len(rows) == 2:
            combine(rows[0], rows[1], out=target)
        else:
            np.copyto(target, rows[0])


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
        starts = [0, *itertools.accumulate(counts)]
        self.partials: list[list[Partial]] = [[] for _ in counts]
        self._number = 0
        root = self._cut(0, sum(counts), starts)
        self.order = Order.of_tree(self._number, root)

    def _cut(self, start: int, stop: int, starts: Sequence[int]) -> _Node:
        """Makes a partial of each subtree that one rank hosts; returns the tree above them."""
        rank = self._ranks[start]
        if rank == self._ranks[stop - 1]:
            first = starts[rank]
            order = Order.of_tree(stop - start, _balanced(0, stop - start))
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
    # No tree: of a thousand replicas it would be deeper than Python can go.
    steps = [(count, 0 if right == 1 else count, right) for right in range(1, count)]
    return Partial(slice(0, count), Order(count, steps))


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
