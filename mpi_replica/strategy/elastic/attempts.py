"""Attempts of a training: it is called again at the last commit, until no rank was lost in it."""

from __future__ import annotations

import logging
import textwrap
from collections import Counter
from collections.abc import Callable
from time import monotonic
from typing import TypeVar, cast

from ...collectives.agreement.site import function_identity
from ...collectives.barrier import BarrierCall
from ...collectives.strategy_base import StrategyBase
from ...core.context import open_strategies
from ...core.exceptions import ContextError, RankLostError, in_words, mark_reporter
from ...core.layout import numbers_text
from ...core.tracebacks import printed
from ...data.epochs import made_apart
from ...ranks import Dismissal
from ...ranks.launcher_connection import tell
from ...ranks.pause import pause
from ...ranks.survivors import NO_FURTHER_CALL
from ...ranks.watch.strategy_watch import stall_seconds
from .elastic_strategy import ElasticStrategy
from .keeper import Keeper
from .state import ElasticState, committed_by, strategies_of

T = TypeVar("T")

_log = logging.getLogger("mpi_replica")


def run(strategy: ElasticStrategy, train: Callable[[], T], state: ElasticState) -> T | None:
    """Does what `Elastic.run_elastic` says."""
    keeper = _keeper_of(strategy, train, state)
    with committed_by(state, keeper.commit):
        _say_if_unguarded(strategy, keeper)
        strategy._is_elastic = True
        try:
            with made_apart():  # a spare that is not needed makes nothing
                return _train(strategy, keeper, train)
        finally:
            strategy._is_elastic = False


def _keeper_of(strategy: ElasticStrategy, train: object, state: ElasticState) -> Keeper:
    """Returns what keeps the state in this call; an error is one of all ranks with replicas."""
    engine, is_inside = strategy.engine, strategy._is_elastic
    if not is_inside:
        strategy._num_elastic_calls += 1  # also of one that fails here: the others have counted it
    try:
        _check(strategy, train, state)
        return Keeper(strategy, state)
    except Exception as error:  # also where an object of the state can't be kept
        if engine.is_spare:
            raise
        try:
            engine.fail("run_elastic", error)
        except BaseException as told:
            if not is_inside:
                _dismiss_spares(strategy, told)
            raise


def _train(strategy: ElasticStrategy, keeper: Keeper, train: Callable[[], T]) -> T | None:
    engine, survivors = strategy.engine, strategy.survivors
    function = function_identity(train)
    while True:
        if engine.is_spare and survivors is not None:
            end = survivors.wait(strategy._num_elastic_calls)
            if end is not None:
                engine.num_made |= Counter(end.num_made)
                _leave_as_the_others(end)
                return None
            keeper.recover()
            continue
        try:
            if keeper.lost_replicas:
                keeper.restore_checkpoint()
            keeper.begin(function)
            keeper.commit()
            result = train()
            call = engine.make("run_elastic", None, BarrierCall, "run_elastic", "end of ", function)
            engine.cross_replica(call)
            engine.agreement.assemble()
        except BaseException as error:
            if not keeper.must_recover(error):
                _dismiss_spares(strategy, error)
                if _is_of_another(strategy, error):
                    raise RankLostError(
                        "a rank was lost, in a call of another strategy than the one whose"
                        " run_elastic this is: others are not made anew. Use one strategy, or start"
                        " the program again from a checkpoint."
                    ) from error
                raise
            own = engine.agreement.untold if isinstance(error, RankLostError) else error
            if own is not None:
                _log.warning(
                    "rank %d goes back to the last commit because of a loss. At that time this came"
                    " up on it:\n%s",
                    engine.layout.rank,
                    textwrap.indent(printed(own), "  "),
                )
        else:
            _dismiss_spares(strategy)
            keeper.say_end()
            return result
        keeper.recover()


def _status_of(error: BaseException) -> int | None:
    """Returns the status of a program that ends itself, without an error text."""
    if not isinstance(error, SystemExit):
        return None
    code = 0 if error.code is None else error.code
    return code if isinstance(code, int) else None


def _is_of_another(strategy: ElasticStrategy, error: BaseException) -> bool:
    """Returns whether `error` is the loss that another strategy has met."""
    others = cast("set[StrategyBase]", set(open_strategies) - {strategy})
    return any(other.engine.transport.loss is error for other in others)


def _dismiss_spares(strategy: ElasticStrategy, error: BaseException | None = None) -> None:
    """Tells those that wait that this call is at its end: they must not wait for another one.

    It waits until all have heard of a good one; rank 0 reports a spare that does not come.
    """
    if strategy.survivors is None:
        return
    text, status = ("", None) if error is None else (in_words(error), _status_of(error))
    end = Dismissal(text, status, strategy.engine.num_made)
    start = monotonic()
    due = stall_seconds()
    for spare in strategy.survivors.dismiss(strategy._num_elastic_calls, end):
        waited = monotonic() - start
        if waited > due and strategy.engine.layout.rank == 0:
            _log.warning(
                "run_elastic has come to its end, and has waited %.0f s for rank %d: a spare that"
                " is not in run_elastic yet. Call it there on all ranks.",
                waited,
                spare,
            )
            due *= 2
        pause(waited)
    if error is None and (lost := strategy.survivors.lost_spares):
        tell(went_on_without=[member.pid for member in lost])
        if strategy.engine.layout.rank == 0:
            ranks = numbers_text("rank", sorted(member.first_rank for member in lost))
            _log.warning("lost %s, which waited as a spare and was not needed.", ranks)


def _leave_as_the_others(end: Dismissal) -> None:
    """Returns where the others have come to a good end; raises what a spare raises elsewhere."""
    if end.status is not None:
        raise SystemExit(end.status)
    if end.text:
        error = RankLostError(
            f"this spare was not needed, and the program has ended elsewhere: {end.text}"
        )
        if end.text != NO_FURTHER_CALL:
            mark_reporter(error, False)  # the others have printed what it was
        raise error


def _check(strategy: ElasticStrategy, train: object, state: object) -> None:
    """Raises where these are no arguments of a call of it, or none can be made here."""
    if not callable(train):
        raise TypeError(f"run_elastic needs a callable, got {train!r}.")
    function_identity(train).require_eager("run_elastic")
    if not isinstance(state, ElasticState):
        raise TypeError(f"run_elastic needs a mr.ElasticState, got {state!r}.")
    if strategy._is_elastic:
        raise ContextError(
            "run_elastic was called inside of itself: the outer call goes back to its own state"
            " when a rank is lost. Give all that is trained to one call."
        )
    others = strategies_of(state) - {strategy}
    if others:
        raise ValueError(
            f"the state given to run_elastic of {strategy!r} belongs to {others.pop()!r}. Make it"
            " of variables of the strategy whose run_elastic is called."
        )


def _say_if_unguarded(strategy: ElasticStrategy, keeper: Keeper) -> None:
    layout = strategy.engine.layout
    if layout.size > 1 and not keeper.is_guarded and layout.rank == 0:
        _log.warning(
            "a lost rank ends this job: the MPI library has no fault tolerance, or was started"
            " without it. Start the program by python -m mpi_replica run --elastic, with Open MPI."
        )
