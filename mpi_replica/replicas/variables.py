"""Variables: state that replicas share.

A mirrored variable has one array on each rank, the same everywhere. A variable that is
synchronized on read has a component for each replica, combined when it is read from above.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn, TypeVar, cast

import numpy as np

from ..collectives import cross_replica
from ..collectives.agreement.site import CallSite
from ..collectives.broadcast import Broadcast
from ..collectives.strategy_base import StrategyBase
from ..core.argument_checks import flag
from ..core.array_ways import Array
from ..core.context import (
    called_for,
    current_state,
    current_strategy,
    require_cross_replica,
    require_once,
)
from ..core.exceptions import RankLostError
from ..core.jax_state import require_unstaged
from ..core.options import (
    CommunicationOptions,
    ReduceOp,
    VariableAggregation,
    VariableSynchronization,
)
from ..core.randomness import WHERE_REPLICA_0_IS
from ..core.values import ActsAsValue, PerReplica, component_of, per_replica, written_by
from .assignment import Assignable, plain_value
from .storage import Storage, check_dtype, initial_array

_Enum = TypeVar("_Enum", VariableSynchronization, VariableAggregation)


class Variable(Assignable, ActsAsValue):
    """An array that replicas share and assign to.

    Collective: all ranks make it, in cross-replica context (``strategy.scope()``), or all
    replicas in a step function.

    Parameters
    ----------
    initial_value : array_like or callable
        Replica 0's counts, on all ranks; a callable is called once, where replica 0 is. It must not
        draw from ``strategy.rng``, nor make a call that stands above the replicas.
    trainable : bool, optional
        A mark for optimizers. Default: True, unless it is synchronized on read.
    dtype : dtype, optional
        Default: that of `initial_value`. What numpy casts to it (``same_kind``) is converted, and
        integers that it can hold.
    name : str, optional
        For error messages.
    synchronization : VariableSynchronization, default AUTO
        ``AUTO`` and ``ON_WRITE``: mirrored, the same on all ranks. ``ON_READ``: each replica has
        its own component, which begins with the value: with ``SUM`` they add up to a multiple.
    aggregation : VariableAggregation, default NONE
        How what replicas assign is combined. ``NONE``: all replicas must assign the same value.

    Raises
    ------
    ValueError
        Unknown or unfit synchronization or aggregation; MEAN of a dtype that is no float.
    TypeError
        `trainable` is no bool; a dtype of texts, dates or objects, or one that the value is not
        converted to; a value with a mask, a unit or labels, which would be lost.
    OverflowError
        An integer that `dtype` can't hold; without `dtype` one of more than 64 bits is a TypeError.
    StructureMismatchError
        The ranks, or the components of a `PerReplica`, have different shapes or dtypes.
    CollectiveMismatchError
        They gave other names, `trainable`, synchronization or aggregation.

    Notes
    -----
    It acts like an array in expressions and numpy functions; methods of arrays are those of
    ``value()``, as in ``v.value().sum()``. Reading never communicates, except
    that a variable synchronized on read, read in cross-replica context, is reduced: collective.

    Making it copies the value: an array on each rank, or one for each replica. One message of 256
    bytes a rank where the value fits into it, else one Allgatherv more; for 64 KiB and more another
    such message and a ``Bcast``. Counterpart of ``tf.Variable`` in a strategy's scope.

    Examples
    --------
    >>> import mpi_replica as mr
    >>> with mr.MPIStrategy(num_replicas=2).scope():
    ...     v = mr.Variable(1.0, name="v")
    >>> float(v.assign_add(2.0) * 2)
    6.0
    """

    def __init__(
        self,
        initial_value: Any,
        trainable: bool | None = None,
        dtype: Any = None,
        name: str | None = None,
        synchronization: VariableSynchronization = VariableSynchronization.AUTO,
        aggregation: VariableAggregation = VariableAggregation.NONE,
    ) -> None:
        strategy = self._strategy = cast("StrategyBase", current_strategy())
        self.name = "Variable" if name is None else name
        require_once(strategy.per_replica_call, "Variable")
        state = current_state()
        context = None if state is None else state.replica_context
        # In cross-replica context all components that are here are compared with replica 0's.
        ids = strategy.engine.layout.local_replica_ids or (0,)
        if context is not None:
            ids = (context.replica_id_in_sync_group,)
        holds_first = ids[0] == 0
        is_called = callable(initial_value)

        def called() -> Any:
            if context is not None:  # a replica makes no calls for all
                return initial_value()
            what, how = f"the initial_value of {self.name}", WHERE_REPLICA_0_IS
            with called_for(strategy.engine, 0, what, "mr.Variable", how):
                return initial_value()

        def first_values() -> list[Array]:
            initial = plain_value(called() if is_called else initial_value)
            used = ids if isinstance(initial, PerReplica) and not is_called else ids[:1]
            own = (component_of(initial, i, strategy.num_replicas_in_sync) for i in used)
            return [initial_array(self.name, one, dtype) for one in own]

        self._on_read = synchronization is VariableSynchronization.ON_READ
        if strategy.engine.is_spare:  # should it be needed, a state comes with other values
            self._storage: Storage = self._store(first_values()[0])
        else:
            values = first_values if holds_first or not is_called else None
            meet = strategy.engine.cross_replica if context is None else context.meet
            call = strategy.engine.make(
                "Variable",
                None,
                self._creation,
                synchronization,
                aggregation,
                trainable,
                values,
                is_called,
            )
            self._storage = meet(call)
        self.synchronization = _member(VariableSynchronization, synchronization)
        self.aggregation = _member(VariableAggregation, aggregation)
        self.trainable = not self._on_read if trainable is None else trainable
        strategy.engine.variables[id(self)] = self

    def _creation(
        self,
        site: CallSite,
        options: CommunicationOptions,
        synchronization: VariableSynchronization,
        aggregation: VariableAggregation,
        trainable: bool | None,
        first_values: Callable[[], list[Array]] | None,
        is_called: bool,
    ) -> Broadcast:
        """Returns the call that makes the variable; without values where the own are no use."""
        sync = _member(VariableSynchronization, synchronization)
        mode = _member(VariableAggregation, aggregation)
        if sync is VariableSynchronization.NONE:
            raise ValueError(
                f"{self.name}: VariableSynchronization.NONE is not supported, as in tf. Use"
                " AUTO, ON_WRITE or ON_READ."
            )
        detail, is_usual = f"{self.name}, {sync.name}, {mode.name}", not self._on_read
        if trainable is not None and flag("trainable", trainable) != is_usual:
            detail += f", trainable={not is_usual}"
        value, others = None, []
        if first_values is not None:
            value, *others = first_values()
            for one in (value, *others):
                check_dtype(self.name, one.dtype, mode)
        return Broadcast(
            site,
            options,
            "Variable",
            detail,
            value,
            compared=not is_called,
            others=others,
            finish=self._store,
        )

    def _store(self, value: Array) -> Storage:
        engine = self._strategy.engine
        # Making a variable is collective, so that all ranks count alike.
        identity = engine.name_of_next_variable(self.name)
        local = engine.layout.local_replica_ids  # a spare has no replica yet
        keys = (self._on_read and local) or (None,)
        return Storage(identity, {key: np.array(value) for key in keys}, engine.group.quietly)

    @property
    def strategy(self) -> StrategyBase:
        """The strategy that it belongs to."""
        return self._strategy

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype, which never changes."""
        return np.dtype(self._storage.any_array.dtype)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape, which never changes."""
        return tuple(self._storage.any_array.shape)

    @property
    def ndim(self) -> int:
        """The number of dimensions."""
        return self._storage.any_array.ndim

    @property
    def size(self) -> int:
        """The number of items."""
        return self._storage.any_array.size

    def value(self) -> Any:
        """Return the value as an array, or a numpy scalar where it has no dimensions.

        In a replica: the replica's own. In cross-replica context, synchronized on read: the
        combined value of all replicas (collective).

        Returns
        -------
        numpy.ndarray or numpy scalar
            Of the variable's shape and dtype, read-only: the variable's own array, which an
            assignment leaves as it is. What SUM and MEAN combine of all replicas is a fresh array.

        Raises
        ------
        ValueError
            Synchronized on read with aggregation NONE, in cross-replica context.
        ContextError
            Synchronized on read, and read while another strategy is the current one, or in a
            `ReplicaContext` made by hand, of one of several replicas. JAX traces a function (jit,
            scan): it would keep the value for all later calls.
        RankLostError
            The value went with a lost rank, and was not assigned since.

        Notes
        -----
        No communication and no copy, unless components are combined: SUM and MEAN cost what
        ``Strategy.reduce`` does; ONLY_FIRST_REPLICA what it costs to make the variable.
        Counterpart of ``tf.Variable.value``.

        Examples
        --------
        >>> mr.Variable([1.0, 2.0]).value()
        array([1., 2.])
        """
        require_unstaged(self.name, "was read")
        if not self._on_read:
            return self._storage.read(None)[()]
        key = self._own_key()
        if key is not None:
            return self._storage.read(key)[()]
        return self._combined()

    read_value = value

    def numpy(self) -> Any:
        """Return the value, as `value` does.

        Returns
        -------
        numpy.ndarray or numpy scalar
            As for `value`, with its errors and cost. Counterpart of ``tf.Variable.numpy``.

        Raises
        ------
        ValueError, ContextError, RankLostError
            As for `value`.

        Examples
        --------
        >>> mr.Variable([1.0, 2.0]).numpy()
        array([1., 2.])
        """
        return self.value()

    def _own_key(self) -> int | None:
        """Returns the replica whose component the running code sees; None above the replicas."""
        state = current_state()
        if state is None or state.strategy is not self._strategy:
            local = self._strategy.engine.layout.local_replica_ids  # none on a spare
            return 0 if local and self._strategy.num_replicas_in_sync == 1 else None
        if state.kind == "update":
            return state.component
        context = state.replica_context
        if context is None:
            return None
        context.require_run(f"reading {self.name}")
        return context.replica_id_in_sync_group

    def _combined(self) -> Any:
        require_cross_replica(self._strategy, f"reading {self.name}")
        engine = self._strategy.engine
        mode = self.aggregation
        if mode is VariableAggregation.NONE:
            raise ValueError(
                f"{self.name} is synchronized on read with aggregation NONE: there is no one value"
                " in cross-replica context. Give it another aggregation, or use"
                " strategy.experimental_local_results."
            )
        if mode is VariableAggregation.ONLY_FIRST_REPLICA:
            keys = self._storage.keys
            first = self._here([0])[0] if 0 in keys else self._storage.any_array

            return engine.cross_replica(
                engine.make("read", None, Broadcast, "read", self.identity, first, compared=True)
            )[()]
        op = ReduceOp.from_variable_aggregation(mode)
        local = engine.layout.local_replica_ids
        values = per_replica(self._here(local), engine.layout)
        total = cross_replica.reduce(engine, f"read of {self.identity}", op, values, None, None)
        # What is reduced has this machine's byte order.
        return total if total.dtype == self.dtype else np.asarray(total, self.dtype)[()]

    def _here(self, replica_ids: Sequence[int]) -> list[Any]:
        """Returns the components of these local replicas; where they are lost, raises on all ranks.

        Those of other ranks may have been written since.
        """
        try:
            return [self._storage.read(i) for i in replica_ids]
        except RankLostError as error:
            self._strategy.engine.fail(f"reading {self.name}", error)

    def require(self, num_replicas: int) -> None:
        """Raise where its components are those of a strategy with other replicas."""
        engine = self._strategy.engine
        if self._on_read and engine.layout.num_replicas != num_replicas:
            raise ValueError(
                f"{self.name} has components for the {engine.layout.num_replicas} replicas of its"
                f" own strategy, and was given to one that has {num_replicas}. Mixing different"
                " strategies: give it to its own, or its value."
            )

    def components(self, replica_ids: Sequence[int]) -> list[Any] | None:
        """Return the components of these local replicas; None for a mirrored variable."""
        if not self._on_read:
            return None
        return [self._storage.read(i) for i in replica_ids]

    def shared_value(self) -> Any:
        """Return the value of a mirrored variable."""
        return self.value()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        value = np.asarray(self.value())
        if copy is False and dtype is not None and np.dtype(dtype) != value.dtype:
            raise ValueError("a conversion to another dtype needs a copy.")
        return np.array(value, dtype=dtype, copy=True if copy else None)

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **kwargs: Any) -> Any:
        if any(isinstance(out, Variable) for out in written_by(method, inputs, kwargs)):
            self._refuse_in_place()
        if "where" in kwargs:
            kwargs["where"] = plain_value(kwargs["where"])
        plain = [plain_value(x) for x in inputs]
        if any(isinstance(x, PerReplica) for x in plain):
            return NotImplemented
        return getattr(ufunc, method)(*plain, **kwargs)

    def _refuse_in_place(self) -> NoReturn:
        raise TypeError(
            f"{self.name} can't be changed in place: use assign, assign_add or assign_sub."
        )

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "value":  # it would hide the method, and assign nothing
            raise AttributeError(
                f"{self.name}.value can't be set: it is a method. Use {self.name}.assign(x)."
            )
        super().__setattr__(name, value)

    def __setitem__(self, key: Any, value: Any) -> NoReturn:
        self._refuse_in_place()

    def __len__(self) -> int:
        return len(self._storage.any_array)

    def __copy__(self) -> NoReturn:
        raise TypeError("a variable can't be copied: read its value, or make a new one.")

    def __deepcopy__(self, memo: Any) -> NoReturn:
        self.__copy__()

    def __reduce__(self) -> NoReturn:
        raise TypeError("a variable can't be pickled: it belongs to a strategy. Read its value.")

    def __repr__(self) -> str:
        head = f"<mr.Variable {self.name!r} shape={self.shape} dtype={self.dtype}"
        if not self._on_read:
            return f"{head}, value={self._storage.any_array!r}>"
        try:
            parts = ", ".join(f"{key}: {self._storage.read(key)!r}" for key in self._storage.keys)
        except RankLostError:
            parts = "that were lost with a rank"
        return f"{head}, {self.aggregation.name} of components {parts}>"


def _member(kind: type[_Enum], value: Any) -> _Enum:
    """Returns `value`, which must be a member of the enum `kind`.

    Raises
    ------
    ValueError
        It is none.
    """
    if not isinstance(value, kind):
        known = [str(entry) for entry in kind if entry is not VariableSynchronization.NONE]
        raise ValueError(f"{value!r} is no mr.{kind.__name__}. Use mr.{', mr.'.join(known)}.")
    return value


def _only_of_the_value(name: str) -> property:
    def lacks(self: Variable) -> NoReturn:
        raise AttributeError(
            f"the variable {self.name} has no {name}: its value has it. Write"
            f" {self.name}.value().{name}, or use functions of numpy, which take a variable."
        )

    return property(lacks, doc="It has none.")


# What arrays are asked for most. No `__getattr__`: with one, all attributes take twice as long.
for _name in (
    *("T", "astype", "copy", "flatten", "item", "max", "mean", "min", "ravel", "reshape"),
    *("squeeze", "std", "sum", "tolist", "transpose", "var"),
):
    setattr(Variable, _name, _only_of_the_value(_name))
