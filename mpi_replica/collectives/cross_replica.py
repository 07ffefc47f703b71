"""reduce and gather in cross-replica context: for values of replicas, on every rank.

Where the components of all replicas are at hand (in a ``merge_fn``) no message is needed. Above the
replicas a call that has nothing to send is compared with that of the other ranks nevertheless.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..core import nest
from ..core.array_libraries import give_back, way_back
from ..core.context import current_state
from ..core.dtypes import as_plain_array
from ..core.options import CommunicationOptions, ReduceOp
from ..core.values import DistributedValues
from .agreement.call import Call
from .agreement.site import CallSite
from .at_hand import AtHand
from .axes import finished, normalized, partial
from .engine import Engine
from .equal_everywhere import EqualEverywhere
from .gather import AllGather
from .reduce import AllReduce
from .sparse import has_slices, reduce_with_slices

# Performs a call, and returns its result.
_Perform = Callable[[Call], list[Any]]
# The leaves of each replica.
_Rows = Sequence[Sequence[Any]]


def reduce(
    engine: Engine,
    kind: str,
    reduce_op: ReduceOp | str,
    value: Any,
    axis: Any,
    options: CommunicationOptions | None,
    detail: str = "",
    *,
    plain_is_component: bool = False,
) -> Any:
    """Returns the nest `value` with each leaf reduced over all replicas. Collective.

    `plain_is_component`: a value that is not distributed is that of the only replica.
    """
    engine.check_thread(kind)  # also where all components are at hand

    def words() -> str:
        words = f"{ReduceOp.of(reduce_op).name}, axis={normalized(axis)}"
        return f"{words}, {detail}" if detail else words

    leaves = _Leaves(engine, kind, value, options, words, plain_is_component)
    structure = leaves.structure

    def combine(perform: _Perform, rows: _Rows, paths: Sequence[str]) -> list[Any]:
        if axis is None and has_slices(rows):
            return reduce_with_slices(
                engine, perform, kind, reduce_op, rows, structure, paths, options, detail
            )
        call = engine.make(
            kind, options, _reduction, kind, reduce_op, rows, axis, paths, structure, detail
        )
        return perform(call)

    def of_shared(shared: Any, path: str) -> Any:
        op = ReduceOp.of(reduce_op)
        _require_returned(f"{kind}({op.name})", shared, path)
        if op in (ReduceOp.SUM, ReduceOp.PROD):
            raise ValueError(
                f"{kind}({op.name}) of {shared!r} (value{path}), which is no value per replica: it"
                " is the same on all of them, so it is not clear how often it counts. Pass what"
                " strategy.run returned, or multiply by strategy.num_replicas_in_sync yourself."
            )
        axes = normalized(axis)
        if axes is None:
            return shared
        total, count = partial(op, shared, axes, path)
        result = finished(op, total, count, as_plain_array(shared).dtype, path)
        return give_back([result], way_back([shared]))[0]

    return leaves.map(combine, of_shared)


def gather(
    engine: Engine,
    value: Any,
    axis: Any,
    *,
    plain_is_component: bool = False,
) -> Any:
    """Returns the nest `value` with the components of each leaf concatenated. Collective."""
    engine.check_thread("gather")  # also where all components are at hand
    leaves = _Leaves(engine, "gather", value, None, lambda: f"axis={axis!r}", plain_is_component)
    structure = leaves.structure

    def combine(perform: _Perform, rows: _Rows, paths: Sequence[str]) -> list[Any]:
        call = engine.make("gather", None, AllGather, "gather", axis, rows, structure, None, paths)
        return perform(call)

    def of_shared(shared: Any, path: str) -> Any:
        _require_returned("gather", shared, path, " strategy.gather_objects takes None, too.")
        raise ValueError(
            f"gather of {shared!r} (value{path}), which is no value per replica. Pass what"
            " strategy.run returned, or np.concatenate what you have; strategy.gather_objects takes"
            " an object of each rank."
        )

    return leaves.map(combine, of_shared)


def _require_returned(call: str, value: Any, path: str, else_do: str = "") -> None:
    """Raises where `value` is what ``strategy.run`` gives of a step without a ``return``."""
    if value is None:
        raise ValueError(
            f"{call} of None (value{path}), which is what strategy.run gives where the function"
            f" returned nothing. Does it lack a return?{else_do}"
        )


class _Leaves:
    """The leaves of a nest, by where their components are."""

    def __init__(
        self,
        engine: Engine,
        kind: str,
        value: Any,
        options: CommunicationOptions | None,
        words: Callable[[], str],
        plain_is_component: bool,
    ) -> None:
        self.engine = engine
        self._kind = kind
        self._options = options
        self._words = words
        engine.require_open()  # also where all components are at hand
        try:
            self.leaves, self.structure = nest.flatten(value)
        except Exception as error:
            engine.fail(kind, error)
        self.paths = nest.leaf_paths(self.structure)
        self._plain_is_component = plain_is_component

    def _is_shared(self, leaf: Any) -> bool:
        if isinstance(leaf, DistributedValues):
            return leaf.components(()) is None
        return not self._plain_is_component

    def _rows(self, ids: Sequence[int], wanted: Sequence[int]) -> list[list[Any]]:
        """Returns the wanted leaves of each of these replicas."""
        columns = []
        for index in wanted:
            leaf = self.leaves[index]
            components = leaf.components(ids) if isinstance(leaf, DistributedValues) else [leaf]
            columns.append(components or [])
        return [list(row) for row in zip(*columns, strict=True)]

    def map(
        self,
        combine: Callable[[_Perform, _Rows, Sequence[str]], list[Any]],
        of_shared: Callable[[Any, str], Any],
    ) -> Any:
        """Returns the nest with a result for each leaf; leaves that travel share one call.

        `combine` takes what performs a call, the leaves of each replica that the call stands for,
        and their paths, and gives a result for each.
        """
        engine, layout = self.engine, self.engine.layout
        results: list[Any] = [None] * len(self.leaves)
        here, elsewhere, plain = [], [], []
        try:
            for index, leaf in enumerate(self.leaves):
                if isinstance(leaf, DistributedValues):
                    leaf.require(layout.num_replicas)
                if self._is_shared(leaf):
                    value = leaf
                    if isinstance(leaf, DistributedValues):
                        value = leaf.shared_value()
                    else:
                        plain.append(leaf)
                    results[index] = of_shared(value, self.paths[index])
                elif isinstance(leaf, DistributedValues) and leaf.holds_all:
                    here.append(index)
                else:
                    elsewhere.append(index)
            rows_here = self._rows(layout.all_replica_ids, here)
            rows = self._rows(layout.local_replica_ids, elsewhere)
            words = self._words() if rows_here or plain or not elsewhere else ""
        except Exception as error:
            engine.fail(self._kind, error)
        if words:
            self._compare(words, [*rows_here, *plain], at_once=not elsewhere)
        at_hand: AtHand = engine.group.kept[AtHand]
        for wanted, those, perform in (
            (elsewhere, rows, engine.cross_replica),  # first: what is at hand is compared with it
            (here, rows_here, at_hand.perform),
        ):
            if wanted:
                own_results = combine(perform, those, [self.paths[index] for index in wanted])
                for index, result in zip(wanted, own_results, strict=True):
                    results[index] = result
        return nest.unflatten(self.structure, results)

    def _compare(self, words: str, values: list[Any], *, at_once: bool) -> None:
        """Has the ranks compare what does not travel; of nothing, that all make the call.

        Not in a ``merge_fn`` or an update, of which they compare what these give.
        """
        engine, kind, state = self.engine, self._kind, current_state()
        is_compared = engine.agreement.runs or (state is not None and state.kind == "update")
        if engine.layout.size == 1 or is_compared:
            return
        text = nest.structure_text(self.structure)

        def make(site: CallSite, options: CommunicationOptions) -> Call:
            return EqualEverywhere(
                site,
                options,
                kind,
                words if text == "*" else f"{words}, {text}",
                values,
                "What is no value per replica must be the same on all ranks. Pass what strategy.run"
                " returned; strategy.gather_objects takes an object of each rank.",
                write=lambda value: lambda: None,
                held_bytes=0,
                at_once=at_once and bool(values),
            )

        engine.cross_replica(engine.make(kind, self._options, make))


def _reduction(
    site: CallSite,
    options: CommunicationOptions,
    kind: str,
    reduce_op: ReduceOp | str,
    rows: Sequence[Sequence[Any]],
    axis: Any,
    paths: Sequence[str],
    structure: nest.Structure,
    detail: str,
) -> Call:
    """Returns the call that reduces the leaves of the replicas of a rank.

    Along axes there travels what each replica has left: wide sums, and with them how many elements
    they are of.
    """
    op = ReduceOp.of(reduce_op)
    axes = normalized(axis)
    words = ", ".join(filter(None, [f"axis={axes}" if axis is not None else "", detail]))
    if axes is None:
        return AllReduce(site, options, kind, op, rows, structure, detail=words, paths=paths)
    number = len(paths)
    contributions, dtypes = [], []
    for row in rows:
        parts = [partial(op, leaf, axes, path) for leaf, path in zip(row, paths, strict=True)]
        sign = -1 if op is ReduceOp.MIN else 1  # so that MIN, too, tells whether there was any
        counts = [np.int64(sign * count) for _, count in parts]
        contributions.append([total for total, _ in parts] + counts)
        dtypes.append(
            [as_plain_array(leaf).dtype for leaf in row] + [count.dtype for count in counts]
        )

    way = way_back(rows[0])

    def finish(results: list[Any]) -> list[Any]:
        leaves = [
            finished(op, total, abs(int(count)), dtype, path)
            for total, count, dtype, path in zip(
                results[:number], results[number:], dtypes[0][:number], paths, strict=True
            )
        ]
        return give_back(leaves, way)

    inner = ReduceOp.SUM if op is ReduceOp.MEAN else op
    all_paths = [*paths, *(f"{path} (its number of elements)" for path in paths)]
    return AllReduce(
        site,
        options,
        kind,
        inner,
        contributions,
        structure,
        detail=words,
        paths=all_paths,
        finish=finish,
        asked=op,
        dtypes=dtypes,
    )
