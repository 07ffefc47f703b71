"""Running a function on the replicas of this rank.

Each replica runs in a greenlet; or in a thread, where a rank has several and a library is in use
that keeps for a thread what belongs to a replica. They run one at a time, in the order of their
ids, and switch only at collectives: a replica posts its call and switches to the hub (the code that
called ``strategy.run``); when all local replicas have posted, the hub performs the call with the
other ranks and resumes them. A rank's only replica performs its calls itself, but for those that
run functions of the program.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Sequence
from time import perf_counter_ns
from typing import Any, NoReturn, cast

import numpy as np
from greenlet import getcurrent

from ..collectives.agreement.agreement import MOST_REFUSALS
from ..collectives.agreement.call import Call
from ..collectives.agreement.stand import Note, Stand
from ..collectives.merge import MergeCall
from ..core.context import current_state
from ..core.digests import digest_of
from ..core.exceptions import add_note
from ..core.randomness import put_state, state_of
from ..core.tracebacks import let_go
from ..ranks.watch import event_log
from .kept_by_runs import KeptByRuns
from .merge_fn import comparable, run_merge_fn, unpacked
from .returned_values import RunEnd, joined
from .seat import Seat, SharedRun

# What most of them return.
_NOTHING = digest_of(None)

# The kinds of the leaves of a None.
_NO_VALUE = ("none",)


class Run(SharedRun):
    """One call of ``strategy.run`` on this rank."""

    #: Whether all ranks have agreed that it has ended.
    _end_is_agreed = False
    #: Whether a merge_fn runs, or has failed.
    _is_merging = False
    #: The generator of all ranks, if a merge_fn has used it, and the state that this has found.
    _random: tuple[np.random.Generator, Any] | None = None

    def execute(self, kept: KeptByRuns) -> Any:
        """Runs the function on all local replicas; returns what they returned, merged."""
        agreement = self.engine.agreement
        try:
            agreement.enter_run(self)
            log = event_log.current
            if log is None:
                return self._go_through(kept)
            begun = perf_counter_ns()  # no `span`: that is three more calls of Python
            try:
                return self._go_through(kept)
            finally:
                log.add_span(self.identity.text, "run", begun, current_state())
        except BaseException as error:
            if self.doom is None and self in agreement.runs:
                # Ctrl-C between two replicas, or anywhere else in here: the others don't know.
                self._deal_with(error, [])
                self._unwind()
            for seat in self.seats:
                seat.take_back()
            if self._random is not None:
                generator, state = self._random
                put_state(generator, state)
            if agreement.final is None:
                agreement.notes.take_back()  # of a merge_fn that went on when another rank failed
            let_go(error)
            if self.doom is None or self.doom is error:
                raise
            raise self.doom from self.doom.__cause__
        finally:
            try:
                agreement.leave_run(self)
            finally:
                agreement.leave_run(self)
                self._give_back(kept)

    def _go_through(self, kept: KeptByRuns) -> Any:
        """Runs the function on all local replicas, to the end of the run."""
        self._start(kept)
        while self.doom is None:
            if self.lent is not None:
                self.lent.give_back()
                self.lent.check()
            has_ended = False
            waiting: list[Seat] = []
            for seat in self.seats:  # no comprehension: most runs end here at once
                if seat.status != "returned":
                    waiting = [seat for seat in self.seats if seat.status == "waits"]
                    break
            else:
                has_ended = True
            try:
                failure, self.failure = self.failure, None
                if failure is not None and waiting:  # else Ctrl-C has come before it was there
                    raise failure
                if has_ended:
                    return self._end(kept)
                if len(waiting) == len(self.seats):
                    answers = self._perform([seat.call for seat in waiting if seat.call])
                else:
                    self._report()
                self._resume(waiting, answers)
            except BaseException as error:
                told = self._deal_with(error, waiting)
                let_go(error)
                let_go(told)
        self._unwind()
        raise self.doom

    def will_draw(self, generator: np.random.Generator) -> None:
        if self._random is None:
            self._random = generator, state_of(generator)

    def is_here(self) -> bool:
        return self._hub is (
            threading.current_thread() if self.libraries.has_threads else getcurrent()
        )

    def meeting(self) -> tuple[tuple[int, ...], str]:
        """Returns the replicas of this rank that have not come to a call, and that of others."""
        missing = tuple(seat.replica_id for seat in self.seats if seat.status != "waits")
        call = next((seat.call for seat in self.seats if seat.call is not None), None)
        return missing, "" if call is None else call.text or call.kind

    def _start(self, kept: KeptByRuns) -> None:
        for seat in self.seats:
            seat.worker = kept.worker(seat.replica_id, is_thread=self.libraries.has_threads)
            seat.status = "runs"
            seat.worker.begin(seat.work)
            if seat.status == "raised" or self.failure is not None:
                return  # a replica that has not started is not started

    def _resume(self, waiting: Sequence[Seat], answers: list[Any]) -> None:
        answers.reverse()
        for seat in waiting:
            # Popped: what is kept here would live until the next call is done.
            seat.worker.resume(answers.pop())
            if self.failure is not None:
                return  # the next one may wait for what this one holds

    def _perform(self, calls: list[Call]) -> list[Any]:
        failed = [call for call in calls if call.error is not None]
        if failed:
            agreement = self.engine.agreement
            stands = [agreement.stand(call) for call in calls]
            originals = {
                call.replica_ids[0]: call.error for call in failed if call.error is not None
            }
            self.engine.report(stands, originals, calls[0])
        results = self.engine.perform(calls)
        if isinstance(calls[0], MergeCall):
            self._is_merging = True
            results = self._merge(cast("list[MergeCall]", calls), *results[0])
            for shared in self.shared:
                shared.renew()
            self._is_merging = False
        return results

    def _merge(self, calls: list[MergeCall], scope: Any, args: Any, kwargs: Any) -> list[Any]:
        call, states = calls[0], self.libraries.process_states
        if states is None:
            result = run_merge_fn(self.strategy, call, scope, args, kwargs)
        else:
            result = states.in_all_turns(run_merge_fn, self.strategy, call, scope, args, kwargs)
        if self.engine.layout.size > 1:
            advice = (
                "merge_fn must return the same on all ranks: pass what differs between replicas"
                " through args instead of using it from outside."
            )
            what = f"the result of merge_fn {call.identity.text}, given to merge_call"
            digest = _NOTHING if result is None else digest_of(comparable(result))
            self.engine.agreement.notes.add(
                Note(what, call.site, digest, advice, "CollectiveMismatchError")
            )
        layout = self.engine.layout
        return unpacked(result, layout.local_replica_ids, layout.num_replicas, calls)

    def _deal_with(self, error: BaseException, waiting: Sequence[Seat]) -> BaseException:
        """Passes an error on to the replicas, and to the other ranks where they don't know it.

        Returns what has become of it there.
        """
        if self._end_is_agreed and not isinstance(error, Exception):
            self.doom = error  # Ctrl-C as behind the run: nobody waits here to be told
        # What a collective in a merge_fn has told the others is told again, as the end of the run:
        # whether it tells them, or fails alike on all ranks, depends on the layout.
        is_known = self.engine.agreement.is_agreed(error) and not self._is_merging
        if self.doom is None and not is_known:
            error = self._tell(error)
        if self.doom is None and not waiting:
            self.doom = error
        for seat in waiting:
            if seat.status == "waits":
                at_call = error if self.doom is None else self.stop_error(self.doom)
                if at_call is not error:
                    BaseException.with_traceback(at_call, None)
                seat.stop(at_call)
        return error

    def _tell(self, error: BaseException) -> BaseException:
        """Tells the other ranks of an error that came up here, between collectives."""
        agreement = self.engine.agreement
        ids = self.engine.layout.local_replica_ids
        end = self.end_with(None)
        end.replica_ids = ids
        try:
            stand = agreement.failed_stand(end, error, "raised")
            self.engine.report([stand], {ids[0]: error}, end)
        except BaseException as told:
            if self.doom is None:
                if agreement.final is None and not agreement.is_agreed(told):
                    raise  # of a signal's handler: the others don't know of either
                self.doom = error
            return told

    def _report(self) -> NoReturn:
        """Tells the other ranks that some local replicas have returned or raised."""
        agreement = self.engine.agreement
        stands: list[Stand] = []
        originals: dict[int, BaseException] = {}
        end = self.end_with(None)
        for seat in self.seats:
            ids = (seat.replica_id,)
            if seat.status == "runs":
                seat.give_up_where_it_left()
            its_end = self._end_of(seat) if seat.status == "returned" else None
            if seat.call is not None and seat.status == "waits":
                stands.append(agreement.stand(seat.call))
                if seat.call.error is not None:
                    originals[seat.replica_id] = seat.call.error
            elif seat.error is not None:
                end.replica_ids = ids
                originals[seat.replica_id] = seat.error
                stands.append(agreement.failed_stand(end, seat.error, "raised"))
            elif its_end is not None:
                stands.append(Stand(ids, "returned", its_end.describe(), None, self.ordinal))
        self.engine.report(stands, originals, end)

    def _end_of(self, seat: Seat) -> RunEnd | None:
        """Returns the end of a replica that has returned; None where that is its mistake."""
        try:
            return seat.end or self.end_with(seat.value, seat.replica_id)
        except Exception as error:
            seat.error, seat.status = error, "raised"
            return None

    def _end(self, kept: KeptByRuns) -> Any:
        """Agrees on the end of the run; returns what the local replicas returned, wrapped."""
        seats = self.seats
        is_empty = True
        for seat in seats:
            if seat.value is not None:
                is_empty = False
                break
        if is_empty:
            ends = [self._empty_end(kept)]  # one tells of all of them
        else:
            ends = [end for seat in seats if (end := self._end_of(seat)) is not None]
            if len(ends) < len(seats):
                self._report()
        kinds = self.engine.perform(ends)[0]
        self._end_is_agreed = True
        if is_empty and kinds == _NO_VALUE:
            return None
        return joined(ends, kinds, self.engine.layout)

    def _empty_end(self, kept: KeptByRuns) -> RunEnd:
        """Returns the end of a run in which no replica returned anything, as most steps do."""
        key = self.site.digest, self.identity.digest
        end = kept.empty_ends.get(key)
        # One that has become that of values, since others returned some, is none any more.
        if end is None or end.options is not self.options or end.kinds != _NO_VALUE:
            end = self.end_with(None)
            end.replica_ids = self.engine.layout.local_replica_ids
            kept.keep_end(key, end)
        return end

    def _unwind(self) -> None:
        """Stops the replicas that still wait, and says which ones would not stop."""
        for seat in self.seats:
            if seat.status == "waits" and self.doom is not None:
                seat.stop(self.stop_error(self.doom))
        refused = [seat.replica_id for seat in self.seats if seat.status == "abandoned"]
        if refused and self.doom is not None:
            text = (
                f"{self.engine.layout.describe(refused)} swallowed the error at its collective"
                f" {MOST_REFUSALS} times and was abandoned in the middle of {self.identity.text}."
                " Let mr.errors.ReplicaStopped pass: catch Exception, not BaseException."
            )
            add_note(self.doom, text)
            try:
                warnings.warn(text, RuntimeWarning, stacklevel=2)
            except RuntimeWarning:
                pass  # where warnings are errors, the note tells it

    def _give_back(self, kept: KeptByRuns) -> None:
        """Gives workers back, and lets go of all that is the program's.

        A run and the contexts of its replicas refer to each other: what they hold would stay in
        memory until a garbage collection, which large arrays do not bring about.
        """
        if self.lent is not None:
            self.lent.give_back()
            self.lent = None  # of what replicas gave away while they were stopped, it knows still
        del self.fn, self.mirrored
        self.shared = ()  # a replica that is given up looks there
        if self.libraries.process_states is not None:
            self.libraries.process_states.enter(0)
            self.libraries.shared_state.forget_steps(self.strategy, self.ordinal)
        if self.failure is not None:
            let_go(self.failure)
            self.failure = None
        if self.doom is not None and all(
            [seat.is_over or seat.status == "new" for seat in self.seats]
        ):
            self.doom = None  # which is for replicas that call once more
        for seat in self.seats:
            if seat.is_over:
                kept.keep(seat.replica_id, seat.worker, is_thread=self.libraries.has_threads)
            elif seat.status == "waits":  # a signal's handler has raised while it was to stop
                seat.worker.give_up()
            seat.forget()
