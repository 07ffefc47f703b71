"""What a program trains, and where it goes on after a loss."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from ...checkpoint import Checkpoint
from ...collectives.strategy_base import StrategyBase
from ...core.doors import publish
from ...core.exceptions import ContextError

if TYPE_CHECKING:
    from ...checkpoint import CheckpointManager


class ElasticState(Checkpoint):
    """The state of a program that goes on without a lost rank: see ``strategy.run_elastic``.

    Parameters
    ----------
    strategy : Strategy, optional
        By position, as for `Checkpoint`.
    **objects
        What a `Checkpoint` can hold, each an attribute, too. Make variables, datasets and iterators
        before `run_elastic`. The strategy's variables and random numbers, where each of its
        distributed datasets stands, and how many epochs others have begun, are part of a commit by
        themselves; of a checkpoint on disk only the random numbers are. Of a `PerReplica` of
        objects a replica that moves to another rank gets a copy of those there, with the committed
        state: use ``state.models`` then.

    Raises
    ------
    ValueError
        As for `Checkpoint`.

    Notes
    -----
    It is a `Checkpoint`: a `CheckpointManager` saves and restores it. Where that has saved one, the
    newest is restored if a rank is lost together with the one that keeps copies for it.

    Examples
    --------
    >>> import mpi_replica as mr
    >>> strategy = mr.MPIStrategy(num_replicas=2)
    >>> with strategy.scope():
    ...     weights = mr.Variable([1.0, 2.0])
    >>> state = mr.ElasticState(step=0, weights=weights)
    >>> def train():
    ...     while state.step < 3:
    ...         strategy.run(lambda: weights.assign_add([1.0, 1.0]))
    ...         state.step += 1
    ...         state.commit()
    >>> strategy.run_elastic(train, state)
    >>> weights.numpy()
    array([4., 5.])
    """

    #: What a commit does, inside of `run_elastic`.
    _commit: Callable[[], None] | None = None

    def commit(self) -> None:
        """Make this the state at which all ranks go on, should one be lost.

        Collective: all ranks call it, in cross-replica context, inside of `run_elastic`. It is
        agreed: all living ranks have committed, or none, also where one dies meanwhile.

        Raises
        ------
        ContextError
            Called outside of `run_elastic`, or in a replica.
        TypeError, ValueError
            An object can't be kept: as for ``Checkpoint.save``; where the job can go on without a
            rank, since nothing is kept elsewhere.
        DivergenceError
            A `PerReplica` of objects, of which one state is kept, does not hold the same for all.
        CollectiveMismatchError
            The ranks are at different calls.
        RankLostError
            A rank has died; `run_elastic` deals with it.

        Notes
        -----
        What is mirrored is kept on each rank: arrays of variables by reference, other arrays, and
        the state of objects, as copies. What belongs to replicas (`PerReplica` values, variables
        that are synchronized on read, random numbers that were drawn in replicas) is sent to one
        other rank, on another host where there is one: one message each. Beside that one message of
        256 bytes a rank, one more where objects of replicas are compared, and one agreement
        (``MPIX_Comm_iagree``). Where a lost rank ends the job, only the first one.

        Examples
        --------
        >>> strategy = mr.MPIStrategy()
        >>> state = mr.ElasticState(strategy, step=0)
        >>> def train():
        ...     state.step += 1
        ...     state.commit()  # what comes after it is done again, should a rank be lost
        >>> strategy.run_elastic(train, state)
        """
        if self._commit is None:
            raise ContextError(
                "ElasticState.commit was called outside of strategy.run_elastic, where nothing"
                " would ever go back to it. Call it in the function that is given to"
                " run_elastic(train, state), or save a checkpoint instead."
            )
        self._commit()


publish("mpi_replica", ElasticState)

# Functions, since each method would be a name that no object of a state can have.


def objects_of(state: ElasticState) -> dict[str, Any]:
    """Returns what a state holds, by name."""
    return state._objects


def replace_objects(state: ElasticState, objects: Mapping[str, Any]) -> None:
    """Puts these objects into a state, in the place of those that it holds."""
    state._replace(objects)


@contextlib.contextmanager
def restored_exactly(state: ElasticState) -> Iterator[None]:
    """Returns a context in which a checkpoint of `state` makes it what it was, as a commit does."""
    state._is_exact = True
    try:
        yield
    finally:
        state._is_exact = False


def strategies_of(state: ElasticState) -> set[StrategyBase]:
    """Returns the strategies of which a state is known to be: none, where it has no variables."""
    strategies = {v.strategy for v in state._variables()}
    return strategies if state._given_strategy is None else {state._given_strategy, *strategies}


def manager_of(state: ElasticState) -> CheckpointManager | None:
    """Returns the `CheckpointManager` that was made last for a state, if that is in use."""
    return None if state._manager is None else state._manager()


@contextlib.contextmanager
def committed_by(state: ElasticState, commit: Callable[[], None]) -> Iterator[None]:
    """Returns a context in which ``state.commit()`` calls `commit`.

    Raises
    ------
    ContextError
        It calls another function already.
    """
    if state._commit is not None:
        raise ContextError("run_elastic was called inside of itself, with the same state.")
    state._commit = commit
    try:
        yield
    finally:
        state._commit = None
