"""Enums and options: plain data, no behaviour beyond checking itself."""

from __future__ import annotations

import dataclasses
import enum
import functools

from .argument_checks import integer


class ReduceOp(enum.Enum):
    """How the values of replicas are combined.

    ``SUM`` and ``MEAN`` as in `tf.distribute.ReduceOp`; ``MIN``, ``MAX`` and ``PROD`` are
    additions. Where an op is asked for, its name in any case is accepted as well.

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
        """Returns the op that `op` names.

        Raises
        ------
        ValueError
            `op` is a string that names none.
        TypeError
            `op` is neither a string nor a `ReduceOp`.
        """
        if isinstance(op, ReduceOp):
            return op
        if isinstance(op, str):
            known = _OPS_BY_NAME.get(op) or _OPS_BY_NAME.get(op.upper())
            if known is not None:
                return known
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
        """Returns the op that does what `aggregation` says.

        Raises
        ------
        ValueError
            `aggregation` is no reduction (``NONE`` and ``ONLY_FIRST_REPLICA`` are none).
        """
        if aggregation is VariableAggregation.SUM:
            return ReduceOp.SUM
        if aggregation is VariableAggregation.MEAN:
            return ReduceOp.MEAN
        raise ValueError(f"{aggregation!r} is not a reduction. Only SUM and MEAN are.")


_OPS_BY_NAME = ReduceOp.__members__  # asking the class for it makes a new one each time


class VariableSynchronization(enum.Enum):
    """When the copies of a variable are brought together (`tf.VariableSynchronization`)."""

    AUTO = 0
    NONE = 1
    ON_WRITE = 2
    ON_READ = 3


class VariableAggregation(enum.Enum):
    """How what replicas assign to a variable is combined (`tf.VariableAggregation`)."""

    NONE = 0
    SUM = 1
    MEAN = 2
    ONLY_FIRST_REPLICA = 3


class CommunicationImplementation(enum.Enum):
    """Which engine moves the data of sums and products.

    Counterpart of ``tf.distribute.experimental.CommunicationImplementation``.
    """

    #: The package chooses.
    AUTO = "AUTO"
    #: ``MPI_Allreduce``, in the order that the MPI library chooses.
    ALLREDUCE = "ALLREDUCE"
    #: A window of shared memory, where all ranks are on one host; always in one order.
    SHARED_MEMORY = "SHARED_MEMORY"
    #: ``MPI_Alltoallv`` and ``MPI_Allgatherv``; always in one order.
    ALLTOALL = "ALLTOALL"


@dataclasses.dataclass(frozen=True)
class CommunicationOptions:
    """Options of collective calls: per strategy, or per call.

    Fields that are set in the call win over those of the strategy.

    Parameters
    ----------
    bytes_per_pack : int, default 0
        Bytes that travel in one message; 0 lets the package choose.
    timeout_seconds : float, optional
        Limit of the wait for the other ranks in each exchange. None waits for ever, and reports
        who is missing. A timeout is final: the strategy can't be used afterwards, on any rank.
    implementation : CommunicationImplementation or str, default AUTO
        Which engine moves the data of sums and products. MIN and MAX, which are exact, always go
        by ``MPI_Allreduce``.
    reproducible : bool, optional
        Whether sums and products have the same bits in every layout, on every MPI library: they
        are combined in one order over the ids of the replicas. Default: False. The environment
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
    CommunicationOptions(bytes_per_pack=0, timeout_seconds=5, \
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
        if self.timeout_seconds is not None and not self.timeout_seconds > 0:
            raise ValueError(
                f"timeout_seconds must be a positive number or None, got {self.timeout_seconds!r}."
            )
        if self.name is not None and not isinstance(self.name, str):
            raise TypeError(f"name must be a string or None, got {self.name!r}.")
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

        Raises
        ------
        TypeError
            `call` is neither None nor `CommunicationOptions`.
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
    """For what a ``dataset_fn`` is called: once a rank, or once a replica."""

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
