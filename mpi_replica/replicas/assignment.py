"""Assigning to variables: how what replicas assign is combined."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Self

import numpy as np

from ..collectives.agreement.call import Call
from ..collectives.agreement.site import CallSite
from ..collectives.broadcast import Broadcast
from ..collectives.equal_everywhere import EqualEverywhere
from ..collectives.reduce import AllReduce
from ..collectives.sparse import reduce_values
from ..collectives.strategy_base import StrategyBase
from ..core import nest
from ..core.abstract_strategy import AbstractReplicaContext
from ..core.abstract_variable import AbstractVariable
from ..core.array_ways import Array
from ..core.context import State, current_state, require_cross_replica
from ..core.indexed_slices import IndexedSlices
from ..core.jax_state import require_unstaged
from ..core.options import CommunicationOptions, ReduceOp, VariableAggregation
from ..core.values import Mirrored, PerReplica, component_of
from .storage import SCATTER, Storage, StorageWriting

_REDUCED = (VariableAggregation.SUM, VariableAggregation.MEAN)


class Assignable(AbstractVariable):
    """The part of a variable that is assigned to."""

    name: str
    aggregation: VariableAggregation
    _strategy: StrategyBase
    _storage: Storage
    _on_read: bool

    @property
    def identity(self) -> str:
        """A name that tells it from all other variables, the same on every rank."""
        return self._storage.identity

    def assign(
        self, value: Any, use_locking: bool = False, name: Any = None, read_value: bool = True
    ) -> Any:
        """Give the variable a new value.

        In a replica: collective, by the aggregation; `value` is this replica's. NONE: all replicas
        must assign the same value, of which a hash travels with the next call. Synchronized on
        read: the replica's own component, no communication; a run that fails takes it back. In
        cross-replica context: collective; rank 0's value counts.

        Parameters
        ----------
        value : array_like
            Of the variable's shape, and of a dtype that numpy casts to the variable's
            (``same_kind``).
        use_locking, name : optional
            Accepted for tf's sake: they change nothing.
        read_value : bool, default True
            Whether the variable is returned.

        Returns
        -------
        Variable or None
            Itself; None without `read_value`.

        Raises
        ------
        ValueError
            Another shape; under NONE the replicas assigned different values; a `PerReplica` in
            cross-replica context. Under NONE what only some replicas do wrong, also a shape or
            dtype, may be told at a later call or at the end of the run, which depends on the
            layout: don't catch it in the step.
        TypeError
            A dtype that does not fit.
        CollectiveMismatchError
            Replicas are at different calls; on every rank.
        ContextError
            Called in a replica of another strategy, or in a `ReplicaContext` made by hand, of one
            of several replicas.

        Notes
        -----
        Takes a new array, and leaves the old one to who has read it. Messages: under SUM and MEAN
        those of ``all_reduce``; under ONLY_FIRST_REPLICA, and in cross-replica context, those of
        making the variable. Under NONE one of 256 bytes after 64 assignments, or where their old
        values have 16 MiB, and no call came between. Counterpart of ``tf.Variable.assign``.

        Examples
        --------
        >>> strategy = mr.MPIStrategy(num_replicas=2)
        >>> with strategy.scope():
        ...     v = mr.Variable([0.0, 0.0], aggregation=mr.VariableAggregation.MEAN)
        >>> def step():
        ...     v.assign(np.full(2, mr.get_replica_context().replica_id_in_sync_group))
        >>> strategy.run(step)
        >>> v.numpy()
        array([0.5, 0.5])
        """
        self._assign("assign", value)
        return self if read_value else None

    def assign_add(
        self, delta: Any, use_locking: bool = False, name: Any = None, read_value: bool = True
    ) -> Any:
        """Add `delta`, as `assign` does, which says more.

        Parameters
        ----------
        delta : array_like
            Under SUM and MEAN those of all replicas are combined, and then added once.
        use_locking, name, read_value : optional
            As for `assign`.

        Returns
        -------
        Variable or None
            As for `assign`.

        Raises
        ------
        ValueError
            As for `assign`; also in cross-replica context for one that is summed on read, as in tf.
        TypeError, CollectiveMismatchError, ContextError
            As for `assign`; a TypeError also for a dtype that can't be added.
        RankLostError
            What it is added to went with a lost rank, and was not assigned since.

        Examples
        --------
        >>> mr.Variable(1.0).assign_add(2.0).numpy()
        np.float64(3.0)
        """
        self._assign("assign_add", delta)
        return self if read_value else None

    def assign_sub(
        self, delta: Any, use_locking: bool = False, name: Any = None, read_value: bool = True
    ) -> Any:
        """Subtract `delta`, as `assign_add` adds.

        Parameters
        ----------
        delta : array_like
            As for `assign_add`.
        use_locking, name, read_value : optional
            As for `assign`.

        Returns
        -------
        Variable or None
            As for `assign`.

        Raises
        ------
        Exception
            As for `assign_add`.

        Examples
        --------
        >>> mr.Variable(1.0).assign_sub(2.0).numpy()
        np.float64(-1.0)
        """
        self._assign("assign_sub", delta)
        return self if read_value else None

    def scatter_add(
        self, sparse_delta: IndexedSlices, use_locking: bool = False, name: Any = None
    ) -> Self:
        """Add rows to those of the variable, by their indices.

        Collective, and with the same meaning, as `assign_add` is: in a replica under SUM and MEAN
        the rows of all replicas are gathered first, and of MEAN divided by their number.

        Parameters
        ----------
        sparse_delta : IndexedSlices
            Rows of the variable's. Those that have the same index add up, in their order, and in
            that of the replicas. Replicas may give other numbers of rows, but under NONE.
        use_locking, name : optional
            Accepted for tf's sake: they change nothing.

        Returns
        -------
        Variable
            Itself.

        Raises
        ------
        IndexError
            An index is none of a row; on every rank.
        ValueError, TypeError
            As for `assign_add`; the variable has no rows, or its dtype can't be added.

        Notes
        -----
        Takes a copy of the whole variable: what was read before stays what it was. Messages as for
        `assign`; under SUM and MEAN those of ``all_reduce`` of the rows beside. Counterpart of
        ``tf.Variable.scatter_add``.

        Examples
        --------
        >>> import numpy as np, mpi_replica as mr
        >>> v = mr.Variable(np.zeros((3, 2)))
        >>> v.scatter_add(mr.IndexedSlices([[1.0, 2.0], [3.0, 4.0]], [2, 2])).numpy()
        array([[0., 0.],
               [0., 0.],
               [4., 6.]])
        """
        return self._assign("scatter_add", sparse_delta)

    def scatter_sub(
        self, sparse_delta: IndexedSlices, use_locking: bool = False, name: Any = None
    ) -> Self:
        """Subtract rows, as `scatter_add` adds them.

        Parameters
        ----------
        sparse_delta : IndexedSlices
            As for `scatter_add`.
        use_locking, name : optional
            As for `assign`.

        Returns
        -------
        Variable
            Itself.

        Raises
        ------
        Exception
            As for `scatter_add`.

        Examples
        --------
        >>> mr.Variable([1.0, 1.0]).scatter_sub(mr.IndexedSlices([2.0], [1])).numpy()
        array([ 1., -1.])
        """
        return self._assign("scatter_sub", sparse_delta)

    def scatter_min(
        self, sparse_delta: IndexedSlices, use_locking: bool = False, name: Any = None
    ) -> Self:
        """Keep the smaller one of each row's items and those given, as `scatter_add` adds them.

        Parameters
        ----------
        sparse_delta : IndexedSlices
            Rows, as for `scatter_add`: of those that have the same index the smallest items count.
        use_locking, name : optional
            As for `assign`.

        Returns
        -------
        Variable
            Itself.

        Raises
        ------
        NotImplementedError
            In a replica, under SUM and MEAN, as in tf; on every rank.
        IndexError, ValueError, TypeError
            As for `scatter_add`.

        Examples
        --------
        >>> mr.Variable([1.0, 1.0]).scatter_min(mr.IndexedSlices([0.5, 2.0], [0, 1])).numpy()
        array([0.5, 1. ])
        """
        return self._assign("scatter_min", sparse_delta)

    def scatter_max(
        self, sparse_delta: IndexedSlices, use_locking: bool = False, name: Any = None
    ) -> Self:
        """Keep the greater one of each row's items and those given, as `scatter_min` does.

        Parameters
        ----------
        sparse_delta : IndexedSlices
            Rows, as for `scatter_add`: of those that have the same index the greatest items count.
        use_locking, name : optional
            As for `assign`.

        Returns
        -------
        Variable
            Itself.

        Raises
        ------
        Exception
            As for `scatter_min`.

        Examples
        --------
        >>> mr.Variable([1.0, 1.0]).scatter_max(mr.IndexedSlices([0.5, 2.0], [0, 1])).numpy()
        array([1., 2.])
        """
        return self._assign("scatter_max", sparse_delta)

    def scatter_update(
        self, sparse_delta: IndexedSlices, use_locking: bool = False, name: Any = None
    ) -> Self:
        """Put rows in the place of those that are there, as `scatter_min` does.

        Parameters
        ----------
        sparse_delta : IndexedSlices
            Rows, as for `scatter_add`: of those that have the same index the last one counts.
        use_locking, name : optional
            As for `assign`.

        Returns
        -------
        Variable
            Itself.

        Raises
        ------
        Exception
            As for `scatter_min`.

        Examples
        --------
        >>> mr.Variable([1.0, 1.0]).scatter_update(mr.IndexedSlices([2.0, 3.0], [1, 1])).numpy()
        array([1., 3.])
        """
        return self._assign("scatter_update", sparse_delta)

    def _assign(self, how: str, value: Any) -> Self:
        require_unstaged(f"{self.name}.{how}", "was called")
        state = current_state()
        engine = self._strategy.engine
        if state is not None and state.kind == "update" and state.strategy is self._strategy:
            # Otherwise it is assigned as above the replicas.
            if self._on_read is (state.component is not None):
                self._assign_in_update(how, value, state)
                return self
        context = None if state is None else state.replica_context
        if context is None or context.strategy is not self._strategy:
            require_cross_replica(self._strategy, f"{self.name}.{how}")
            kind = f"Variable.{how}"
            engine.cross_replica(
                engine.make(kind, None, self._assignment_of_rank_0, kind, how, value)
            )
        elif self._on_read:
            context.require_run(f"{self.name}.{how}")
            key = context.replica_id_in_sync_group
            mine = self._storage.fitting(self.name, how, self._own(value, key))
            context.will_write(self._storage)
            self._storage.write(key, how, mine)
        else:
            if how in SCATTER and self.aggregation in _REDUCED:
                value = self._reduced_rows(context, how, value)
            replica_id = context.replica_id_in_sync_group
            kind = f"Variable.{how}"
            context.meet(
                engine.make(kind, None, self._assignment_in_replica, kind, how, value, replica_id)
            )
        return self

    def _own(self, value: Any, replica_id: int) -> Any:
        """Returns what a replica assigns of `value`, which may be one of all replicas."""
        return component_of(plain_value(value), replica_id, self._strategy.num_replicas_in_sync)

    def _assign_in_update(self, how: str, value: Any, state: State) -> None:
        engine, storage, component = self._strategy.engine, self._storage, state.component
        if component is not None:
            value = self._own(value, component)
        elif isinstance(value, PerReplica):  # whose component is here depends on the rank
            raise ValueError(
                f"{self.name}.{how} got a PerReplica in update: the variable would differ"
                " between ranks. Reduce it first: strategy.extended.reduce_to(op, value, var)."
            )
        mine = storage.fitting(self.name, how, plain_value(value))
        if component is None and engine.layout.size > 1:
            engine.cross_replica(engine.make("update", None, self._compared_update, how, mine))
            return
        if component is not None and state.ways_back is not None:
            state.ways_back.setdefault((storage, component), storage.way_back(component))
        storage.write(component, how, mine)

    def _reduced_rows(self, context: AbstractReplicaContext, how: str, value: Any) -> IndexedSlices:
        """Returns the rows of all replicas, one behind the other; of MEAN, divided by their number.

        Collective.
        """

        def own_rows() -> list[Any]:
            if how not in ("scatter_add", "scatter_sub"):
                raise NotImplementedError(
                    f"{self.name}.{how} in a replica has no meaning under aggregation"
                    f" {self.aggregation.name}, as in tf. Make the variable with NONE or"
                    " ONLY_FIRST_REPLICA."
                )
            own = self._own(value, context.replica_id_in_sync_group)
            return [self._storage.fitting(self.name, how, own)]

        op = ReduceOp.from_variable_aggregation(self.aggregation)
        engine, structure = self._strategy.engine, nest.flatten(None)[1]
        meet = context.meet
        rows: IndexedSlices = reduce_values(engine, meet, op, own_rows, structure, None, None)
        return rows

    def _compared_update(
        self, site: CallSite, options: CommunicationOptions, how: str, value: Array | IndexedSlices
    ) -> Call:
        """Returns the call by which `update` writes what must be the same on all ranks."""
        advice = (
            "What update writes must be the same on all ranks: reduce it first, or pass it through"
            " the args of merge_call."
        )
        what, writing = f"{how} to {self.identity}", self._writing_for_now(how)
        return EqualEverywhere(site, options, "update", what, value, advice, *writing)

    def _writing_for_now(self, how: str) -> tuple[Callable[[Any], Callable[[], None]], int]:
        """Returns what writes a value that can be taken back, and the memory held for that."""
        write = functools.partial(self._storage.write_for_now, None, how)
        return write, self._storage.any_array.nbytes

    def _assignment_in_replica(
        self,
        site: CallSite,
        options: CommunicationOptions,
        kind: str,
        how: str,
        value: Any,
        replica_id: int,
    ) -> Call:
        """Returns the call by which a replica assigns to a mirrored variable."""
        storage, mode = self._storage, self.aggregation
        mine = storage.fitting(self.name, how, self._own(value, replica_id))
        is_scatter = how in SCATTER
        writing = StorageWriting(storage, [None], how)
        if mode is VariableAggregation.ONLY_FIRST_REPLICA:
            return Broadcast(
                site,
                options,
                kind,
                self.identity,
                mine,
                compared=not is_scatter,  # there may be other numbers of rows
                writing=writing,
            )
        if mode is VariableAggregation.NONE or is_scatter:
            advice = (
                "With VariableAggregation.NONE all replicas must assign the same value. Make"
                " the variable with aggregation=mr.VariableAggregation.MEAN, SUM or"
                " ONLY_FIRST_REPLICA, or all_reduce the value first."
            )
            writing_for_now = self._writing_for_now(how)
            return EqualEverywhere(
                site, options, kind, self.identity, mine, advice, *writing_for_now
            )
        op = ReduceOp.from_variable_aggregation(mode)
        structure = nest.flatten(None)[1]
        return AllReduce(
            site, options, kind, op, [[mine]], structure, detail=self.identity, writing=writing
        )

    def _assignment_of_rank_0(
        self, site: CallSite, options: CommunicationOptions, kind: str, how: str, value: Any
    ) -> Call:
        """Returns the call by which rank 0 assigns in cross-replica context."""
        if isinstance(value, PerReplica):
            raise ValueError(
                f"{self.name}.{how} got a PerReplica in cross-replica context: ranks would"
                " differ. Reduce it first: strategy.reduce(op, value, axis=None)."
            )
        # Outside of any strategy the one replica has the one component.
        is_split = self._is_summed and not self._strategy.is_default
        if is_split and how != "assign":
            raise ValueError(
                f"{self.name}.{how} in cross-replica context is not supported for a variable"
                " that is summed on read, as in tf: it is not clear which component gets it."
                f" Call {how} in a replica."
            )
        layout = self._strategy.engine.layout
        mine = self._storage.fitting(self.name, how, plain_value(value))
        keys: Sequence[int | None] = layout.local_replica_ids if self._on_read else (None,)
        num_parts = layout.num_replicas if is_split else None
        writing = StorageWriting(self._storage, keys, how, num_parts)
        return Broadcast(
            site, options, kind, self.identity, mine, compared=how not in SCATTER, writing=writing
        )

    @property
    def is_mirrored(self) -> bool:
        """Whether it has one value, and not a component for each replica."""
        return not self._on_read

    @property
    def is_lost(self) -> bool:
        """Whether the components of replicas here went with a rank, and were not assigned since."""
        return self._storage.is_lost

    @property
    def _is_summed(self) -> bool:
        return self._on_read and self.aggregation is VariableAggregation.SUM

    def put_back(self, fill: Callable[[Array], None]) -> None:
        """Take what `value` gave above the replicas, which `fill` writes into an array.

        The same on all ranks; no communication. Some hundred KiB of memory, where nobody holds what
        was read before.
        """
        count = self._strategy.engine.layout.num_replicas
        self._storage.refill(fill, count if self._is_summed else None)

    def put_back_components(self, components: Mapping[int, Array]) -> None:
        """Hold these components of a variable that is synchronized on read, and no others.

        No communication.
        """
        self._storage.replace({i: np.array(value) for i, value in components.items()})


def lose_components(strategy: StrategyBase) -> None:
    """Takes from the variables of a strategy what replicas had: those have moved.

    A state that holds some of them puts them back. The others are lost until they are assigned.
    """
    engine = strategy.engine
    for variable in engine.variables.values():
        if not variable.is_mirrored:
            variable._storage.lose(engine.layout.local_replica_ids)


def lose_later_values(variables: Iterable[Assignable]) -> None:
    """Makes variables an error until they are assigned, but for those that never were.

    They were made since the moment that a program goes back to: it may have kept them.
    """
    lose_values(variable for variable in variables if not variable._storage.is_as_made)


def lose_values(variables: Iterable[Assignable]) -> None:
    """Makes variables an error until they are assigned: nobody knows what they should be."""
    for variable in variables:
        variable._storage.lose(variable._storage.keys)


def plain_value(value: Any) -> Any:
    """Returns the value in a variable or a Mirrored; anything else as it is."""
    if isinstance(value, Assignable):
        return value.shared_value()
    return value.value if isinstance(value, Mirrored) else value
