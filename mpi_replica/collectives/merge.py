"""merge_call: the arguments of all replicas, gathered to every rank.

Small arguments travel with the call. Large arrays stay where they are until ``merge_fn`` looks at
them, so that one that only reduces them costs an ``all_reduce``. `arguments` says how they travel.
"""

from __future__ import annotations

import itertools
import marshal
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from ..core import nest
from ..core.argument_checks import check_call
from ..core.array_libraries import as_constants
from ..core.array_ways import Array
from ..core.exceptions import ContextError
from ..core.key_order import SORTED, key_order, with_sorted_keys
from ..core.options import CommunicationOptions
from ..core.thread_state import ThreadState
from ..core.values import PerReplica, component_of
from .agreement.call import Call
from .agreement.group import Group
from .agreement.site import CallSite, FunctionIdentity, call_site, function_identity
from .agreement.stand import LeafDescription
from .agreement.steps import Steps
from .arguments import (
    Elsewhere,
    Held,
    Packed,
    bytes_of,
    held_by,
    joined,
    largest,
    own_copy,
    pack,
    refuses_writes,
    require_packable,
    unpack_all,
)
from .blobs import all_blobs, payload_of
from .collection import gathered
from .engine import Engine
from .stand_ins import StandIns, separate, write_back

T = TypeVar("T")


class MergeScope:
    """The time in which a ``merge_fn`` runs, and in which its arguments may be looked at."""

    def __init__(
        self, engine: Engine, options: CommunicationOptions, stand_ins: Sequence[StandIns]
    ) -> None:
        self.engine = engine
        self.options = options
        self.is_open = True
        self._stand_ins = stand_ins

    def close(self, *, has_failed: bool = False) -> None:
        """Ends it: what was written into copies of arguments is written into these."""
        stand_ins, self._stand_ins = self._stand_ins, ()  # a kept argument does not keep all others
        self.is_open = False
        write_back(stand_ins, has_failed=has_failed)


class MergeCall(Call):
    """One replica's call of ``merge_call``.

    Parameters
    ----------
    is_shared : callable
        Tells the leaves that are the same object on all replicas of a rank and stay themselves
        (variables); it returns their name, or None.
    engine : Engine
        Performs the calls by which `function` looks at its arguments.
    """

    kind = "merge_call"
    runs_user_code = True
    identity: FunctionIdentity
    #: Of mappings among the arguments.
    key_order = SORTED

    def __init__(
        self,
        site: CallSite,
        options: CommunicationOptions,
        function: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        is_shared: Callable[[Any], str | None],
        replica_id: int,
        engine: Engine,
    ) -> None:
        super().__init__(site, options)
        check_merge_call(function, args, kwargs)
        self.function = function
        self._engine = engine
        identity = self.identity = function_identity(function)
        identity.require_eager("merge_call")
        self.leaves, self.structure, is_plain = nest.flatten_arguments(args, kwargs)
        self.shared: list[str | None] = [None] * len(self.leaves)
        state = ThreadState.of_this_thread()
        #: What libraries keep for the thread of the replica: `function` finds it in another one.
        self.thread_state = None if state == (None, None) else state
        #: What torch records, by the ids of the constants that `function` gets: no gradient passes
        #: what it computes, since components from other ranks have no graph here.
        #: So is that for which copies stand in, by the ids of these.
        self.originals: dict[int, Any] = {}
        if not is_plain:
            number = engine.layout.num_replicas
            components = [component_of(leaf, replica_id, number) for leaf in self.leaves]
            self.leaves, self.originals = as_constants(components)
            self.shared = [is_shared(leaf) for leaf in self.leaves]
        self.stand_ins = StandIns(self.leaves, self.originals)
        self.leaves = self.stand_ins.leaves
        if kwargs or self.structure.num_nodes > len(self.leaves) + 3:  # some argument is a nest
            self.key_order = key_order((tuple(args), dict(kwargs)), self.structure)
        self.packed: Packed = [], b""
        if engine.layout.size > 1:
            self.packed = self._told_where(pack)
        elif not is_plain or any(map(_holds_objects, self.leaves)):
            self._told_where(require_packable)  # a program is right on one rank as on several
        self.identify((identity.digest, nest.key(self.structure), tuple(self.shared)))

    @property
    def lent(self) -> Sequence[Any]:
        return self.leaves

    def leaves_in_words(self, position: int) -> tuple[LeafDescription, ...]:
        return tuple(LeafDescription(name or "value") for name in self.shared)

    def prepare(self, group: Group, calls: Sequence[MergeCall]) -> tuple[bytes, bytes]:
        for call in calls:
            call.stand_ins.take_writes_as_given()
        if group.layout.size == 1:
            return b"", b""
        blob = self._written(calls)
        return payload_of(group, blob), blob

    def steps(
        self, group: Group, calls: Sequence[MergeCall], prepared: bytes
    ) -> Steps[list[memoryview]] | list[memoryview]:
        return [] if group.layout.size == 1 else all_blobs(group, prepared)

    def answer(self, calls: Sequence[MergeCall], results: Sequence[memoryview]) -> list[Any]:
        """Returns the arguments; the caller runs the function outside of the interrupt gate."""
        layout = self._engine.layout
        rows: list[list[Held | Elsewhere]] = []
        own = _apart(calls)
        common_order = _common_order(calls)
        if layout.size == 1:
            rows = [[Held(leaf) for leaf in leaves] for leaves in own]
        for rank, data in enumerate(results):
            if rank == layout.rank:  # its own objects, not copies of them
                rows += [
                    held_by(leaves, call.packed[0]) for leaves, call in zip(own, calls, strict=True)
                ]
            else:
                tables, values, order, unwritable = marshal.loads(data)
                if order != common_order:
                    common_order = None
                given = unpack_all(tables, values, layout.counts[rank], self.leaves)
                for replica, index in unwritable:
                    given[replica][index].refuse_writes()
                rows += given
        scope = MergeScope(self._engine, self.options, [call.stand_ins for call in calls])
        merged = [
            self._merge(index, [row[index] for row in rows], scope)
            for index in range(len(self.leaves))
        ]
        arguments = nest.unflatten(self.structure, merged)
        if common_order is None:
            arguments = with_sorted_keys(arguments, self.structure)
        return [(scope, *arguments)]

    def _told_where(self, work: Callable[[Sequence[Any]], T]) -> T:
        """Returns what comes of the leaves; an error names the one that it is of."""
        try:
            return work(self.leaves)
        except Exception:
            for path, leaf in zip(nest.leaf_paths(self.structure), self.leaves, strict=True):
                try:
                    work([leaf])
                except Exception as error:
                    raise TypeError(
                        f"merge_call got {type(leaf).__name__} for value{path}, which can't travel"
                        f" to the other ranks: {str(error).rstrip('.')}. Pass arrays, numbers,"
                        " texts, or objects that pickle knows."
                    ) from error
            raise

    def _written(self, calls: Sequence[MergeCall]) -> bytes:
        packed = [call.packed for call in calls]
        unwritable = [  # now: while others have come to their calls, all have refused writes
            (replica, index)
            for replica, call in enumerate(calls)
            for index, leaf in enumerate(call.leaves)
            if refuses_writes(leaf)
        ]
        try:
            return marshal.dumps((*joined(packed), _common_order(calls), unwritable))
        except ValueError:
            what, place = largest(packed)
            paths = nest.leaf_paths(self.structure)
            where = "" if place is None else f" for value{paths[place]}"
            raise ValueError(
                f"merge_call got {what}{where}: an object of 2 GiB and more can't travel. Pass"
                " arrays of 64 KiB and more, which travel by themselves and are of any size: of an"
                " object those that it is made of."
            ) from None

    def _merge(self, index: int, column: Sequence[Held | Elsewhere], scope: MergeScope) -> Any:
        if self.shared[index] is not None:
            return self.leaves[index]
        # Alike on all ranks, also on one that hosts all of the large components itself.
        for entry in column:
            if not isinstance(entry, Held) or entry.is_large:
                return LazyPerReplica(column, nest.leaf_paths(self.structure)[index], scope)
        values = [entry.value for entry in column if isinstance(entry, Held)]
        for value in values:
            if value is not None:
                return PerReplica(values)
        return None


def _holds_objects(leaf: Any) -> bool:
    return isinstance(leaf, np.ndarray) and leaf.dtype.hasobject


def _common_order(calls: Sequence[MergeCall]) -> str | None:
    """Returns the order of keys in what the replicas of a rank give; None where it differs."""
    first = calls[0].key_order
    for call in calls:
        if call.key_order != first:
            return None
    return first


def _apart(calls: Sequence[MergeCall]) -> Sequence[list[Any]]:
    """Returns the leaves of replicas, where what several give is one of each's own.

    A ``merge_fn`` may write into it: so do replicas that are on ranks of their own. Of one object
    the last one keeps what it has given, which nobody has changed since.
    """
    rows = [list(call.leaves) for call in calls]
    separate([call.stand_ins for call in calls], rows)
    if len(calls) == 1:
        return rows
    last = {id(leaf): call for call in calls for leaf in call.leaves}
    return [
        [
            leaf if last.get(id(leaf), call) is call else own_copy(leaf, entry)
            for leaf, entry in itertools.zip_longest(row, call.packed[0])
        ]
        for call, row in zip(calls, rows, strict=True)
    ]


def check_merge_call(function: Any, args: Any, kwargs: Any) -> None:
    """Raises where these are no function and its arguments.

    Raises
    ------
    TypeError, ValueError
        They are not.
    """
    if not callable(function):
        raise TypeError(f"merge_fn must be callable, got {function!r}.")
    check_call(args, kwargs)


class LazyPerReplica(PerReplica):
    """A `PerReplica` in a ``merge_fn`` whose large components are gathered when looked at."""

    __slots__ = ("_column", "_is_gathered", "_path", "_scope")

    def __init__(self, column: Sequence[Held | Elsewhere], path: str, scope: MergeScope) -> None:
        super().__init__([None] * len(column))
        self._column = column
        self._path = path
        self._scope = scope
        self._is_gathered = False

    @property
    def holds_all(self) -> bool:
        """Whether the components of all replicas are here already, on every rank."""
        return self._is_gathered

    @property
    def values(self) -> tuple[Any, ...]:
        """The components of all replicas; looking at them is a collective call."""
        if not self.holds_all:
            self._gather()
        return tuple(entry.value for entry in self._column if isinstance(entry, Held))

    def components(self, replica_ids: Sequence[int]) -> list[Any]:
        """Returns the components of these replicas; those of this rank without communication."""
        local_replica_ids = self._scope.engine.layout.local_replica_ids
        return [
            entry.value
            if i in local_replica_ids and isinstance(entry := self._column[i], Held)
            else self.values[i]
            for i in replica_ids
        ]

    def _texts(self, show: Callable[[Any], str]) -> list[str]:
        return [
            show(entry.value) if isinstance(entry, Held) else f"<replica {i}: not gathered>"
            for i, entry in enumerate(self._column)
        ]

    def _gather(self) -> None:
        scope = self._scope
        if not scope.is_open:
            raise ContextError(
                f"an argument of merge_fn (value{self._path}) was looked at after merge_fn had"
                " returned; its large components are still with their replicas. Look at it inside"
                " merge_fn: np.asarray of its values, or experimental_local_results."
            )
        scope.engine.check_thread("merge_fn")
        look = _Look(call_site(), scope.options, self._path, self._column)
        self._column = scope.engine.cross_replica(look)
        self._is_gathered = True


class _Look(Call):
    """The gathering of an argument's large components, when ``merge_fn`` looks at them."""

    kind = "look at an argument of merge_fn"

    def __init__(
        self,
        site: CallSite,
        options: CommunicationOptions,
        path: str,
        column: Sequence[Held | Elsewhere],
    ) -> None:
        super().__init__(site, options)
        self.column = column
        self.detail = f"value{path}: look at it on all ranks before branching on the rank"
        self.identify(path)

    def prepare(self, group: Group, calls: Sequence[_Look]) -> tuple[bytes, Any]:
        layout = group.layout
        sizes = [0] * layout.num_replicas
        mine: list[Array] = []
        for replica, entry in enumerate(self.column):
            if isinstance(entry, Elsewhere):
                sizes[replica] = entry.size_bytes
            elif replica in layout.local_replica_ids and entry.is_large:
                mine.append(bytes_of(entry.value))
                sizes[replica] = mine[-1].nbytes
        rank_bytes = [sum(sizes[i] for i in layout.replica_ids(r)) for r in range(layout.size)]
        receive = np.empty(sum(sizes), np.uint8)
        return b"", (mine, receive, rank_bytes, self._arrays(receive, sizes))

    def steps(
        self, group: Group, calls: Sequence[_Look], prepared: Any
    ) -> Steps[dict[int, tuple[Array, Array]]]:
        mine, receive, rank_bytes, arrays = prepared
        yield gathered(group.layout, mine or [np.empty(0, np.uint8)], receive, rank_bytes)
        return arrays  # type: ignore[no-any-return]

    def answer(
        self, calls: Sequence[_Look], results: dict[int, tuple[Array, Array]]
    ) -> list[list[Held | Elsewhere]]:
        for block, array in results.values():
            if array is not block:
                np.copyto(array, block)
        return [
            [
                Held(entry.as_passed(results[replica][1]))
                if isinstance(entry, Elsewhere)
                else entry
                for replica, entry in enumerate(self.column)
            ]
        ]

    def _arrays(self, receive: Array, sizes: Sequence[int]) -> dict[int, tuple[Array, Array]]:
        """Returns where the components from elsewhere come, and as what they are given.

        That is the same memory, but for those behind one of another dtype that are not aligned.
        """
        arrays = {}
        ends = itertools.accumulate(sizes)
        for replica, (entry, end) in enumerate(zip(self.column, ends, strict=True)):
            if isinstance(entry, Elsewhere):
                block = receive[end - sizes[replica] : end].view(entry.dtype).reshape(entry.shape)
                is_aligned = block.flags.aligned
                arrays[replica] = block, block if is_aligned else np.empty_like(block)
        return arrays
