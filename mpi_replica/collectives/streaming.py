"""Reductions that do not fit into the header: pack by pack, and piece by piece.

A piece of a large leaf goes straight from the leaf into the result where nothing is to be done to
it: where each rank has one replica, and the leaf is an array that MPI can send. Floats of 2 bytes
are scattered: each rank gets a part of all contributions, adds them in 4 bytes, and gives the
rounded sums to all. That halves what travels, and what each rank has to convert.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..options import ReduceOp
from .engine import Engine
from .inline import UFUNCS
from .packing import ALIGNMENT, Pack, Plan, Slot, Stream, cut, is_ordered_by_keys

__all__ = ["Movement"]

Array = np.ndarray[Any, Any]


class Movement:
    """The movement of one reduction's data; all that it needs is allocated when it is made.

    Parameters
    ----------
    contributions, results : sequence of sequence of array
        The leaves of each local replica, and where their results go.
    has_outputs : bool
        Whether `results` has memory for the small leaves, too.
    is_in_place : bool
        Whether each large result is the memory of its leaf, on all ranks.
    """

    def __init__(
        self,
        engine: Engine,
        plan: Plan,
        contributions: Sequence[Sequence[Array]],
        results: Sequence[list[Array]],
        timeout_seconds: float | None,
        *,
        has_outputs: bool,
        is_in_place: bool,
    ) -> None:
        self._plan = plan
        self._carry = engine.carry
        self._quietly = engine.quietly
        self._transport = engine.transport
        self._contributions = contributions
        self._results = results
        self._timeout_seconds = timeout_seconds
        self._is_in_place = is_in_place
        self._op = plan.op
        self._ufunc = UFUNCS[plan.op]
        layout = engine.layout
        self._scale = layout.num_replicas if plan.op is ReduceOp.MEAN else 1
        # MPI wants "in place" from all ranks or from none: where one has several replicas, all
        # combine in the result, or in scratch memory, and reduce that in place.
        self._one_each = layout.has_one_each
        # The parts that ranks scatter are as long as the longest of them.
        self._scratch = engine.scratch(plan.scratch_bytes + ALIGNMENT * layout.size)
        self._used_bytes = 0
        # Memory for small results, where there is none yet: for each replica, of each pack.
        self._chunks: list[dict[Pack, list[Array]]] | None = None
        if not has_outputs:
            self._chunks = [
                {
                    pack: [np.empty(chunk.stop - chunk.start, pack.dtype) for chunk in pack.chunks]
                    for pack in plan.packs
                }
                for _ in results
            ]

    def run(self) -> None:
        """Move everything; called where all ranks have agreed to."""
        self._quietly(self._run)

    def _run(self) -> None:
        for pack in self._plan.packs:
            self._move_pack(pack)
        for stream in self._plan.streams:
            leaves = [of_replica[stream.leaf] for of_replica in self._contributions]
            results = [of_replica[stream.leaf] for of_replica in self._results]
            is_direct = stream.dtype == stream.result_dtype and self._one_each
            if is_direct and not is_ordered_by_keys(stream.dtype, self._op):
                self._move_straight(stream, leaves[0], results[0])
            elif stream.is_narrow and self._one_each and self._transport.size > 1:
                self._scatter(stream, leaves[0], results[0])
            else:
                self._move_combined(stream, leaves, results)

    def _move_pack(self, pack: Pack) -> None:
        self._used_bytes = 0
        buffer = self._take(pack.dtype, pack.length)
        contributions = self._contributions
        if self._plan.plain_order is not None and len(contributions) == 1:
            leaves = contributions[0]
            np.concatenate([leaves[leaf] for leaf in pack.leaves], axis=None, out=buffer)
        else:
            start = 0
            for leaf in pack.leaves:
                column = [leaves[leaf].reshape(-1) for leaves in contributions]
                part = buffer[start : start + column[0].size]
                self._combine(column, part)
                start += part.size
        self._over_ranks(None, buffer)
        if self._scale != 1:
            np.divide(buffer, self._scale, out=buffer)
        if self._chunks is None:
            for results in self._results:
                for chunk in pack.chunks:
                    _write(chunk.slots, buffer[chunk.start : chunk.stop], results)
            return
        for results, of_replica in zip(self._results, self._chunks, strict=True):
            for chunk, total in zip(pack.chunks, of_replica[pack], strict=True):
                total[...] = buffer[chunk.start : chunk.stop]
                cut(chunk.slots, total, results)

    def _move_straight(self, stream: Stream, leaf: Array, result: Array) -> None:
        """Reduce from the leaf into the result."""
        in_place, scale, dtype = self._is_in_place, self._scale, stream.dtype
        flags = leaf.flags
        items = None
        if flags.c_contiguous and flags.aligned and leaf.dtype == dtype:
            # MPI must not be given the memory of the result beside it.
            if in_place or not np.may_share_memory(leaf, result):
                items = leaf.reshape(-1)
        totals = result.reshape(-1)
        send: Array | None = None
        for start, stop, where in stream.pieces(large=in_place or self._transport.is_crowded):
            total = totals[start:stop]
            if items is None:
                self._used_bytes = 0
                part = leaf[where]
                send = self._take(dtype, stop - start)
                np.copyto(send.reshape(part.shape), part)
            elif not in_place:
                send = items[start:stop]
            self._over_ranks(send, total)
            if scale != 1:
                np.divide(total, scale, out=total)

    def _move_combined(
        self, stream: Stream, leaves: Sequence[Array], results: Sequence[Array]
    ) -> None:
        """Combine the pieces of the local replicas, and reduce that in place."""
        is_direct = stream.dtype == stream.result_dtype
        for start, stop, where in stream.pieces():
            self._used_bytes = 0
            target = results[0][where]
            wide = target.reshape(-1) if is_direct else self._take(stream.dtype, stop - start)
            self._combine([leaf[where] for leaf in leaves], wide.reshape(target.shape))
            self._over_ranks(None, wide)
            if self._scale != 1:
                np.divide(wide, self._scale, out=wide)
            if not is_direct:
                np.copyto(target, wide.reshape(target.shape), casting="unsafe")
            for result in results[1:]:  # while it is in the cache
                np.copyto(result[where], target)

    def _scatter(self, stream: Stream, leaf: Array, result: Array) -> None:
        """Have each rank add up a part of each piece, wide, and give the rounded sums to all."""
        narrow, size, rank = stream.result_dtype, self._transport.size, self._transport.rank
        item = narrow.itemsize
        can_be_sent = leaf.flags.c_contiguous and leaf.dtype == narrow
        for start, stop, where in stream.pieces():
            self._used_bytes = 0
            send = leaf[where]
            if can_be_sent:
                send = send.reshape(-1)
            else:
                copy = self._take(narrow, stop - start)
                np.copyto(copy.reshape(send.shape), send)
                send = copy
            # the same cut on all ranks
            ends = [(stop - start) * (r + 1) // size for r in range(size)]
            lengths = [end - begin for begin, end in itertools.pairwise([0, *ends])]
            part = lengths[rank]
            counts = [length * item for length in lengths]
            given = self._take(narrow, part * size)
            self._carry(
                self._transport.all_to_all,
                send.view(np.uint8),
                counts,
                given.view(np.uint8),
                [part * item] * size,
                self._timeout_seconds,
            )
            total = self._take(stream.dtype, part)
            self._combine(list(given.reshape(size, part)), total)
            if self._scale != 1:
                np.divide(total, self._scale, out=total)
            sums = given[:part]
            np.copyto(sums, total, casting="unsafe")
            self._carry(
                self._transport.all_gather_blocks,
                sums.view(np.uint8),
                result[where].reshape(-1).view(np.uint8),
                counts,
                self._timeout_seconds,
            )

    def _take(self, dtype: np.dtype[Any], length: int) -> Array:
        """Return scratch memory behind what was taken since `_used_bytes` was 0."""
        start = self._used_bytes
        stop = start + length * dtype.itemsize
        self._used_bytes = stop + -stop % ALIGNMENT
        return self._scratch[start:stop].view(dtype)

    def _combine(self, arrays: Sequence[Array], out: Array) -> None:
        """Combine arrays of equal shape into `out`, in their order, in the dtype of `out`."""
        np.copyto(out, arrays[0], casting="unsafe")
        for array in arrays[1:]:
            self._ufunc(out, array, out=out, casting="unsafe", dtype=out.dtype)

    def _over_ranks(self, send: Array | None, total: Array) -> None:
        """Reduce `send`, or `total` in place, over the ranks into `total`."""
        transport, op = self._transport, self._op
        if transport.size == 1:
            if send is not None:
                np.copyto(total, send)
            return
        if is_ordered_by_keys(total.dtype, op):
            self._over_ranks_by_keys(total)
            return
        if total.dtype.kind == "b":  # MIN and MAX, which MPI knows for integers only
            total = total.view(np.uint8)
            send = None if send is None else send.view(np.uint8)
        self._carry(transport.all_reduce, send, total, op, self._timeout_seconds)

    def _over_ranks_by_keys(self, total: Array) -> None:
        """Reduce integers that are ordered like the floats, with NaN beyond all others.

        MPI leaves open what MIN and MAX do with NaN, and libraries give it or drop it by position.
        """
        key = np.dtype(f"i{total.dtype.itemsize}")
        keys, shifted = self._take(key, total.size), self._take(key, total.size)
        is_nan = self._take(np.dtype(np.bool_), total.size)
        bounds = np.iinfo(key)
        beyond = bounds.min if self._op is ReduceOp.MIN else bounds.max
        np.copyto(keys, total.view(key))
        _flip_negative(keys, shifted)
        np.isnan(total, out=is_nan)
        np.copyto(keys, beyond, where=is_nan)
        self._carry(self._transport.all_reduce, None, keys, self._op, self._timeout_seconds)
        np.equal(keys, beyond, out=is_nan)
        _flip_negative(keys, shifted)
        np.copyto(total, keys.view(total.dtype))
        np.copyto(total, np.nan, where=is_nan)


def _write(slots: Sequence[Slot], items: Array, results: Sequence[Array]) -> None:
    """Copy leaves of a pack to where they go."""
    for leaf, where, shape, dtype in slots:
        part = items[where]
        if shape is not None:
            part = part.reshape(shape)
        if dtype is None:
            results[leaf][...] = part
        else:
            np.copyto(results[leaf], part, casting="unsafe")


def _flip_negative(keys: Array, shifted: Array) -> None:
    """Turn float bits into integers of the same order, or back: negative ones count downwards."""
    np.right_shift(keys, keys.dtype.itemsize * 8 - 1, out=shifted)
    np.bitwise_and(shifted, np.iinfo(keys.dtype).max, out=shifted)
    np.bitwise_xor(keys, shifted, out=keys)
