"""The contract of a plan: how a dataset gets its elements."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...core.array_libraries import copy_of
from ...core.nest import map_structure
from ..elements import no_rows_of, require_alike, rows_of, spec_of, stack
from .random_order import MOST_ROWS

INFINITE_CARDINALITY = -1
UNKNOWN_CARDINALITY = -2

Positions = NDArray[np.int64]
#: Gets the number of rows of a batch, returns which of them each replica gets.
Cut = Callable[[int], Sequence[slice]]

#: An element behind its number of rows: of the whole batch, 1 where there is no batch. With a `Cut`
#: the list of its parts.
Element = tuple[int, Any]


class DatasetPlan:
    """How a dataset gets its elements.

    `cut` picks the parts wanted of an outermost batch; None wants it whole. Where it is not said, a
    plan is `indexable`, and `batched`, if all of its sources are.
    """

    def __init__(
        self,
        text: str,
        length: int,
        *,
        indexable: bool | None = None,
        batched: bool | None = None,
        sources: Sequence[DatasetPlan] = (),
    ) -> None:
        if length > MOST_ROWS:  # positions are int64
            raise ValueError(
                f"{text} has {length} elements, and a dataset has {MOST_ROWS} at most. Repeat it"
                " less often; repeat() is without end."
            )
        self.text = text
        self.length = length
        if indexable is None:
            indexable = all(plan.indexable for plan in sources)
        if batched is None:
            batched = all(plan.batched for plan in sources)
        self.indexable: bool = indexable
        self.batched: bool = batched
        #: Whether it leaves out elements that make no whole batch.
        self.drops_remainder: bool = bool(sources) and all(plan.drops_remainder for plan in sources)
        #: Whether `spec` reads nothing.
        self.spec_is_free: bool = all(plan.spec_is_free for plan in sources)
        #: Whether any elements of it stack to the same dtypes and shapes.
        self.is_uniform: bool = all(plan.is_uniform for plan in sources)
        self._first_spec: Any = None
        self._no_rows: Any = None

    def spec(self) -> Any:
        """Returns the nest of `ArraySpec` of an element; here, that of the first one."""
        return self.first_spec()

    def first_spec(self) -> Any:
        """Returns the nest of `ArraySpec` of the first element, which is read for it once.

        Raises
        ------
        ValueError
            There is no element.
        """
        if self._first_spec is None:
            first = next(self.iterate(0, None), None)
            if first is None:
                raise ValueError(
                    f"{self.text} yielded nothing, so the spec of its elements is not known. "
                    "Check what it reads."
                )
            self._no_rows = no_rows_of(first[1])
            self._first_spec = spec_of(first[1])
        return self._first_spec

    def iterate(self, epoch: int, cut: Cut | None, start: int = 0) -> Iterator[Element]:
        """Iterates the elements of one epoch, from position `start` on."""
        positions = itertools.count(start) if self.length < 0 else range(start, self.length)
        return (self.element(position, epoch, cut) for position in positions)

    def values(self, epoch: int, start: int = 0) -> Iterator[Any]:
        """Iterates the elements of one epoch without their numbers of rows."""
        return (value for _, value in self.iterate(epoch, None, start))

    def element(self, position: int, epoch: int, cut: Cut | None) -> Element:
        """Returns the element at a position, where the plan is indexable."""
        (element,) = self.elements(np.array([position], np.int64), epoch)
        return 1, element

    def elements(self, positions: Positions, epoch: int) -> list[Any]:
        """Returns the elements at these positions, where the plan is indexable."""
        return [self.element(position, epoch, None)[1] for position in positions.tolist()]

    def read(self, positions: Positions, epoch: int) -> Any:
        """Returns the elements at these positions, stacked, where the plan is indexable."""
        return self._stacked(self.elements(positions, epoch), positions)

    def read_parts(self, parts: Sequence[Positions], epoch: int) -> list[Any]:
        """Returns the elements of each part, stacked by themselves, where the plan is indexable.

        What a part is does not depend on which others are read with it.

        Raises
        ------
        StructureMismatchError
            The parts differ in structure, dtypes or numbers of axes.
        """
        positions = np.concatenate(parts)
        if self.is_uniform:
            rows = self.read(positions, epoch)
            stops = itertools.accumulate(part.size for part in parts)
            return [
                rows_of(rows, slice(stop - part.size, stop))
                for stop, part in zip(stops, parts, strict=True)
            ]
        elements = iter(self.elements(positions, epoch))
        stacked = [
            self._stacked(list(itertools.islice(elements, part.size)), part) for part in parts
        ]
        first, *others = map(spec_of, stacked)
        for other in others:
            require_alike(first, other, f"what replicas get of {self.text}")
        return stacked

    def _stacked(self, elements: Sequence[Any], positions: Positions) -> Any:
        if not positions.size:
            self.first_spec()  # the first element shows the shape of none
            return map_structure(copy_of, self._no_rows)
        # Others may read the rows beside these.
        return stack(elements, positions.tolist(), sorts_keys=False)

    def place(self, position: int, epoch: int) -> str:
        """Returns the words for an element in a message: the row that it comes from, if it can."""
        return f"element {position} of {self.text}"


class Verb(DatasetPlan):
    """A plan that does something with one source, and is otherwise what that one is.

    Parameters
    ----------
    source : DatasetPlan
    verb : str
        What the text of the source goes on with: ``batch(4)``.
    others : sequence of DatasetPlan
        Further sources.
    """

    def __init__(
        self,
        source: DatasetPlan,
        verb: str,
        *,
        length: int | None = None,
        indexable: bool | None = None,
        batched: bool | None = None,
        others: Sequence[DatasetPlan] = (),
    ) -> None:
        super().__init__(
            f"{source.text}.{verb}",
            source.length if length is None else length,
            indexable=indexable,
            batched=batched,
            sources=[source, *others],
        )
        self._source = source

    def spec(self) -> Any:
        """Returns the nest of `ArraySpec` of an element."""
        return self._source.spec()
