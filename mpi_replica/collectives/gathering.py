"""all_gather: the values of all replicas, one behind the other along an axis.

Everything travels as bytes, whatever its dtype. The extents along the axis travel with the
header, and so does the data where it is small. Small leaves share one message; large ones go
straight into the result where the axis is the first, and through one copy otherwise.
"""

from __future__ import annotations

import math
import operator
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np

from .. import nest
from ..dtypes import as_plain_array, is_text, wire_name
from ..options import CommunicationOptions
from ..values import IndexedSlices
from .agreement import INLINE_BYTES
from .blobs import LARGE_BYTES
from .call import Call
from .callsite import CallSite
from .engine import Engine
from .standing import CallDescription, LeafDescription

__all__ = ["AllGather", "gather_bytes"]

Array = np.ndarray[Any, Any]

#: Leaves whose result is below this share one message.
_SHARED_BYTES = 1 << 16


class AllGather(Call):
    """One call of ``all_gather``, or of ``gather`` in cross-replica context.

    `contributions` are the leaves of each replica that this call stands for; `paths` tell where
    they are, where these are only some of the leaves of `structure`, and the result is a list.
    """

    def __init__(
        self,
        site: CallSite,
        options: CommunicationOptions,
        kind: str,
        axis: int,
        contributions: Sequence[Sequence[Any]],
        structure: nest.Structure,
        detail: str | None = None,
        paths: Sequence[str] | None = None,
    ) -> None:
        super().__init__(site, options)
        self.kind = kind
        self.structure = structure
        self.is_flat = paths is not None
        self.paths = nest.leaf_paths(structure) if paths is None else tuple(paths)
        try:
            self.axis = operator.index(axis)
        except TypeError:
            raise TypeError(f"axis must be an integer, got {axis!r}.") from None
        self.detail = f"axis={self.axis}" if detail is None else detail
        self.contributions = [self._arrays(leaves) for leaves in contributions]
        signatures = [self._signature(arrays) for arrays in self.contributions]
        self.agrees = all(signature == signatures[0] for signature in signatures)
        self.identify((self.detail, nest.key(structure), self.paths, signatures[0]))

    def _arrays(self, leaves: Sequence[Any]) -> list[Array]:
        arrays = []
        for index, leaf in enumerate(leaves):
            if isinstance(leaf, IndexedSlices):
                raise NotImplementedError(
                    f"{self.kind} of IndexedSlices (value{self._path(index)}) is not supported, as"
                    " in tf.distribute. Gather its values and indices."
                )
            array = as_plain_array(leaf)
            if array.dtype.hasobject:
                raise TypeError(
                    f"{self.kind} got {type(leaf).__name__} for value{self._path(index)}, which is"
                    " no array of a fixed item size. Use merge_call for other values."
                )
            if array.ndim == 0:
                raise ValueError(
                    f"{self.kind} got a scalar for value{self._path(index)}: {leaf!r}. Only arrays"
                    f" can be concatenated; write np.array([{leaf!r}])."
                )
            if not -array.ndim <= self.axis < array.ndim:
                raise ValueError(
                    f"axis {self.axis} is out of range for value{self._path(index)} of shape"
                    f" {array.shape}. It must be from {-array.ndim} to {array.ndim - 1}."
                )
            arrays.append(array)
        return arrays

    def _path(self, index: int) -> str:
        return self.paths[index]

    def _signature(self, arrays: Sequence[Array]) -> tuple[Any, ...]:
        return tuple(
            (
                array.dtype.kind if is_text(array.dtype) else wire_name(array.dtype),
                self._free_shape(array),
            )
            for array in arrays
        )

    def _free_shape(self, array: Array) -> tuple[int | None, ...]:
        axis = self.axis % array.ndim
        return (*array.shape[:axis], None, *array.shape[axis + 1 :])

    def words(self, position: int = 0) -> CallDescription:
        leaves = tuple(
            LeafDescription({"U": "str", "S": "bytes"}.get(name, name), shape)
            for name, shape in self._signature(self.contributions[position])
        )
        return CallDescription(
            self.kind,
            self.detail,
            self.site,
            self.options.name,
            nest.structure_text(self.structure),
            self.paths,
            leaves,
        )

    def perform(self, engine: Engine, calls: Sequence[AllGather]) -> list[Any]:
        contributions = [leaves for call in calls for leaves in call.contributions]
        results = _gather(engine, calls, contributions)
        # Each replica may write into its result: it must not be the array of another one.
        each = [results, *([np.copy(result) for result in results] for _ in calls[1:])]
        return each if self.is_flat else [nest.unflatten(self.structure, mine) for mine in each]


def _gather(
    engine: Engine, calls: Sequence[AllGather], contributions: Sequence[Sequence[Array]]
) -> list[Array]:
    call, counts = calls[0], engine.layout.counts
    agreement, seconds = engine.agreement, call.options.timeout_seconds
    with agreement.preparing(calls):
        head = _extents(contributions, call.axis)
        size = sum(array.nbytes for arrays in contributions for array in arrays)
        payload = _TOO_LONG
        if 1 + len(head) + size <= INLINE_BYTES:
            data = (array.tobytes() for arrays in contributions for array in arrays)
            payload = _WITH_DATA + head + b"".join(data)
        elif 1 + len(head) <= INLINE_BYTES:
            payload = _WITHOUT_DATA + head
        engine.lay_by_reserve(LARGE_BYTES)
    agreement.agree(calls, payload)
    payloads = agreement.payloads()
    inline = all(data[:1] == _WITH_DATA for data in payloads)
    if any(data[:1] == _TOO_LONG for data in payloads):
        with engine.moving(call):
            heads = engine.carry(engine.transport.all_gather_bytes, head, seconds)
    else:
        heads = [data[1:] for data in payloads]
    if not contributions[0]:
        return []
    lengths = [_EXTENT.size * count * len(contributions[0]) for count in counts]
    table = [
        list(_EXTENT.iter_unpack(data[:length]))
        for data, length in zip(heads, lengths, strict=True)
    ]
    leaves = [
        _Leaf([arrays[index] for arrays in contributions], call.axis, index, table, counts)
        for index in range(len(contributions[0]))
    ]
    if sum(leaf.result_bytes for leaf in leaves) > LARGE_BYTES:
        with agreement.preparing(calls):
            pack = _allocate(leaves)
        agreement.agree(calls)
    else:
        pack = engine.with_reserve(lambda: _allocate(leaves))
    if inline:
        parts = [part[length:] for part, length in zip(heads, lengths, strict=True)]
        _take_inline(leaves, parts, counts)
    else:
        with engine.moving(call):
            _move(engine, leaves, pack, seconds)
    return [leaf.finish() for leaf in leaves]


# The first byte of the payload tells what follows.
_WITH_DATA, _WITHOUT_DATA, _TOO_LONG = b"\0", b"\1", b"\2"
_EXTENT = struct.Struct("<QQ")  # extent along the axis, bytes of an item


def _extents(contributions: Sequence[Sequence[Array]], axis: int) -> bytes:
    return b"".join(
        _EXTENT.pack(array.shape[axis], array.dtype.itemsize)
        for arrays in contributions
        for array in arrays
    )


class _Leaf:
    """One leaf on its way: the blocks of all replicas, and where they go.

    `table` holds, for each rank, (extent, item size) of each of its replicas' leaves.
    """

    def __init__(
        self,
        arrays: Sequence[Array],
        axis: int,
        index: int,
        table: Sequence[Sequence[tuple[int, int]]],
        counts: Sequence[int],
    ) -> None:
        self.arrays = arrays
        first = arrays[0]
        self.axis = axis % first.ndim
        number = len(table[0]) // counts[0]
        entries = [
            [row[replica * number + index] for replica in range(count)]
            for row, count in zip(table, counts, strict=True)
        ]
        every = [entry for of_rank in entries for entry in of_rank]
        self.item_sizes = [size for _, size in every]
        self.dtype = first.dtype
        if is_text(self.dtype):
            unit = 4 if self.dtype.kind == "U" else 1
            self.dtype = np.dtype(f"{self.dtype.kind}{max(1, max(self.item_sizes) // unit)}")
        self.extents = [extent for extent, _ in every]
        self.shapes = [self._with_extent(first.shape, extent) for extent in self.extents]
        self.result_shape = self._with_extent(first.shape, sum(self.extents))
        item = math.prod(self._with_extent(first.shape, 1)) * self.dtype.itemsize
        self.rank_bytes = [sum(extent for extent, _ in of_rank) * item for of_rank in entries]
        self.result_bytes: int = sum(self.rank_bytes)

    def _with_extent(self, shape: tuple[int, ...], extent: int) -> tuple[int, ...]:
        return (*shape[: self.axis], extent, *shape[self.axis + 1 :])

    @property
    def is_small(self) -> bool:
        """Whether it shares a message with other small ones."""
        return self.result_bytes <= _SHARED_BYTES

    def allocate(self) -> None:
        """Make the memory for the result, and for all blocks where they are not the result."""
        self.arrays = [array.astype(self.dtype, copy=False) for array in self.arrays]
        self.result = np.empty(self.result_shape, self.dtype)
        self.flat = (
            _as_bytes(self.result) if self.axis == 0 else np.empty(self.result_bytes, np.uint8)
        )

    def blocks(self) -> list[Array]:
        """Return a view of each replica's block."""
        ends = np.cumsum([math.prod(shape) for shape in self.shapes])
        items = self.flat.view(self.dtype)
        return [
            items[end - math.prod(shape) : end].reshape(shape)
            for end, shape in zip(ends.tolist(), self.shapes, strict=True)
        ]

    def finish(self) -> Array:
        """Return the result; blocks along another axis than the first find their place in it."""
        if self.axis != 0:
            np.concatenate(self.blocks(), axis=self.axis, out=self.result)
        return self.result


def _as_bytes(array: Array) -> Array:
    return array.reshape(-1).view(np.uint8)


def _take_inline(leaves: Sequence[_Leaf], data: Sequence[bytes], counts: Sequence[int]) -> None:
    targets = [leaf.blocks() for leaf in leaves]
    replica = 0
    for part, count in zip(data, counts, strict=True):
        start = 0
        for _ in range(count):
            for leaf, blocks in zip(leaves, targets, strict=True):
                block = blocks[replica]
                dtype = leaf.dtype
                if is_text(dtype):
                    unit = 4 if dtype.kind == "U" else 1
                    dtype = np.dtype(f"{dtype.kind}{max(1, leaf.item_sizes[replica] // unit)}")
                items = np.frombuffer(part, dtype, block.size, start)
                np.copyto(block, items.reshape(block.shape))
                start += items.nbytes
            replica += 1


class _Pack:
    """Small leaves that share one message; the memory for it."""

    def __init__(self, leaves: Sequence[_Leaf]) -> None:
        self.leaves = leaves
        columns = zip(*(leaf.rank_bytes for leaf in leaves), strict=True)
        self.rank_bytes = [sum(of_rank) for of_rank in columns]
        self.mine = np.concatenate([_as_bytes(array) for leaf in leaves for array in leaf.arrays])
        self.every = np.empty(sum(self.rank_bytes), np.uint8)

    def unpack(self) -> None:
        """Give each leaf the blocks of all ranks."""
        start = 0
        filled = [0] * len(self.leaves)
        for rank in range(len(self.rank_bytes)):
            for position, leaf in enumerate(self.leaves):
                length = leaf.rank_bytes[rank]
                at = filled[position]
                leaf.flat[at : at + length] = self.every[start : start + length]
                filled[position] += length
                start += length


def _allocate(leaves: Sequence[_Leaf]) -> _Pack | None:
    """Make all memory that the movement needs."""
    for leaf in leaves:
        leaf.allocate()
    small = [leaf for leaf in leaves if leaf.is_small]
    return _Pack(small) if len(small) > 1 else None


def _move(
    engine: Engine, leaves: Sequence[_Leaf], pack: _Pack | None, seconds: float | None
) -> None:
    if pack is not None:
        gather = engine.transport.all_gather_blocks
        engine.carry(gather, pack.mine, pack.every, pack.rank_bytes, seconds)
        pack.unpack()
    for leaf in leaves:
        if pack is None or not leaf.is_small:
            parts = [_as_bytes(array) for array in leaf.arrays]
            gather_bytes(engine, parts, leaf.flat, leaf.rank_bytes, seconds)


def gather_bytes(
    engine: Engine,
    parts: Sequence[Array],
    receive: Array,
    rank_bytes: Sequence[int],
    timeout_seconds: float | None,
) -> None:
    """Fill `receive` with the blocks of all ranks; this rank's block is made of `parts`."""
    layout, gather = engine.layout, engine.transport.all_gather_blocks
    if all(count == 1 for count in layout.counts):
        engine.carry(gather, parts[0], receive, rank_bytes, timeout_seconds)
        return
    start = sum(rank_bytes[: layout.rank])
    np.concatenate(parts, out=receive[start : start + rank_bytes[layout.rank]])
    engine.carry(gather, None, receive, rank_bytes, timeout_seconds)
