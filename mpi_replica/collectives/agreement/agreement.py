"""All ranks are at the same call, or all of them raise.

Before data moves, the ranks exchange one small header each: a fingerprint of the call, the chain
of notes (what must have been the same since the last header), and whether this rank's replicas
agree among themselves. Where all headers are equal the data may move. Otherwise the ranks
exchange reports and judge them, each for itself and all alike.

The headers travel on a communicator of the strategy's own, in the order in which they are sent,
so that the n-th header of one rank always meets the n-th of the others: ordinals of calls need
not travel.

Up to `_ALLGATHER_RANKS` ranks every rank sees all headers, and small payloads travel in them.
Above, one small reduction finds out whether they are equal, at a cost that grows with the
logarithm of the ranks.
"""

from __future__ import annotations

import enum
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import NoReturn

from ...core import exceptions
from ...core.exceptions import CollectiveTimeoutError, ContextError, RankLostError, ReplicaStopped
from ...core.layout import Layout
from ...ranks.interrupts import gate
from ...ranks.transport import HEADER_BYTES, Payload, Transport
from ...ranks.watch.recorder import FlightRecorder
from ...ranks.watch.strategy_watch import IS_OVER, OTHERS_MAY_COME
from . import travelling_error
from .call import Call
from .current_run import CurrentRun
from .header import (
    AGREES,
    COMPARED_BYTES,
    INLINE_BYTES,
    LEAVES,
    REPORTS,
    are_clocks_due,
    are_clocks_due_by_words,
    chains,
    head,
    payloads,
    state_of_words,
    states,
    words,
)
from .header_sizes import HeaderSizes
from .judgement import Promotion, Verdict, judge, rank_left
from .notes import Notes
from .stand import Report, Stand, chain_of

_ALLGATHER_RANKS = 32

#: A program that catches what refuses its calls this often is stopped in another way.
MOST_REFUSALS = 100


class Life(enum.Enum):
    """How far the life of a strategy has come on this rank."""

    OPEN = enum.auto()
    #: The program has ended here or elsewhere, and no header will be answered any more.
    LEFT = enum.auto()
    #: A message is in flight that will not be waited for.
    BROKEN = enum.auto()
    CLOSED = enum.auto()


class Agreement:
    """The state of agreement of one strategy on this rank."""

    def __init__(self, transport: Transport, layout: Layout) -> None:
        self._transport = transport
        self._layout = layout
        #: What must have been the same on all ranks since the last header.
        self.notes = Notes()
        self._wide = transport.size > _ALLGATHER_RANKS
        self.sizes = HeaderSizes(transport.headers, carries_payload=not self._wide)
        #: Of the same calls: it knows whether the clocks of the ranks should be compared.
        self.recorder = FlightRecorder()
        #: Whether they should by all ranks, where they should by this one: whether a rank is traced
        #: is its own knowledge, and a comparison takes all of them.
        self.are_clocks_due = False
        #: Runs that this rank is in, the innermost last.
        self.runs: list[CurrentRun] = []
        #: Ordinal of the last run that began, or what all ranks set it to after an error.
        self.last_run_ordinal = 0
        #: The exception that was raised last because all ranks agreed to.
        self.raised: BaseException | None = None
        self.life = Life.OPEN
        #: Why the strategy can't be used any more, where it can't.
        self.final: BaseException | None = None
        # It, and its traceback when a call was refused with it for the first time.
        self._refused: tuple[BaseException | None, TracebackType | None] = None, None
        self._num_refused = 0
        #: What was to be told, where this rank has met a loss instead.
        self.untold: BaseException | None = None
        #: Whether other ranks went on when this one left.
        self.others_stay = False
        #: Whether all of them have left, each where the others did, and know it.
        self.all_have_left = False
        #: Whether they had not assigned the same then, since their last header.
        self.last_values_differ = False
        #: The last agreed error, which every rank holds: where it comes back uncaught from the
        #: step function, it need not travel again.
        self.last_error: BaseException | None = None
        #: How often all ranks have agreed on an error.
        self.num_raised = 0
        #: Called where this rank gives up the strategy, to tell the others.
        self.on_break: Callable[[BaseException], None] = lambda _: None

    @property
    def run_ordinal(self) -> int:
        """Ordinal of the innermost run that this rank is in; 0 outside."""
        return self.runs[-1].ordinal if self.runs else 0

    def enter_run(self, run: CurrentRun) -> None:
        """Begins a run: it gets the next ordinal. In one that is over, none begins."""
        if self.runs and self.runs[-1].doom is not None:
            self.refuse_if_over()
        self.last_run_ordinal += 1
        run.ordinal = self.last_run_ordinal
        self.runs.append(run)

    def leave_run(self, run: CurrentRun) -> None:
        """Ends a run, if it has not ended: a signal's handler may raise here, too."""
        if run in self.runs:
            self.runs.remove(run)

    def local_meeting(self) -> tuple[tuple[int, ...], str]:
        """Returns the local replicas that have not come to a call, and the call of the others.

        The text is empty where no replica waits at a call. Read by the watcher, too.
        """
        runs = self.runs[-1:]
        return runs[0].meeting() if runs else (self._layout.local_replica_ids, "")

    def agree(
        self, calls: Sequence[Call], payload: Payload = b"", *, is_begun: bool = False
    ) -> None:
        """Returns when all ranks are known to be at the call. Collective.

        `calls` are those of the local replicas, which agree among themselves. `payload` has
        `sizes.room_bytes` at most, and is there on all ranks or on none; those of all ranks are in
        the headers then. `is_begun`: they have agreed on the call before.

        Raises
        ------
        BaseException
            What all ranks agreed to raise.
        """
        first = calls[0]
        if self.final is not None or (self.runs and self.runs[-1].doom is not None):
            self.refuse_if_over()
        if gate.is_pending and gate.take():
            self.report(*self.failure(calls, KeyboardInterrupt()))
        if not self._compare(AGREES, payload, first):
            self._exchange_reports([self.stand(call) for call in calls], {})
        if is_begun:
            self.sizes.agree_again()
        else:
            self.sizes.agree(first.fingerprint)
        self.last_error = self.raised = None
        if self.notes.are_any:
            self.notes.drop()

    def failure(
        self, calls: Sequence[Call], error: BaseException
    ) -> tuple[Sequence[Stand], Mapping[int, BaseException], Call]:
        """Returns what `report` tells of an error that came up here, inside the first call."""
        first, *others = calls
        stands = [self.failed_stand(first, error), *map(self.stand, others)]
        return stands, {first.replica_ids[0]: error}, first

    def report(
        self, stands: Sequence[Stand], originals: Mapping[int, BaseException], first: Call
    ) -> NoReturn:
        """Tells the other ranks where the local replicas stand, which is not at one same call.

        `originals` are this rank's exceptions by replica id: here they are raised as they are.
        """
        self.refuse_if_over()
        self._compare(REPORTS, b"", first)
        self._exchange_reports(stands, originals)

    def refuse_if_over(self) -> None:
        """Raises where the other ranks no longer answer: in a strategy or a run that is over."""
        if self.final is not None:
            self.refuse(self.final)
        for run in self.runs:
            if run.doom is not None:
                raise ReplicaStopped(
                    "no collective can be called any more in a run that has failed"
                ) from run.doom

    def refuse(self, final: BaseException) -> NoReturn:
        """Raises `final`; of the calls that were refused before its traceback holds nothing.

        A loop that catches it would call for ever, and the other ranks wait.
        """
        if self._refused[0] is not final:
            self._refused, self._num_refused = (final, final.__traceback__), 0
        self._num_refused += 1
        if self._num_refused > MOST_REFUSALS and self.life is Life.BROKEN:
            raise ReplicaStopped(
                f"the program has caught {type(final).__name__} of {MOST_REFUSALS} calls and goes"
                " on, in a loop with `except Exception`, say: no call of this strategy can succeed"
                " any more. Let it pass."
            ) from final
        raise BaseException.with_traceback(final, self._refused[1])

    def leaving(self, cause: str = "") -> Iterator[None]:
        """Tells the others that this rank's program ends; yields while they don't know. Collective.

        `cause` says why, where it is no good end. What is yielded to goes on with other
        strategies: their ranks may come there first.
        """
        if self.life in (Life.LEFT, Life.BROKEN):
            return
        self._end(Life.LEFT, RankLostError("the program of this rank has ended."))
        payload = cause.encode(errors="replace")[:INLINE_BYTES]
        self.recorder.want_comparison()
        chain, is_clock_due = chain_of(self.notes.values), self.recorder.is_clock_due
        mine = head(0, chain, LEAVES, is_clock_due, len(payload)) + payload
        try:
            if self._wide:
                word = words(mine)
                finished = self._transport.begin_maximum(word)
                while (greatest := finished()) is None:
                    yield
                if (greatest[:2] == word[:2]).all():
                    self.all_have_left = True
                    self.are_clocks_due = are_clocks_due_by_words(greatest)
                    return
            size_bytes = self.sizes.next_bytes
            is_done = self._transport.begin_exchange(mine, size_bytes)
            while not is_done():
                yield
        except RankLostError:
            return  # it has left before
        headers = self._transport.headers[size_bytes].tobytes()
        self.all_have_left = set(states(headers, size_bytes)) == {LEAVES}
        self.others_stay = not self.all_have_left
        is_good_end = self.all_have_left and not any(payloads(headers, size_bytes))
        self.last_values_differ = is_good_end and len(set(chains(headers, size_bytes))) > 1
        self.are_clocks_due = are_clocks_due(headers, size_bytes)

    def _others_left(self, size_bytes: int, call: Call) -> NoReturn:
        """Raises, since the program has ended on some ranks."""
        headers = self._transport.headers[size_bytes].tobytes()
        told = zip(states(headers, size_bytes), payloads(headers, size_bytes), strict=True)
        causes = {
            rank: payload.decode(errors="ignore")
            for rank, (state, payload) in enumerate(told)
            if state == LEAVES
        }
        error = rank_left(causes, self._layout)
        description = call.describe()
        # No text of the error: those who left can't tell whether all others are at one call.
        exceptions.add_note(error, f"this rank waits in {description.what} at {description.where}")
        self.raised = error
        self._end(Life.LEFT, error)
        stay = [rank for rank in range(self._layout.size) if rank not in causes]
        reporter = [*(rank for rank in causes if causes[rank]), *stay][0]
        exceptions.mark_reporter(error, reporter == self._layout.rank)
        self._doom_runs(error)
        raise error

    def _doom_runs(self, error: BaseException) -> None:
        """Ends all runs with an error that is none of a replica."""
        for run in self.runs:
            run.doom, run.a_replica_failed = error, False

    def close(self) -> None:
        """Refuses every further call on this rank, without telling the others."""
        if self.final is None:
            text = "the strategy is closed. Make a new one, or close it at the end of the program."
            self._end(Life.CLOSED, ContextError(text))

    def _end(self, life: Life, final: BaseException) -> None:
        self.life, self.final = life, final

    def failed_stand(self, call: Call, error: BaseException, status: str = "failed") -> Stand:
        """Returns the stand of replicas in which `error` came up."""
        who = self._layout.describe(call.replica_ids)
        serial = self.num_raised if error is self.last_error else -1
        # Inside of a call it is this package that has called a library.
        place = travelling_error.place_of(error, may_be_library=status == "raised")
        place = place or call.site.line  # a mistake in the arguments has no frame
        packed = travelling_error.pack(error, f"{who} at {place}", serial)
        return Stand(call.replica_ids, status, call.describe(), packed, self.run_ordinal)

    def stand(self, call: Call) -> Stand:
        """Returns where the replicas of `call` stand."""
        if call.error is not None:
            return self.failed_stand(call, call.error)
        return Stand(call.replica_ids, call.status, call.describe(), None, self.run_ordinal)

    def is_agreed(self, error: BaseException) -> bool:
        """Returns whether all ranks raise `error`, or its counterparts, in this moment."""
        return error is self.raised or error is self.final

    def was_told(self, error: BaseException, since: int) -> bool:
        """Returns whether all ranks have agreed on `error` since `num_raised` was `since`.

        So it is with an error of a call that was made for another one: told again it would be taken
        for the next call of ranks that have caught it. The same object may be raised again later,
        as by a Future: on that nobody has agreed.
        """
        return self.num_raised != since and self.is_agreed(error)

    def _compare(self, state: int, payload: Payload, first: Call) -> bool:
        """Exchanges headers; returns whether all ranks agree."""
        is_clock_due = self.recorder.is_clock_due
        mine = head(first.fingerprint, self.notes.chain, state, is_clock_due, len(payload))
        transport, sizes = self._transport, self.sizes
        if self._wide:
            return self._compare_widely(state, mine + payload, bool(payload), first)
        size_bytes = sizes.next_bytes
        if type(payload) is bytes:  # which costs less than to hand on two things
            transport.exchange(mine + payload, size_bytes)
        else:
            transport.exchange(mine, size_bytes, payload)
        heads, starts = sizes.heads(), sizes.head_starts
        compared = mine[:COMPARED_BYTES]
        for start in starts:
            if not heads.startswith(compared, start):
                break
        else:
            if state == AGREES:
                self.are_clocks_due = is_clock_due and are_clocks_due(heads, starts.step)
                return True
        if LEAVES in states(heads, starts.step):
            self._others_left(size_bytes, first)
        sizes.begin_anew()
        return False

    def _compare_widely(self, state: int, mine: bytes, has_payload: bool, first: Call) -> bool:
        """Does as `_compare`, with a reduction; headers travel only where they carry something."""
        transport = self._transport
        word = words(mine)
        greatest = transport.maximum(word)
        if state_of_words(greatest) == LEAVES:
            transport.exchange(mine)
            self._others_left(HEADER_BYTES, first)
        if (greatest[:2] != word[:2]).any() or state != AGREES:
            return False
        self.are_clocks_due = are_clocks_due_by_words(greatest)
        if has_payload:
            transport.exchange(mine)
        return True

    def break_off(self, error: BaseException) -> None:
        """Gives up the strategy: this rank was in an exchange when `error` came up."""
        self._end(Life.BROKEN, error)
        if not isinstance(error, exceptions.MPIReplicaError):  # it comes again at the next call
            text = f"it came up in the middle of {self.recorder.latest[0]}. {IS_OVER}"
            exceptions.add_note(error, text)
        if isinstance(error, RankLostError):
            self._doom_runs(error)
        if error is self._transport.loss and self._transport.is_fault_tolerant:
            self._transport.revoke()
        else:
            self.on_break(error)

    def give_up(self, error: exceptions.MPIReplicaError) -> None:
        """Gives up the strategy with an error that the watchers have told to all ranks.

        Called in any thread: a wait of this rank ends with the error, and so does the next call.
        """
        if self.final is None:
            self._end(Life.BROKEN, error)
            self._transport.is_interrupted = True

    def time_out(self, call: Call, cause: BaseException | None = None) -> NoReturn:
        """Gives up the wait for the other ranks, and with it the strategy.

        `cause`: an error of which they were to be told.
        """
        if self.final is not None:  # the watchers have told why
            raise self.final from cause
        description = call.describe()
        final = CollectiveTimeoutError(
            f"{description.what} at {description.where} has waited"
            f" {call.options.timeout_seconds:g} s for the other ranks"
            f" ({self._layout.describe(call.replica_ids)} waits). {OTHERS_MAY_COME}"
        )
        self._end(Life.BROKEN, final)
        raise final from cause

    def _exchange_reports(
        self, stands: Sequence[Stand], originals: Mapping[int, BaseException]
    ) -> NoReturn:
        """Exchanges reports and raises what follows."""
        notes = self.notes
        report = Report(tuple(stands), notes.all, self.last_run_ordinal, notes.num_draws)
        texts = self._transport.all_gather_bytes(pickle.dumps(report, 5))
        reports: list[Report] = [pickle.loads(text) for text in texts]
        verdict = judge(reports, self._layout)
        self.last_run_ordinal = max(report.run_ordinal for report in reports) + 1
        if verdict.action == "promote":
            raise Promotion(verdict.change)
        num_draws = [report.num_draws for report in reports]
        notes.take_back([report.notes for report in reports], num_draws)
        self.raise_agreed(self._agreed_error(verdict, originals), verdict)

    def _agreed_error(
        self, verdict: Verdict, originals: Mapping[int, BaseException]
    ) -> BaseException:
        """Returns what this rank raises: the original, what travelled, or what stands for it."""
        traveller = verdict.traveller
        if traveller is None:
            if verdict.error is None:
                raise RuntimeError(f"a verdict without an error: {verdict!r}")
            return verdict.error
        if traveller.serial == self.num_raised and self.last_error is not None:
            return self.last_error
        mine = self._layout.rank == verdict.origin_rank
        error = originals[verdict.origin_replica] if mine else travelling_error.load(traveller)
        flag = b"" if error is None else b"loaded"
        flags = self._transport.all_gather_bytes(flag)
        if not mine and not all(flags):
            error = None
        if error is None:
            error = travelling_error.stand_in(traveller)
        elif mine:
            exceptions.add_note(error, f"raised by {traveller.origin}")
        for remark in verdict.remarks:
            exceptions.add_note(error, remark)
        return error

    def assemble(self) -> None:
        """Returns where all living ranks come. Collective; nothing where a lost rank ends the job.

        Ranks assemble before they go on as if all had come through an exchange: one that dies may
        let some of the others through its last one, and fail it for others.

        Raises
        ------
        RankLostError
            Some of them have met a loss instead.
        """
        transport = self._transport
        if not transport.is_fault_tolerant or transport.agree(1):
            return
        transport.has_told_loss = True
        transport.revoke()
        loss = transport.loss or RankLostError("a rank has died.")
        self.break_off(loss)
        raise loss

    def raise_agreed(self, error: BaseException, verdict: Verdict) -> NoReturn:
        """Raises what all ranks raise now, each of them by its own reckoning and all alike."""
        self.assemble()
        self.num_raised += 1
        if error is not self.last_error:  # where it comes again, all ranks have it
            exceptions.mark_reporter(error, max(verdict.origin_rank, 0) == self._layout.rank)
        self.last_error = error
        if verdict.doomed_run is not None:
            for run in self.runs:
                if run.ordinal >= verdict.doomed_run:
                    run.doom = error
                    run.a_replica_failed = verdict.traveller is not None
            if self.runs and verdict.traveller is not None:
                stopped = ReplicaStopped(
                    f"this replica stops at its call, because {verdict.traveller.origin} raised"
                    f" {verdict.traveller.words}"
                )
                self.raised = stopped
                raise stopped from error
        self.raised = error
        raise error
