"""``strategy.run_elastic``: training that goes on without a lost rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from ...core.context import require_cross_replica
from .elastic_strategy import ElasticStrategy

if TYPE_CHECKING:
    from .state import ElasticState

T = TypeVar("T")


class Elastic(ElasticStrategy):
    """The part of a strategy that goes on without a lost rank."""

    def run_elastic(self, train: Callable[[], T], state: ElasticState) -> T | None:
        """Call `train`, and call it again at the last commit whenever a rank was lost.

        Collective: all ranks call it, in cross-replica context. When a rank dies, the ranks that
        are left host its replicas, or a spare takes its place; there are as many replicas as
        before. With ``reproducible=True`` all results have the same bits as without the loss.

        Parameters
        ----------
        train : callable
            Called without arguments. It trains on from where `state` is, and calls
            ``state.commit()`` from time to time: after a loss what came later is done again.
        state : ElasticState
            All that changes, but for variables, random numbers and positions of datasets, which
            are part of it by themselves. Other objects that are not in it stay as they were when a
            rank was lost. A `PerReplica` that was made before is a `RankLostError`, and so are a
            dataset's iterator, and a variable that was made, and assigned, since the last commit,
            until it is assigned again; so are components of one that was made since.

        Returns
        -------
        object
            What `train` returned. None on a spare that was not needed.

        Raises
        ------
        RankLostError
            A rank was lost together with the one that kept copies for it, or before there were any,
            and there is no checkpoint; or the program has ended on another one by an error of its
            own, and can't be waited for; or on a spare, when it has failed on the other ranks.
        CollectiveMismatchError
            The ranks are at different calls; also where one has left `run_elastic` by an error that
            it has caught, and calls it again, when another one is lost.
        ContextError
            Called in a replica, or inside of itself.
        TypeError, ValueError
            `train` is not callable; `state` is no `ElasticState`, or one of another strategy; on
            every rank. An object of it can't be kept: as for ``Checkpoint.save``.
        BaseException
            What `train` raised, if it was not for a loss.

        Notes
        -----
        It needs an MPI library with fault tolerance (ULFM): Open MPI under ``mpirun --with-ft
        ulfm``, which ``python -m mpi_replica run --elastic`` takes care of. Without it a warning
        says so, and a lost rank ends the job; a `CheckpointManager` goes on with it later.

        A loss makes every call of this strategy a `RankLostError` until `train` has been left, and
        what was made before raises it, too: values of `run` and of datasets. Let it pass.

        Costs one message of 256 bytes a rank at the begin and at the end, and what a commit costs
        at the begin. ``tf.distribute`` has no counterpart; Horovod has ``hvd.elastic.run``.

        Examples
        --------
        One with variables stands at `ElasticState`.

        >>> strategy = mr.MPIStrategy()
        >>> state = mr.ElasticState(strategy, step=0)
        >>> def train():
        ...     while state.step < 3:
        ...         state.step += 1
        ...         state.commit()
        ...     return state.step
        >>> strategy.run_elastic(train, state)
        3
        """
        require_cross_replica(self, "run_elastic")
        # Packages before their parts: a thread that looks at them takes their locks in this order.
        from ... import checkpoint, data  # noqa: F401
        from .attempts import run  # with it come input and checkpoints: 15 ms

        return run(self, train, state)
