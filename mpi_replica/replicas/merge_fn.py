"""Running a ``merge_fn``: once on each rank, in cross-replica context."""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from traceback import walk_tb
from typing import Any, Literal

import numpy as np

from ..collectives.agreement.call import Call
from ..collectives.agreement.site import boundary
from ..collectives.merge import MergeCall, MergeScope
from ..collectives.stand_ins import StandIns, separate, write_back
from ..collectives.strategy_base import StrategyBase
from ..core import nest
from ..core.array_libraries import as_constants, copy_of, is_in_c_order
from ..core.context import State, entered
from ..core.exceptions import add_note
from ..core.indexed_slices import IndexedSlices
from ..core.library_state import forget_casts
from ..core.thread_state import ThreadState
from ..core.values import DistributedValues, Mirrored, component_of, read_only
from .memory_of_replicas import MemoryOfReplicas, are_apart, can_be_copied, extents_of

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
    has_failed = True
    try:
        with entered(State(strategy, None, "merge_fn")):
            result = invoke_merge_fn(call.function, strategy, args, kwargs, call.thread_state)
        has_failed = False
        return result
    except TypeError as error:
        *_, (frame, _) = walk_tb(error.__traceback__)
        if frame.f_code is invoke_merge_fn.__code__:  # it was not entered
            where = call.describe().where
            add_note(
                error,
                f"merge_fn {call.identity.text} gets the strategy first, and then what merge_call"
                f" at {where} was given as args and kwargs.",
            )
        raise
    finally:
        try:
            scope.close(has_failed=has_failed)
        finally:
            forget_casts()


def call_directly(
    strategy: StrategyBase, merge_fn: Callable[..., Any], args: Any, kwargs: Mapping[str, Any]
) -> Any:
    """Calls a ``merge_fn`` for the only replica of a strategy that communicates with nobody."""
    leaves, structure, is_plain = nest.flatten_arguments(args, kwargs)
    constants, originals = (leaves, {}) if is_plain else as_constants(leaves)
    stand_ins = StandIns(constants, originals)
    own = list(stand_ins.leaves)
    separate([stand_ins], [own])
    if stand_ins.copies or constants is not leaves:
        args, kwargs = nest.unflatten(structure, own)
    has_failed = True
    try:
        with entered(State(strategy, None, "merge_fn")):
            result = merge_fn(strategy, *args, **kwargs)
        has_failed = False
    finally:
        write_back([stand_ins], has_failed=has_failed)
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

    def call() -> Any:
        return invoke_merge_fn(merge_fn, strategy, args, kwargs)

    own = ThreadState.of_this_thread()  # the program, and other runs, go on in this thread
    return own.hold_in(functools.partial(thread_state.hold_in, call))


def unpacked(
    value: Any, replica_ids: Sequence[int], num_replicas: int, calls: Sequence[MergeCall]
) -> list[Any]:
    """Returns, for each local replica, the nest `value` with its component of each PerReplica.

    Each replica may write into the arrays that it gets: they must not be those of another one, nor
    what another one has passed to its call; nor parts of each other, which copies would not be.
    What a ``merge_fn`` gives back as it got it is the replica's own argument, or the copy of it
    that it got where several give one. All other arrays of numpy, but in `IndexedSlices`, are in C
    order, as copies are: the order of additions, and so the bits of a sum, follow from that.
    """
    if value is None:
        return [None] * len(replica_ids)
    flat = nest.flatten_plain(value)
    given = [
        _of_replica(*flat, i, num_replicas, call)
        for i, call in zip(replica_ids, calls, strict=True)
    ]
    leaves = [leaf for own, _ in given for leaf in own]
    held: list[list[Any]] = []
    if len(replica_ids) > 1:
        held = [[*call.leaves, *call.originals.values()] for call in calls]
        leaves += itertools.chain.from_iterable(held)
    if are_apart(leaves):
        owned = _by_identity([own for own, _ in given], held)
    else:
        owned = _by_memory([own for own, _ in given], held, calls)
    return [nest.unflatten(of, own) for own, (_, of) in zip(owned, given, strict=True)]


def _of_replica(
    leaves: list[Any],
    structure: nest.Structure,
    is_plain: int,
    replica_id: int,
    num_replicas: int,
    call: MergeCall,
) -> tuple[list[Any], nest.Structure]:
    """Returns the leaves of a result, and their nest, as a replica sees them, not copied yet."""
    if not is_plain:  # a PerReplica may be one of nests
        components = [component_of(leaf, replica_id, num_replicas) for leaf in leaves]
        leaves, structure = nest.flatten(nest.unflatten(structure, components))
    return _as_given_or_in_c_order(leaves, call), structure


def _as_given_or_in_c_order(leaves: list[Any], call: MergeCall) -> list[Any]:
    """Returns what a replica has passed as it is, and all other arrays of numpy in C order."""
    if call.originals:
        leaves = [call.originals.get(id(leaf), leaf) for leaf in leaves]
    moved = [one for one in leaves if isinstance(one, np.ndarray) and not is_in_c_order(one)]
    if not moved:
        return leaves
    known = {id(one): one for one in (*call.leaves, *call.originals.values())}
    for one in moved:
        if id(one) not in known:
            known[id(one)] = _copied(one, "C")  # once: what it gets twice is one thing
    return [known.get(id(leaf), leaf) for leaf in leaves]


def _by_identity(given: Sequence[list[Any]], held: Sequence[list[Any]]) -> list[list[Any]]:
    """Returns the leaves of each replica where two objects share no memory.

    Of what another replica has, which only the same object may be, it gets a copy.
    """
    if not held:
        return list(given)
    owners: dict[int, set[int]] = {}
    for replica, leaves in enumerate(held):
        for leaf in leaves:
            owners.setdefault(id(leaf), set()).add(replica)
    owned = []
    for replica, leaves in enumerate(given):
        copies: dict[int, Any] = {}  # what it gets twice is one thing, as where it is no copy
        for leaf in leaves:
            owner = owners.setdefault(id(leaf), {replica})
            if id(leaf) not in copies:
                is_shared = owner != {replica} and extents_of(leaf)
                copies[id(leaf)] = _copied(leaf) if is_shared else leaf
        owned.append([copies[id(leaf)] for leaf in leaves])
    return owned


def _by_memory(
    given: Sequence[list[Any]], held: Sequence[list[Any]], calls: Sequence[MergeCall]
) -> list[list[Any]]:
    """Returns the leaves of each replica where some may share memory with others."""
    memory = MemoryOfReplicas()
    for replica, leaves in enumerate(held):
        for leaf in leaves:
            memory.add(extents_of(leaf), replica)
    owned = []
    for replica, (leaves, call) in enumerate(zip(given, calls, strict=True)):
        copies: dict[int, Any] = {}  # what it gets twice is one thing, as where it is no copy
        before = MemoryOfReplicas()
        passed = {*map(id, call.leaves), *map(id, call.originals.values())}
        for leaf in leaves:
            if id(leaf) in copies:
                continue
            extents = extents_of(leaf)
            is_shared = memory.is_of_another(extents, replica)
            if not is_shared and id(leaf) not in passed:
                is_shared = before.is_of_another(extents, None)
            copies[id(leaf)] = mine = _copied(leaf) if is_shared else leaf
            if is_shared:
                extents = extents_of(mine)
            before.add(extents, replica)
            memory.add(extents, replica)
        owned.append([copies[id(leaf)] for leaf in leaves])
    return owned


def _copied(value: Any, order: Literal["C", "K"] = "K") -> Any:
    """Returns a copy of a value; of one that is read-only, as on ranks of one replica, too.

    An array of numpy, also in a file, keeps its order but for gaps, since a replica may have passed
    it; one of another class comes in C order.
    """
    if isinstance(value, IndexedSlices):
        return value.changed(_copied)
    if can_be_copied(value):
        return value.clone_state() if hasattr(value, "clone_state") else copy.deepcopy(value)
    is_plain = type(value) in (np.ndarray, np.memmap)  # a copy() of other classes may take no order
    mine = value.copy(order) if is_plain else copy_of(value)
    is_read_only = isinstance(value, (np.ndarray, np.void)) and not value.flags.writeable
    return read_only(mine) if is_read_only else mine


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
