"""Plans that make other elements of those of their sources: stacked, changed, side by side."""

# ruff: noqa: D102 - what a plan overrides is documented in DatasetPlan.

from __future__ import annotations

import dataclasses
import functools
import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from ...core.context import reading_own_rows
from ...core.exceptions import add_note
from ...core.nest import Structure, map_structure, unflatten
from ..elements import (
    ArraySpec,
    as_arrays,
    own_arrays,
    own_copy,
    parts_of,
    row_count,
    rows_of,
    stack,
)
from ..epochs import Reading
from .dataset_plan import (
    INFINITE_CARDINALITY,
    UNKNOWN_CARDINALITY,
    Cut,
    DatasetPlan,
    Element,
    Positions,
    Verb,
)
from .function_calls import FunctionCalls, name_of, spread


class Batch(Verb):
    """Consecutive elements, stacked."""

    def __init__(self, source: DatasetPlan, batch_size: int, drop_remainder: bool) -> None:
        length = source.length
        if length >= 0:
            length = length // batch_size if drop_remainder else -(-length // batch_size)
        verb = f"batch({batch_size}{', drop_remainder=True' * drop_remainder})"
        super().__init__(source, verb, length=length, batched=True)
        self._batch_size = batch_size
        self.drops_remainder = drop_remainder
        self.is_uniform = self.is_uniform and drop_remainder

    def spec(self) -> Any:
        rows = self._batch_size if self.drops_remainder else None
        # Rows that are read as one array keep their byte order; stacked ones get the machine's.
        is_read = self.indexable and self._source.is_uniform and not self._source.batched

        def of_rows(spec: ArraySpec) -> ArraySpec:
            dtype = spec.dtype if is_read else np.result_type(spec.dtype)
            return ArraySpec((rows, *spec.shape), dtype)

        return map_structure(of_rows, self._source.spec())

    def iterate(self, epoch: int, cut: Cut | None, start: int = 0) -> Iterator[Element]:
        if self.indexable:
            return super().iterate(epoch, cut, start)
        return self._stream(epoch, cut, start * self._batch_size)

    def element(self, position: int, epoch: int, cut: Cut | None) -> Element:
        start = position * self._batch_size
        stop = start + self._batch_size
        if self._source.length >= 0:
            stop = min(stop, self._source.length)
        positions = np.arange(start, stop, dtype=np.int64)
        if cut is None:
            return len(positions), self._source.read_parts([positions], epoch)[0]
        parts = [positions[part] for part in cut(len(positions))]
        with reading_own_rows():
            if self._source.is_uniform:
                return len(positions), self._source.read_parts(parts, epoch)
            # Nothing is as long as the first row of this batch: others may have other lengths.
            read = [part if part.size else positions[:1] for part in parts]
            made = self._source.read_parts(read, epoch)
        return len(positions), [
            one if part.size else own_copy(rows_of(one, slice(0, 0)))
            for one, part in zip(made, parts, strict=True)
        ]

    def _stream(self, epoch: int, cut: Cut | None, start: int) -> Iterator[Element]:
        elements = enumerate(self._source.values(epoch, start), start)
        size = min(self._batch_size, sys.maxsize)  # islice counts no further
        while rows := list(itertools.islice(elements, size)):
            if self.drops_remainder and len(rows) < self._batch_size:
                return
            numbers, values = zip(*rows, strict=True)
            batch = stack(values, numbers, sorts_keys=True)
            number = len(rows)
            yield number, batch if cut is None else own_copy(parts_of(batch, cut(number)))


class Map(Verb):
    """What a function makes of each element."""

    def __init__(
        self, source: DatasetPlan, function: Callable[..., Any], parallel_calls: int
    ) -> None:
        self._name = f"map({name_of(function)})"
        super().__init__(source, self._name)
        self.spec_is_free = self.is_uniform = False
        self._function = function
        self._calls = FunctionCalls(parallel_calls)

    def spec(self) -> Any:
        spec = self.first_spec()
        if not self.batched:
            return spec
        # Batches differ in their number of rows; another function may even make single numbers.
        return map_structure(
            lambda leaf: dataclasses.replace(
                leaf, shape=(None, *leaf.shape[1:])[: len(leaf.shape)]
            ),
            spec,
        )

    def iterate(self, epoch: int, cut: Cut | None, start: int = 0) -> Iterator[Element]:
        return self._calls.results(
            functools.partial(self._call, element, position, epoch, cut)
            for position, element in enumerate(self._source.values(epoch, start), start)
        )

    def element(self, position: int, epoch: int, cut: Cut | None) -> Element:
        _, element = self._source.element(position, epoch, None)
        return self._call(element, position, epoch, cut)

    def elements(self, positions: Positions, epoch: int) -> list[Any]:
        elements = self._source.elements(positions, epoch)
        calls = (
            functools.partial(self._call, element, position, epoch, None)
            for position, element in zip(positions.tolist(), elements, strict=True)
        )
        return [value for _, value in self._calls.results(calls)]

    def place(self, position: int, epoch: int) -> str:
        return self._source.place(position, epoch)

    def _call(self, element: Any, position: int, epoch: int, cut: Cut | None) -> Element:
        try:
            with Reading(epoch, position):
                value = spread(self._function, element)
            # Copied, since the function may return what it keeps, or the same buffer each time.
            if cut is None:
                return 1, own_arrays(value, self._returned)
            made = as_arrays(value, self._returned)
            rows = row_count(made, self._returned)
            return rows, own_copy(parts_of(made, cut(rows)))
        except Exception as error:
            add_note(error, f"Raised in {self._name} for {self.place(position, epoch)}.")
            raise

    def _returned(self) -> str:
        return f"what {self._name} returned"


class Zip(DatasetPlan):
    """Nests of elements, one of each source."""

    def __init__(self, structure: Structure, sources: Sequence[DatasetPlan]) -> None:
        lengths = [source.length for source in sources]
        if UNKNOWN_CARDINALITY in lengths:
            length = UNKNOWN_CARDINALITY
        else:
            known = [length for length in lengths if length >= 0]
            length = min(known, default=INFINITE_CARDINALITY)
        super().__init__(
            f"zip({', '.join(source.text for source in sources)})",
            length,
            sources=sources,
        )
        self._structure = structure
        self._sources = sources

    def spec(self) -> Any:
        return unflatten(self._structure, [source.spec() for source in self._sources])

    def iterate(self, epoch: int, cut: Cut | None, start: int = 0) -> Iterator[Element]:
        inputs = [source.iterate(epoch, cut, start) for source in self._sources]
        steps: Iterator[Sequence[Element]] = zip(*inputs, strict=False)
        if self.length >= 0:  # nothing is read of the longer ones beyond the end
            steps = itertools.islice(steps, max(0, self.length - start))
        return (self._joined(step, start + n, cut) for n, step in enumerate(steps))

    def element(self, position: int, epoch: int, cut: Cut | None) -> Element:
        parts = [source.element(position, epoch, cut) for source in self._sources]
        return self._joined(parts, position, cut)

    def elements(self, positions: Positions, epoch: int) -> list[Any]:
        columns = [source.elements(positions, epoch) for source in self._sources]
        return [unflatten(self._structure, row) for row in zip(*columns, strict=True)]

    def read(self, positions: Positions, epoch: int) -> Any:
        return unflatten(
            self._structure, [source.read(positions, epoch) for source in self._sources]
        )

    def place(self, position: int, epoch: int) -> str:
        if not self.indexable:
            return super().place(position, epoch)
        return " and ".join(source.place(position, epoch) for source in self._sources)

    def _joined(self, parts: Sequence[Element], position: int, cut: Cut | None) -> Element:
        rows = [count for count, _ in parts]
        if cut is not None and len(set(rows)) > 1:
            raise ValueError(
                f"the batches of element {position} of {self.text} have {rows} rows, so they can't "
                "be cut alike. Zip first: Dataset.zip(...).batch(global_batch_size)."
            )
        values = [value for _, value in parts]
        if cut is None:
            return rows[0], unflatten(self._structure, values)
        return rows[0], [
            unflatten(self._structure, of_part) for of_part in zip(*values, strict=True)
        ]
