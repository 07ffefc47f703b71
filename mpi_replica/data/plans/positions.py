"""Plans that pick: elements of their source, or of two, at other positions or moments."""

# ruff: noqa: D102 - what a plan overrides is documented in DatasetPlan.

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from ...core.array_libraries import by_numpy
from ...core.nest import map_structure
from ..elements import common_spec, concatenate, require_alike, require_fit, spec_of
from ..read_ahead import read_ahead
from .dataset_plan import (
    INFINITE_CARDINALITY,
    UNKNOWN_CARDINALITY,
    Cut,
    DatasetPlan,
    Element,
    Positions,
    Verb,
)
from .random_order import MOST_ROWS, RandomOrder

# Epochs that are set aside for one iteration of an endless repeat, so that the next iteration
# does not see the same orders again.
_EPOCHS_OF_ENDLESS_REPEAT = 2**32

# A permutation computes so many places at once, and keeps them: neighbours are asked for next,
# and numpy needs as long for few as for these.
_BLOCK = 1024


class _Route(NamedTuple):
    """Where to get some of the elements asked for."""

    source: DatasetPlan
    positions: Positions
    epoch: int
    #: Which of the elements asked for they are; None for all, in their order.
    places: Positions | None = None


def _order(routes: Sequence[_Route]) -> Positions:
    """Returns the order that puts elements, one route's after the other's, where they belong."""
    return np.argsort(np.concatenate([route.places for route in routes]))


class _Picking(Verb):
    """Elements that are a source's, where they are reached by position: only that differs."""

    def routes(self, positions: Positions, epoch: int) -> Sequence[_Route]:
        """Returns where to get the elements at these positions; for none of them one route."""
        return [_Route(self._source, self.inner(positions, epoch), epoch)]

    def inner(self, positions: Positions, epoch: int) -> Positions:
        """Returns at which positions of the source they are, in the same epoch."""
        return positions

    def element(self, position: int, epoch: int, cut: Cut | None) -> Element:
        (route,) = self.routes(np.array([position], np.int64), epoch)
        return route.source.element(int(route.positions[0]), route.epoch, cut)

    def elements(self, positions: Positions, epoch: int) -> list[Any]:
        routes = self.routes(positions, epoch)
        parts = [route.source.elements(route.positions, route.epoch) for route in routes]
        if len(parts) == 1:
            return parts[0]
        for route, part in zip(routes, parts, strict=True):
            if route.source is not routes[0].source:
                where = f"concatenate({route.source.text})"
                require_alike(spec_of(parts[0][0]), spec_of(part[0]), where)
        elements = list(itertools.chain.from_iterable(parts))
        return [elements[place] for place in _order(routes).tolist()]

    def read(self, positions: Positions, epoch: int) -> Any:
        routes = self.routes(positions, epoch)
        parts = [route.source.read(route.positions, route.epoch) for route in routes]
        if len(parts) == 1:
            return parts[0]
        order = _order(routes)
        return map_structure(
            lambda leaf: by_numpy(lambda array: array[order], leaf), concatenate(parts)
        )

    def place(self, position: int, epoch: int) -> str:
        if not self.indexable:
            return super().place(position, epoch)
        (route,) = self.routes(np.array([position], np.int64), epoch)
        return route.source.place(int(route.positions[0]), route.epoch)


class Permutation(_Picking):
    """All elements of an indexable source in a random order."""

    def __init__(self, source: DatasetPlan, seed: int, reshuffle: bool) -> None:
        same = ", reshuffle_each_iteration=False" * (not reshuffle)
        super().__init__(source, f"shuffle(seed={seed}{same})")
        self._seed = seed
        self._reshuffle = reshuffle
        self._order: tuple[int, RandomOrder] | None = None
        self._block: tuple[int, int, Positions] | None = None

    def inner(self, positions: Positions, epoch: int) -> Positions:
        if not positions.size:
            return positions
        key = epoch if self._reshuffle else 0
        order = self._order
        if order is None or order[0] != key:
            order = key, RandomOrder(self.length, seed=self._seed, epoch=key)
            self._order = order
        number = int(positions[0]) // _BLOCK
        start = number * _BLOCK
        if positions.min() < start or positions.max() >= start + _BLOCK:
            return order[1](positions)
        block = self._block
        if block is None or block[:2] != (key, number):
            stop = min(start + _BLOCK, self.length)
            block = key, number, order[1](np.arange(start, stop, dtype=np.int64))
            self._block = block
        return block[2][positions - start]


class Repeat(_Picking):
    """Several passes; pass i of epoch e is epoch e * passes + i of the source."""

    def __init__(self, source: DatasetPlan, count: int | None) -> None:
        if count == 0 or source.length == 0:
            length = 0
        elif count is None or source.length == INFINITE_CARDINALITY:
            length = INFINITE_CARDINALITY
        elif source.length == UNKNOWN_CARDINALITY:
            length = UNKNOWN_CARDINALITY
        else:
            length = source.length * count
        verb = f"repeat({'' if count is None else count})"
        indexable = source.indexable and source.length >= 0
        super().__init__(source, verb, length=length, indexable=indexable)
        self._count = count
        self._passes = _EPOCHS_OF_ENDLESS_REPEAT if count is None else count

    def routes(self, positions: Positions, epoch: int) -> Sequence[_Route]:
        numbers, inner = np.divmod(positions, max(1, self._source.length))
        first = epoch * self._passes
        passes = np.unique(numbers).tolist()
        if len(passes) <= 1:
            return [_Route(self._source, inner, first + sum(passes))]
        places = [np.flatnonzero(numbers == number) for number in passes]
        return [
            _Route(self._source, inner[where], first + number, where)
            for number, where in zip(passes, places, strict=True)
        ]

    def iterate(self, epoch: int, cut: Cut | None, start: int = 0) -> Iterator[Element]:
        length = self._source.length
        if self.length == 0:
            return iter(())
        if length == UNKNOWN_CARDINALITY:
            return itertools.islice(self._run(epoch, cut, 0, 0), start, None)
        return self._run(epoch, cut, *(divmod(start, length) if length > 0 else (0, start)))

    def _run(self, epoch: int, cut: Cut | None, number: int, start: int) -> Iterator[Element]:
        """Iterates from pass `number` on, and in that one from element `start` on."""
        while self._count is None or number < self._count:
            yielded = start > 0
            for element in self._source.iterate(epoch * self._passes + number, cut, start):
                yielded = True
                yield element
            if self._count is None and not yielded:
                raise ValueError(
                    f"pass {number} of {self.text} yielded nothing, so it would never end. Return "
                    "a new iterator with elements in each call, or give repeat a count."
                )
            number, start = number + 1, 0


class Section(_Picking):
    """Elements `start` to `start + count`, or to the end."""

    def __init__(self, source: DatasetPlan, verb: str, start: int, count: int | None) -> None:
        length = source.length
        if length >= 0:
            length = max(0, length - start)
            length = length if count is None else min(count, length)
        elif count == 0 or (count is not None and length == INFINITE_CARDINALITY):
            length = count
        super().__init__(source, verb, length=length)
        self._start = start
        self._count = count

    def inner(self, positions: Positions, epoch: int) -> Positions:
        return self._start + positions

    def iterate(self, epoch: int, cut: Cut | None, start: int = 0) -> Iterator[Element]:
        # no source has more elements than islice counts
        count = None if self._count is None else min(max(0, self._count - start), sys.maxsize)
        start = min(self._start + start, sys.maxsize)
        return itertools.islice(self._source.iterate(epoch, cut, start), count)


class Prefetch(_Picking):
    """All elements; iterating them reads ahead in a thread."""

    def __init__(self, source: DatasetPlan, buffer_size: int) -> None:
        super().__init__(source, f"prefetch({buffer_size})")
        self._buffer_size = buffer_size

    def iterate(self, epoch: int, cut: Cut | None, start: int = 0) -> Iterator[Element]:
        make = functools.partial(self._source.iterate, epoch, cut, start)
        size = self._buffer_size
        return read_ahead(make, size if self.length < 0 else min(size, self.length + 1))

    def place(self, position: int, epoch: int) -> str:
        return self._source.place(position, epoch)


class Shard(_Picking):
    """Each `number`-th element, from `index` on."""

    def __init__(self, source: DatasetPlan, number: int, index: int) -> None:
        length = source.length
        if length >= 0:
            length = -(-max(0, length - index) // number)
        super().__init__(source, f"shard({number}, {index})", length=length)
        self._number = min(number, MOST_ROWS)  # one element at most is that far apart
        self._index = index

    def inner(self, positions: Positions, epoch: int) -> Positions:
        return self._index + self._number * positions

    def iterate(self, epoch: int, cut: Cut | None, start: int = 0) -> Iterator[Element]:
        if self.indexable:
            return super().iterate(epoch, cut, start)
        first = self._index + self._number * start
        return itertools.islice(self._source.iterate(epoch, cut, first), 0, None, self._number)


class Concatenate(_Picking):
    """The elements of one source, then those of another; a chain of these holds one flat list."""

    def __init__(self, first: DatasetPlan, second: DatasetPlan) -> None:
        lengths = first.length, second.length
        if INFINITE_CARDINALITY in lengths or UNKNOWN_CARDINALITY in lengths:
            is_infinite = INFINITE_CARDINALITY in lengths
            length = INFINITE_CARDINALITY if is_infinite else UNKNOWN_CARDINALITY
        else:
            length = sum(lengths)
        super().__init__(first, f"concatenate({second.text})", length=length, others=[second])
        firsts = first._sources if isinstance(first, Concatenate) else [first]
        self._sources: list[DatasetPlan] = [*firsts, second]
        self._source = self._sources[0]
        self._spec: Any = None
        if self.spec_is_free:
            self._spec = _common_spec([first, second])
            self.is_uniform = self.is_uniform and first.spec() == second.spec()

    def spec(self) -> Any:
        if self._spec is None:
            self._spec = _common_spec(self._sources)
        return self._spec

    @functools.cached_property
    def _starts(self) -> Positions:
        """Where each source begins, up to one without end."""
        lengths = [source.length for source in self._sources[:-1]]
        known = itertools.takewhile(lambda length: length >= 0, lengths)
        return np.cumsum([0, *known], dtype=np.int64)

    def routes(self, positions: Positions, epoch: int) -> Sequence[_Route]:
        starts = self._starts
        # For none of them the source of the first element: it shows what they are like.
        asked = positions if positions.size else np.zeros(1, np.int64)
        numbers = np.searchsorted(starts, asked, "right") - 1
        found = np.unique(numbers).tolist()
        if len(found) == 1:
            return [_Route(self._sources[found[0]], positions - starts[found[0]], epoch)]
        places = [np.flatnonzero(numbers == number) for number in found]
        return [
            _Route(self._sources[number], positions[where] - starts[number], epoch, where)
            for number, where in zip(found, places, strict=True)
        ]

    def iterate(self, epoch: int, cut: Cut | None, start: int = 0) -> Iterator[Element]:
        for number, source in enumerate(self._sources):
            if source.length == UNKNOWN_CARDINALITY:
                rest = (plan.iterate(epoch, cut) for plan in self._sources[number:])
                yield from itertools.islice(itertools.chain.from_iterable(rest), start, None)
                return
            yield from source.iterate(epoch, cut, start)
            start = max(0, start - source.length)


def _common_spec(sources: Sequence[DatasetPlan]) -> Any:
    """Returns the spec of the elements of sources that come one after the other, where they fit."""
    first = common = sources[0].spec()
    for source in sources[1:]:
        other = source.spec()
        require_fit(first, other, f"concatenate({source.text})")
        common = common_spec(common, other)
    return common
