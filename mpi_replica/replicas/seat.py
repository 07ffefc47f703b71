"""The place of one local replica in a run: what it runs, and where it waits for the others."""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import greenlet
import numpy as np

from ..collectives.agreement.agreement import MOST_REFUSALS
from ..collectives.agreement.call import Call
from ..collectives.agreement.current_run import CurrentRun
from ..collectives.agreement.driver import in_the_middle_of
from ..collectives.agreement.site import CallSite, function_identity
from ..collectives.strategy_base import StrategyBase
from ..core import nest
from ..core.abstract_strategy import CountsEpochs
from ..core.context import swap_state
from ..core.exceptions import ContextError, ReplicaStopped, add_note, in_words, text_of
from ..core.indexed_slices import IndexedSlices
from ..core.library_state import forget_casts
from ..core.options import CommunicationOptions
from ..core.randomness import put_state, state_of
from ..core.scipy_solvers import Solver
from ..core.tracebacks import came_up_in_package, let_go
from ..ranks.watch import event_log
from ..ranks.watch.span import span_of_package
from . import lent_arrays
from .lent_arrays import LentArrays
from .replica import require_unstaged_call
from .replica_context import ReplicaContext
from .returned_values import RunEnd
from .run_arguments import RunArguments
from .run_libraries import libraries_of_run
from .storage import Storage
from .worker import Worker

_OF_VALUES = (
    "If it is the value of a variable: write by variable.assign, assign_add or scatter_add, or into"
    " a copy, np.array(variable.value())."
)
_OF_EVENT_LOOPS = (
    "Replicas of a rank share a thread, which runs one event loop of asyncio at a time. Make the"
    " strategy with replica_threads=True, or await nothing in which replicas make collective calls."
)

_abandoned: list[Seat] = []  # never resumed and never collected: that would run their code


class SharedRun(CurrentRun):
    """What the replicas of a run have in common."""

    #: What came up where it did, for the hub.
    failure: BaseException | None = None

    def __init__(
        self,
        strategy: StrategyBase,
        fn: Callable[..., Any],
        arguments: RunArguments,
        site: CallSite,
        options: CommunicationOptions,
    ) -> None:
        self.strategy = strategy
        self.fn = fn
        #: `mirrored` are torch's tensors that all replicas get, if there are some; `shared` finds
        #: changes of what replicas of this rank share, as modules of torch and generators.
        seats, self.mirrored, self.shared = arguments
        self.identity = function_identity(fn)
        self.identity.require_eager("strategy.run")
        self.site = site
        self.options = options
        self.engine = strategy.engine
        last = len(seats) - 1
        self.seats = [Seat(self, i, i < last, *seat) for i, seat in enumerate(seats)]
        #: Whether this rank has one replica, which performs its calls itself.
        self.is_alone = len(self.seats) == 1
        #: What the local replicas that wait have given to their calls, and others have returned.
        self.lent = None if self.is_alone else LentArrays()
        #: Where what is printed goes. One that has redirected it, in a ``with`` over a collective,
        #: has that for itself: each would put back what another one has set, in the order of ids.
        self.stdout, self.stderr = sys.stdout, sys.stderr
        self.libraries = libraries_of_run(
            len(self.seats),
            strategy.num_replicas_in_sync,
            asks_for_threads=strategy.replica_threads,
        )
        #: Whether its replicas have things of their own in the same places, while they take turns.
        self.takes_turns = bool(self.shared) or self.libraries.process_states is not None
        #: What performs the calls. No greenlet where there are threads: objects that outlive a
        #: thread and know a greenlet of it crash the garbage collector (greenlet 3.5).
        here = threading.current_thread if self.libraries.has_threads else greenlet.getcurrent
        self._hub = here()

    def end_with(self, value: Any, replica_id: int | None = None) -> RunEnd:
        """Returns the end of the run, for a replica or for all of this rank that return a value."""
        return RunEnd(self.site, self.options, self.identity, self.strategy, value, replica_id)

    def stop_error(self, doom: BaseException) -> BaseException:
        """Returns what a replica gets at a call in a run that is over because of `doom`."""
        if not self.a_replica_failed:
            return BaseException.with_traceback(doom, None)
        stopped = ReplicaStopped(
            f"this replica stops at its call, because another one raised {in_words(doom)}"
        )
        stopped.__cause__ = doom
        return stopped


class Seat:
    """The place of one local replica in a run."""

    # With thousands of replicas on a rank this is a tenth of a run: Python gives an object a dict
    # where an attribute is set that none of the first thirty of its class had.
    __slots__ = (
        "_epochs",
        "_ids",
        "_random",
        "_refusals",
        "_written",
        "args",
        "call",
        "end",
        "error",
        "held",
        "kwargs",
        "others_follow",
        "position",
        "replica_id",
        "run",
        "status",
        "value",
        "worker",
    )

    #: There is none before it begins.
    worker: Worker

    def __init__(
        self,
        run: SharedRun,
        position: int,
        others_follow: bool,
        replica_id: int,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> None:
        self.run = run
        #: Among those of this rank.
        self.position = position
        #: Whether others of them run before it goes on.
        self.others_follow = others_follow
        self.replica_id = replica_id
        self._ids = (replica_id,)  # of each call
        self.args = args
        self.kwargs = kwargs
        #: "new", "runs", "waits" at a call, "returned", "raised", "left" or "abandoned"
        self.status = "new"
        self.call: Call | None = None
        self.value: Any = None
        #: Of the run, with what it has returned before others went on.
        self.end: RunEnd | None = None
        self.error: BaseException | None = None
        #: Of torch's modules, where it waits in a call that has put other weights into them.
        self.held: Sequence[Any] = ()
        #: Its generator, if it was used, and the state in which the run has found it.
        self._random: tuple[np.random.Generator, Any] | None = None
        #: What takes back all that it has written to its components of variables since these were
        #: last written above the replicas, and how often they had been.
        self._written: dict[Storage, tuple[int, Callable[[], None]]] | None = None
        #: How many epochs of datasets it had begun when it began one in this run.
        self._epochs: weakref.WeakKeyDictionary[CountsEpochs, int] | None = None
        self._refusals = 0

    @property
    def is_over(self) -> bool:
        """Whether the step function has come to its end."""
        return self.status in ("returned", "raised")

    def will_draw(self, generator: np.random.Generator) -> None:
        """Notes that the replica uses its generator."""
        if self._random is None:
            self._random = generator, state_of(generator)

    def will_write(self, storage: Storage) -> None:
        """Notes that the replica writes its component of a variable."""
        if self._written is None:
            self._written = {}
        writes_above, _ = self._written.get(storage, (None, None))
        if writes_above != storage.writes_above:
            self._written[storage] = storage.writes_above, storage.way_back(self.replica_id)

    def will_begin_epoch(self, epochs: CountsEpochs) -> None:
        """Notes that the replica begins an epoch of a dataset."""
        if self._epochs is None:
            self._epochs = weakref.WeakKeyDictionary()
        self._epochs.setdefault(epochs, epochs.begun[self.replica_id])

    def take_back(self) -> None:
        """Has it draw the same numbers and begin the same epochs again; its components go back.

        Of a run that fails some replicas may not have begun, and which depends on who shares a
        rank.
        """
        for storage, (writes_above, put_back) in (self._written or {}).items():
            if writes_above == storage.writes_above:  # what a merge_fn has assigned stays
                put_back()
        if self._random is not None:
            generator, state = self._random
            put_state(generator, state)
        for epochs, begun in (self._epochs or {}).items():
            epochs.begun[self.replica_id] = begun

    def work(self) -> None:
        """Runs the step function to its end; called where the replica runs."""
        strategy = self.run.strategy
        context = ReplicaContext.in_run(strategy, self.replica_id, self)
        swap_state(context.state)  # in a context of the replica's own, which is thrown away
        run = self.run
        try:
            sys.stdout, sys.stderr = run.stdout, run.stderr
            for shared in run.shared:
                shared.entered_by(self.replica_id)
            if event_log.current is None or run.is_alone:  # alone its step is all of the run
                self.value = run.libraries.call(self.position, run.fn, self.args, self.kwargs)
            else:
                with span_of_package(run.identity.text, "run"):
                    self.value = run.libraries.call(self.position, run.fn, self.args, self.kwargs)
            if run.lent is not None and self.value is not None and self.others_follow:
                # Now: the next one may put something else into the same dict.
                self.end = run.end_with(self.value, self.replica_id)
                run.lent.add(self, self.end.leaves)
            if run.mirrored is not None:
                run.mirrored.check()
            for shared in run.shared:
                shared.left_by(self.replica_id)
            self.status = "returned"
        except BaseException as error:
            is_given_up = run not in run.engine.agreement.runs  # by the hub, or the collector
            if is_given_up and isinstance(error, greenlet.GreenletExit):
                raise
            if isinstance(error, ValueError) and "read-only" in text_of(error):
                self._advise(error)
            if isinstance(error, RuntimeError) and "running event loop" in text_of(error):
                add_note(error, _OF_EVENT_LOOPS)
            self.error = error
            self.status = "raised"
            let_go(error)  # now: the next replica may get the same one, with another traceback

    def _advise(self, error: ValueError) -> None:
        """Says what to do where the step could not write into an array that replicas share."""
        leaves, _ = nest.flatten((self.args, self.kwargs))
        leaves = [x.values if isinstance(x, IndexedSlices) else x for x in leaves]
        is_shared = any(isinstance(x, np.ndarray) and not x.flags.writeable for x in leaves)
        if is_shared or (self.run.lent is not None and self.run.lent.refuse_writes):
            add_note(error, lent_arrays.ADVICE)
        if self.run.engine.variables:
            add_note(error, _OF_VALUES)

    def meet(self, call: Call) -> Any:
        """Posts `call` and waits until the hub has performed it; called by the replica."""
        if not self.worker.is_here():
            raise ContextError(
                "a collective was called outside of the greenlet or thread of its replica. Call it"
                " directly from the function given to strategy.run."
            )
        if self.call is not None:
            raise in_the_middle_of(self.call.text or self.call.kind)
        run = self.run
        if "jax" in sys.modules or "torch" in sys.modules:  # now: a step may have imported it
            require_unstaged_call(call)
            forget_casts()
            run.libraries.check()
        if run.doom is not None:
            self.refuse(run.doom)
        if call.error is not None and call.is_told:
            raise call.error
        if call.site.solver is not None:
            self._refuse_in_solver(call, call.site.solver)
        if run.takes_turns:
            self._end_turn()
        call.replica_ids = self._ids
        self.call = call
        self.status = "waits"
        if run.lent is not None and call.error is None and self.others_follow:
            run.lent.add(self, call.lent)
        if run.is_alone and call.error is None and not call.runs_user_code:
            # No partner to wait for: without two switches. The hub deals with errors.
            try:
                result = run.engine.perform([call])[0]
            except BaseException as error:
                run.failure = error
            else:
                self.call = None
                self.status = "runs"
                return result
        return self._wait()

    def _refuse_in_solver(self, call: Call, solver: Solver) -> None:
        """Ends the run where other replicas of the rank could not be in this solver, too."""
        run = self.run
        if run.is_alone or (run.libraries.has_threads and not solver.holds_lock):
            return
        why = (
            "holds a lock while it calls back, for which the other replicas of this rank would wait"
            " for ever. Host"
            if solver.holds_lock
            else "keeps its state for the thread while it calls back, and replicas of this rank"
            " share a thread: each would go on with that of another one. Make the strategy with"
            " replica_threads=True (or set MPI_REPLICA_THREADS=1), or host"
        )
        # For the hub, which ends the run with it: scipy makes others of what is raised there.
        run.failure = ContextError(
            f"{call.kind} was called inside of scipy.{solver.name}, which {why} one replica on each"
            " rank."
        )

    def meet_elsewhere(self, call: Call) -> Any:
        """As `meet`, in a thread of JAX, while that of this replica waits for what is done there.

        What comes up where this is the rank's only replica is settled in its own thread.
        """
        run = self.run
        if run.doom is not None:
            self.refuse(run.doom)
        if run.takes_turns:
            self._end_turn()
        call.replica_ids = self._ids
        self.call = call
        self.status = "waits"
        if not run.is_alone:
            if call.site.solver is not None:
                self._refuse_in_solver(call, call.site.solver)
            return self._wait()
        if call.error is not None:
            raise call.error
        try:
            result = run.engine.perform([call])[0]
        except BaseException as error:
            run.failure = error
            raise
        self.call = None
        self.status = "runs"
        return result

    def settle(self) -> None:
        """Has the hub deal with what came up elsewhere, and raises what it makes of it."""
        if self.status == "waits":
            self._wait()

    def _end_turn(self) -> None:
        """Keeps what is this replica's own from those of the rank that go on now.

        Raises
        ------
        ContextError
            It has changed what another one has, or holds what another one would go through.
        """
        libraries = self.run.libraries
        held: Sequence[Any] = ()
        if libraries.process_states is not None:
            held = libraries.shared_state.held_modules(self.replica_id, self.run.seats)
        for shared in self.run.shared:
            shared.left_by(self.replica_id)
        self.held = held
        if libraries.process_states is not None:
            libraries.process_states.leave(self.position)

    def _begin_turn(self) -> None:
        """Puts back what is this replica's own."""
        states = self.run.libraries.process_states
        if states is not None:
            self.held = ()
            states.enter(self.position)
        for shared in self.run.shared:
            shared.entered_by(self.replica_id)

    def _wait(self) -> Any:
        run, out, err = self.run, sys.stdout, sys.stderr
        try:
            if out is not run.stdout or err is not run.stderr:
                sys.stdout, sys.stderr = run.stdout, run.stderr
            return self.worker.wait()
        finally:  # not by the hub: where a signal's handler raises there, this replica still waits
            call, self.call = self.call, None
            self.status = "runs"
            if sys.stdout is not out or sys.stderr is not err:
                sys.stdout, sys.stderr = out, err
            if call is not None and call.error is not None:
                let_go(call.error)
            if run.takes_turns:
                self._begin_turn()

    def check_devices(self, devices: Sequence[Any]) -> None:
        """Raises where a function on these devices of JAX would be in the way of other replicas."""
        self.run.libraries.check_devices(self.position, devices)

    def refuse(self, doom: BaseException) -> None:
        """Raises, since the run is over; gives up on a replica that will not stop."""
        self._refusals += 1
        if self._refusals > MOST_REFUSALS:
            self.status = "abandoned"
            _abandoned.append(self)
            self.worker.wait()
        raise self.run.stop_error(doom)

    def give_up_where_it_left(self) -> None:
        """Gives up on a replica that has come back without a call and without an end.

        Called by the hub, which is the parent of the replica's greenlet.
        """
        self.status = "left"
        self.error = ContextError(
            f"replica {self.replica_id} has left its step by a switch to the parent of its"
            " greenlet, which runs the replicas. Switch between greenlets that the step has made."
        )
        _abandoned.append(self)

    def stop(self, error: BaseException) -> None:
        """Raises `error` at the call at which the replica waits; called by the hub."""
        self._refusals += self.run.doom is not None
        trace = error.__traceback__ if came_up_in_package(error) else None
        self.worker.throw(error, trace)

    def forget(self) -> None:
        """Lets go of what it was called with, and of what came of it; called by the hub."""
        self.args, self.kwargs, self._written, self._epochs = (), {}, None, None
        self.value = self.end = self.error = None
