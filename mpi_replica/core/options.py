"""Enums and options: plain data, no behaviour beyond checking itself."""

from __future__ import annotations

import dataclasses
import enum
import functools
import numbers
from typing import Any

from .argument_checks import integer


class ReduceOp(enum.Enum):
    """How the values of replicas are combined.

    Where an op is asked for, its name in any case is accepted as well. Counterpart of
    ``tf.distribute.ReduceOp``, which has no ``MIN``, ``MAX`` and ``PROD``.

    Attributes
    ----------
    SUM
        The sum; not of bools.
    MEAN
        The sum, divided by the number of replicas; of integers and bools it is float64.
    MIN, MAX
        The smallest and the greatest one; not of complex numbers, and not of longdouble.
    PROD
        The product; not of bools.

    Examples
    --------
    >>> ReduceOp.of("mean")
    <ReduceOp.MEAN: 'MEAN'>
    """

    SUM = "SUM"
    MEAN = "MEAN"
    MIN = "MIN"
    MAX = "MAX"
    PROD = "PROD"

    # Enum's own hashes the name, in Python, at every lookup by op; members are single objects.
    __hash__ = object.__hash__

    @classmethod
    def of(cls, op: ReduceOp | str) -> ReduceOp:
        """Return the op that `op` names.

        Parameters
        ----------
        op : ReduceOp or str
            An op, or its name in any case.

        Returns
        -------
        ReduceOp
            The op.

        Raises
        ------
        ValueError
            `op` is a string that names none.
        TypeError
            `op` is neither a string nor a `ReduceOp`.

        Examples
        --------
        >>> mr.ReduceOp.of("max") is mr.ReduceOp.of(mr.ReduceOp.MAX)
        True
        """
        if isinstance(op, str):
            known = _OPS_BY_NAME.get(op) or _OPS_BY_NAME.get(op.upper())
            if known is not None:
                return known
        if isinstance(op, ReduceOp):
            return op
        names = ", ".join(cls.__members__)
        if isinstance(op, str):
            raise ValueError(
                f"{op!r} is not a reduce op. Use one of {names}, as mr.ReduceOp or as a string."
            )
        raise TypeError(
            f"A reduce op must be a mr.ReduceOp or a string, got {op!r}. Use one of {names}."
        )

    @staticmethod
    def from_variable_aggregation(aggregation: VariableAggregation) -> ReduceOp:
        """Return the op that does what `aggregation` says.

        Parameters
        ----------
        aggregation : VariableAggregation
            ``SUM`` or ``MEAN``.

        Returns
        -------
        ReduceOp
            The op of that name.

        Raises
        ------
        ValueError
            `aggregation` is no reduction (``NONE`` and ``ONLY_FIRST_REPLICA`` are none).

        Notes
        -----
        Counterpart of ``tf.distribute.ReduceOp.from_variable_aggregation``.

        Examples
        --------
        >>> mr.ReduceOp.from_variable_aggregation(mr.VariableAggregation.SUM)
        <ReduceOp.SUM: 'SUM'>
        """
        if aggregation is VariableAggregation.SUM:
            return ReduceOp.SUM
        if aggregation is VariableAggregation.MEAN:
            return ReduceOp.MEAN
        raise ValueError(f"{aggregation!r} is not a reduction. Only SUM and MEAN are.")


# As programs write them; asking the class for its members makes a new mapping each time.
_OPS_BY_NAME = {
    **ReduceOp.__members__,
    **{name.lower(): op for name, op in ReduceOp.__members__.items()},
}


class VariableSynchronization(enum.Enum):
    """When the copies of a variable are brought together (`tf.VariableSynchronization`).

    Attributes
    ----------
    AUTO, ON_WRITE
        When it is assigned to: the variable is mirrored, and the same on all ranks.
    ON_READ
        When it is read above the replicas: each replica has a component of its own until then.
    NONE
        Never. No variable can be made with it, as in tf: a `ValueError`.

    Examples
    --------
    >>> on_read = mr.VariableSynchronization.ON_READ
    >>> mr.Variable(0.0, synchronization=on_read, aggregation=mr.VariableAggregation.SUM).trainable
    False
    """

    AUTO = 0
    NONE = 1
    ON_WRITE = 2
    ON_READ = 3


class VariableAggregation(enum.Enum):
    """How what replicas assign to a variable is combined (`tf.VariableAggregation`).

    For a variable that is synchronized on read: how the components are, where it is read.

    Attributes
    ----------
    NONE
        Not at all: all replicas must assign the same value. Synchronized on read it has no one
        value above several replicas, nor in ``strategy.scope()``.
    SUM
        Added up.
    MEAN
        Added up, and divided by the number of replicas; the dtype must be a float or complex.
    ONLY_FIRST_REPLICA
        What replica 0 assigns counts, or its component.

    Examples
    --------
    >>> strategy = mr.MPIStrategy(num_replicas=2)
    >>> with strategy.scope():
    ...     v = mr.Variable(0.0, aggregation=mr.VariableAggregation.SUM)
    >>> def step():
    ...     v.assign_add(1.0)
    >>> strategy.run(step)
    >>> float(v)
    2.0
    """

    NONE = 0
    SUM = 1
    MEAN = 2
    ONLY_FIRST_REPLICA = 3


class _Implementations(enum.EnumMeta):
    """Says what stands for those of TensorFlow."""

    def __getattr__(cls, name: str) -> Any:
        text = f"{cls.__name__} has no {name}"
        if name in ("NCCL", "RING"):
            text += ", which is TensorFlow's: here the MPI library moves the data. Use AUTO"
        raise AttributeError(f"{text}.", name=name, obj=cls)


class CommunicationImplementation(enum.Enum, metaclass=_Implementations):
    """Which engine moves the data of sums and products.

    Counterpart of ``tf.distribute.experimental.CommunicationImplementation``.

    Attributes
    ----------
    AUTO
        The package chooses.
    ALLREDUCE
        ``MPI_Allreduce``, in the order that the MPI library chooses.
    SHARED_MEMORY
        A window of shared memory, where all ranks are on one host; always in one order.
    ALLTOALL
        ``MPI_Alltoallv`` and ``MPI_Allgatherv``; always in one order.

    Examples
    --------
    >>> mr.CommunicationOptions(implementation="alltoall").implementation
    <CommunicationImplementation.ALLTOALL: 'ALLTOALL'>
    """

    AUTO = "AUTO"
    ALLREDUCE = "ALLREDUCE"
    SHARED_MEMORY = "SHARED_MEMORY"
    ALLTOALL = "ALLTOALL"


@dataclasses.dataclass(frozen=True)
class CommunicationOptions:
    """Options of collective calls: per strategy, or per call.

    Fields that are set in the call win over those of the strategy. Counterpart of
    ``tf.distribute.experimental.CommunicationOptions``, which has the first three.

    Parameters
    ----------
    bytes_per_pack : int, default 0
        Bytes that travel in one message; 0 lets the package choose.
    timeout_seconds : float, optional
        Limit of the wait for the other ranks in each exchange. None waits for ever, and reports
        who is missing. A timeout is final: the strategy can't be used afterwards, on any rank. It
        does not limit the wait for ranks that have not yet made the strategy, which is reported.
    implementation : CommunicationImplementation or str, default AUTO
        Which engine moves the data of sums and products. MIN and MAX, which are exact, always go
        by ``MPI_Allreduce``.
    reproducible : bool, optional
        Whether sums, means and products have the same bits in every layout, on every MPI library:
        they are combined in one order over the ids of the replicas. Default: False. The environment
        variable ``MPI_REPLICA_REPRODUCIBLE`` (1 or 0) gives that of a strategy.
    name : str, optional
        Replaces the call site in the comparison of calls: two lines that mean one call get the
        same name.

    Raises
    ------
    ValueError
        A field is out of range, or fields that don't fit together: reproducible sums by
        ``ALLREDUCE``, whose order depends on the layout.
    TypeError
        A field is of another type.

    Examples
    --------
    >>> CommunicationOptions(timeout_seconds=5).merge(CommunicationOptions(name="loss"))
    CommunicationOptions(bytes_per_pack=0, timeout_seconds=5.0, \
implementation=<CommunicationImplementation.AUTO: 'AUTO'>, reproducible=None, name='loss')
    """

    bytes_per_pack: int = 0
    timeout_seconds: float | None = None
    implementation: CommunicationImplementation = CommunicationImplementation.AUTO
    reproducible: bool | None = None
    name: str | None = None
    #: What of it changes the messages, in words: it must be the same on all replicas.
    wire: str = dataclasses.field(default="", init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        number = integer("bytes_per_pack", self.bytes_per_pack, 0)
        object.__setattr__(self, "bytes_per_pack", number)
        seconds: Any = self.timeout_seconds
        if seconds is not None:
            is_number = isinstance(seconds, numbers.Real) and not isinstance(seconds, bool)
            if not is_number or not seconds > 0:
                raise (ValueError if is_number else TypeError)(
                    f"timeout_seconds must be a positive number or None, got {seconds!r}."
                )
            try:
                object.__setattr__(self, "timeout_seconds", float(seconds))
            except OverflowError:
                raise ValueError(
                    "timeout_seconds is larger than any float. Leave it out for no limit."
                ) from None
        if self.name is not None:
            if not isinstance(self.name, str):
                raise TypeError(f"name must be a string or None, got {self.name!r}.")
            # Of no class of the program, which may not travel.
            object.__setattr__(self, "name", str.__str__(self.name))
        implementation: object = self.implementation  # a name is accepted as well
        if not isinstance(implementation, CommunicationImplementation):
            known = ", ".join(member.name for member in CommunicationImplementation)
            try:
                chosen = CommunicationImplementation[str(implementation).upper()]
            except KeyError:
                raise ValueError(
                    f"{implementation!r} is not an implementation. Use one of {known}."
                ) from None
            object.__setattr__(self, "implementation", chosen)
        if self.reproducible is not None and not isinstance(self.reproducible, bool):
            raise TypeError(f"reproducible must be True, False or None, got {self.reproducible!r}.")
        if self.reproducible and self.implementation is CommunicationImplementation.ALLREDUCE:
            raise ValueError(
                "reproducible=True can't be had with implementation=ALLREDUCE: the order of its"
                " sums depends on the layout and on the MPI library. Use AUTO, SHARED_MEMORY or"
                " ALLTOALL."
            )
        # How the messages are cut, who moves them, and whether they are waited for in a loop.
        words = [
            f"bytes_per_pack={self.bytes_per_pack}" if self.bytes_per_pack else "",
            "" if self.timeout_seconds is None else "with a timeout",
            "reproducible" if self.reproducible else "",
        ]
        if self.implementation is not CommunicationImplementation.AUTO:
            words.append(f"implementation={self.implementation.name}")
        object.__setattr__(self, "wire", ", ".join(filter(None, words)))

    def merge(self, call: CommunicationOptions | None) -> CommunicationOptions:
        """Return these options with the fields that are set in `call` put over them.

        A field of `call` that has its default counts as not set.

        Parameters
        ----------
        call : CommunicationOptions or None
            Those of a call.

        Returns
        -------
        CommunicationOptions
            New ones; these themselves where `call` is None.

        Raises
        ------
        TypeError
            `call` is neither None nor `CommunicationOptions`.
        ValueError
            The fields don't fit together: reproducible sums by ``ALLREDUCE``.

        Examples
        --------
        >>> base = mr.CommunicationOptions(timeout_seconds=60)
        >>> base.merge(mr.CommunicationOptions(name="loss")).timeout_seconds
        60.0
        """
        if call is None:
            return self
        if not isinstance(call, CommunicationOptions):
            raise TypeError(
                f"options must be mr.CommunicationOptions or None, got {call!r}."
                " Write options=mr.CommunicationOptions(name='x')."
            )
        return _merged(self, call)


@functools.lru_cache(maxsize=256)
def _merged(base: CommunicationOptions, call: CommunicationOptions) -> CommunicationOptions:
    changes = {
        field.name: getattr(call, field.name)
        for field in dataclasses.fields(call)
        if field.init and getattr(call, field.name) != field.default
    }
    return dataclasses.replace(base, **changes)


class InputReplicationMode(enum.Enum):
    """For what a ``dataset_fn`` is called: once a rank, or once a replica.

    Counterpart of ``tf.distribute.InputReplicationMode``.

    Attributes
    ----------
    PER_WORKER
        Once for each rank, whose replicas take batches of its dataset in turns.
    PER_REPLICA
        Once for each replica: it makes no calls above the replicas, and draws nothing there.

    Examples
    --------
    >>> per_replica = mr.InputReplicationMode.PER_REPLICA
    >>> options = mr.InputOptions(experimental_replication_mode=per_replica)
    """

    PER_WORKER = "PER_WORKER"
    PER_REPLICA = "PER_REPLICA"


@dataclasses.dataclass(frozen=True)
class InputOptions:
    """Options of distributed datasets (`tf.distribute.InputOptions`).

    Parameters
    ----------
    experimental_fetch_to_device : bool, optional
        Accepted for tf's sake; there are no devices to fetch to.
    experimental_replication_mode : InputReplicationMode, default PER_WORKER
        For what ``dataset_fn`` is called.
    experimental_place_dataset_on_device : bool, default False
        Accepted for tf's sake.
    experimental_per_replica_buffer_size : int, default 0
        How many steps' batches a rank makes ahead, in a thread, so that a step does not wait for
        its input. 0 makes them when they are asked for. Each rank may have a number of its own.

    Raises
    ------
    TypeError, ValueError
        A field is of another type, or the number is negative.

    Notes
    -----
    tf's default is 1: there a buffer holds what was copied to a device. Here a thread runs
    functions of the program (`map`, generators, other iterables) while the step works, so programs
    ask for it. They get the same batches with any number, unless what reads depends on something
    that a step changes. It must make no collective call: that is a `ContextError` on all ranks.

    The thread begins with the first step of an iteration and ends with its iterator. An error comes
    with the step that it belongs to; a checkpoint counts the steps that were taken. It takes the
    memory of that many steps more, and some 20 microseconds a step. An iterator, which can't be
    iterated anew, is a `ValueError` as input then: what was read ahead could be lost.

    Examples
    --------
    >>> options = InputOptions(experimental_per_replica_buffer_size=2)
    >>> options.experimental_per_replica_buffer_size
    2
    """

    experimental_fetch_to_device: bool | None = None
    experimental_replication_mode: InputReplicationMode = InputReplicationMode.PER_WORKER
    experimental_place_dataset_on_device: bool = False
    experimental_per_replica_buffer_size: int = 0

    def __post_init__(self) -> None:
        mode: object = self.experimental_replication_mode
        if not isinstance(mode, InputReplicationMode):
            raise TypeError(
                f"experimental_replication_mode must be mr.InputReplicationMode, got {mode!r}."
            )
        name = "experimental_per_replica_buffer_size"
        object.__setattr__(self, name, integer(name, getattr(self, name), 0))
