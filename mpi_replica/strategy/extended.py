"""``strategy.extended``: further methods, for library code such as optimizers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from ..collectives import cross_replica
from ..collectives.agreement.site import function_identity
from ..collectives.broadcast import Broadcast
from ..collectives.strategy_base import StrategyBase
from ..core import nest
from ..core.argument_checks import check_call, integer
from ..core.context import (
    State,
    called_for,
    current_strategy,
    entered,
    is_in_merge_fn,
    require_cross_replica,
)
from ..core.exceptions import ContextError
from ..core.options import CommunicationOptions, ReduceOp
from ..core.values import (
    DistributedValues,
    Mirrored,
    PerReplica,
    is_made_on_ranks,
    read_only,
)
from ..replicas.returned_values import joined_on_all_ranks
from ..replicas.run_arguments import shared_tensors
from ..replicas.variables import Variable


class StrategyExtended:
    """Further methods of a strategy, as ``strategy.extended``: for library code.

    Never made directly. Counterpart of ``tf.distribute.StrategyExtended``.

    Examples
    --------
    >>> mr.MPIStrategy(num_replicas=2).extended.worker_devices
    ('rank:0/replica:0', 'rank:0/replica:1')
    """

    def __init__(self, strategy: StrategyBase) -> None:
        self._strategy = strategy

    @property
    def worker_devices(self) -> tuple[str, ...]:
        """A name for each replica of this rank, as "rank:1/replica:3"."""
        layout = self._strategy.engine.layout
        return tuple(f"rank:{layout.rank}/replica:{i}" for i in layout.local_replica_ids)

    @property
    def parameter_devices(self) -> tuple[str, ...]:
        """A name for each place of variables: that of each replica of this rank."""
        return self.worker_devices

    @property
    def experimental_require_static_shapes(self) -> bool:
        """Whether shapes must be known beforehand: they need not."""
        return False

    @property
    def should_checkpoint(self) -> bool:
        """Whether this rank writes what is the same on all ranks: rank 0 does."""
        return self._strategy.engine.layout.rank == 0

    def variable_created_in_scope(self, v: Any) -> bool:
        """Return whether `v` is a variable of this strategy.

        Parameters
        ----------
        v : Variable
            Any variable.

        Returns
        -------
        bool
            Whether it was made in the scope of this strategy, or in one of its replicas.

        Raises
        ------
        ValueError
            `v` is no variable.

        Notes
        -----
        No communication. Counterpart of
        ``tf.distribute.StrategyExtended.variable_created_in_scope``.

        Examples
        --------
        >>> strategy = mr.MPIStrategy()
        >>> with strategy.scope():
        ...     v = mr.Variable(1.0)
        >>> strategy.extended.variable_created_in_scope(v)
        True
        """
        if not isinstance(v, Variable):
            raise ValueError(f"{v!r} is no mr.Variable.")
        return v.strategy is self._strategy

    def colocate_vars_with(self, colocate_with_variable: Any) -> contextlib.nullcontext[None]:
        """Return a context manager in which variables are made as they always are.

        On MPI every rank has its own copy of each variable. No communication. Counterpart of
        ``tf.distribute.StrategyExtended.colocate_vars_with``.

        Parameters
        ----------
        colocate_with_variable : Variable
            A variable of this strategy.

        Returns
        -------
        context manager
            It changes nothing.

        Raises
        ------
        ValueError
            It is no such variable.
        ContextError
            Called outside of ``strategy.scope()``.

        Examples
        --------
        >>> with mr.MPIStrategy().scope() as strategy:
        ...     v = mr.Variable(1.0)
        ...     with strategy.extended.colocate_vars_with(v):
        ...         w = mr.Variable(2.0)
        """
        if current_strategy() is not self._strategy:
            raise ContextError(
                "colocate_vars_with was called outside of its strategy. Call it inside"
                " `with strategy.scope():`."
            )
        self._require_variable("colocate_vars_with", colocate_with_variable)
        return contextlib.nullcontext()

    def value_container(self, value: Any) -> Any:
        """Return the variable that `value` belongs to: here it is `value` itself.

        Parameters
        ----------
        value : object
            Anything.

        Returns
        -------
        object
            `value`. Counterpart of ``tf.distribute.StrategyExtended.value_container``.

        Examples
        --------
        >>> v = mr.Variable(1.0)
        >>> mr.get_strategy().extended.value_container(v) is v
        True
        """
        return value

    def reduce_to(
        self,
        reduce_op: ReduceOp | str,
        value: Any,
        destinations: Any = None,
        options: CommunicationOptions | None = None,
    ) -> Any:
        """Combine a value of all replicas and give it to `destinations`.

        Collective: all ranks call it, in the same order.

        Parameters
        ----------
        reduce_op : ReduceOp or str
            SUM, MEAN, MIN, MAX or PROD; strings in any case.
        value : nest of PerReplica
            Components of equal shape, or `IndexedSlices`.
        destinations : None, Variable, DistributedValues or int
            An int is a rank: that one gets the result, the others None. All else is every rank.
        options : CommunicationOptions, optional
            Fields that are set win over those of the strategy.

        Returns
        -------
        nest of Mirrored, nest of numpy.ndarray, or None
            `Mirrored` where every rank gets the result.

        Raises
        ------
        ValueError, TypeError
            `destinations` is no rank, or nothing of the above; see also ``Strategy.reduce``.

        Notes
        -----
        Messages as for ``Strategy.reduce``. Counterpart of
        ``tf.distribute.StrategyExtended.reduce_to``.

        Examples
        --------
        >>> import mpi_replica as mr
        >>> strategy = mr.MPIStrategy(num_replicas=2)
        >>> strategy.extended.reduce_to("SUM", strategy.run(lambda: 2.0), None)
        Mirrored:np.float64(4.0)
        """
        require_cross_replica(self._strategy, "reduce_to")
        return self._reduce_to("reduce_to", reduce_op, [(value, destinations)], options)[0]

    def batch_reduce_to(
        self,
        reduce_op: ReduceOp | str,
        value_destination_pairs: Sequence[tuple[Any, Any]],
        options: CommunicationOptions | None = None,
    ) -> list[Any]:
        """Do `reduce_to` for several values, in one call of the engine.

        Collective: all ranks call it, in the same order.

        Parameters
        ----------
        reduce_op : ReduceOp or str
            For all of them.
        value_destination_pairs : sequence of (value, destinations)
            As for `reduce_to`.
        options : CommunicationOptions, optional
            Fields that are set win over those of the strategy.

        Returns
        -------
        list
            A result for each pair; an empty list for an empty sequence.

        Raises
        ------
        ValueError
            An entry is no pair, or there is no sequence of them. All else as for `reduce_to`.

        Notes
        -----
        Messages as for one ``Strategy.reduce`` of a nest of all values. Counterpart of
        ``tf.distribute.StrategyExtended.batch_reduce_to``.

        Examples
        --------
        >>> strategy = mr.MPIStrategy(num_replicas=2)
        >>> loss, rows = strategy.run(lambda: (0.5, 3))
        >>> strategy.extended.batch_reduce_to("SUM", [(loss, None), (rows, None)])
        [Mirrored:np.float64(1.0), Mirrored:np.int64(6)]
        """
        require_cross_replica(self._strategy, "batch_reduce_to")
        return self._reduce_to("batch_reduce_to", reduce_op, value_destination_pairs, options)

    def _require_variable(self, call: str, var: Any) -> None:
        if not isinstance(var, Variable) or var.strategy is not self._strategy:
            raise ValueError(f"{call} needs a mr.Variable of this strategy, got {var!r}.")

    def _reduce_to(
        self,
        kind: str,
        reduce_op: ReduceOp | str,
        given: Any,
        options: CommunicationOptions | None,
    ) -> list[Any]:
        engine = self._strategy.engine
        rank, size = engine.layout.rank, engine.layout.size
        try:
            if not isinstance(given, Iterable):
                raise ValueError(f"{kind} needs (value, destinations) pairs, got {given!r}.")
            pairs = list(given)
            roots = [_root(pair, size) for pair in pairs]
        except Exception as error:
            engine.fail(kind, error)
        results = cross_replica.reduce(
            engine,
            kind,
            reduce_op,
            [value for value, _ in pairs],
            None,
            options,
            "" if all(root is None for root in roots) else f"destinations={roots}",
            plain_is_component=self._strategy.is_default,
        )
        of_roots: list[Any] = []
        for result, root in zip(results, roots, strict=True):
            if root is None:
                of_roots.append(nest.map_structure(_mirrored, result))
            else:
                of_roots.append(result if root == rank else None)
        return of_roots

    def broadcast_to(self, value: Any, destinations: Any = None) -> Any:
        """Give rank 0's `value` to every rank.

        Collective: all ranks call it; what others than rank 0 pass is ignored.

        Parameters
        ----------
        value : nest
            Arrays, or any objects that can be pickled.
        destinations : optional
            Accepted for tf's sake: every rank gets it.

        Returns
        -------
        nest of Mirrored
            Rank 0's value; fresh arrays. None stays None.

        Raises
        ------
        TypeError
            Rank 0's value can't be pickled; on every rank.
        Exception
            What pickle raises where it can't be loaded on some rank; on every rank.
        ValueError
            Rank 0's value is a `PerReplica`, and no argument of a ``merge_fn`` that calls it; on
            every rank.
        CollectiveMismatchError
            Ranks are at different calls; on every rank.
        ContextError
            Called in a replica, or from another thread.

        Notes
        -----
        One message of 256 bytes a rank where the value fits into it, else one Allgatherv more.
        Arrays of 64 KiB and more go by themselves, a ``Bcast`` each, behind another message of 256
        bytes. For objects that are no arrays, numbers or texts one such message more: every rank
        loads them, rank 0 too, and an error there is one on all ranks. With more than 1 MiB of all
        else there are two such. Each rank copies the arrays once.
        Counterpart of ``tf.compat.v1.distribute.StrategyExtended.broadcast_to``.

        Examples
        --------
        >>> mr.MPIStrategy().extended.broadcast_to({"seed": 7})
        {'seed': Mirrored:7}
        """
        require_cross_replica(self._strategy, "broadcast_to")
        engine, kind = self._strategy.engine, "broadcast_to"
        if is_in_merge_fn():  # whose large arguments come now: on all ranks, or on none
            leaves = nest.flatten(value)[0]
            _refuse_per_replica([leaf for leaf in leaves if is_made_on_ranks(leaf)])
            for leaf in leaves:
                if isinstance(leaf, PerReplica):
                    _ = leaf.values
        elif engine.layout.rank == engine.layout.rank_of(0):
            try:
                _refuse_per_replica(value)
            except Exception as error:
                engine.fail(kind, error)
        result = engine.cross_replica(
            engine.make(
                kind, None, Broadcast, kind, "", value, compared=False, finish=_fresh_arrays
            )
        )
        return nest.map_structure(_mirrored, result)

    def update(
        self,
        var: Variable,
        fn: Callable[..., Any],
        args: tuple[Any, ...] | list[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        group: bool = True,
    ) -> Any:
        """Run ``fn(var, *args, **kwargs)`` on each rank, where it may assign to `var`.

        Collective: all ranks call it, and assign the same, as they do where the arguments are those
        of a ``merge_fn`` or came from `reduce_to`. A hash of all bytes is compared.

        Parameters
        ----------
        var : Variable
            A variable of this strategy.
        fn : callable
            What it assigns to `var` is written as it is, whatever the aggregation. For a variable
            that is synchronized on read it is called for each local replica; where it raises, on
            any rank, all that it has assigned is taken back. Other variables that are synchronized
            on read are assigned as in cross-replica context.
        args, kwargs : tuple or list, and mapping
            Nests; a `Mirrored` is passed as the value in it. Where `fn` is called for each local
            replica, with containers of its own, and arrays of numpy that it can't write into.
        group : bool, default True
            Whether the result comes alone; otherwise as a tuple with an entry for each call of this
            rank.

        Returns
        -------
        object
            What `fn` returned; for a variable that is synchronized on read, as ``strategy.run``
            returns it: a nest with a `PerReplica` in the place of each value.

        Raises
        ------
        ValueError
            An argument is a `PerReplica`: the ranks would diverge. `var` is no variable of this
            strategy, `args` no tuple or list, `kwargs` no mapping. The ranks assigned different
            values; on every rank, at this or a later call.
        StructureMismatchError
            For replicas `fn` returned nests of different structure.
        Exception
            What `fn` raised, where it is called for each local replica; on every rank.
        TypeError
            `fn` is not callable. What is wrong with the arguments of a rank is told to the others
            at their next collective call.
        ContextError
            Called in a replica; for a variable that is synchronized on read, in another thread than
            the strategy's. `fn`, where it is called for each local replica, assigned to a
            variable that they share, made another call that stands above the replicas, as
            ``reduce`` and ``run`` do, has written into a tensor of torch among its arguments, or
            has drawn from ``strategy.rng``.

        Notes
        -----
        The hash of 100 MB takes about 20 ms; on one rank there is none. For a variable that is
        synchronized on read: one message of 256 bytes a rank, which says that `fn` raised nowhere;
        three more where replicas returned other kinds of values, or keys in another order; and what
        components were before is held until the end. Counterpart of
        ``tf.distribute.StrategyExtended.update``.

        Examples
        --------
        >>> strategy = mr.MPIStrategy(num_replicas=2)
        >>> with strategy.scope():
        ...     v = mr.Variable(1.0)
        >>> total = strategy.extended.reduce_to("SUM", strategy.run(lambda: 2.0), v)
        >>> float(strategy.extended.update(v, lambda v, total: v.assign_add(total), args=(total,)))
        5.0
        """
        require_cross_replica(self._strategy, "update")
        engine = self._strategy.engine
        engine.require_replicas("update")
        engine.require_open()
        since = engine.agreement.num_raised
        try:
            self._require_variable("update", var)
            plain, structure = _arguments_of_update(fn, args, {} if kwargs is None else kwargs)
        except Exception as error:
            engine.share("update", error, since)
        if var.is_mirrored:
            args, named = nest.unflatten(structure, plain)
            with entered(State(self._strategy, None, "update", is_merged=is_in_merge_fn())):
                result = fn(var, *args, **named)
            return result if group else (result,)
        engine.check_thread("update")
        plain = [read_only(leaf) for leaf in plain]
        shared = shared_tensors("update", structure, plain)
        what = f"the function that updates {var.name}, which is synchronized on read,"
        results = []
        ways_back: dict[tuple[Any, int], Callable[[], None]] = {}
        try:
            for i in engine.layout.local_replica_ids:
                args, named = nest.unflatten(structure, plain)
                state = State(
                    self._strategy, None, "update", i, ways_back, is_merged=is_in_merge_fn()
                )
                with called_for(engine, i, what, "the update"), entered(state):
                    results.append(fn(var, *args, **named))
                if shared is not None:
                    shared.check()
            values = results if group else [None] * len(results)
            whole = joined_on_all_ranks(self._strategy, "update", values)
        except BaseException as error:
            # For how many replicas it was called depends on how many share the rank.
            for take_back in ways_back.values():
                take_back()
            is_of_program = isinstance(error, (Exception, SystemExit))
            if is_of_program and not engine.agreement.was_told(error, since):
                engine.fail("update", error)
            raise
        for storage, _ in ways_back:
            storage.writes_above += 1
        return whole if group else tuple(results)


def _arguments_of_update(fn: Any, args: Any, kwargs: Any) -> tuple[list[Any], nest.Structure]:
    """Returns the leaves of what `fn` is called with, and their structure."""
    if not callable(fn):
        raise TypeError(f"update needs a callable, got {fn!r}. It gets the variable.")
    function_identity(fn).require_eager("update")
    check_call(args, kwargs)
    leaves, structure = nest.flatten((tuple(args), dict(kwargs)))
    for leaf, path in zip(leaves, nest.leaf_paths(structure), strict=True):
        if isinstance(leaf, PerReplica):
            raise ValueError(
                f"update got a PerReplica for (args, kwargs){path}: the variable would differ"
                " between ranks. Reduce it first: strategy.extended.reduce_to(op, value, var)."
            )
    return [leaf.value if isinstance(leaf, Mirrored) else leaf for leaf in leaves], structure


def _mirrored(value: Any) -> Any:
    return value if value is None or isinstance(value, Mirrored) else Mirrored(value)


def _fresh_arrays(value: Any) -> Any:
    """Returns the nest `value` with arrays that are nobody else's: the caller may write to his."""

    def fresh(leaf: Any) -> Any:
        is_of_numpy = isinstance(leaf, (np.ndarray, np.void))
        return leaf.copy() if is_of_numpy else leaf  # with its mask, or unit

    return nest.map_structure(fresh, value)


def _root(pair: Any, size: int) -> int | None:
    """Returns the rank that gets the result of a pair, or None for all."""
    if not isinstance(pair, tuple) or len(pair) != 2:
        raise ValueError(f"batch_reduce_to needs (value, destinations) pairs, got {pair!r}.")
    destinations = pair[1]
    if destinations is None or isinstance(destinations, DistributedValues):
        return None
    try:
        rank = integer("destinations", destinations)
    except TypeError:
        raise TypeError(
            f"destinations must be None, a variable, a DistributedValues or a rank, got"
            f" {destinations!r}."
        ) from None
    if not 0 <= rank < size:
        raise ValueError(f"destinations={rank} is no rank: there are {size}, from 0 on.")
    return rank


def _refuse_per_replica(value: Any) -> None:
    if any(isinstance(leaf, PerReplica) for leaf in nest.flatten(value)[0]):
        raise ValueError(
            "broadcast_to got a PerReplica, of which every rank holds other components. Give it one"
            " value: strategy.reduce or strategy.gather makes one of all."
        )
