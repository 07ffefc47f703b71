"""IndexedSlices in reductions: the slices of all replicas, one behind the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..core import nest
from ..core.dtypes import accumulation
from ..core.indexed_slices import IndexedSlices
from ..core.options import CommunicationOptions, ReduceOp
from .agreement.call import Call
from .agreement.site import CallSite
from .agreement.stand import CallDescription
from .engine import Engine
from .gather import AllGather
from .reduce import AllReduce


def reduce_values(
    engine: Engine,
    meet: Callable[[Call], Any],
    reduce_op: ReduceOp | str,
    components: Callable[[], list[Any]],
    structure: nest.Structure,
    options: CommunicationOptions | None,
    out: Any,
) -> Any:
    """Returns ``all_reduce`` of a nest whose leaves may be `IndexedSlices`.

    `components` gives what this replica contributes, or raises; `meet` performs a replica's call.
    """
    try:
        leaves = components()
    except Exception as error:
        return meet(engine.failed("all_reduce", options, error))
    if has_slices([leaves]):
        paths = nest.leaf_paths(structure)
        results = reduce_with_slices(
            engine, meet, "all_reduce", reduce_op, [leaves], structure, paths, options, out=out
        )
        return nest.unflatten(structure, results)
    call = engine.make(
        "all_reduce", options, AllReduce, "all_reduce", reduce_op, [leaves], structure, out
    )
    return meet(call)


def has_slices(rows: Sequence[Sequence[Any]]) -> bool:
    """Returns whether a leaf of a replica is `IndexedSlices`."""
    return any([type(leaf) is IndexedSlices for row in rows for leaf in row])


def reduce_with_slices(
    engine: Engine,
    perform: Callable[[Call], Any],
    kind: str,
    reduce_op: ReduceOp | str,
    rows: Sequence[Sequence[Any]],
    structure: nest.Structure,
    paths: Sequence[str],
    options: CommunicationOptions | None,
    detail: str = "",
    out: Any = None,
) -> list[Any]:
    """Returns the results of a reduction in which some leaves are `IndexedSlices`.

    Dense leaves are reduced as always, in a call of their own where there are any.

    Parameters
    ----------
    rows : sequence of sequence
        The leaves of each replica that calls.
    paths : sequence of str
        Where these leaves are in `structure`.
    detail : str
        What else of the arguments must be the same.
    """
    are_sparse = [has_slices([column]) for column in zip(*rows, strict=True)]
    sparse = [index for index, is_sparse in enumerate(are_sparse) if is_sparse]
    dense = [index for index, is_sparse in enumerate(are_sparse) if not is_sparse]

    results: list[Any] = [None] * len(paths)
    gathered = perform(
        engine.make(kind, options, _gathering, kind, reduce_op, rows, structure, paths, detail, out)
    )
    op = ReduceOp.of(reduce_op)
    count = engine.layout.num_replicas if op is ReduceOp.MEAN else 1
    for position, index in enumerate(sparse):
        values, indices, lengths = gathered[4 * position : 4 * position + 3]
        slices = rows[0][index]
        _, result = accumulation(slices.values.dtype, op)
        if count != 1:
            values = engine.group.quietly(np.divide, values, count)
        shape = slices.dense_shape
        results[index] = IndexedSlices.of_replicas(values, result, indices, shape, lengths.tolist())
    if dense:
        dense_rows = [[row[index] for index in dense] for row in rows]
        names = [paths[index] for index in dense]
        reduced = perform(
            engine.make(
                kind,
                options,
                AllReduce,
                kind,
                op,
                dense_rows,
                structure,
                detail=detail,
                paths=names,
            )
        )
        for index, value in zip(dense, reduced, strict=True):
            results[index] = value
    return results


def _gathering(
    site: CallSite,
    options: CommunicationOptions,
    kind: str,
    reduce_op: ReduceOp | str,
    rows: Sequence[Sequence[Any]],
    structure: nest.Structure,
    paths: Sequence[str],
    detail: str,
    out: Any,
) -> Call:
    """Returns the call that gathers the slices of all replicas."""
    if out is not None:
        raise TypeError(
            "out= can't take the sum of IndexedSlices: it has as many rows as all replicas"
            " have together. Leave out= away, or use to_dense()."
        )
    op = ReduceOp.of(reduce_op)
    calls = [_first_call(site, options, kind, op, row, structure, paths, detail) for row in rows]
    first = calls[0]
    if any(call.fingerprint != first.fingerprint for call in calls):
        return _Apart(calls)
    first.contributions = [call.contributions[0] for call in calls]
    return first


def _first_call(
    site: CallSite,
    options: CommunicationOptions,
    kind: str,
    op: ReduceOp,
    leaves: Sequence[Any],
    structure: nest.Structure,
    paths: Sequence[str],
    detail: str,
) -> AllGather | AllReduce:
    """Returns the call that a replica with these leaves makes first: it gathers their slices.

    Of each leaf that is `IndexedSlices`, there travel its rows, their places, and how many they
    are.
    """
    sparse = [index for index, leaf in enumerate(leaves) if type(leaf) is IndexedSlices]
    if not sparse:
        return AllReduce(site, options, kind, op, [leaves], structure, detail=detail, paths=paths)
    if op not in (ReduceOp.SUM, ReduceOp.MEAN):
        raise TypeError(
            f"{op.name} of IndexedSlices has no meaning. Use SUM or MEAN, or to_dense()."
        )
    parts: list[Any] = []
    for index in sparse:
        slices = leaves[index]
        try:
            wide, _ = accumulation(slices.values.dtype, op)
        except TypeError as error:
            raise TypeError(f"{kind} of value{paths[index]}: {error}") from None
        parts += [slices.wide_values.astype(wide, copy=False), slices.indices]
        # And no rows at all, of their own dtype: others may have the same to be added up in.
        parts += [np.array([len(slices.indices)]), slices.values[:0]]
    where = [f"{paths[index]} of dense shape {leaves[index].dense_shape}" for index in sparse]
    words = f"{op.name}, IndexedSlices at value{', value'.join(where)}"
    of_each = ("values", "indices", "rows", "values")
    names = [f"{paths[index]}.{part}" for index in sparse for part in of_each]
    words += f", {detail}" if detail else ""
    return AllGather(site, options, kind, 0, [parts], structure, words, names)


class _Apart(Call):
    """Calls of the replicas of a rank that differ: made to be told to all ranks."""

    agrees = False

    def __init__(self, calls: Sequence[Call]) -> None:
        super().__init__(calls[0].site, calls[0].options)
        self.kind = calls[0].kind
        self._calls = calls

    def words(self, position: int = 0) -> CallDescription:
        return self._calls[position].words()
