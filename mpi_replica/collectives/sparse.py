"""IndexedSlices in all_reduce: the slices of all replicas, one behind the other."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from .. import nest
from ..dtypes import accumulation
from ..options import CommunicationOptions, ReduceOp
from ..values import IndexedSlices
from .call import Call
from .callsite import CallSite
from .engine import Engine
from .gathering import AllGather

__all__ = ["is_sparse", "reduce_with_slices"]


def is_sparse(leaf: Any) -> bool:
    """Return whether `leaf` is `IndexedSlices`."""
    return type(leaf) is IndexedSlices


class _Context(Protocol):
    @property
    def num_replicas_in_sync(self) -> int: ...
    @property
    def _engine(self) -> Engine: ...
    def all_reduce(
        self, reduce_op: ReduceOp | str, value: Any, options: CommunicationOptions | None = None
    ) -> Any: ...
    def meet(self, call: Call) -> Any: ...


def reduce_with_slices(
    context: _Context,
    reduce_op: ReduceOp | str,
    value: Any,
    options: CommunicationOptions | None,
) -> Any:
    """Return ``all_reduce`` of a nest in which some leaves are `IndexedSlices`.

    Dense leaves are reduced as always, in a call of their own where there are any.
    """
    leaves, structure = nest.flatten(value)
    sparse = {index: leaf for index, leaf in enumerate(leaves) if is_sparse(leaf)}

    def make(site: CallSite, merged: CommunicationOptions) -> Call:
        op = ReduceOp.of(reduce_op)
        if op not in (ReduceOp.SUM, ReduceOp.MEAN):
            raise TypeError(
                f"{op.name} of IndexedSlices has no meaning. Use SUM or MEAN, or to_dense()."
            )
        parts = []
        shapes = []
        for slices in sparse.values():
            wide, _ = accumulation(slices.values.dtype, op)
            parts.append(
                {"values": slices.values.astype(wide, copy=False), "indices": slices.indices}
            )
            shapes.append(slices.dense_shape)
        flat, parts_structure = nest.flatten(parts)
        paths = [nest.leaf_paths(structure)[index] for index in sparse]
        detail = f"{op.name}, IndexedSlices at {paths} of dense shapes {shapes}"
        return AllGather("all_reduce", 0, [flat], parts_structure, site, merged, detail)

    gathered = context.meet(context._engine.make("all_reduce", options, make))
    op = ReduceOp.of(reduce_op)
    dense = [leaf for index, leaf in enumerate(leaves) if index not in sparse]
    reduced = iter(context.all_reduce(op, dense, options) if dense else ())
    merged_slices = iter(gathered)
    results = []
    for index, leaf in enumerate(leaves):
        if index not in sparse:
            results.append(next(reduced))
            continue
        part = next(merged_slices)
        _, result = accumulation(leaf.values.dtype, op)
        values = part["values"]
        if op is ReduceOp.MEAN:
            values = np.divide(values, context.num_replicas_in_sync)
        results.append(
            IndexedSlices(values.astype(result, copy=False), part["indices"], leaf.dense_shape)
        )
    return nest.unflatten(structure, results)
