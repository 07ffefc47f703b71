"""all_reduce: one result out of the contributions of all replicas.

`_reduce_replicas` is the one engine behind ``all_reduce``, ``reduce``, ``reduce_to`` and the
aggregations of variables: it takes the leaves of each local replica and gives one result for
each leaf.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from .. import nest
from ..dtypes import accumulation, as_plain_array, wire_name
from ..options import CommunicationOptions, ReduceOp
from .agreement import INLINE_BYTES
from .call import Call
from .callsite import CallSite
from .engine import Engine
from .packing import Plan, plan
from .standing import CallDescription, LeafDescription

__all__ = ["AllReduce"]

Array = np.ndarray[Any, Any]

_UFUNCS: dict[ReduceOp, np.ufunc] = {
    ReduceOp.SUM: np.add,
    ReduceOp.MEAN: np.add,
    ReduceOp.MIN: np.minimum,
    ReduceOp.MAX: np.maximum,
    ReduceOp.PROD: np.multiply,
}

_FLOAT64 = np.dtype(np.float64)
_PYTHON_NUMBERS = {int: "int", float: "float"}


class AllReduce(Call):
    """One call of ``all_reduce``, or of a reduction in cross-replica context.

    Parameters
    ----------
    kind : str
        The name of the call, as the user knows it.
    contributions : list of list
        The leaves of each replica that this call stands for.
    paths : sequence of str, optional
        Where the leaves are, where these are only some of the leaves of `structure`, and the
        result is a list.
    then : callable, optional
        What is done with the results, once on each rank; it gives the result of the call.
    asked : ReduceOp, optional
        What the user asked for, where `op` is what is left of it to do.
    dtypes : sequence of sequence of numpy.dtype, optional
        What the leaves of each replica were before a part of the reduction was done.
    """

    def __init__(
        self,
        kind: str,
        op: ReduceOp,
        contributions: Sequence[Sequence[Any]],
        structure: nest.Structure,
        site: CallSite,
        options: CommunicationOptions,
        detail: str = "",
        paths: Sequence[str] | None = None,
        then: Callable[[list[Any]], Any] | None = None,
        asked: ReduceOp | None = None,
        dtypes: Sequence[Sequence[np.dtype[Any]]] | None = None,
    ) -> None:
        super().__init__(site, options)
        self.kind = kind
        self.op = op
        self.asked = asked or op
        self.dtypes = dtypes
        self.structure = structure
        self.is_flat = paths is not None
        self.paths = nest.leaf_paths(structure) if paths is None else tuple(paths)
        self.detail = detail
        self.then = then
        self.python_numbers = [
            [_PYTHON_NUMBERS.get(type(leaf), "") for leaf in leaves] for leaves in contributions
        ]
        self.contributions = [self._arrays(leaves) for leaves in contributions]
        self._sign()

    def _arrays(self, leaves: Sequence[Any]) -> list[Array]:
        arrays = []
        for index, leaf in enumerate(leaves):
            array = as_plain_array(leaf)
            if array.dtype.kind not in "biufc" and (
                array.dtype.kind != "V" or array.dtype.names is not None or leaf is None
            ):
                path = self.paths[index]
                raise TypeError(
                    f"{self.kind} got {type(leaf).__name__} of dtype {array.dtype} for value{path}:"
                    f" {self.op.name} needs numbers. Use all_gather for strings and merge_call for"
                    " other values."
                )
            arrays.append(array)
        return arrays

    def _sign(self) -> None:
        signature = tuple((array.dtype, array.shape) for array in self.contributions[0])
        dtypes = None if self.dtypes is None else tuple(self.dtypes[0])
        for position, arrays in enumerate(self.contributions):
            if tuple((array.dtype, array.shape) for array in arrays) != signature or (
                self.dtypes is not None and tuple(self.dtypes[position]) != dtypes
            ):
                self.agrees = False
                return
        self.agrees = True
        try:
            self.plan: Plan = plan(signature, self.op, self.options.bytes_per_pack)
        except TypeError:
            self._name_what_has_no_meaning()
            raise
        key = (self.asked, self.detail, self.structure, self.paths, signature, dtypes)
        self.identify(key, self.describe)

    def _name_what_has_no_meaning(self) -> None:
        """Raise the plan's error with the path of the leaf that it is about."""
        for path, array in zip(self.paths, self.contributions[0], strict=True):
            try:
                accumulation(array.dtype, self.op)
            except TypeError as error:
                raise TypeError(f"{self.kind} of value{path}: {error}") from None

    def promote(self, leaves: Sequence[int]) -> None:
        for arrays in self.contributions:
            for index in leaves:
                arrays[index] = arrays[index].astype(_FLOAT64)
        for numbers in self.python_numbers:
            for index in leaves:
                numbers[index] = "float"
        self._sign()

    def words(self, position: int = 0) -> CallDescription:
        arrays = self.contributions[position]
        dtypes = [a.dtype for a in arrays] if self.dtypes is None else self.dtypes[position]
        leaves = tuple(
            LeafDescription(wire_name(dtype), array.shape, number)
            for dtype, array, number in zip(
                dtypes, arrays, self.python_numbers[position], strict=True
            )
        )
        return CallDescription(
            self.kind,
            f"{self.asked.name}{', ' * bool(self.detail)}{self.detail}",
            self.site,
            self.options.name,
            nest.structure_text(self.structure),
            self.paths,
            leaves,
            size_bytes=sum(array.nbytes for array in arrays),
        )

    def perform(self, engine: Engine, calls: Sequence[AllReduce]) -> list[Any]:
        contributions = [leaves for call in calls for leaves in call.contributions]
        results = _reduce_replicas(engine, calls, contributions)
        if self.then is not None:
            return [self.then(results)] * len(calls)
        # Each replica may write into its result: it must not be the array of another one.
        each = [results, *([np.copy(result)[()] for result in results] for _ in calls[1:])]
        return each if self.is_flat else [nest.unflatten(self.structure, mine) for mine in each]


def _reduce_replicas(
    engine: Engine, calls: Sequence[AllReduce], contributions: Sequence[Sequence[Array]]
) -> list[Any]:
    """Reduce the leaves of all replicas; return the results, fresh arrays or numpy scalars.

    `contributions` are the leaves of each local replica. Everything that can fail is done before
    the ranks agree: after it, no memory is allocated and no user code runs.
    """
    call = calls[0]
    op = call.op
    agreement = engine.agreement
    scale = engine.layout.num_replicas if op is ReduceOp.MEAN else 1
    with agreement.preparing(calls):
        steps = call.plan
        results = [np.empty(shape, dtype) for dtype, shape in steps.results]
        small = steps.small_bytes
        inline = agreement.carries_payload and small is not None and small <= INLINE_BYTES
        # The second part holds what MIN and MAX need beside a piece: keys, a shift and a mask.
        parts = 4 if op in (ReduceOp.MIN, ReduceOp.MAX) else 1
        scratch = engine.scratch(parts * steps.scratch_bytes)
        payload = _fold_packs(steps, op, contributions) if inline else b""
    payloads = agreement.agree(calls, payload)
    if inline:
        _finish_inline(steps, op, payloads, scale, results)
    else:
        with engine.moving(call):
            _move(engine, steps, op, contributions, scratch, scale, results, call.options)
    return [result[()] if result.ndim == 0 else result for result in results]


def _fold(op: ReduceOp, arrays: Sequence[Array], out: Array) -> None:
    """Combine arrays of equal shape into `out`, in their order, in the dtype of `out`."""
    np.copyto(out, arrays[0], casting="unsafe")
    ufunc = _UFUNCS[op]
    for array in arrays[1:]:
        ufunc(out, array, out=out, casting="unsafe", dtype=out.dtype)


def _fold_packs(steps: Plan, op: ReduceOp, contributions: Sequence[Sequence[Array]]) -> bytes:
    parts = []
    with np.errstate(all="ignore"):
        for pack in steps.packs:
            buffer = np.empty(pack.length, pack.dtype)
            for slot in pack.slots:
                arrays = [leaves[slot.leaf].reshape(-1) for leaves in contributions]
                _fold(op, arrays, buffer[slot.start : slot.stop])
            parts.append(buffer.tobytes())
    return b"".join(parts)


def _finish_inline(
    steps: Plan, op: ReduceOp, payloads: Sequence[bytes], scale: int, results: Sequence[Array]
) -> None:
    start = 0
    with np.errstate(all="ignore"):
        for pack in steps.packs:
            rows = [np.frombuffer(data, pack.dtype, pack.length, start) for data in payloads]
            start += pack.size_bytes
            total = rows[0].copy()
            _fold(op, rows, total)
            _unpack(pack, total, scale, results)


def _unpack(pack: Any, total: Array, scale: int, results: Sequence[Array]) -> None:
    if scale != 1:
        np.divide(total, scale, out=total)
    for slot in pack.slots:
        np.copyto(results[slot.leaf].reshape(-1), total[slot.start : slot.stop], casting="unsafe")


def _move(
    engine: Engine,
    steps: Plan,
    op: ReduceOp,
    contributions: Sequence[Sequence[Array]],
    scratch: Array,
    scale: int,
    results: Sequence[Array],
    options: CommunicationOptions,
) -> None:
    """Reduce over the ranks, pack by pack and piece by piece."""
    beside = scratch[steps.scratch_bytes :]
    # MPI wants "in place" from all ranks or from none: a rank with one replica among others with
    # several reduces in place, too.
    from_leaves = all(count == 1 for count in engine.layout.counts)
    with np.errstate(all="ignore"):
        for pack in steps.packs:
            buffer = scratch[: pack.size_bytes].view(pack.dtype)
            for slot in pack.slots:
                arrays = [leaves[slot.leaf].reshape(-1) for leaves in contributions]
                _fold(op, arrays, buffer[slot.start : slot.stop])
            _across_ranks(engine, op, None, buffer, beside, options.timeout_seconds)
            _unpack(pack, buffer, scale, results)
        for stream in steps.streams:
            leaves = [of_replica[stream.leaf].reshape(-1) for of_replica in contributions]
            result = results[stream.leaf].reshape(-1)
            for start in range(0, stream.length, stream.piece):
                stop = min(start + stream.piece, stream.length)
                pieces = [leaf[start:stop] for leaf in leaves]
                target = result[start:stop]
                direct = target.dtype == stream.dtype
                size = (stop - start) * stream.dtype.itemsize
                total = target if direct else scratch[:size].view(stream.dtype)
                send = None
                if from_leaves and pieces[0].dtype == stream.dtype:
                    send = pieces[0]
                else:
                    _fold(op, pieces, total)
                _across_ranks(engine, op, send, total, beside, options.timeout_seconds)
                if scale != 1:
                    np.divide(total, scale, out=total)
                if not direct:
                    np.copyto(target, total, casting="unsafe")


def _across_ranks(
    engine: Engine,
    op: ReduceOp,
    send: Array | None,
    total: Array,
    scratch: Array,
    timeout_seconds: float | None,
) -> None:
    """Reduce `send`, or `total` in place, over the ranks into `total`."""
    transport = engine.transport
    if transport.size == 1:
        if send is not None:
            np.copyto(total, send)
        return
    if total.dtype.kind == "b":  # MIN and MAX of bool: MPI knows them for integers only
        total = total.view(np.uint8)
        send = None if send is None else send.view(np.uint8)
    if op not in (ReduceOp.MIN, ReduceOp.MAX) or total.dtype.kind != "f":
        engine.carry(transport.all_reduce, send, total, op, timeout_seconds)
        return
    # MPI leaves open what MIN and MAX do with NaN, and libraries give it or drop it by position.
    # Integers that are ordered like the floats, with NaN beyond all others, leave nothing open.
    source = total if send is None else send
    keys, shifted, rest = np.split(scratch, [total.nbytes, 2 * total.nbytes])
    keys, shifted = (part.view(f"i{total.dtype.itemsize}") for part in (keys, shifted))
    is_nan = rest[: total.size].view(np.bool_)
    bounds = np.iinfo(keys.dtype)
    beyond = bounds.min if op is ReduceOp.MIN else bounds.max
    np.copyto(keys, source.view(keys.dtype))
    _flip_negative(keys, shifted)
    np.isnan(source, out=is_nan)
    np.copyto(keys, beyond, where=is_nan)
    engine.carry(transport.all_reduce, None, keys, op, timeout_seconds)
    np.equal(keys, beyond, out=is_nan)
    _flip_negative(keys, shifted)
    np.copyto(total, keys.view(total.dtype))
    np.copyto(total, np.nan, where=is_nan)


def _flip_negative(keys: Array, shifted: Array) -> None:
    """Turn float bits into integers of the same order, or back: negative ones count downwards."""
    np.right_shift(keys, keys.dtype.itemsize * 8 - 1, out=shifted)
    np.bitwise_and(shifted, np.iinfo(keys.dtype).max, out=shifted)
    np.bitwise_xor(keys, shifted, out=keys)
