"""Strategies at the end of a failed test: whoever waits in one of their calls is told.

A rank whose test has failed makes no further collective call. It leaves the strategies of the test,
as a program that ends would, so that a rank which waits in one gets an error instead of waiting.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from .. import ending
from ..collectives.engine import Engine
from ..errors import RankLostError

__all__ = ["Parting"]

_DONE = object()


class Parting:
    """Leaves strategies, a step at a time: it is collective, and the other ranks may be late."""

    def __init__(self) -> None:
        self._older: Sequence[Engine] | None = None
        self._wider: list[Engine] = []
        self._leaving: list[tuple[Engine, Iterator[None], str]] = []

    def begin_test(self) -> None:
        """Begin a test: strategies that are there already are not its own."""
        self._older = ending.engines()
        self._wider.clear()

    def keep(self, known: Sequence[Engine]) -> None:
        """Take those that are not `known` for strategies of more than this test."""
        self._wider += [engine for engine in ending.engines() if engine not in known]

    def leave_own(self, where: str) -> None:
        """Begin to leave the strategies that the test or its fixtures have made."""
        if self._older is None:
            return
        others = [*self._older, *self._wider]
        self._leave([engine for engine in ending.engines() if engine not in others], where)

    def leave_all(self, where: str) -> None:
        """Begin to leave all strategies."""
        self._leave(ending.engines(), where)

    def _leave(self, engines: Sequence[Engine], where: str) -> None:
        begun = [engine for engine, _, _ in self._leaving]
        for engine in engines:
            if engine not in begun and engine.is_in_its_thread():
                self._leaving.append((engine, engine.agreement.leaving(), where))
        self.advance()

    def advance(self) -> bool:
        """Go on leaving; return whether all ranks have left what this one has begun to leave."""
        going_on = []
        for engine, steps, where in self._leaving:
            given_up = RankLostError(
                f"this strategy was given up in {where}, where not all ranks came to the end of"
                " the test. Make a strategy for each test: the fixture `strategy` is one."
            )
            try:
                goes_on = next(steps, _DONE) is not _DONE
            except Exception:
                # A call of it was interrupted halfway, as pytest-timeout does.
                engine.agreement.break_off(given_up)
                continue
            if goes_on:
                going_on.append((engine, steps, where))
            elif not engine.agreement.has_message_in_flight:  # of that the end takes care
                ending.forget(engine)
                engine.agreement.final = given_up
        self._leaving = going_on
        return not going_on
