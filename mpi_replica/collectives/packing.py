"""How the leaves of a nest travel: a pure plan, made once for each signature.

Large leaves stream in pieces, straight from leaf to result. Small leaves of one dtype share a
pack. Everything is small enough to stay in the processor's cache between its steps, so that
neither a nest of any size nor a single huge array is ever copied as a whole.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import numpy as np

from ..dtypes import accumulation
from ..options import ReduceOp

__all__ = ["Pack", "Plan", "Slot", "Stream", "plan"]

#: Bytes of a piece, where the user does not say: fast on every library that was measured.
_PIECE_BYTES = 1 << 20

#: MPI counts items in a C int.
_LARGEST_PIECE_BYTES = 1 << 30

#: Leaves below this share a pack; above, a message of their own costs less than the copy.
_SMALL_BYTES = 1 << 16

#: No number needs a larger one.
_ALIGNMENT = 16

Signature = tuple[tuple[np.dtype[Any], tuple[int, ...]], ...]


@dataclasses.dataclass(frozen=True)
class Slot:
    """The place of a small leaf in its pack, in items."""

    leaf: int
    start: int
    stop: int


@dataclasses.dataclass(frozen=True)
class Pack:
    """Small leaves that travel together."""

    dtype: np.dtype[Any]
    slots: tuple[Slot, ...]
    length: int

    @property
    def size_bytes(self) -> int:
        """Bytes of one rank's contribution."""
        return self.length * self.dtype.itemsize


@dataclasses.dataclass(frozen=True)
class Stream:
    """A large leaf that travels in pieces of `piece` items."""

    leaf: int
    dtype: np.dtype[Any]
    length: int
    piece: int


@dataclasses.dataclass(frozen=True)
class Plan:
    """What to do with leaves of one signature under one op.

    ``dtype`` of packs and streams is what the leaf accumulates in.
    """

    packs: tuple[Pack, ...]
    streams: tuple[Stream, ...]
    #: dtype and shape of each result
    results: tuple[tuple[np.dtype[Any], tuple[int, ...]], ...]
    #: the largest number of bytes that a pack or a piece needs, rounded up
    scratch_bytes: int

    @functools.cached_property
    def small_bytes(self) -> int | None:
        """Bytes of all packs, or None where there are streams."""
        return None if self.streams else sum(pack.size_bytes for pack in self.packs)


@functools.lru_cache(maxsize=1024)
def plan(signature: Signature, op: ReduceOp, bytes_per_pack: int = 0) -> Plan:
    """Return the plan for leaves of these dtypes and shapes.

    Raises
    ------
    TypeError
        `op` has no meaning for a dtype.
    """
    piece_bytes = min(bytes_per_pack or _PIECE_BYTES, _LARGEST_PIECE_BYTES)
    open_packs: dict[np.dtype[Any], list[Slot]] = {}
    packs: list[Pack] = []
    streams: list[Stream] = []
    results = []
    for leaf, (dtype, shape) in enumerate(signature):
        wide, result = accumulation(dtype, op)
        results.append((result, shape))
        length = math.prod(shape)
        if length * wide.itemsize >= min(_SMALL_BYTES, piece_bytes):
            streams.append(Stream(leaf, wide, length, max(1, piece_bytes // wide.itemsize)))
            continue
        slots = open_packs.setdefault(wide, [])
        start = slots[-1].stop if slots else 0
        if slots and (start + length) * wide.itemsize > piece_bytes:
            packs.append(Pack(wide, tuple(slots), start))
            slots.clear()
            start = 0
        slots.append(Slot(leaf, start, start + length))
    packs += [Pack(wide, tuple(slots), slots[-1].stop) for wide, slots in open_packs.items()]
    needs = [pack.size_bytes for pack in packs]
    needs += [min(stream.piece, stream.length) * stream.dtype.itemsize for stream in streams]
    # What lies behind it in the same memory must be aligned: mpi4py takes no other arrays.
    scratch_bytes = -(-max(needs, default=0) // _ALIGNMENT) * _ALIGNMENT
    return Plan(tuple(packs), tuple(streams), tuple(results), scratch_bytes)
