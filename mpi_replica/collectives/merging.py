"""merge_call: the arguments of all replicas, gathered to every rank.

Small arguments travel with the call: arrays as their bytes, other objects pickled. Array leaves
of `LAZY_BYTES` and more stay where they are until ``merge_fn`` looks at them, so that one that
only reduces them costs an ``all_reduce``.
"""

from __future__ import annotations

import marshal
import math
import pickle
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from .. import nest
from ..errors import ContextError
from ..options import CommunicationOptions
from ..values import DistributedValues, PerReplica, component_of
from .blobs import agree_on_blobs
from .call import Call
from .callsite import CallSite, call_site, function_identity
from .collecting import gather_bytes
from .engine import Engine
from .standing import CallDescription, LeafDescription

__all__ = ["LAZY_BYTES", "LazyPerReplica", "MergeCall", "MergeScope"]

Array = np.ndarray[Any, Any]

#: Array leaves of this size are gathered when somebody looks at them.
LAZY_BYTES = 1 << 16

_NONE, _PLAIN, _OBJECT, _ARRAY, _SCALAR, _LAZY, _DTYPE_PICKLED = "npoasld"

# marshal writes them as they are, at a tenth of the price of pickle.
_PLAIN_TYPES = frozenset({int, float, complex, bool, str, bytes})
_NUMPY_NUMBERS = frozenset(np.dtype(code).type for code in "?bBhHiIlLqQefdFD")


class MergeScope:
    """The time in which a ``merge_fn`` runs, and in which its arguments may be looked at."""

    def __init__(self, engine: Engine, options: CommunicationOptions) -> None:
        self.engine = engine
        self.options = options
        self.is_open = True


class MergeCall(Call):
    """One replica's call of ``merge_call``.

    Parameters
    ----------
    is_shared : callable
        Tells the leaves that are the same object on all replicas of a rank and stay themselves
        (variables); it returns their name, or None.
    travels : bool
        Whether there are other ranks, to which the arguments go.
    """

    kind = "merge_call"
    runs_user_code = True

    def __init__(
        self,
        function: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        is_shared: Callable[[Any], str | None],
        replica_id: int,
        travels: bool,
        site: CallSite,
        options: CommunicationOptions,
    ) -> None:
        super().__init__(site, options)
        self.function = function
        identity = self.identity = function_identity(function)
        self.leaves, self.structure, is_plain = nest.flatten_arguments(args, kwargs)
        self.shared: list[str | None] = [None] * len(self.leaves)
        if not is_plain:
            self.leaves = [component_of(leaf, replica_id) for leaf in self.leaves]
            self.shared = [is_shared(leaf) for leaf in self.leaves]
        self.packed = _pack(self.leaves) if travels else ([], b"")
        self.identify((identity.digest, nest.key(self.structure), tuple(self.shared)))

    def words(self, position: int = 0) -> CallDescription:
        leaves = tuple(LeafDescription(name or "value") for name in self.shared)
        return CallDescription(
            self.kind,
            self.identity.text,
            self.site,
            self.options.name,
            nest.structure_text(self.structure),
            nest.leaf_paths(self.structure),
            leaves,
            code=self.identity.digest.hex(),
        )

    def perform(self, engine: Engine, calls: Sequence[MergeCall]) -> list[Any]:
        """Gather the arguments; the caller runs the function outside of the interrupt gate."""
        agreement, layout = engine.agreement, engine.layout
        if layout.size == 1:
            agreement.agree(calls)
            rows: list[list[_Held | _Elsewhere]] = [
                [_Held(leaf) for leaf in call.leaves] for call in calls
            ]
        else:
            with agreement.preparing(calls):
                blob = marshal.dumps(_joined([call.packed for call in calls]))
            blobs = agree_on_blobs(engine, calls, blob)
            rows = []
            for rank, data in enumerate(blobs):
                if rank == layout.rank:  # its own objects, not copies of them
                    rows += [[_Held(leaf) for leaf in call.leaves] for call in calls]
                else:
                    tables, joined = marshal.loads(data)
                    rows += _unpack_all(tables, joined, layout.counts[rank])
        scope = MergeScope(engine, self.options)
        merged = [
            self._merge(index, [row[index] for row in rows], scope)
            for index in range(len(self.leaves))
        ]
        args, kwargs = nest.unflatten(self.structure, merged)
        return [(scope, args, kwargs)]

    def _merge(self, index: int, column: Sequence[_Held | _Elsewhere], scope: MergeScope) -> Any:
        if self.shared[index] is not None:
            return self.leaves[index]
        if scope.engine.layout.size > 1:
            # Alike on all ranks, also on one that hosts all of the large components itself.
            for entry in column:
                if not isinstance(entry, _Held) or _is_lazy(entry.value):
                    return LazyPerReplica(column, nest.leaf_paths(self.structure)[index], scope)
        values = [entry.value for entry in column if isinstance(entry, _Held)]
        for value in values:
            if value is not None:
                return PerReplica(values)
        return None


class _Held:
    """A component that is here."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


class _Elsewhere:
    """An array that is still with its replica."""

    __slots__ = ("dtype", "shape")

    def __init__(self, dtype: np.dtype[Any], shape: tuple[int, ...]) -> None:
        self.dtype = dtype
        self.shape = shape

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def _pack(leaves: Sequence[Any]) -> tuple[list[tuple[Any, ...]], bytes]:
    """Return the leaves of a replica as plain data: a table of what they are, then their bytes."""
    table: list[tuple[Any, ...]] = []
    data: list[bytes] = []
    for leaf in leaves:
        kind = type(leaf)
        if leaf is None or isinstance(leaf, DistributedValues):
            table.append((_NONE,))
        elif kind in _PLAIN_TYPES:
            table.append((_PLAIN, leaf))
        elif kind is np.ndarray and not leaf.dtype.hasobject:
            how = _LAZY if leaf.nbytes >= LAZY_BYTES else _ARRAY
            table.append((how, *_dtype_on_wire(leaf.dtype), leaf.shape))
            if how == _ARRAY:
                data.append(leaf.tobytes())
        elif kind in _NUMPY_NUMBERS:
            table.append((_SCALAR, *_dtype_on_wire(leaf.dtype), ()))
            data.append(leaf.tobytes())
        else:
            table.append((_OBJECT, pickle.dumps(leaf, protocol=5)))
    return table, b"".join(data)


def _dtype_on_wire(dtype: np.dtype[Any]) -> tuple[str, bytes | str]:
    if dtype.kind in "biufcSUmM":  # others, as ml_dtypes' bfloat16, have no name of their own
        return _ARRAY, dtype.str
    return _DTYPE_PICKLED, pickle.dumps(dtype, protocol=5)


def _joined(
    packed: Sequence[tuple[list[tuple[Any, ...]], bytes]],
) -> tuple[list[list[tuple[Any, ...]]], bytes]:
    """Return the tables and the bytes of the local replicas; one table where all are alike.

    What travels then does not grow with the replicas of a rank.
    """
    tables = [table for table, _ in packed]
    # Not by comparing them: 1, True and 1.0 are equal. Version 2 writes equal things alike.
    if len(tables) > 1 and len({marshal.dumps(table, 2) for table in tables}) == 1:
        tables = tables[:1]
    return tables, b"".join([data for _, data in packed])


def _unpack_all(
    tables: Sequence[Sequence[tuple[Any, ...]]], data: bytes, count: int
) -> list[list[_Held | _Elsewhere]]:
    """Return the leaves of a rank's replicas, out of what `_joined` gave there."""
    rows = []
    start = 0
    for table in tables if len(tables) == count else [*tables] * count:
        row: list[_Held | _Elsewhere] = []
        for entry in table:
            held, start = _unpack(entry, data, start)
            row.append(held)
        rows.append(row)
    return rows


def _unpack(entry: tuple[Any, ...], data: bytes, start: int) -> tuple[_Held | _Elsewhere, int]:
    """Return a leaf, and where the next one begins."""
    kind, *rest = entry
    if kind == _NONE:
        return _Held(None), start
    if kind == _PLAIN:
        return _Held(rest[0]), start
    if kind == _OBJECT:
        return _Held(pickle.loads(rest[0])), start
    coding, name, shape = rest
    dtype = pickle.loads(name) if coding == _DTYPE_PICKLED else np.dtype(name)
    if kind == _LAZY:
        return _Elsewhere(dtype, shape), start
    size = math.prod(shape)
    array = np.frombuffer(data, dtype, size, start)
    # copied: arrays of other replicas are as writable as one's own
    value = array[0] if kind == _SCALAR else array.reshape(shape).copy()
    return _Held(value), start + size * dtype.itemsize


class LazyPerReplica(PerReplica):
    """A `PerReplica` in a ``merge_fn`` whose large components are gathered when looked at."""

    __slots__ = ("_column", "_is_gathered", "_path", "_scope")

    def __init__(self, column: Sequence[_Held | _Elsewhere], path: str, scope: MergeScope) -> None:
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
        return tuple(entry.value for entry in self._column if isinstance(entry, _Held))

    def component(self, replica_id: int) -> Any:
        entry = self._column[replica_id]
        is_local = replica_id in self._scope.engine.layout.local_replica_ids
        return entry.value if is_local and isinstance(entry, _Held) else self.values[replica_id]

    def components(self, replica_ids: Sequence[int]) -> list[Any]:
        if not set(replica_ids) <= set(self._scope.engine.layout.local_replica_ids):
            return [self.values[i] for i in replica_ids]
        return [self.component(i) for i in replica_ids]

    def _texts(self, show: Callable[[Any], str]) -> list[str]:
        return [
            show(entry.value) if isinstance(entry, _Held) else f"<replica {i}: not gathered>"
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
        look = _Look(self._path, self._column, call_site(), scope.options)
        self._column = scope.engine.cross_replica(look)
        self._is_gathered = True


class _Look(Call):
    """The gathering of an argument's large components, when ``merge_fn`` looks at them."""

    kind = "look at an argument of merge_fn"

    def __init__(
        self,
        path: str,
        column: Sequence[_Held | _Elsewhere],
        site: CallSite,
        options: CommunicationOptions,
    ) -> None:
        super().__init__(site, options)
        self.path = path
        self.column = column
        self.identify(path)

    def words(self, position: int = 0) -> CallDescription:
        return CallDescription(
            self.kind,
            f"value{self.path}: look at it on all ranks before branching on the rank",
            self.site,
            self.options.name,
        )

    def perform(self, engine: Engine, calls: Sequence[_Look]) -> list[Any]:
        layout = engine.layout
        with engine.agreement.preparing(calls):
            sizes = [0] * layout.num_replicas
            mine: list[Array] = []
            for replica, entry in enumerate(self.column):
                if isinstance(entry, _Elsewhere):
                    sizes[replica] = entry.size_bytes
                elif replica in layout.local_replica_ids and _is_lazy(entry.value):
                    sizes[replica] = entry.value.nbytes
                    mine.append(_bytes_of(entry.value))
            rank_bytes = [sum(sizes[i] for i in layout.replica_ids(r)) for r in range(layout.size)]
            receive = np.empty(sum(sizes), np.uint8)
        engine.agreement.agree(calls)
        if not mine:
            mine = [np.empty(0, np.uint8)]
        with engine.moving(self):
            gather_bytes(engine, mine, receive, rank_bytes, self.options.timeout_seconds)
        column: list[_Held | _Elsewhere] = []
        start = 0
        for entry, size in zip(self.column, sizes, strict=True):
            if isinstance(entry, _Elsewhere):
                block = receive[start : start + size].view(entry.dtype)
                column.append(_Held(block.reshape(entry.shape)))
            else:
                column.append(entry)
            start += size
        return [column]


def _is_lazy(value: Any) -> bool:
    return type(value) is np.ndarray and not value.dtype.hasobject and value.nbytes >= LAZY_BYTES


def _bytes_of(array: Array) -> Array:
    """Return the bytes of `array` in C order, in its own byte order."""
    return np.asarray(array, order="C").reshape(-1).view(np.uint8)
