"""The context machine: who calls, a replica or the code that stands above all replicas.

=================  =======================  ==========================  ============
state              get_replica_context()    in_cross_replica_context()  has_strategy()
=================  =======================  ==========================  ============
default            the default context      False                       False
in ``scope()``     None                     True                        True
in a replica       its own                  False                       True
in a ``merge_fn``  None                     True                        True
=================  =======================  ==========================  ============

The state lives in a context variable: a new thread starts in the default state, and each replica
has a state of its own. So do a new greenlet and a new `contextvars.Context`: what is called there
by mistake, as part of a step, would silently be for one replica. Where a strategy of several
replicas is open, the default strategy holds only where one was made or entered before.
"""

from __future__ import annotations

import contextlib
import contextvars
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Generic, NamedTuple, TypeVar

from .abstract_strategy import AbstractReplicaContext, AbstractStrategy, CallsPerReplica
from .exceptions import ContextError, add_note
from .jax_state import require_unstaged
from .randomness import FOR_EACH_REPLICA

_Strategy = TypeVar("_Strategy", bound=AbstractStrategy)


class State(NamedTuple):
    """What the code that runs now is part of."""

    strategy: AbstractStrategy
    #: None in cross-replica context
    replica_context: AbstractReplicaContext | None = None
    #: "scope", "permanent", "replica", "merge_fn" or "update"
    kind: str = "scope"
    #: the component that ``extended.update`` is at
    component: int | None = None
    #: what takes back what such an update has written, by arrays of a variable and component
    ways_back: dict[tuple[Any, int], Callable[[], None]] | None = None
    #: whether such an update is a ``merge_fn``'s
    is_merged: bool = False


_state: contextvars.ContextVar[State | None] = contextvars.ContextVar("mpi_replica", default=None)

# The replica that a function above the replicas is called for.
_called_for: contextvars.ContextVar[int | None] = contextvars.ContextVar(
    "mpi_replica called for", default=None
)

_reads_own_rows: contextvars.ContextVar[bool] = contextvars.ContextVar(
    "mpi_replica reads own rows", default=False
)

# Whether a strategy was made or entered in this thread, greenlet or context.
_has_entered = contextvars.ContextVar("mpi_replica has entered", default=False)

#: Those that were made and not closed, but for the default ones.
open_strategies: weakref.WeakSet[AbstractStrategy] = weakref.WeakSet()

# Kinds of states in which code stands above the replicas, and in no call of theirs.
_ABOVE = ("scope", "permanent")

#: Where a step can't make calls.
NO_PART = (
    "A thread, greenlet or contextvars.Context that a step starts is no part of its replica, nor is"
    " a signal's handler: compute there, and call collectives in the function given to"
    " strategy.run."
)

# Set by the strategy module, which lies above this one.
_default_strategy: Callable[[], AbstractStrategy]


def register_default_strategy(strategy: Callable[[], AbstractStrategy]) -> None:
    """Tells how to get the default strategy."""
    global _default_strategy
    _default_strategy = strategy


def enter_open_strategy(strategy: AbstractStrategy) -> None:
    """Counts a strategy that was made here among those that are open."""
    _has_entered.set(True)
    open_strategies.add(strategy)


def require_default(call: str) -> None:
    """Raises where `call` on the default strategy is most likely meant for another one.

    Raises
    ------
    ContextError
        A strategy of several replicas is open, and this thread, greenlet or context has never
        entered one; or its replicas are in the middle of a step, and this is none of them.
    """
    for strategy in tuple(open_strategies):
        if strategy.num_replicas_in_sync == 1:
            continue
        if _has_entered.get() and not strategy.is_between_replicas:
            continue
        raise ContextError(
            f"{call} was called on the default strategy, which has one replica, while {strategy!r}"
            f" is open. {NO_PART} Outside of steps hand the context on with"
            " contextvars.copy_context().run(function), or enter strategy.scope() there. If one"
            " replica is meant, call mr.experimental_set_strategy(None) there first."
        )


def current_state() -> State | None:
    """Returns the state of the code that runs now; None is the default state."""
    return _state.get()


def is_in_merge_fn() -> bool:
    """Returns whether the code that runs now is a ``merge_fn``, or what that gives to an update."""
    state = current_state()
    return state is not None and (state.kind == "merge_fn" or state.is_merged)


def swap_state(state: State | None) -> contextvars.Token[State | None]:
    """Makes `state` the current one; `restore_state` takes the token back."""
    return _state.set(state)


def restore_state(token: contextvars.Token[State | None]) -> None:
    """Undoes `swap_state`."""
    _state.reset(token)


class entered:
    """Run the body in `state`."""

    __slots__ = ("_state", "_token")

    def __init__(self, state: State) -> None:
        self._state = state

    def __enter__(self) -> None:
        self._token = _state.set(self._state)

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        _state.reset(self._token)


def current_strategy() -> AbstractStrategy:
    """Returns the current strategy; the default strategy outside of any."""
    state = _state.get()
    return _default_strategy() if state is None else state.strategy


def has_strategy() -> bool:
    """Return whether the current strategy is another one than the default strategy.

    Returns
    -------
    bool
        False outside of any strategy, and in the scope of the default strategy.

    Notes
    -----
    No communication. Counterpart of ``tf.distribute.has_strategy``.

    Examples
    --------
    >>> mr.has_strategy()
    False
    >>> with mr.MPIStrategy().scope():
    ...     mr.has_strategy()
    True
    """
    state = _state.get()
    return state is not None and not state.strategy.is_default


def in_cross_replica_context() -> bool:
    """Return whether the code stands above all replicas: in ``scope()`` or a ``merge_fn``.

    Returns
    -------
    bool
        False in a replica, and outside of any strategy: there the default strategy's only replica
        is.

    Notes
    -----
    No communication. Counterpart of ``tf.distribute.in_cross_replica_context``.

    Examples
    --------
    >>> mr.in_cross_replica_context()
    False
    >>> with mr.MPIStrategy().scope():
    ...     mr.in_cross_replica_context()
    True
    """
    state = _state.get()
    return state is not None and state.replica_context is None


def experimental_set_strategy(strategy: AbstractStrategy | None) -> None:
    """Make `strategy` the current one, without a ``with``; None goes back to the default.

    It holds in this thread, until it is called again.

    Parameters
    ----------
    strategy : Strategy or None
        Which one.

    Raises
    ------
    ContextError
        The call stands inside a ``scope()`` or a replica.
    TypeError
        `strategy` is none.

    Notes
    -----
    No communication. Counterpart of ``tf.distribute.experimental_set_strategy``.

    Examples
    --------
    >>> mr.experimental_set_strategy(mr.MPIStrategy(num_replicas=2))
    >>> mr.get_strategy().num_replicas_in_sync
    2
    >>> mr.experimental_set_strategy(None)
    >>> mr.has_strategy()
    False
    """
    if strategy is not None and not isinstance(strategy, AbstractStrategy):
        raise TypeError(
            f"experimental_set_strategy needs a strategy or None, got {strategy!r}. Write"
            " mr.experimental_set_strategy(mr.MPIStrategy())."
        )
    state = _state.get()
    if state is not None and state.kind != "permanent":
        raise ContextError(
            "experimental_set_strategy must not be called inside strategy.scope() or a replica."
            " Call it once, at the start of the program."
        )
    _has_entered.set(True)
    _state.set(
        None if strategy is None or strategy.is_default else State(strategy, None, "permanent")
    )


@contextlib.contextmanager
def called_for(
    caller: CallsPerReplica,
    replica_id: int,
    function: str,
    call: str,
    how: str = FOR_EACH_REPLICA,
) -> Iterator[None]:
    """Runs a body in which `call` calls `function` for one replica, and `how` it is called.

    What stands above all replicas is no part of it: `require_once` tells.
    """
    before, caller.per_replica_call = caller.per_replica_call, (function, call, how)
    token = _called_for.set(replica_id)
    try:
        yield
    except Exception as error:
        add_note(error, f"Raised in {function.removesuffix(',')}, called for replica {replica_id}.")
        raise
    finally:
        _called_for.reset(token)
        caller.per_replica_call = before


def replica_id_at_work() -> int | None:
    """Returns the replica that this code is part of, or is called for; None above them."""
    state = _state.get()
    context = None if state is None else state.replica_context
    return _called_for.get() if context is None else context.replica_id


def require_once(per_replica_call: tuple[str, str, str] | None, call: str) -> None:
    """Raises in a function that is called for a replica, if that is under way, or makes its rows.

    Raises
    ------
    ContextError
        How often `call` is made would depend on the layout.
    """
    if _reads_own_rows.get():
        raise ContextError(
            f"{call} was called where rows are made, which each rank does for its own replicas: how"
            f" often depends on the layout. Call {call} before or after next(), and pass on what"
            " comes of it."
        )
    if per_replica_call is not None:
        function, outer, how = per_replica_call
        raise ContextError(
            f"{call} was called while {function} runs. That is called {how}. Call {call} before or"
            f" after {outer}."
        )


@contextlib.contextmanager
def reading_own_rows() -> Iterator[None]:
    """Runs a body that reads rows which other ranks do not read.

    What stands above all replicas is no part of it: `require_once` and `require_common_draw` tell.
    """
    token = _reads_own_rows.set(True)
    try:
        yield
    finally:
        _reads_own_rows.reset(token)


def require_common_draw(per_replica_call: tuple[str, str, str] | None) -> None:
    """Raises where not all ranks draw the same from ``strategy.rng``, or not on every layout.

    Raises
    ------
    ContextError
        The code that runs now is a replica's, or makes what is for one; or reads rows of a rank.
    """
    if is_in_step():
        raise ContextError(
            "strategy.rng was drawn from in a replica: what it draws there depends on how many"
            " replicas a rank hosts. Use mr.get_replica_context().rng, or draw before the step and"
            " pass on what was drawn."
        )
    if per_replica_call is not None:
        function, _, how = per_replica_call
        raise ContextError(
            f"{function} draws from strategy.rng. It is called {how}. Draw before it, or"
            " make a generator for each replica: np.random.default_rng((seed, replica_id))."
        )
    if _reads_own_rows.get():
        raise ContextError(
            "strategy.rng was drawn from where rows are made, which each rank does for its own"
            " replicas: ranks would draw other numbers from then on. Make the numbers of a row from"
            " its position: dataset.enumerate().map(f), and np.random.default_rng((seed, i)) in f."
        )


def require_cross_replica(strategy: AbstractStrategy, call: str) -> None:
    """Raises unless `call` on `strategy` is legal here: above the replicas, and once for all.

    Raises
    ------
    ContextError
        It is not; the text says which call fits.
    """
    require_once(strategy.per_replica_call, call)
    require_above(strategy, call)


def require_above(strategy: AbstractStrategy, call: str) -> None:
    """Raises unless `call` on `strategy` stands outside of replicas and other strategies.

    And not while JAX traces a function, which would make the call this once.

    Raises
    ------
    ContextError
        It does not; the text says which call fits.
    """
    state = _state_beside(strategy)
    is_above = state is None or (state.strategy is strategy and state.kind in _ABOVE)
    if is_above and strategy.is_in_run:
        raise ContextError(
            f"{call} was called while {strategy!r} is in the middle of a step, and in none of its"
            f" replicas. {NO_PART} Another thread waits until the step is over, or makes its own"
            " strategy."
        )
    _require_outside(strategy, call)
    require_unstaged(call, "was called")


def is_in_step() -> bool:
    """Returns whether the code that runs now is a replica's, of no default strategy."""
    state = _state.get()
    is_replica = state is not None and state.replica_context is not None
    return is_replica and has_strategy()


def _state_beside(strategy: AbstractStrategy) -> State | None:
    """Returns the state of the code that runs now; in the default strategy's, others see none.

    As tf's ``enter_or_assert_strategy``, and so a function works above the replicas that merges in
    a step.
    """
    state = _state.get()
    is_free = state is not None and state.strategy.is_default and not strategy.is_default
    return None if is_free else state


def _require_outside(strategy: AbstractStrategy, call: str) -> None:
    """Raises where the code that runs now is in a replica, or in another strategy."""
    state = _state_beside(strategy)
    if state is None:
        return
    if state.strategy is not strategy:
        mend = "Leave its scope first."
        if strategy.is_default:
            mend = "What is made outside of a scope is the former's: make it in strategy.scope()."
        raise ContextError(
            f"Mixing different strategies: {call} of {strategy!r} was called while"
            f" {state.strategy!r} is the current one. {mend}"
        )
    if state.replica_context is not None:
        instead = {
            "gather": "ctx.all_gather",
            "reduce": "ctx.all_reduce, or call it in a merge_fn given to ctx.merge_call",
            "barrier": "ctx.all_reduce or any other collective, which all replicas wait for",
        }.get(call, "ctx.merge_call, whose merge_fn runs in cross-replica context")
        raise ContextError(
            f"{call} was called in a replica: it needs cross-replica context. Use {instead}, with"
            " ctx = mr.get_replica_context()."
        )


class _EnteredScope:
    """A scope that was entered in this thread or task, and what held before it."""

    __slots__ = ("before", "is_left", "mine", "outer")

    def __init__(self, mine: State | None) -> None:
        self.before, self.outer, self.mine = _state.get(), _innermost.get(), mine
        #: Whether it is over, though one that was entered later was the innermost then.
        self.is_left = False
        _state.set(mine)
        _innermost.set(self)

    def leave(self) -> None:
        """Goes back to the last scope before it that was not left."""
        before, outer = self.before, self.outer
        while outer is not None and outer.is_left:
            before, outer = outer.before, outer.outer
        _state.set(before)
        _innermost.set(outer)

    def leave_before_later_ones(self, error: object) -> None:
        """Leaves it where an error has stopped its code, and generators hold later ones.

        With the end of a generator they go on, and with any other error they are over.
        """
        self.is_left = True
        if isinstance(error, GeneratorExit):
            return
        scopes = []
        inner = _innermost.get()
        while inner is not None and inner is not self:
            scopes.append(inner)
            inner = inner.outer
        if inner is self:
            for later in scopes:
                later.is_left = True
            self.leave()


_innermost: contextvars.ContextVar[_EnteredScope | None] = contextvars.ContextVar(
    "mpi_replica scope", default=None
)


class Scope(Generic[_Strategy]):
    """The context manager that ``strategy.scope()`` returns; may be entered again and nested."""

    def __init__(self, strategy: _Strategy) -> None:
        self._strategy = strategy
        self._entered: list[_EnteredScope] = []

    def __enter__(self) -> _Strategy:
        strategy = self._strategy
        state = _state.get()
        if strategy.is_default:
            if state is not None and not state.strategy.is_default:
                raise ContextError(
                    f"Must not nest the scope of the default strategy inside that of"
                    f" {state.strategy!r}."
                )
            mine = state
        else:
            _require_outside(strategy, "scope")
            state = _state_beside(strategy)
            is_inside = state is not None and state.kind not in _ABOVE
            mine = state if is_inside else State(strategy)
        _has_entered.set(True)
        self._entered.append(_EnteredScope(mine))
        return strategy

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        last = self._entered[-1] if self._entered else None
        is_innermost = last is not None and last is _innermost.get() and last.mine is _state.get()
        may_be_left = is_innermost or error is not None or (last is not None and last.is_left)
        if last is None or not may_be_left:
            raise ContextError(  # it stays entered, and can be left later
                "scopes were left in another order than they were entered (nesting error). Use"
                " `with strategy.scope():`."
            )
        self._entered.pop()
        if is_innermost:
            last.leave()
        elif not last.is_left:
            last.leave_before_later_ones(error)
