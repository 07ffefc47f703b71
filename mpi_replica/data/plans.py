"""What the verbs of a dataset do: which position of the source, in which epoch.

Where rows can be reached by position (`indexable`) a verb only computes positions, and `Slices`
reads last: nothing is read that was not asked for. Elsewhere elements stream by. All of it is a
function of (epoch, position), so that every rank, and a run that goes on later, gets the same.
"""

# ruff: noqa: D102 - what a plan overrides is documented in Plan.

from __future__ import annotations

import inspect
import itertools
import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..nest import flatten, leaf_paths, map_structure
from .elements import ArraySpec, as_arrays, at, concatenate, spec_of, stack

__all__ = [
    "INFINITE_CARDINALITY",
    "UNKNOWN_CARDINALITY",
    "Batch",
    "BufferShuffle",
    "Generated",
    "Permutation",
    "Plan",
    "Range",
    "Repeat",
    "SliceRows",
    "Slices",
]

INFINITE_CARDINALITY = -1
UNKNOWN_CARDINALITY = -2

# Epochs that are set aside for one iteration of an endless repeat, so that the next iteration
# does not see the same orders again.
_EPOCHS_OF_ENDLESS_REPEAT = 2**32

Positions = NDArray[np.int64]
SliceRows = Callable[[int], slice]


class Plan(ABC):
    """How a dataset gets its elements.

    An element comes with its number of rows: of the whole batch, 1 where there is no batch. `cut`
    picks the rows wanted of an outermost batch of n; None wants all.
    """

    def __init__(self, text: str, length: int, *, indexable: bool, batched: bool) -> None:
        self.text = text
        self.length = length
        self.indexable = indexable
        self.batched = batched

    @abstractmethod
    def spec(self) -> Any:
        """Return the nest of `ArraySpec` of an element."""

    def iterate(self, epoch: int, cut: SliceRows | None) -> Iterator[tuple[int, Any]]:
        """Iterate the elements of one epoch."""
        positions = itertools.count() if self.length < 0 else range(self.length)
        return (self.element(position, epoch, cut) for position in positions)

    def element(self, position: int, epoch: int, cut: SliceRows | None) -> tuple[int, Any]:
        """Return the element at a position, where the plan is indexable."""
        rows = self.read(np.array([position], np.int64), epoch)
        return 1, map_structure(operator.itemgetter(0), rows)

    def read(self, positions: Positions, epoch: int) -> Any:
        """Return the elements at these positions, stacked, where the plan is indexable."""
        raise NotImplementedError(f"{self.text} can't be read by position.")


class Slices(Plan):
    """Rows of arrays."""

    def __init__(self, arrays: Any) -> None:
        leaves, structure = flatten(arrays)
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
        self._arrays = arrays

    def spec(self) -> Any:
        return map_structure(lambda leaf: ArraySpec(leaf.shape[1:], leaf.dtype), self._arrays)

    def read(self, positions: Positions, epoch: int) -> Any:
        return map_structure(lambda leaf: leaf[positions], self._arrays)


class Range(Plan):
    """Numbers at equal distances."""

    def __init__(self, start: int, stop: int, step: int) -> None:
        length = max(0, -((start - stop) // step))
        super().__init__(f"range({start}, {stop}, {step})", length, indexable=True, batched=False)
        self._start = start
        self._step = step

    def spec(self) -> Any:
        return ArraySpec((), np.dtype(np.int64))

    def read(self, positions: Positions, epoch: int) -> Any:
        return self._start + self._step * positions


class Generated(Plan):
    """What a function's iterator yields, as a stream."""

    def __init__(self, generator: Callable[[], Iterable[Any]]) -> None:
        name = getattr(generator, "__qualname__", type(generator).__qualname__)
        super().__init__(
            f"from_generator({name})", UNKNOWN_CARDINALITY, indexable=False, batched=False
        )
        self._generator = generator
        self._spec: Any = None

    def spec(self) -> Any:
        if self._spec is None:
            first = next(self.iterate(0, None), None)
            if first is None:
                raise ValueError(
                    f"{self.text} yielded nothing, so the spec of its elements is not known. "
                    "Check what it reads."
                )
            self._spec = spec_of(first[1])
        return self._spec

    def iterate(self, epoch: int, cut: SliceRows | None) -> Iterator[tuple[int, Any]]:
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
        for number, element in enumerate(made):
            # Copied, since a generator may fill the same buffer again before a batch is stacked.
            arrays = as_arrays(element, f"element {number} of {self.text}", copy=True)
            # Index () makes a 0-d array the numpy scalar that a row of a 1-D array is too.
            yield 1, map_structure(operator.itemgetter(()), arrays)


class Batch(Plan):
    """Consecutive elements, stacked."""

    def __init__(self, source: Plan, batch_size: int, drop_remainder: bool) -> None:
        length = source.length
        if length >= 0:
            length = length // batch_size if drop_remainder else -(-length // batch_size)
        text = f"{source.text}.batch({batch_size}{', drop_remainder=True' * drop_remainder})"
        super().__init__(text, length, indexable=source.indexable, batched=True)
        self._source = source
        self._batch_size = batch_size
        self._drop_remainder = drop_remainder

    def spec(self) -> Any:
        rows = self._batch_size if self._drop_remainder else None
        return map_structure(
            lambda spec: ArraySpec((rows, *spec.shape), spec.dtype), self._source.spec()
        )

    def iterate(self, epoch: int, cut: SliceRows | None) -> Iterator[tuple[int, Any]]:
        return super().iterate(epoch, cut) if self.indexable else self._stream(epoch, cut)

    def element(self, position: int, epoch: int, cut: SliceRows | None) -> tuple[int, Any]:
        start = position * self._batch_size
        stop = start + self._batch_size
        if self._source.length >= 0:
            stop = min(stop, self._source.length)
        positions = np.arange(start, stop, dtype=np.int64)
        wanted = positions if cut is None else positions[cut(len(positions))]
        return len(positions), self._source.read(wanted, epoch)

    def read(self, positions: Positions, epoch: int) -> Any:
        # No batch of batches is wanted: the first one shows the shape of none.
        numbers = positions.tolist() or [0]
        batches = stack([self.element(n, epoch, None)[1] for n in numbers], numbers)
        return map_structure(operator.itemgetter(slice(len(positions))), batches)

    def _stream(self, epoch: int, cut: SliceRows | None) -> Iterator[tuple[int, Any]]:
        elements = enumerate(value for _, value in self._source.iterate(epoch, None))
        while taken := list(itertools.islice(elements, self._batch_size)):
            if self._drop_remainder and len(taken) < self._batch_size:
                return
            numbers, values = zip(*taken, strict=True)
            wanted = slice(None) if cut is None else cut(len(taken))
            yield len(taken), map_structure(operator.itemgetter(wanted), stack(values, numbers))


class Permutation(Plan):
    """All elements of an indexable source in a random order."""

    def __init__(self, source: Plan, seed: int, reshuffle: bool) -> None:
        text = f"{source.text}.shuffle(seed={seed})"
        super().__init__(text, source.length, indexable=True, batched=source.batched)
        self._source = source
        self._seed = seed
        self._reshuffle = reshuffle
        self._newest: tuple[int, Positions] | None = None

    def spec(self) -> Any:
        return self._source.spec()

    def element(self, position: int, epoch: int, cut: SliceRows | None) -> tuple[int, Any]:
        return self._source.element(int(self._order(epoch)[position]), epoch, cut)

    def read(self, positions: Positions, epoch: int) -> Any:
        return self._source.read(self._order(epoch)[positions], epoch)

    def _order(self, epoch: int) -> Positions:
        key = epoch if self._reshuffle else 0
        newest = self._newest
        if newest is None or newest[0] != key:
            newest = key, _random(self._seed, key).permutation(self.length)
            self._newest = newest
        return newest[1]


class BufferShuffle(Plan):
    """Elements of a stream, each drawn at random from a buffer."""

    def __init__(self, source: Plan, seed: int, reshuffle: bool, buffer_size: int) -> None:
        text = f"{source.text}.shuffle({buffer_size}, seed={seed})"
        super().__init__(text, source.length, indexable=False, batched=source.batched)
        self._source = source
        self._seed = seed
        self._reshuffle = reshuffle
        self._buffer_size = buffer_size

    def spec(self) -> Any:
        return self._source.spec()

    def iterate(self, epoch: int, cut: SliceRows | None) -> Iterator[tuple[int, Any]]:
        random = _random(self._seed, epoch if self._reshuffle else 0)
        elements = self._source.iterate(epoch, cut)
        buffer = list(itertools.islice(elements, self._buffer_size))
        for element in elements:
            drawn = int(random.integers(len(buffer)))
            yield buffer[drawn]
            buffer[drawn] = element
        for drawn in random.permutation(len(buffer)):
            yield buffer[drawn]


class Repeat(Plan):
    """Several passes; pass i of epoch e is epoch e * passes + i of the source."""

    def __init__(self, source: Plan, count: int | None) -> None:
        if count == 0 or source.length == 0:
            length = 0
        elif count is None or source.length == INFINITE_CARDINALITY:
            length = INFINITE_CARDINALITY
        elif source.length == UNKNOWN_CARDINALITY:
            length = UNKNOWN_CARDINALITY
        else:
            length = source.length * count
        super().__init__(
            f"{source.text}.repeat({'' if count is None else count})",
            length,
            indexable=source.indexable and source.length >= 0,
            batched=source.batched,
        )
        self._source = source
        self._count = count
        self._passes = _EPOCHS_OF_ENDLESS_REPEAT if count is None else count

    def spec(self) -> Any:
        return self._source.spec()

    def iterate(self, epoch: int, cut: SliceRows | None) -> Iterator[tuple[int, Any]]:
        return super().iterate(epoch, cut) if self.indexable else self._stream(epoch, cut)

    def element(self, position: int, epoch: int, cut: SliceRows | None) -> tuple[int, Any]:
        number, inner = divmod(position, self._source.length)
        return self._source.element(inner, epoch * self._passes + number, cut)

    def read(self, positions: Positions, epoch: int) -> Any:
        numbers, inner = np.divmod(positions, self._source.length)
        parts = [
            self._source.read(inner[numbers == number], epoch * self._passes + number)
            for number in np.unique(numbers).tolist() or [0]
        ]
        if len(parts) == 1:
            return parts[0]
        # The parts lie pass after pass; the inverse of that sort puts each row where it was asked.
        place = np.argsort(np.argsort(numbers, kind="stable"))
        return map_structure(operator.itemgetter(place), concatenate(parts))

    def _stream(self, epoch: int, cut: SliceRows | None) -> Iterator[tuple[int, Any]]:
        for number in itertools.islice(itertools.count(), self._count):
            yielded = False
            for element in self._source.iterate(epoch * self._passes + number, cut):
                yielded = True
                yield element
            if self._count is None and not yielded:
                raise ValueError(
                    f"pass {number} of {self.text} yielded nothing, so it would never end. Return "
                    "a new iterator with elements in each call, or give repeat a count."
                )


def _random(seed: int, epoch: int) -> np.random.Generator:
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, epoch])))
