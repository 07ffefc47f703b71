"""Input pipelines: datasets that ranks or replicas have of their own, and who takes what of them.

A pipeline belongs to replicas and not to a rank: where a rank is lost, others make its pipeline,
and read on where it stood.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ..core.context import reading_own_rows
from ..core.layout import Layout
from ..core.values import Mirrored
from .batches import arrays_of, copied_batch
from .dataset import Dataset, elements_of
from .epochs import ReadElements, Reading, made_apart
from .function_contexts import InputContext

#: What a replica gets for whom there is nothing more.
END = object()


class Pipelines:
    """The datasets that a function makes, one for each rank or replica.

    Parameters
    ----------
    layout : Layout
        Which replicas share a pipeline: those that are on one rank now.
    dataset_fn : callable
        Gets an `InputContext`.
    per_replica : bool
        Whether each replica has a pipeline of its own.
    """

    def __init__(
        self, layout: Layout, dataset_fn: Callable[[InputContext], Any], *, per_replica: bool
    ) -> None:
        self._dataset_fn = dataset_fn
        self._per_replica = per_replica
        self._num_replicas = layout.num_replicas
        counts = (1,) * layout.num_replicas if per_replica else layout.counts
        #: Which replicas take of each pipeline, in turns.
        self._shared_by = Layout(counts, 0)
        #: How many replicas take of each.
        self.counts = self._shared_by.hosting_counts
        self._made: dict[int, Any] = {}

    def sources(self, replica_ids: Sequence[int]) -> list[Any]:
        """Returns the datasets of these replicas' pipelines, each once.

        Raises
        ------
        TypeError
            The function has made something that can't be iterated.
        ValueError
            It has given two pipelines of this rank one iterator.
        """
        return [self._source(number) for number in self._numbers(replica_ids)]

    def _numbers(self, replica_ids: Sequence[int]) -> list[int]:
        return list(dict.fromkeys(self._shared_by.rank_of(i) for i in replica_ids))

    def _source(self, number: int) -> Any:
        if number not in self._made:
            context = InputContext(len(self.counts), number, self._num_replicas)
            with made_apart():
                source = self._dataset_fn(context)
            check_source(source, "dataset_fn")
            self._require_no_other(number, source)
            self._made[number] = source
        return self._made[number]

    def _require_no_other(self, number: int, source: Any) -> None:
        """Raises where another pipeline reads `source`, too: an iterator, which has one place."""
        for other, made in self._made.items():
            if made is source and isinstance(source, Iterator):
                raise ValueError(
                    f"dataset_fn gives input pipelines {other} and {number}, which are on one rank,"
                    f" one and the same {type(source).__qualname__}: each would get what the other"
                    " one leaves, and on ranks of their own all. Make an iterator in each call, or"
                    " give what can be iterated anew, such as"
                    " mr.data.Dataset.from_generator(function)."
                )

    def steps(self, replica_ids: Sequence[int], epoch: int, start: int) -> Iterator[list[Any]]:
        """Returns what these replicas get in each step from `start` on: an element, or `END`."""
        layout = self._shared_by
        of_pipelines = []
        for number in self._numbers(replica_ids):
            sharing = layout.replica_ids(number)
            mine = [position for position, i in enumerate(sharing) if i in replica_ids]
            source = self._source(number)
            first = start * len(sharing)
            if isinstance(source, Dataset):
                elements = map(arrays_of, elements_of(source, epoch, first))
            else:
                # All of a step are read before any is used, and may come in one and the same
                # memory; and a step may write into them.
                read = ReadElements(source, Reading(epoch))
                elements = map(copied_batch, itertools.islice(read, first, None))
            of_pipelines.append((elements, len(sharing), mine))
        own_rows = reading_own_rows if self._per_replica else contextlib.nullcontext
        while True:
            values = []
            for elements, count, mine in of_pipelines:
                with own_rows():
                    step = [next(elements, END) for _ in range(count)]
                values += [step[position] for position in mine]
            yield values
            if all(value is END for value in values):
                return


def check_source(source: Any, name: str) -> None:
    """Raises unless `source` can be distributed.

    Raises
    ------
    TypeError
        It can't be iterated, or its items are most likely no batches.
    """
    value = source.value if isinstance(source, Mirrored) else source
    # Their keys or characters are no batches; and the arrays of (x, y) are one, as a nest is.
    if isinstance(value, (Mapping, tuple, str, bytes)):
        raise TypeError(
            f"{name} needs a mr.data.Dataset or another iterable of batches, got"
            f" {type(value).__name__} {value!r:.100}. Of arrays write"
            " mr.data.Dataset.from_tensor_slices(arrays).batch(n); or list(batches) where its items"
            " are batches."
        )
    # Arrays have what iterates, also those that hold one number.
    if not isinstance(value, Iterable) or (isinstance(value, np.ndarray) and not value.ndim):
        raise TypeError(
            f"{name} needs a mr.data.Dataset or another iterable of batches, got {source!r}."
        )
