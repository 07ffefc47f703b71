"""Running a ``merge_fn``: once on each rank, in cross-replica context."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ..collectives.agreement.call import Call
from ..collectives.agreement.site import boundary
from ..collectives.merge import MergeCall, MergeScope
from ..collectives.strategy_base import StrategyBase
from ..core import nest
from ..core.array_libraries import as_constants, copy_of
from ..core.context import State, entered
from ..core.indexed_slices import IndexedSlices
from ..core.thread_state import ThreadState
from ..core.values import DistributedValues, Mirrored, PerReplica, component_of, read_only
from .memory_of_replicas import MemoryOfReplicas, extents_of

# Of leaves of a result above this size dtype and shape are compared between ranks.
_HASHED_BYTES = 1 << 16


def perform_alone(strategy: StrategyBase, call: Call) -> Any:
    """Performs the call of a `ReplicaContext` that was made by hand: there is one replica."""
    call.replica_ids = (0,)
    if call.error is not None:
        raise call.error
    result = strategy.engine.perform([call])[0]
    if not isinstance(call, MergeCall):
        return result
    return unpacked(run_merge_fn(strategy, call, *result), [0], 1, [call])[0]


def run_merge_fn(
    strategy: StrategyBase, call: MergeCall, scope: MergeScope, args: Any, kwargs: Any
) -> Any:
    """Runs the function of a call; its arguments can be looked at until it has returned."""
    try:
        with entered(State(strategy, None, "merge_fn")):
            return invoke_merge_fn(call.function, strategy, args, kwargs, call.thread_state)
    finally:
        scope.is_open = False


def call_directly(
    strategy: StrategyBase, merge_fn: Callable[..., Any], args: Any, kwargs: Mapping[str, Any]
) -> Any:
    """Calls a ``merge_fn`` for the only replica of a strategy that communicates with nobody."""
    leaves, structure, is_plain = nest.flatten_arguments(args, kwargs)
    originals: dict[int, Any] = {}
    if not is_plain:
        leaves, originals = as_constants(leaves)
        if originals:
            args, kwargs = nest.unflatten(structure, leaves)
    with entered(State(strategy, None, "merge_fn")):
        result = merge_fn(strategy, *args, **kwargs)
    if not originals:
        return result
    return nest.map_structure(lambda leaf: originals.get(id(leaf), leaf), result)


@boundary
def invoke_merge_fn(
    merge_fn: Callable[..., Any],
    strategy: StrategyBase,
    args: Any,
    kwargs: Any,
    thread_state: ThreadState | None = None,
) -> Any:
    """Calls a ``merge_fn``, in the state of its replica; the frames of a call site end here."""
    if thread_state is None:
        return merge_fn(strategy, *args, **kwargs)
    return thread_state.hold_in(functools.partial(merge_fn, strategy, *args, **kwargs))


def unpacked(
    value: Any, replica_ids: Sequence[int], num_replicas: int, calls: Sequence[MergeCall]
) -> list[Any]:
    """Returns, for each local replica, the nest `value` with its component of each PerReplica.

    Each replica may write into the arrays that it gets: they must not be those of another one, nor
    what another one has passed to its call; nor parts of each other, which copies would not be.
    What a ``merge_fn`` gives back as it got it is the replica's own argument.
    """
    for call in calls:
        for copy in call.copies.values():
            copy.write_back()
    if value is None:
        return [None] * len(replica_ids)
    memory = None
    if len(replica_ids) > 1:
        memory = MemoryOfReplicas()
        for i, call in zip(replica_ids, calls, strict=True):
            for leaf in (*call.leaves, *call.originals.values()):
                memory.add(extents_of(leaf), i)

    def of_replica(replica_id: int, call: MergeCall) -> Any:
        copies: dict[int, Any] = {}  # what it gets twice is one thing, as where it is no copy
        given = MemoryOfReplicas()

        def own(leaf: Any) -> Any:
            found = call.originals.get(id(leaf), leaf)
            if id(found) not in copies:
                extents = extents_of(found)
                is_shared = memory is not None and memory.is_of_another(extents, replica_id)
                if not is_shared and given.is_of_another(extents, None):
                    is_shared = not any([leaf is passed for passed in call.leaves])
                copies[id(found)] = mine = _copied(found) if is_shared else found
                if is_shared:
                    extents = extents_of(mine)
                given.add(extents, replica_id)
                if memory is not None:
                    memory.add(extents, replica_id)
            return copies[id(found)]

        def component(leaf: Any) -> Any:
            if isinstance(leaf, PerReplica):  # of nests, perhaps
                return nest.map_structure(own, component_of(leaf, replica_id, num_replicas))
            return own(component_of(leaf, replica_id, num_replicas))

        return nest.map_structure(component, value)

    return list(map(of_replica, replica_ids, calls))


def _copied(value: Any) -> Any:
    """Returns a copy of an array; of one that is read-only, as on ranks of one replica, too."""
    if isinstance(value, IndexedSlices):
        return value.changed(_copied)
    copy = copy_of(value)
    is_read_only = isinstance(value, (np.ndarray, np.void)) and not value.flags.writeable
    return read_only(copy) if is_read_only else copy


def comparable(result: Any) -> Any:
    """Returns what of a merge_fn's result must be the same on all ranks."""

    def of_leaf(leaf: Any) -> Any:
        if isinstance(leaf, Mirrored):
            leaf = leaf.value
        if isinstance(leaf, DistributedValues):
            return None
        try:
            is_large = getattr(leaf, "nbytes", 0) > _HASHED_BYTES
        except RuntimeError:  # of a sparse tensor
            is_large = True
        is_array = is_large and hasattr(leaf, "dtype") and hasattr(leaf, "shape")
        return (str(leaf.dtype), tuple(leaf.shape)) if is_array else leaf

    return nest.map_structure(of_leaf, result)
