"""Keeping the state of a program safe: commits, and what is done when a rank is lost."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence
from time import monotonic
from typing import Any

from ...checkpoint.checkpoint import require_same
from ...checkpoint.comparison import variables_in
from ...checkpoint.object_places import saved_once
from ...collectives.agreement.site import CallSite, FunctionIdentity
from ...core.abstract_variable import AbstractVariable
from ...core.context import require_cross_replica
from ...core.exceptions import (
    CorruptCheckpointError,
    RankLostError,
    ReplicaStopped,
    mark_reporter,
)
from ...core.layout import Layout, numbers_text
from ...core.object_state import places_of
from ...core.options import CommunicationOptions
from ...data.distributed_dataset import known_datasets, rename
from ...data.epochs import put_epochs_back
from ...data.iterator import DistributedIterator
from ...ranks.launcher_connection import tell
from ...ranks.survivors import Survivors
from ...ranks.transport import Transport
from ...ranks.watch.span import span_of_package
from ...replicas.assignment import lose_components, lose_values
from .commit import Beginning, Committing, Guarded
from .elastic_strategy import ElasticStrategy
from .losses import Loss
from .recovery import HeldCommit, gather_state
from .replica_objects import moved
from .snapshot import Snapshot, are_empty, put_back, take, variables_beside
from .state import ElasticState, manager_of, objects_of, replace_objects, restored_exactly

_log = logging.getLogger("mpi_replica")


class Keeper:
    """Commits a state, and brings all living ranks back to the last commit.

    Parameters
    ----------
    strategy : MPIStrategy
    state : ElasticState
    """

    def __init__(self, strategy: ElasticStrategy, state: ElasticState) -> None:
        self._strategy = strategy
        self._state = state
        self._survivors = strategy.survivors
        #: Whether the job goes on without a lost rank.
        self.is_guarded = self._survivors is not None and self._survivors.is_fault_tolerant
        self._num_losses_before = len(strategy.losses)
        self._commit: HeldCommit | None = None
        # Those in the state at the commit: they come back also where nobody else holds them since.
        self._variables: list[AbstractVariable] = []
        # The newest snapshot, and an older one whose memory is used again.
        self._newest: Snapshot | None = None
        self._reusable: Snapshot | None = None
        #: Replicas whose state is gone, so that the last checkpoint is needed.
        self.lost_replicas: tuple[int, ...] = ()
        # Why it is gone.
        self._why_lost = ""
        if self.is_guarded and not strategy.engine.is_spare:
            self._commit_beginning()

    def _commit_beginning(self) -> None:
        """Commits the state as it is at first, by this rank alone."""
        snapshot = take(self._strategy, objects_of(self._state))
        engine = self._strategy.engine
        # What the others have is told in `begin`. Before, this rank knows only that nobody has
        # drawn random numbers where there was no run, and none were restored.
        is_new = engine.agreement.last_run_ordinal == 0 and self._strategy.generators.are_new
        is_empty = is_new and are_empty(snapshot.own.values())
        empty = frozenset(engine.layout.all_replica_ids) if is_empty else None
        self._commit = HeldCommit(0, snapshot.shared, snapshot.own, dict, empty, self._step(0))
        self._variables = [*variables_in(objects_of(self._state))]

    def begin(self, function: FunctionIdentity) -> None:
        """Begins, on all ranks; each tells whether something belongs to its replicas."""
        engine, commit = self._strategy.engine, self._commit
        is_empty = commit is None or are_empty(commit.own.values())
        call = engine.make("run_elastic", None, Beginning, function, is_empty)
        empty: frozenset[int] = engine.cross_replica(call)
        if commit is not None and commit.number == 0:
            commit.empty = empty

    def _step(self, number: int) -> int:
        """Returns the state's ``step``, for people; where that is no number at hand, `number`."""
        step: Any = getattr(self._state, "step", None)
        if isinstance(step, bool) or not hasattr(step, "__index__"):
            return number
        if isinstance(step, AbstractVariable) and not step.is_mirrored:
            return number  # reading it is a call
        try:
            return int(step)
        except Exception:  # an array of several items, or NaN; what the program's own code raises
            return number

    def _committing(self, site: CallSite, options: CommunicationOptions) -> Committing:
        """Returns the call that commits the objects as they are now."""
        objects = objects_of(self._state)
        snapshot = None
        if self.is_guarded:
            snapshot = take(self._strategy, objects, reuse=self._reusable)
        return Committing(site, options, list(objects), snapshot)

    @span_of_package("ElasticState.commit", "commit")
    def commit(self) -> None:
        """Commits, on all ranks; see `ElasticState.commit`."""
        require_cross_replica(self._strategy, Committing.kind)
        engine = self._strategy.engine
        call = engine.make(Committing.kind, None, self._committing)
        if self.is_guarded and call.error is None:
            of_replicas, _ = saved_once(objects_of(self._state), "state")
            require_same(self._strategy, Committing.kind, of_replicas)
        number = 1 if self._commit is None else self._commit.number + 1
        step = self._step(number) if self.is_guarded else number  # before: it may run any code
        guarded: Guarded | None = engine.cross_replica(call)
        snapshot = call.snapshot if isinstance(call, Committing) else None
        if snapshot is None or guarded is None:
            return
        engine.agreement.assemble()
        self._reusable, self._newest = self._newest, snapshot
        self._variables = [*variables_in(objects_of(self._state))]
        self._commit = HeldCommit(
            number, snapshot.shared, snapshot.own, guarded.kept, guarded.empty, step
        )

    def must_recover(self, error: BaseException) -> bool:
        """Returns whether all ranks go back to the last commit because of what came up here."""
        survivors = self._survivors
        # The other one ends loops that catch what a loss raises.
        is_error = isinstance(error, (Exception, ReplicaStopped))
        if survivors is None or survivors.is_over or not is_error:
            return False
        return survivors.is_fault_tolerant and self._strategy.engine.transport.loss is not None

    @span_of_package("recovery from a loss", "recovery")
    def recover(self) -> None:
        """Leaves lost ranks behind, and goes back to the last commit. All living ranks come here.

        Raises
        ------
        RankLostError
            The state of replicas is gone, and there is no checkpoint.
        """
        start = monotonic()
        survivors = self._survivors
        if survivors is None:
            raise RuntimeError("one rank alone can't have lost another one")
        before, transport = survivors.members, survivors.transport
        try:
            survivors.call_together()
            try:
                survivors.come_together(lambda made: self._go_on(survivors, made))
            except BaseException as error:
                # The strategy is over, on all ranks.
                self._strategy.engine.agreement.break_off(error)
                raise
        finally:
            if transport is not None:  # where it fails, its watch stays: the wait is over
                transport.steps_ended = transport.steps
        lost = [member for member in before if member not in survivors.members]
        step = None if self._commit is None or self.lost_replicas else self._commit.step
        layout = self._strategy.engine.layout
        tell(went_on_without=[member.pid for member in lost])
        loss = Loss.of_members(lost, step, monotonic() - start, layout)
        self._strategy.losses = (*self._strategy.losses, loss)
        self._strategy.engine.num_made["losses"] = len(self._strategy.losses)
        if not self.lost_replicas:
            self._warn(str(loss))
        else:  # it does not go on where there is no checkpoint
            gone = numbers_text("replica", self.lost_replicas)
            self._warn(f"{loss.what}, and what belonged to {gone}: looks for the last checkpoint.")

    def _warn(self, text: str) -> None:
        """Logs on one of the ranks."""
        if self._strategy.engine.layout.rank == 0:
            with contextlib.suppress(Exception):  # logging fails where stderr is closed
                _log.warning("%s", text)

    def _go_on(self, survivors: Survivors, transport: Transport | None) -> None:
        """Moves the strategy to the new transport, and puts its state back to the last commit."""
        strategy, engine = self._strategy, self._strategy.engine
        number = engine.layout.num_replicas
        if transport is None:  # a spare that waits on
            counts = Layout.even(number, survivors.num_active, 0).counts
            layout = Layout.waiting(counts, survivors.rank)
            strategy.move(survivors.waiting_transport(), layout)
            return
        layout = Layout.even(number, transport.size, transport.rank)
        strategy.move(transport, layout)
        lose_components(strategy)
        commit, held, lost, self._why_lost, engine.num_made, known = gather_state(
            transport,
            layout,
            self._commit,
            call=strategy._num_elastic_calls,
            num_made=engine.num_made,
            known=known_datasets(engine.datasets),
        )
        if self._commit is None:  # a spare, which has made no run
            rename(engine.datasets, known)
        self.lost_replicas = tuple(lost)
        if commit is None:
            if manager_of(self._state) is None:
                raise self._gone(
                    self.lost_replicas,
                    ". Give the state a mr.CheckpointManager and save from time"
                    " to time: its newest checkpoint is restored then.",
                )
            replace_objects(self._state, moved(objects_of(self._state), held, layout))
            return
        objects = put_back(strategy, objects_of(self._state), commit.shared, commit.own)
        replace_objects(self._state, objects)
        self._commit = commit
        self._newest = self._reusable = None

    def restore_checkpoint(self) -> None:
        """Restores the newest checkpoint, where the state of replicas is gone. Collective.

        Raises
        ------
        RankLostError
            There is none, or none that is whole.
        """
        manager = manager_of(self._state)
        lost, self.lost_replicas = self.lost_replicas, ()
        # What is not in the checkpoint is as where a program is started with it: datasets begin
        # anew, and no rank knows what variables were at first.
        objects = objects_of(self._state)
        leaves = [leaf for value in objects.values() for _, leaf in places_of(value)]
        iterators = [leaf for leaf in leaves if isinstance(leaf, DistributedIterator)]
        for dataset in self._strategy.engine.datasets.values():
            dataset.begin_anew(iterators)
        put_epochs_back({})
        beside = variables_beside(self._strategy, objects)
        lose_values(beside.values())
        with restored_exactly(self._state):
            try:
                path = None if manager is None else manager._restore_or_initialize()
            except CorruptCheckpointError as error:
                raise self._gone(lost, f". {error}") from error
        if path is None:
            raise self._gone(lost, ", and no checkpoint was saved before.")
        # Otherwise a loss may leave some ranks with it, and others with the commit.
        self._strategy.engine.agreement.assemble()
        self._commit_beginning()
        self._warn(str(self._strategy.losses[-1]))

    def say_end(self) -> None:
        """Logs what was lost in this call of ``run_elastic``, once."""
        losses = self._strategy.losses[self._num_losses_before :]
        if losses and self._strategy.engine.layout.rank == 0:
            ranks = sorted(rank for loss in losses for rank in loss.ranks)
            seconds = sum(loss.seconds for loss in losses)
            _log.warning(
                "ended without %s, lost in %d event%s; %.3f s went into going on.",
                numbers_text("rank", ranks),
                len(losses),
                "s" * (len(losses) > 1),
                seconds,
            )

    def _gone(self, replica_ids: Sequence[int], text: str) -> RankLostError:
        """Returns the error of a state that no rank has, which all ranks raise."""
        replicas = numbers_text("replica", replica_ids)
        error = RankLostError(f"what belonged to {replicas} is gone: {self._why_lost}{text}")
        mark_reporter(error, self._strategy.engine.layout.rank == 0)
        return error
