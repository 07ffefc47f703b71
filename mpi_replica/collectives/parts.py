"""What travels together in a reduction: some chunks of a pack, or a piece of a leaf."""

from __future__ import annotations

import abc
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from ..core.array_ways import Array
from ..core.tree import Partial
from .combine import Combine
from .delivery import PackDelivery
from .plan import Pack, Piece, Stream

ALL_CHUNKS = slice(None)


class Part(abc.ABC):
    """Some items of the leaves, the same ones on all ranks.

    Attributes
    ----------
    length : int
    dtype, result_dtype : numpy.dtype
        What they accumulate in, and what the results have.
    result : array, optional
        The memory of the first local replica's result, flat; None for a pack, which has none.
    """

    length: int
    dtype: np.dtype[Any]
    result_dtype: np.dtype[Any]
    result: Array | None = None

    @abc.abstractmethod
    def gather(
        self, partial: Partial, combine: Combine, target: Array, temporaries: Sequence[Array]
    ) -> None:
        """Combines what some local replicas contribute into `target`, in the dtype of `target`."""

    @abc.abstractmethod
    def deliver(self, total: Array | None) -> None:
        """Gives all local replicas the result; None where it is in `result` already."""

    def contribution(self, dtype: np.dtype[Any]) -> Array | None:
        """Returns the contribution of the only local replica where it can be sent as it is."""
        return None


class PackPart(Part):
    """Some chunks of a pack."""

    def __init__(
        self,
        pack: Pack,
        chunks: slice,
        contributions: Sequence[Sequence[Array]],
        delivery: PackDelivery,
    ) -> None:
        self._pack = pack
        self._chunks = chunks
        self._contributions = contributions
        self._delivery = delivery
        if chunks is ALL_CHUNKS:
            self.length, self._leaves = pack.length, pack.leaves
        else:
            wanted = pack.chunks[chunks]
            self.length = sum([chunk.stop - chunk.start for chunk in wanted])
            self._leaves = [slot.leaf for chunk in wanted for slot in chunk.slots]
        self.dtype = self.result_dtype = pack.dtype

    def gather(
        self, partial: Partial, combine: Combine, target: Array, temporaries: Sequence[Array]
    ) -> None:
        contributions = self._contributions[partial.local]
        if len(contributions) == 1:
            leaves = [contributions[0][leaf] for leaf in self._leaves]
            np.concatenate(leaves, axis=None, out=target, casting="unsafe")
            return
        start = 0
        for leaf in self._leaves:
            column = [leaves[leaf] for leaves in contributions]
            stop = start + column[0].size
            shape = column[0].shape
            places = [array[start:stop].reshape(shape) for array in (target, *temporaries)]
            partial.order.combine(combine, column, places[0], places[1:])
            start = stop

    def deliver(self, total: Array | None) -> None:
        if total is not None:  # always: it has no memory of its own
            self._delivery.deliver(self._pack, total, self._chunks)


class StreamPart(Part):
    """A piece of a large leaf."""

    def __init__(
        self,
        stream: Stream,
        piece: Piece,
        contributions: Sequence[Sequence[Array]],
        results: Sequence[Sequence[Array]],
    ) -> None:
        start, stop, where = piece
        leaf = stream.leaf
        self.length = stop - start
        self.dtype, self.result_dtype = stream.dtype, stream.result_dtype
        first = results[0][leaf][where]
        if len(contributions) == 1:  # as it is mostly: without comprehensions
            self._column, self._results = [contributions[0][leaf][where]], [first]
        else:
            self._column = [leaves[leaf][where] for leaves in contributions]
            self._results = [leaves[leaf][where] for leaves in results]
        self.result = first.reshape(-1)

    def gather(
        self, partial: Partial, combine: Combine, target: Array, temporaries: Sequence[Array]
    ) -> None:
        column = self._column[partial.local]
        shape = column[0].shape
        spare = [array.reshape(shape) for array in temporaries]
        partial.order.combine(combine, column, target.reshape(shape), spare)

    def deliver(self, total: Array | None) -> None:
        first = self._results[0]
        if total is not None:
            np.copyto(first, total.reshape(first.shape))
        for result in self._results[1:]:  # while it is in the cache
            np.copyto(result, first)

    def contribution(self, dtype: np.dtype[Any]) -> Array | None:
        first = self._column[0]
        if len(self._column) > 1 or first.dtype != dtype:
            return None
        flags = first.flags
        return first.reshape(-1) if flags.c_contiguous and flags.aligned else None


def groups_of_chunks(pack: Pack, most_bytes: int) -> Iterator[slice]:
    """Yields which chunks of a pack go together, with so many bytes at most."""
    first = 0
    most = most_bytes // pack.dtype.itemsize
    for index, chunk in enumerate(pack.chunks):
        if chunk.stop - pack.chunks[first].start > most and index > first:
            yield slice(first, index)
            first = index
    yield slice(first, len(pack.chunks))
