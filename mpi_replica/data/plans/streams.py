"""Plans whose elements can't be reached by position: each depends on those before it."""

# ruff: noqa: D102 - what a plan overrides is documented in DatasetPlan.

from __future__ import annotations

import dataclasses
import functools
import itertools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from ...core.array_libraries import to_numpy
from ...core.exceptions import add_note
from ...core.nest import map_structure
from ..elements import own_copy, parts_of, row_count, unbatched
from ..epochs import Reading
from .dataset_plan import (
    INFINITE_CARDINALITY,
    UNKNOWN_CARDINALITY,
    Cut,
    DatasetPlan,
    Element,
    Verb,
)
from .function_calls import name_of, spread


class BufferShuffle(Verb):
    """Elements of a stream, each drawn at random from a buffer."""

    def __init__(self, source: DatasetPlan, seed: int, reshuffle: bool, buffer_size: int) -> None:
        same = ", reshuffle_each_iteration=False" * (not reshuffle)
        verb = f"shuffle({buffer_size}, seed={seed}{same})"
        super().__init__(source, verb, indexable=False)
        self._seed = seed
        self._reshuffle = reshuffle
        self._buffer_size = buffer_size

    def iterate(self, epoch: int, cut: Cut | None, start: int = 0) -> Iterator[Element]:
        random = _random(self._seed, epoch if self._reshuffle else 0)
        if self._source.indexable:  # an endless one: positions are drawn, and few are read
            drawn = itertools.islice(self._draws(itertools.count(), random), start, None)
            return (self._source.element(position, epoch, cut) for position in drawn)
        elements = self._source.iterate(epoch, cut)
        return itertools.islice(self._draws(elements, random), start, None)

    def _draws(self, elements: Iterator[Any], random: np.random.Generator) -> Iterator[Any]:
        size = min(self._buffer_size, sys.maxsize)  # islice counts no further
        buffer = list(itertools.islice(elements, size))
        for element in elements:
            drawn = int(random.integers(len(buffer)))
            yield buffer[drawn]
            buffer[drawn] = element
        for drawn in random.permutation(len(buffer)):
            yield buffer[drawn]


class Filter(Verb):
    """The elements for which a function returns True."""

    def __init__(self, source: DatasetPlan, predicate: Callable[..., Any]) -> None:
        self._name = f"filter({name_of(predicate)})"
        super().__init__(source, self._name, length=UNKNOWN_CARDINALITY, indexable=False)
        self._predicate = predicate

    def iterate(self, epoch: int, cut: Cut | None, start: int = 0) -> Iterator[Element]:
        # The predicate sees whole batches.
        kept = (
            value
            for position, value in enumerate(self._source.values(epoch))
            if self._is_kept(value, position, epoch)
        )
        for value in itertools.islice(kept, start, None):
            if cut is None:
                yield 1, value
            else:
                rows = row_count(value, lambda: f"an element of {self.text}")
                # Copied where all are wanted, too: views have the strides of the whole.
                yield rows, own_copy(parts_of(value, cut(rows)))

    def _is_kept(self, element: Any, position: int, epoch: int) -> bool:
        try:
            with Reading(epoch, position):
                answer = spread(self._predicate, element)
            if isinstance(answer, bool | np.bool_):
                return bool(answer)
            answer = to_numpy(answer)
            if not (isinstance(answer, np.ndarray) and answer.dtype == bool and answer.ndim == 0):
                raise TypeError(
                    f"{self._name} must return True or False, got {answer!r}. For an array say "
                    "which: mask.all() or mask.any()."
                )
            return bool(answer)
        except Exception as error:
            add_note(error, f"Raised in {self._name} for {self._source.place(position, epoch)}.")
            raise


class Unbatch(Verb):
    """The rows of each element, one after the other."""

    def __init__(self, source: DatasetPlan) -> None:
        # An element may have any number of rows, and a map may change it.
        length = source.length if source.length == INFINITE_CARDINALITY else UNKNOWN_CARDINALITY
        super().__init__(source, "unbatch()", length=length, indexable=False, batched=False)
        self.drops_remainder = False

    def spec(self) -> Any:
        return map_structure(
            lambda leaf: dataclasses.replace(leaf, shape=leaf.shape[1:]), self._source.spec()
        )

    def iterate(self, epoch: int, cut: Cut | None, start: int = 0) -> Iterator[Element]:
        for position, value in enumerate(self._source.values(epoch)):
            rows = row_count(value, functools.partial(self._source.place, position, epoch))
            for element in unbatched(value, rows)[start:]:
                yield 1, element
            start = max(0, start - rows)


def _random(seed: int, epoch: int) -> np.random.Generator:
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, epoch])))
