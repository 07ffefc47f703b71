"""Strategies at the end of a failed test: whoever waits in one of their calls is told.

A rank whose test has failed makes no further collective call. It leaves the strategies of the test,
as a program that ends would, so that a rank which waits in one gets an error instead of waiting.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..collectives.agreement.agreement import Life
from ..collectives.engine import Engine
from ..core.exceptions import RankLostError
from ..strategy import job_end

_DONE = object()


class Departure:
    """Leaves strategies, a step at a time: it is collective, and the other ranks may be late."""

    def __init__(self) -> None:
        self._older: Sequence[Engine] | None = None
        self._wider: list[Engine] = []
        self._leaving: dict[Engine, tuple[Iterator[None], RankLostError]] = {}

    def begin_test(self) -> None:
        """Begins a test: strategies that are there already are not its own."""
        self._older = job_end.engines()
        self._wider.clear()

    def keep(self, known: Sequence[Engine]) -> None:
        """Takes those that are not `known` for strategies of more than this test."""
        self._wider += [engine for engine in job_end.engines() if engine not in known]

    def leave_own(self, where: str) -> None:
        """Begins to leave the strategies that the test or its fixtures have made."""
        if self._older is None:
            return
        others = [*self._older, *self._wider]
        self._leave([engine for engine in job_end.engines() if engine not in others], where)

    def leave_all(self, where: str) -> None:
        """Begins to leave all strategies."""
        self._leave(job_end.engines(), where)

    def _leave(self, engines: Sequence[Engine], where: str) -> None:
        text = (
            f"this strategy was given up in {where}, where not all ranks came to the end of the"
            " test. Make a strategy for each test: the fixture `strategy` is one."
        )
        for engine in engines:
            if engine not in self._leaving and engine.is_in_its_thread():
                # Of its own: raised, it takes the place of the call that has met it.
                self._leaving[engine] = engine.agreement.leaving(), RankLostError(text)
        self.advance()

    def advance(self) -> bool:
        """Goes on leaving; returns whether all ranks have left what this one has begun to leave."""
        for engine, (steps, given_up) in list(self._leaving.items()):
            try:
                if next(steps, _DONE) is not _DONE:
                    continue
            except Exception:
                # A call of it was interrupted halfway, as pytest-timeout does.
                engine.agreement.break_off(given_up)
            else:
                if engine.agreement.life is not Life.BROKEN:  # of that the end takes care
                    job_end.remove_engine(engine)
                    engine.agreement.final = given_up
            del self._leaving[engine]
        return not self._leaving
