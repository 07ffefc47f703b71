"""Which replica some code is part of: its id, its strategy, its random numbers."""

from __future__ import annotations

import contextvars
import warnings
from collections.abc import Sequence
from typing import Any, Protocol, Self

import numpy as np

from ..collectives.agreement.call import Call
from ..collectives.engine import Engine
from ..collectives.strategy_base import StrategyBase
from ..core.abstract_strategy import AbstractReplicaContext, CountsEpochs
from ..core.argument_checks import integer
from ..core.context import State, current_state, require_above, restore_state, swap_state
from ..core.exceptions import ContextError
from ..core.jax_state import is_staged, require_unstaged
from ..core.library_state import is_recording
from .merge_fn import perform_alone
from .storage import Storage


class Place(Protocol):
    """The place of a replica in a run, where it waits for the others."""

    def meet(self, call: Call) -> Any:
        """Waits until all replicas are at `call`, and returns its result."""

    def meet_elsewhere(self, call: Call) -> Any:
        """As `meet`, in another thread, while that of the replica waits for what is done there."""

    def settle(self) -> None:
        """Raises what has come up elsewhere, where the others are still to be told."""

    def will_draw(self, generator: np.random.Generator) -> None:
        """Notes that the replica uses its generator."""

    def will_write(self, storage: Storage) -> None:
        """Notes that the replica writes its component of a variable."""

    def will_begin_epoch(self, epochs: CountsEpochs) -> None:
        """Notes that the replica begins an epoch of a dataset."""

    def check_devices(self, devices: Sequence[Any]) -> None:
        """Raises where a function on these devices of JAX would be in the way of other replicas."""


# Kinds of states in which the code of a step stands above the replicas.
_ABOVE = {"merge_fn": "a merge_fn", "update": "the function of an update"}


class Replica(AbstractReplicaContext):
    """A replica, without what it calls: the base of `ReplicaContext`, which says more."""

    #: How many of its calls can be differentiated.
    num_recorded = 0

    def __init__(self, strategy: StrategyBase, replica_id_in_sync_group: int | None) -> None:
        if not isinstance(strategy, StrategyBase):
            raise TypeError(
                f"ReplicaContext needs a strategy, got {strategy!r}. Give it first, as in"
                " mr.ReplicaContext(strategy, 0)."
            )
        replica_id = None
        if replica_id_in_sync_group is not None:
            try:
                replica_id = integer("replica_id_in_sync_group", replica_id_in_sync_group)
            except TypeError as error:
                raise ValueError(str(error)) from None
        count = strategy.num_replicas_in_sync
        if replica_id is not None and not 0 <= replica_id < count:
            raise ValueError(
                f"replica_id_in_sync_group={replica_id} is no id of {strategy!r}: they go from 0 to"
                f" {count - 1}."
            )
        self._strategy = strategy
        self._replica_id = replica_id
        #: Where it waits in a run; None for one that was made by hand.
        self._place: Place | None = None
        #: That of the code that this context belongs to; None for one that was made by hand.
        self._state: State | None = None
        self._tokens: list[contextvars.Token[State | None]] = []

    @classmethod
    def in_run(cls, strategy: StrategyBase, replica_id: int, place: Place) -> Self:
        """Return the context of a replica that runs."""
        context = cls.__new__(cls)  # nothing is to be checked
        context._strategy = strategy
        context._replica_id = replica_id
        context._place = place
        context._state = State(strategy, context, "replica")
        return context

    @property
    def state(self) -> State | None:
        """What the code of this replica is part of; None for a context that was made by hand."""
        return self._state

    def __enter__(self) -> Self:
        require_above(self._strategy, "ReplicaContext.__enter__")
        if self._state is not None:
            raise ContextError(
                "a ReplicaContext that strategy.run has made can't be entered: it belongs to one"
                " step of its replica. Make one by hand: mr.ReplicaContext(strategy, replica_id)."
            )
        self._tokens.append(swap_state(State(self._strategy, self, "replica")))
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        restore_state(self._tokens.pop())

    def __repr__(self) -> str:
        return f"<ReplicaContext of replica {self._replica_id} of {self._strategy!r}>"

    @property
    def strategy(self) -> StrategyBase:
        """The strategy."""
        return self._strategy

    @property
    def num_replicas_in_sync(self) -> int:
        """How many replicas all ranks host together."""
        return self._strategy.num_replicas_in_sync

    @property
    def replica_id(self) -> int:
        """What `replica_id_in_sync_group` is, for this package: also where JAX traces."""
        if self._replica_id is None:
            raise ValueError(
                "this ReplicaContext was made with replica_id_in_sync_group=None: it has no id."
            )
        return self._replica_id

    @property
    def replica_id_in_sync_group(self) -> int:
        """The id of this replica among all replicas: 0 to ``num_replicas_in_sync - 1``.

        Raises
        ------
        ValueError
            The context was made by hand without an id.
        ContextError
            JAX traces a function (jit, scan): other replicas may run it with this id in it. Or a
            thread that a step has started asked `get_replica_context` for it, as for ``rng``.
        """
        require_unstaged("replica_id_in_sync_group", "was read")
        return self.replica_id

    @property
    def devices(self) -> tuple[str, ...]:
        """Where this replica runs, as a tuple of one string. Deprecated, as in tf."""
        warnings.warn(
            "ReplicaContext.devices is deprecated; use strategy.rank.", DeprecationWarning, 2
        )
        engine = self._strategy.engine
        return (f"rank:{engine.layout.rank}/replica:{self._replica_id}",)

    @property
    def rng(self) -> np.random.Generator:
        """The random numbers of this replica: other ones than those of any other replica.

        A generator that depends on the ``seed`` of the strategy and on the id of the replica, never
        on the rank that hosts it. It goes on from one ``run`` to the next; a run that fails, and
        has asked for it, leaves it as it was.

        Raises
        ------
        ValueError
            The context was made by hand without an id.
        ContextError
            JAX traces a function (jit, scan): what is drawn there would be the same each time. Or
            a ``merge_fn`` used that of its step: it draws from ``strategy.rng``.

        Examples
        --------
        >>> import mpi_replica as mr
        >>> def step():
        ...     return mr.get_replica_context().rng.integers(100)
        >>> mr.MPIStrategy(num_replicas=2, seed=1).run(step)
        PerReplica:{
          0: np.int64(16),
          1: np.int64(19)
        }
        """
        require_unstaged("rng", "was used")
        generator = self._strategy.generators.of_replica(self.replica_id)
        if self._place is not None:
            state = current_state()
            if state is not None and state.kind in _ABOVE:
                raise ContextError(
                    f"ctx.rng was used in {_ABOVE[state.kind]}, which is no part of its replica."
                    " What is drawn would depend on who shares a rank. Use strategy.rng there."
                )
            self._place.will_draw(generator)
        return generator

    @property
    def _engine(self) -> Engine:
        return self._strategy.engine  # the default strategy has one for each thread

    def meet(self, call: Call) -> Any:
        """Wait until all replicas are at `call`, and return its result."""
        if self._place is not None:
            return self._place.meet(call)
        self.require_run(call.kind)
        require_unstaged_call(call)
        return perform_alone(self._strategy, call)

    def meet_elsewhere(self, call: Call) -> Any:
        """Do as `meet`, in a thread of JAX, while that of the replica waits for it."""
        return self.meet(call) if self._place is None else self._place.meet_elsewhere(call)

    @property
    def place(self) -> Place | None:
        """Where it waits in a run; None for one that was made by hand."""
        return self._place

    def will_write(self, storage: Storage) -> None:
        """Note that the replica writes its component of a variable."""
        if self._place is not None:
            self._place.will_write(storage)

    def will_begin_epoch(self, epochs: CountsEpochs) -> None:
        """Note that the replica begins an epoch of a dataset."""
        if self._place is not None:
            self._place.will_begin_epoch(epochs)

    def require_run(self, what: str) -> None:
        """Raise where it was made by hand, of one of several replicas."""
        if self._place is None and self._strategy.num_replicas_in_sync != 1:
            raise ContextError(
                f"{what} in a ReplicaContext that was made by hand needs a strategy with one"
                f" replica; this one has {self._strategy.num_replicas_in_sync}. Use strategy.run."
            )


def require_unstaged_call(call: Call) -> None:
    """Raises where a call is made while JAX traces a function, which is to make it later.

    Or while torch records one, which would not make it. At once: what torch keeps for the process
    while it does so would pass to replicas that run while this one waits.

    Raises
    ------
    ContextError
        They do.
    """
    if is_recording():
        raise ContextError(
            f"{call.kind} was called in a function that torch records (torch.func.linearize,"
            " make_fx, torch.jit.trace, torch.export): torch would keep what came of it this once,"
            " for all later calls. Call it between such functions, and differentiate it by"
            " torch.func.grad, vjp or jvp."
        )
    takes_traced = call.kind in ("all_reduce", "all_gather")
    if takes_traced and call.error is not None and is_staged():
        raise call.error  # of its values, such as a sparse matrix, in which JAX traces some
    what = " with values that JAX does not trace" if takes_traced else ""
    require_unstaged(call.kind, f"was called{what}")
