"""Plans that read: arrays, numbers, objects with rows, and what a function's iterator yields."""

# ruff: noqa: D102 - what a plan overrides is documented in DatasetPlan.

from __future__ import annotations

import functools
import inspect
import itertools
import operator
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

import numpy as np

from ...core.array_libraries import give_back, to_numpy, way_back
from ...core.exceptions import add_note
from ...core.nest import flatten, leaf_paths, unflatten
from ..elements import ArraySpec, at, own_arrays
from ..epochs import ReadElements, Reading
from .dataset_plan import (
    INFINITE_CARDINALITY,
    UNKNOWN_CARDINALITY,
    Cut,
    DatasetPlan,
    Element,
    Positions,
)
from .function_calls import called, name_of


class HasRows(Protocol):
    """An object whose rows are reached by number; it has a length, or a shape."""

    def __getitem__(self, row: int, /) -> Any:
        """Returns one of them."""


def number_of_rows(source: Any) -> int | None:
    """Returns how many rows a source has; None where it does not tell."""
    shape = getattr(source, "shape", None)  # all that an array of zarr has
    if hasattr(type(source), "__len__"):
        try:
            return len(source)
        except TypeError:  # of a sparse matrix of scipy, say
            if shape is None:
                raise
    return operator.index(shape[0]) if isinstance(shape, tuple) and shape else None


class Slices(DatasetPlan):
    """Rows of arrays."""

    def __init__(self, arrays: Any) -> None:
        originals, structure = flatten(arrays)
        leaves = list(map(to_numpy, originals))
        paths = leaf_paths(structure)
        if not leaves:
            raise ValueError(f"from_tensor_slices got {arrays!r}, which holds no array. Give one.")
        for path, leaf in zip(paths, leaves, strict=True):
            if leaf.ndim == 0:
                raise ValueError(
                    f"from_tensor_slices got the scalar {leaf[()]!r}{at(path)}, which has no rows. "
                    "Give an array with an axis 0: np.array([x])."
                )
        if len({len(leaf) for leaf in leaves}) > 1:
            lengths = (f"{path} has {len(leaf)}" for path, leaf in zip(paths, leaves, strict=True))
            raise ValueError(
                "from_tensor_slices got arrays of different length along axis 0: "
                f"{', '.join(lengths)}. Give all of them the same number of rows."
            )
        rows = len(leaves[0])
        super().__init__(f"from_tensor_slices({rows} rows)", rows, indexable=True, batched=False)
        self._leaves = leaves
        self._structure = structure
        self._way = way_back(originals, is_of_call=False)

    def spec(self) -> Any:
        specs = [ArraySpec(leaf.shape[1:], leaf.dtype) for leaf in self._leaves]
        return unflatten(self._structure, specs)

    def element(self, position: int, epoch: int, cut: Cut | None) -> Element:
        # In their own order in memory, as those that are read together.
        return 1, self._given([leaf[position].copy("K") for leaf in self._leaves])

    def elements(self, positions: Positions, epoch: int) -> list[Any]:
        rows = [leaf[positions] for leaf in self._leaves]
        return [self._given([leaf[row] for leaf in rows]) for row in range(positions.size)]

    def read(self, positions: Positions, epoch: int) -> Any:
        return self._given([leaf[positions] for leaf in self._leaves])

    def _given(self, leaves: list[Any]) -> Any:
        return unflatten(self._structure, give_back(leaves, self._way))

    def place(self, position: int, epoch: int) -> str:
        return f"row {position} of {self.text}"


class Range(DatasetPlan):
    """Numbers at equal distances, without end where `stop` is None."""

    def __init__(self, start: int, stop: int | None, step: int) -> None:
        length = INFINITE_CARDINALITY if stop is None else max(0, -((start - stop) // step))
        super().__init__(f"range({start}, {stop}, {step})", length, indexable=True, batched=False)
        self._start = start
        self._step = step

    def spec(self) -> Any:
        return ArraySpec((), np.dtype(np.int64))

    def element(self, position: int, epoch: int, cut: Cut | None) -> Element:
        return 1, np.int64(self._number(position))

    def elements(self, positions: Positions, epoch: int) -> list[Any]:
        return [*self.read(positions, epoch)]

    def read(self, positions: Positions, epoch: int) -> Any:
        if positions.size:
            self._number(int(positions.max()))
        return self._start + self._step * positions

    def _number(self, position: int) -> int:
        number = self._start + self._step * position
        if self.length < 0 and number > np.iinfo(np.int64).max:  # numpy would wrap it around
            raise ValueError(
                f"number {number} of {self.text} does not fit int64. Start with a smaller one."
            )
        return number


class Items(DatasetPlan):
    """Rows of an object that gives one at a time."""

    def __init__(self, source: HasRows, rows: int) -> None:
        text = f"from_source({type(source).__qualname__}, {rows} rows)"
        super().__init__(text, rows, indexable=True, batched=False)
        self.spec_is_free = self.is_uniform = False
        self._source = source

    def element(self, position: int, epoch: int, cut: Cut | None) -> Element:
        try:
            with Reading(epoch, position):
                row = called(operator.getitem, self._source, position)
            # Copied, since the source may fill the same buffer again before a batch is stacked.
            return 1, own_arrays(row, lambda: f"what {self.text} gave")
        except Exception as error:
            add_note(error, f"Raised for {self.place(position, epoch)}.")
            raise

    def place(self, position: int, epoch: int) -> str:
        return f"row {position} of {self.text}"


class Generated(DatasetPlan):
    """What a function's iterator yields, as a stream."""

    def __init__(self, generator: Callable[[], Iterable[Any]]) -> None:
        text = f"from_generator({name_of(generator)})"
        super().__init__(text, UNKNOWN_CARDINALITY, indexable=False, batched=False)
        self.spec_is_free = self.is_uniform = False
        self._generator = generator

    def iterate(self, epoch: int, cut: Cut | None, start: int = 0) -> Iterator[Element]:
        reading = Reading(epoch)
        with reading:
            made = self._generator()
        if not isinstance(made, Iterable):
            raise TypeError(
                f"{self.text} returned {made!r}, which can't be iterated. Write it with yield, or "
                "return an iterator."
            )
        if inspect.isgenerator(made) and inspect.getgeneratorstate(made) != inspect.GEN_CREATED:
            raise TypeError(
                f"{self.text} returned a generator that was started before, so elements are "
                "missing. Make a new one in each call."
            )
        elements = ReadElements(made, reading)
        for number in itertools.count():
            try:
                element = next(elements)
            except StopIteration:
                return
            except Exception as error:
                add_note(error, f"Raised for {self.place(number, epoch)}.")
                raise
            if number >= start:
                # Copied, since a generator may fill the same buffer again.
                yield 1, own_arrays(element, functools.partial(self.place, number, epoch))
