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
from .delivery import PackDelivery
from .engine import Engine
from .extremes import are_keyed, extreme, from_keys, to_keys
from .inline import UFUNCS
from .ordered.settling import settle
from .packing import Pack, Plan, Stream
from .scratch import ALIGNMENT, Scratch

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
        self._scratch = Scratch(engine.scratch(plan.scratch_bytes + ALIGNMENT * layout.size))
        self._delivery = PackDelivery(plan, results, has_outputs=has_outputs)

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
            if is_direct and not are_keyed(stream.dtype, self._op):
                self._move_straight(stream, leaves[0], results[0])
            elif stream.is_narrow and self._one_each and self._transport.size > 1:
                self._scatter(stream, leaves[0], results[0])
            else:
                self._move_combined(stream, leaves, results)

    def _move_pack(self, pack: Pack) -> None:
        self._scratch.clear()
        buffer = self._scratch.take(pack.dtype, pack.length)
        contributions = self._contributions
        if self._plan.plain_order is not None and len(contributions) == 1:
            leaves = contributions[0]
            np.concatenate([leaves[leaf] for leaf in pack.leaves], axis=None, out=buffer)
        else:
            start = 0
            spare = self._spare(pack.dtype, pack.length)
            for leaf in pack.leaves:
                column = [leaves[leaf].reshape(-1) for leaves in contributions]
                stop = start + column[0].size
                self._combine(column, buffer[start:stop], [array[start:stop] for array in spare])
                start = stop
        self._over_ranks(None, buffer)
        if self._scale != 1:
            np.divide(buffer, self._scale, out=buffer)
        self._delivery.deliver(pack, buffer)

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
        large, far = in_place or self._transport.is_crowded, self._transport.is_between_hosts
        for start, stop, where in stream.pieces(large=large, far=far):
            total = totals[start:stop]
            if items is None:
                self._scratch.clear()
                part = leaf[where]
                send = self._scratch.take(dtype, stop - start)
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
        for start, stop, where in stream.pieces(far=self._transport.is_between_hosts):
            self._scratch.clear()
            target = results[0][where]
            wide = (
                target.reshape(-1) if is_direct else self._scratch.take(stream.dtype, stop - start)
            )
            spare = [a.reshape(target.shape) for a in self._spare(stream.dtype, stop - start)]
            self._combine([leaf[where] for leaf in leaves], wide.reshape(target.shape), spare)
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
            self._scratch.clear()
            send = leaf[where]
            if can_be_sent:
                send = send.reshape(-1)
            else:
                copy = self._scratch.take(narrow, stop - start)
                np.copyto(copy.reshape(send.shape), send)
                send = copy
            # the same cut on all ranks
            ends = [(stop - start) * (r + 1) // size for r in range(size)]
            lengths = [end - begin for begin, end in itertools.pairwise([0, *ends])]
            part = lengths[rank]
            counts = [length * item for length in lengths]
            given = self._scratch.take(narrow, part * size)
            self._carry(
                self._transport.all_to_all,
                send.view(np.uint8),
                counts,
                given.view(np.uint8),
                [part * item] * size,
                self._timeout_seconds,
            )
            total = self._scratch.take(stream.dtype, part)
            self._combine(list(given.reshape(size, part)), total, self._spare(total.dtype, part))
            if self._scale != 1:
                np.divide(total, self._scale, out=total)
            if are_keyed(total.dtype, self._op):
                settle(total, 1, self._scratch)
            sums = given[:part]
            np.copyto(sums, total, casting="unsafe")
            self._carry(
                self._transport.all_gather_blocks,
                sums.view(np.uint8),
                result[where].reshape(-1).view(np.uint8),
                counts,
                self._timeout_seconds,
            )

    def _spare(self, dtype: np.dtype[Any], length: int) -> list[Array]:
        """Return what `_combine` needs beside."""
        if not are_keyed(dtype, self._op):
            return []
        return [self._scratch.take(dtype, length) for _ in range(2)]

    def _combine(self, arrays: Sequence[Array], out: Array, spare: Sequence[Array] = ()) -> None:
        """Combine arrays of equal shape into `out`, in their order, in the dtype of `out`."""
        np.copyto(out, arrays[0], casting="unsafe")
        for array in arrays[1:]:
            if spare:
                extreme(self._op, out, array, *spare)
            else:
                self._ufunc(out, array, out=out, casting="unsafe", dtype=out.dtype)

    def _over_ranks(self, send: Array | None, total: Array) -> None:
        """Reduce `send`, or `total` in place, over the ranks into `total`."""
        transport, op = self._transport, self._op
        if transport.size == 1:
            if send is not None:
                np.copyto(total, send)
            if are_keyed(total.dtype, op):  # which NaN it is must not depend on the layout
                settle(total, 1, self._scratch)
            return
        if are_keyed(total.dtype, op):
            self._over_ranks_by_keys(total)
            return
        if total.dtype.kind == "b":  # MIN and MAX, which MPI knows for integers only
            total = total.view(np.uint8)
            send = None if send is None else send.view(np.uint8)
        self._carry(transport.all_reduce, send, total, op, self._timeout_seconds)

    def _over_ranks_by_keys(self, total: Array) -> None:
        """Reduce integers in the place of floats."""
        key, op, scratch = np.dtype(f"i{total.dtype.itemsize}"), self._op, self._scratch
        keys, shifted = scratch.take(key, total.size), scratch.take(key, total.size)
        is_nan = scratch.take(np.dtype(np.bool_), total.size)
        to_keys(op, total, keys, shifted, is_nan)
        self._carry(self._transport.all_reduce, None, keys, op, self._timeout_seconds)
        from_keys(op, keys, total, shifted, is_nan)
