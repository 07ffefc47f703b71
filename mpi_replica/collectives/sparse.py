"""IndexedSlices in all_reduce: the slices of all replicas, one behind the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from .. import nest
from ..dtypes import accumulation
from ..indexed_slices import IndexedSlices
from ..options import CommunicationOptions, ReduceOp
from .call import Call
from .callsite import CallSite
from .engine import Engine
from .gathering import AllGather
from .reduction import AllReduce

__all__ = ["reduce_values"]

# What travels of each leaf: its rows, their places, and how many there are.
_PARTS = ("values", "indices", "rows")


def reduce_values(
    engine: Engine,
    meet: Callable[[Call], Any],
    reduce_op: ReduceOp | str,
    components: Callable[[], list[Any]],
    structure: nest.Structure,
    options: CommunicationOptions | None,
    out: Any,
) -> Any:
    """Return ``all_reduce`` of a nest whose leaves may be `IndexedSlices`.

    `components` gives what this replica contributes, or raises; `meet` performs a replica's call.
    """
    leaves: list[Any] = []
    wrong: Exception | None = None
    try:
        leaves = components()
    except Exception as error:
        wrong = error  # raised where the call is made, which tells the other ranks
    if any(_is_sparse(leaf) for leaf in leaves):
        return _reduce_with_slices(engine, meet, reduce_op, leaves, structure, options, out)

    def make(site: CallSite, merged: CommunicationOptions) -> Call:
        if wrong is not None:
            raise wrong
        return AllReduce(site, merged, "all_reduce", reduce_op, [leaves], structure, out)

    return meet(engine.make("all_reduce", options, make))


def _is_sparse(leaf: Any) -> bool:
    return type(leaf) is IndexedSlices


def _reduce_with_slices(
    engine: Engine,
    meet: Callable[[Call], Any],
    reduce_op: ReduceOp | str,
    leaves: Sequence[Any],
    structure: nest.Structure,
    options: CommunicationOptions | None,
    out: Any,
) -> Any:
    """Return ``all_reduce`` of a nest in which some leaves are `IndexedSlices`.

    Dense leaves are reduced as always, in a call of their own where there are any.
    """
    paths = nest.leaf_paths(structure)
    sparse = [index for index, leaf in enumerate(leaves) if _is_sparse(leaf)]
    dense = [index for index in range(len(leaves)) if index not in sparse]

    def gather(site: CallSite, merged: CommunicationOptions) -> Call:
        op = ReduceOp.of(reduce_op)
        if out is not None:
            raise TypeError(
                "out= can't take the sum of IndexedSlices: it has as many rows as all replicas"
                " have together. Leave out= away, or use to_dense()."
            )
        if op not in (ReduceOp.SUM, ReduceOp.MEAN):
            raise TypeError(
                f"{op.name} of IndexedSlices has no meaning. Use SUM or MEAN, or to_dense()."
            )
        parts = []
        for index in sparse:
            slices = leaves[index]
            wide, _ = accumulation(slices.values.dtype, op)
            parts += [slices.values.astype(wide, copy=False), slices.indices]
            parts.append(np.array([len(slices.indices)]))
        where = [f"{paths[index]} of dense shape {leaves[index].dense_shape}" for index in sparse]
        detail = f"{op.name}, IndexedSlices at value{', value'.join(where)}"
        names = [
            f"{paths[index]}.{part}" for index in sparse for part in ("values", "indices", "rows")
        ]
        return AllGather(site, merged, "all_reduce", 0, [parts], structure, detail, names)

    def reduce(site: CallSite, merged: CommunicationOptions) -> Call:
        values = [leaves[index] for index in dense]
        names = [paths[index] for index in dense]
        op = ReduceOp.of(reduce_op)
        return AllReduce(site, merged, "all_reduce", op, [values], structure, None, "", names)

    results: list[Any] = [None] * len(leaves)
    gathered = meet(engine.make("all_reduce", options, gather))
    scale = engine.layout.num_replicas if ReduceOp.of(reduce_op) is ReduceOp.MEAN else 1
    for position, index in enumerate(sparse):
        values, indices, rows = gathered[3 * position : 3 * position + 3]
        _, result = accumulation(leaves[index].values.dtype, ReduceOp.of(reduce_op))
        values = (values if scale == 1 else np.divide(values, scale)).astype(result, copy=False)
        shape = leaves[index].dense_shape
        results[index] = IndexedSlices.of_replicas(values, indices, shape, rows.tolist())
    if dense:
        reduced = meet(engine.make("all_reduce", options, reduce))
        for index, value in zip(dense, reduced, strict=True):
            results[index] = value
    return nest.unflatten(structure, results)
