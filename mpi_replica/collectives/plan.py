"""How the leaves of a nest travel: a pure plan, made once for each signature.

Large leaves stream in pieces, straight from leaf to result. Small leaves of one dtype share a
pack. Everything is small enough to stay in the processor's cache between its steps, so that
neither a nest of any size nor a single huge array is ever copied as a whole.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..core.dtypes import accumulation, is_narrow_float
from ..core.options import ReduceOp
from ..core.ufuncs import EXTREMES
from ..ranks.transport import ALIGNMENT
from .extremes import are_keyed
from .memory import LEAST_BYTES, Allocation

# Bytes of a piece, where the user does not say: the fastest on the libraries that were measured.
# A piece as large as its array, where this is new memory, would have MPI take memory from the
# system, and give it back. Into kept memory, or such that comes back, up to 2 MiB in one piece are
# a tenth faster.
_PIECE_BYTES = 1 << 19
_MOST_KEPT_BYTES = 1 << 21
# Between hosts, where each exchange costs a way over the network; and of arrays that are much
# larger, also in place, and where ranks share cores.
_LARGE_PIECE_BYTES = 1 << 21
_MUCH_LARGER = 2
# Of packs and of pieces that stay in the cache while several buffers take part.
_STAGED_BYTES = 1 << 20

# Results of small leaves share memory of so many bytes at most.
_CHUNK_BYTES = 1 << 16

#: MPI counts items in a C int.
_LARGEST_PIECE_BYTES = 1 << 30

# So many pieces of a stream are kept. More are made anew when they are asked for: a leaf may say
# that it has any size.
_MOST_KEPT = 4096

#: Leaves below this share a pack; above, a message of their own costs less than the copy.
_SMALL_BYTES = 1 << 16
# Of a leaf that would share it with no other: one that fits into no header (`ranks.transport`).
_ALONE_BYTES = (1 << 15) + 1

#: dtypes and shapes of leaves
Signature = tuple[tuple[np.dtype[Any], ...], tuple[tuple[int, ...], ...]]

_dtype_of, _shape_of = operator.attrgetter("dtype"), operator.attrgetter("shape")


def signature_of(arrays: Sequence[np.ndarray[Any, Any]]) -> Signature:
    """Returns dtypes and shapes of leaves."""
    if len(arrays) == 1:
        (array,) = arrays
        return (array.dtype,), (array.shape,)
    return tuple(map(_dtype_of, arrays)), tuple(map(_shape_of, arrays))


class Slot(NamedTuple):
    """The place of a small leaf in its chunk, in items."""

    leaf: int
    #: The index of a scalar, otherwise a slice.
    where: int | slice
    #: None where the leaf has one dimension, as what `where` gives.
    shape: tuple[int, ...] | None
    #: Of the result; None where it is that of the pack.
    dtype: np.dtype[Any] | None


def cut(slots: Iterable[Slot], items: np.ndarray[Any, Any], results: list[Any]) -> None:
    """Puts leaves in their places in `results`: views of `items` that share none, and scalars."""
    for leaf, where, shape, dtype in slots:
        part = items[where]
        if shape is not None:
            part = part.reshape(shape)
        results[leaf] = part if dtype is None else part.astype(dtype)


class Chunk(NamedTuple):
    """A part of a pack whose results share memory: one that is kept keeps no more than that."""

    start: int
    stop: int
    #: With places that count from `start`.
    slots: tuple[Slot, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class Pack:
    """Small leaves that travel together."""

    dtype: np.dtype[Any]
    #: Whether contributions are combined in the order of the replicas.
    is_ordered: bool
    chunks: tuple[Chunk, ...]
    length: int

    @functools.cached_property
    def leaves(self) -> list[int]:
        """The leaves, in the order in which they travel."""
        return [slot.leaf for chunk in self.chunks for slot in chunk.slots]

    @property
    def size_bytes(self) -> int:
        """Bytes of one rank's contribution."""
        return self.length * self.dtype.itemsize


class Piece(NamedTuple):
    """A part of a large leaf: some of its rows, or of a row; it is contiguous in C order."""

    start: int
    stop: int
    #: The index that gives it from an array in whatever order.
    where: tuple[Any, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class Stream:
    """A large leaf that travels in pieces."""

    leaf: int
    leaf_dtype: np.dtype[Any]
    #: What the leaf accumulates in.
    dtype: np.dtype[Any]
    #: Of the result.
    result_dtype: np.dtype[Any]
    #: Whether contributions are combined in the order of the replicas.
    is_ordered: bool
    shape: tuple[int, ...]
    #: The most items of a piece; of one where large ones are better, in place or where ranks share
    #: cores; of one between hosts; and of one into kept memory.
    piece: int
    large_piece: int
    far_piece: int
    kept_piece: int

    #: Pieces by the most items of one.
    _cut: dict[int, tuple[Piece, ...]] = dataclasses.field(default_factory=dict, init=False)

    def most_items(self, *, large: bool = False, far: bool = False, kept: bool = False) -> int:
        """Returns the most items of a piece."""
        if far:
            return self.far_piece
        most = self.large_piece if large else self.piece
        return max(most, self.kept_piece) if kept else most

    def cut(self, most: int) -> Iterable[Piece]:
        """Returns the pieces of the leaf where they are of `most` items."""
        cut = self._cut.get(most)
        if cut is None:
            if math.prod(self.shape) // most >= _MOST_KEPT:
                return pieces(self.shape, most)
            cut = self._cut[most] = tuple(pieces(self.shape, most))
        return cut

    @functools.cached_property
    def is_lent(self) -> bool:
        """Whether a fresh result lies in memory that comes back."""
        return math.prod(self.shape) * self.result_dtype.itemsize >= LEAST_BYTES

    @property
    def piece_bytes(self) -> int:
        """The most bytes of a piece, in `dtype`."""
        most = max(self.piece, self.large_piece, self.far_piece, self.kept_piece)
        return min(most, math.prod(self.shape)) * self.dtype.itemsize


@dataclasses.dataclass(frozen=True, eq=False)
class Plan:
    """What to do with leaves of one signature under one op.

    ``dtype`` of packs and streams is what the leaf accumulates in.
    """

    op: ReduceOp
    #: Whether contributions to some of the leaves are combined in the order of the replicas.
    is_ordered: bool
    packs: tuple[Pack, ...]
    streams: tuple[Stream, ...]
    #: dtype and shape of each result
    results: tuple[tuple[np.dtype[Any], tuple[int, ...]], ...]
    #: the largest number of bytes that the movement of a pack or a piece needs
    scratch_bytes: int
    #: Bytes of all packs; infinite where there are streams, or more than one chunk.
    small_bytes: float
    #: The leaves in the packs, in the order in which they travel, where each has its pack's dtype.
    plain_order: tuple[int, ...] | None

    @functools.cached_property
    def plain_stream(self) -> Stream | None:
        """The only leaf, where it is large and MPI reduces it as it is.

        Where the order counts, too: of two contributions it does not.
        """
        if self.packs or len(self.streams) != 1:
            return None
        (stream,) = self.streams
        is_plain = stream.leaf_dtype == stream.dtype == stream.result_dtype
        is_of_mpi = stream.dtype.kind != "b" and not are_keyed(stream.dtype, self.op)
        if stream.is_ordered and not mpi_agrees(stream.dtype, self.op):
            return None
        return stream if is_plain and is_of_mpi else None

    @functools.cached_property
    def allocation(self) -> Allocation:
        """Where fresh results of streams lie."""
        streams = {stream.leaf for stream in self.streams}
        return Allocation(
            [about if leaf in streams else None for leaf, about in enumerate(self.results)]
        )


@functools.lru_cache(maxsize=16)  # nests whose keys change have equal leaves
def plan(
    signature: Signature, op: ReduceOp, bytes_per_pack: int = 0, is_ordered: bool = False
) -> Plan:
    """Returns the plan for leaves of these dtypes and shapes.

    Sums of narrow floats are ordered also where that is not asked for: in 4 bytes the order of the
    operands shows in the rounded result. So are those of integers of 1 and 2 bytes: then it is
    numpy that adds them up.

    Raises
    ------
    TypeError
        `op` has no meaning for a dtype.
    """
    most_pack_bytes = min(bytes_per_pack or _STAGED_BYTES, _LARGEST_PIECE_BYTES)
    alone = _alone_in_their_packs(signature, op, is_ordered)
    open_packs: dict[tuple[np.dtype[Any], bool], _OpenPack] = {}
    packs: list[_OpenPack] = []
    streams: list[Stream] = []
    results = []
    alike: dict[Any, Any] = {}  # thousands of leaves are often of a few shapes
    for leaf, (dtype, shape) in enumerate(zip(*signature, strict=True)):
        wide, result, ordered = _way_of(dtype, op, is_ordered)
        results.append(alike.setdefault((result, shape), (result, shape)))
        length = math.prod(shape)
        size_bytes = length * wide.itemsize
        least = _ALONE_BYTES if leaf in alone else _SMALL_BYTES
        if size_bytes >= min(least, most_pack_bytes):
            defaults = _default_piece_bytes(wide, op, size_bytes)
            if ordered:  # whoever moves them has limits
                defaults = (_LARGEST_PIECE_BYTES,) * 4
            lengths = [
                max(1, min(bytes_per_pack or default, _LARGEST_PIECE_BYTES) // wide.itemsize)
                for default in defaults
            ]
            streams.append(Stream(leaf, dtype, wide, result, ordered, shape, *lengths))
            continue
        pack = open_packs.get((wide, ordered))
        if pack is None or (
            pack.length and (pack.length + length) * wide.itemsize > most_pack_bytes
        ):
            pack = open_packs[wide, ordered] = _OpenPack(wide, ordered)
            packs.append(pack)
        pack.add(leaf, shape, length, result)
    # Wide numbers first, so that all are aligned where packs lie one behind the other.
    closed = [pack.closed() for pack in sorted(packs, key=lambda p: -p.dtype.itemsize)]
    needs = [pack.size_bytes * _buffers(pack.dtype, op) for pack in closed]
    needs += [
        stream.piece_bytes * _buffers(stream.dtype, op)
        for stream in streams
        if not stream.is_ordered
    ]
    small_bytes: float = sum(pack.size_bytes for pack in closed)
    if streams or any(len(pack.chunks) > 1 for pack in closed):
        small_bytes = math.inf
    order = [(leaf, pack.dtype) for pack in closed for leaf in pack.leaves]
    is_plain = all(signature[0][leaf] == dtype for leaf, dtype in order)
    return Plan(
        op,
        any([one.is_ordered for one in closed] + [one.is_ordered for one in streams]),
        tuple(closed),
        tuple(streams),
        tuple(results),
        max(needs, default=0) + _MOST_BUFFERS * ALIGNMENT,
        small_bytes,
        tuple(leaf for leaf, _ in order) if is_plain else None,
    )


def _way_of(
    dtype: np.dtype[Any], op: ReduceOp, is_ordered: bool
) -> tuple[np.dtype[Any], np.dtype[Any], bool]:
    """Returns what a leaf accumulates in, what its result is, and whether the order counts."""
    wide, result = accumulation(dtype, op)
    if op in EXTREMES:
        return result, result, False
    # Where processors have AVX, Open MPI's sums of small integers saturate (5.0.11: op_avx), except
    # for the last few items. Those of numpy wrap around.
    saturates = op is ReduceOp.SUM and wide.kind in "iu" and wide.itemsize <= 2
    return wide, result, is_ordered or saturates or is_narrow_float(result)


def mpi_agrees(dtype: np.dtype[Any], op: ReduceOp) -> bool:
    """Returns whether MPI gives the bits of numpy where it combines two contributions.

    Sums of small integers may saturate. A product of complex numbers is a sum of products, where a
    compiler may leave out a rounding.
    """
    return dtype.itemsize >= 4 and not (dtype.kind == "c" and op is ReduceOp.PROD)


def _alone_in_their_packs(signature: Signature, op: ReduceOp, is_ordered: bool) -> set[int]:
    """Returns the leaves that would be in a pack without others."""
    of_dtype: dict[tuple[np.dtype[Any], bool], list[int]] = {}
    for leaf, (dtype, shape) in enumerate(zip(*signature, strict=True)):
        wide, _, ordered = _way_of(dtype, op, is_ordered)
        if math.prod(shape) * wide.itemsize < _SMALL_BYTES:
            of_dtype.setdefault((wide, ordered), []).append(leaf)
    return {leaves[0] for leaves in of_dtype.values() if len(leaves) == 1}


class _OpenPack:
    def __init__(self, dtype: np.dtype[Any], is_ordered: bool) -> None:
        self.dtype = dtype
        self.is_ordered = is_ordered
        self.length = 0
        self._chunks: list[Chunk] = []
        self._slots: list[Slot] = []
        self._used = 0  # of the chunk that is open

    def add(self, leaf: int, shape: tuple[int, ...], length: int, result: np.dtype[Any]) -> None:
        if (self._used + length) * self.dtype.itemsize > _CHUNK_BYTES:
            self._close_chunk()
        start, stop = self._used, self._used + length
        where = slice(start, stop) if shape else start
        slot_shape = None if len(shape) <= 1 else shape
        self._slots.append(Slot(leaf, where, slot_shape, None if result == self.dtype else result))
        self.length += length
        self._used = stop

    def _close_chunk(self) -> None:
        if self._slots:
            start = self.length - self._used
            self._chunks.append(Chunk(start, self.length, tuple(self._slots)))
        self._used, self._slots = 0, []

    def closed(self) -> Pack:
        self._close_chunk()
        return Pack(self.dtype, self.is_ordered, tuple(self._chunks), self.length)


# Of what a piece needs at once, see `_buffers`; two more for good measure.
_MOST_BUFFERS = 6


def _buffers(dtype: np.dtype[Any], op: ReduceOp) -> int:
    """Returns how many buffers of its size a piece needs in scratch memory."""
    # Itself; where it has keys, those, a shift and a mask.
    return 4 if are_keyed(dtype, op) else 1


def _default_piece_bytes(
    dtype: np.dtype[Any], op: ReduceOp, size_bytes: int
) -> tuple[int, int, int, int]:
    """Returns the bytes of a piece, of a large one, one between hosts, and one into kept memory."""
    if are_keyed(dtype, op):
        return (_STAGED_BYTES,) * 4
    is_much_larger = size_bytes >= _MUCH_LARGER * _LARGE_PIECE_BYTES
    large = _LARGE_PIECE_BYTES if is_much_larger else _PIECE_BYTES
    kept = size_bytes if size_bytes <= _MOST_KEPT_BYTES else _PIECE_BYTES
    return _PIECE_BYTES, large, _LARGE_PIECE_BYTES, max(kept, _PIECE_BYTES)


def pieces(shape: tuple[int, ...], most: int) -> Iterator[Piece]:
    """Cuts an array of `shape` into pieces of `most` items at most, in C order.

    Along the first dimension, and within its rows where one alone is too long.
    """
    if not shape:
        yield Piece(0, 1, (Ellipsis,))
        return
    row = math.prod(shape[1:])
    rows = most // row if row else shape[0]
    if rows >= 1 or len(shape) == 1:
        for start in range(0, shape[0], max(rows, 1)):
            stop = min(start + rows, shape[0])
            yield Piece(start * row, stop * row, (slice(start, stop),))
        return
    for first in range(shape[0]):
        before = first * row
        for start, stop, where in pieces(shape[1:], most):
            yield Piece(before + start, before + stop, (first, *where))
