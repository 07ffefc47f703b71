"""What travels together in an ordered reduction: some chunks of a pack, or a piece of a leaf."""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ...tree import Partial
from ..delivery import PackDelivery
from ..packing import Pack, Piece, Plan, Stream

__all__ = ["Part", "parts_of"]

Array = np.ndarray[Any, Any]


class Part(abc.ABC):
    """Some items of the leaves, the same ones on all ranks.

    Attributes
    ----------
    length : int
    dtype, result_dtype : numpy.dtype
        What they accumulate in, and what the results have.
    """

    length: int
    dtype: np.dtype[Any]
    result_dtype: np.dtype[Any]

    @abc.abstractmethod
    def gather(
        self,
        partial: Partial,
        combine: Callable[..., Any],
        target: Array,
        temporaries: Sequence[Array],
    ) -> None:
        """Combine what some local replicas contribute into `target`, in the dtype of `target`."""

    @abc.abstractmethod
    def deliver(self, total: Array | None) -> None:
        """Give all local replicas the result; None where it is in `result` already."""

    def contribution(self, dtype: np.dtype[Any]) -> Array | None:
        """Return the contribution of the only local replica where it can be sent as it is."""
        return None

    @property
    def result(self) -> Array | None:
        """The memory of the first local replica's result, where it has any of its own."""
        return None


class _PackPart(Part):
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
        wanted = pack.chunks[chunks]
        self.length = sum(chunk.stop - chunk.start for chunk in wanted)
        self._leaves = [slot.leaf for chunk in wanted for slot in chunk.slots]
        self.dtype = self.result_dtype = pack.dtype

    def gather(
        self,
        partial: Partial,
        combine: Callable[..., Any],
        target: Array,
        temporaries: Sequence[Array],
    ) -> None:
        contributions = self._contributions[partial.local]
        if len(contributions) == 1:
            leaves = [contributions[0][leaf] for leaf in self._leaves]
            if leaves:
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


class _StreamPart(Part):
    def __init__(
        self,
        stream: Stream,
        piece: Piece,
        contributions: Sequence[Sequence[Array]],
        results: Sequence[Sequence[Array]],
    ) -> None:
        start, stop, where = piece
        self.length = stop - start
        self.dtype, self.result_dtype = stream.dtype, stream.result_dtype
        self._column = [leaves[stream.leaf][where] for leaves in contributions]
        self._results = [leaves[stream.leaf][where] for leaves in results]

    def gather(
        self,
        partial: Partial,
        combine: Callable[..., Any],
        target: Array,
        temporaries: Sequence[Array],
    ) -> None:
        column = self._column[partial.local]
        shape = column[0].shape
        spare = [array.reshape(shape) for array in temporaries]
        partial.order.combine(combine, column, target.reshape(shape), spare)

    def deliver(self, total: Array | None) -> None:
        first, *others = self._results
        if total is not None:
            np.copyto(first, total.reshape(first.shape))
        for result in others:  # while it is in the cache
            np.copyto(result, first)

    def contribution(self, dtype: np.dtype[Any]) -> Array | None:
        if len(self._column) > 1 or self._column[0].dtype != dtype:
            return None
        flags = self._column[0].flags
        return self._column[0].reshape(-1) if flags.c_contiguous and flags.aligned else None

    @property
    def result(self) -> Array | None:
        first: Array = self._results[0].reshape(-1)
        return first


def parts_of(
    plan: Plan,
    contributions: Sequence[Sequence[Array]],
    results: Sequence[list[Array]],
    delivery: PackDelivery,
    most_bytes: int,
) -> list[Part]:
    """Return the parts of a plan, each of `most_bytes` at most in what it accumulates in."""
    parts: list[Part] = []
    for pack in plan.packs:
        for chunks in _groups(pack, most_bytes):
            parts.append(_PackPart(pack, chunks, contributions, delivery))
    for stream in plan.streams:
        most = min(most_bytes // stream.dtype.itemsize, stream.piece)
        for piece in stream.cut(most):
            parts.append(_StreamPart(stream, piece, contributions, results))
    return parts


def _groups(pack: Pack, most_bytes: int) -> list[slice]:
    """Return which chunks of a pack go together."""
    groups: list[slice] = []
    first = 0
    most = most_bytes // pack.dtype.itemsize
    for index, chunk in enumerate(pack.chunks):
        if chunk.stop - pack.chunks[first].start > most and index > first:
            groups.append(slice(first, index))
            first = index
    if pack.chunks:
        groups.append(slice(first, len(pack.chunks)))
    return groups
