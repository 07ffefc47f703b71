"""What the ranks say of one phase of a test, and what follows for all of them: pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Self

import pytest

from ..core.exceptions import RankLostError
from ..core.layout import grouped, numbers_text

PASSED, FAILED, SKIPPED, XFAILED, XPASSED = "passed", "failed", "skipped", "xfailed", "xpassed"
# What pytest has for a success that is none: of a mark, and of ``unittest.expectedFailure``.
_UNEXPECTED = "[XPASS(strict)]", "Unexpected success"
#: Failed, but only because it waited for a rank that went no further.
STOPPED = "stopped"


class Arrival(NamedTuple):
    """What a rank tells when it comes to the fence."""

    #: Where it is: "tests/test_sums.py::test_mean (call)".
    place: str
    #: One of the kinds above.
    kind: str = PASSED
    #: The traceback, or why the rank ends its session.
    text: str = ""
    #: `text` in one line.
    summary: str = ""
    #: Where a rank waited that was stopped.
    waited: str = ""
    #: How far the rank is with the end of the session; 0 before it.
    stage: int = 0
    #: The exit status with which it ends.
    status: int = 0
    #: Whether it has waited so long that it gave up all strategies.
    has_left_all: bool = False
    #: What else must be the same on all ranks.
    detail: Any = None


class _Crash(str):
    """A failure in one line, which pytest takes as a text; other plugins ask where it was."""

    def __new__(cls, message: str, path: str, lineno: int) -> Self:
        made = super().__new__(cls, message)
        made.message, made.path, made.lineno = message, path, lineno
        return made

    message: str
    path: str
    lineno: int


class RanksReport:
    """What failed on which rank, in the place of the traceback of a report.

    The attributes have the names that pytest's reporters look for.
    """

    def __init__(
        self, head: str, parts: Sequence[tuple[str, Any]], summary: str, place: tuple[str, int]
    ) -> None:
        self._head = head
        self._parts = parts
        self.reprcrash = _Crash(summary, *place)

    def toterminal(self, writer: Any) -> None:
        """Writes it, with the colours of this rank's own traceback."""
        writer.line(self._head)
        for title, content in self._parts:
            writer.line()
            writer.line(f"--- {title}", bold=True)
            if hasattr(content, "toterminal"):
                content.toterminal(writer)
            else:
                writer.line(str(content))

    def __str__(self) -> str:
        texts = [f"--- {title}\n{content}" for title, content in self._parts]
        return "\n\n".join([self._head, *texts])


def kind_of(report: pytest.TestReport, error: BaseException | None = None) -> str:
    """Returns the kind of outcome of a report, about a phase that raised `error`."""
    if hasattr(report, "wasxfail"):
        return XFAILED if report.skipped else XPASSED
    if report.failed and isinstance(error, RankLostError) and waited_at(error):
        return STOPPED
    if report.failed and str(report.longrepr).startswith(_UNEXPECTED):
        return XPASSED
    return report.outcome


def waited_at(error: BaseException | None) -> str:
    """Returns where a rank waited, as the notes of its error tell."""
    return "; ".join(getattr(error, "__notes__", ()))


def judge(arrivals: Sequence[Arrival]) -> str | None:
    """Returns the kind of outcome for all ranks; None where each keeps its own.

    A failure that is expected on one rank is one on all; other kinds can't stand side by side.
    """
    kinds = {arrival.kind for arrival in arrivals}
    if len(kinds) == 1 and kinds != {FAILED}:
        return None
    if XFAILED in kinds and kinds <= {XFAILED, XPASSED, PASSED, STOPPED}:
        return XFAILED
    return FAILED


def failure(
    arrivals: Sequence[Arrival],
    rank: int,
    own: Any,
    outputs: Sequence[str],
    place: tuple[str, int],
) -> RanksReport:
    """Returns the report of a failure, on `rank`, whose own traceback is `own`.

    `outputs` are what was captured on each rank that has not failed; `place` is the file and the
    line of the test.
    """
    kinds = _ranks_by_text(arrival.kind for arrival in arrivals)
    head = ", ".join(f"{numbers_text('rank', ranks)} {kind}" for kind, ranks in kinds.items())
    if left := [sender for sender, arrival in enumerate(arrivals) if arrival.has_left_all]:
        head += f"; {numbers_text('rank', left)} waited at the end of it for the others"
    explains = kinds.keys() - {PASSED, STOPPED}  # if nothing does, a traceback tells more
    brief = STOPPED if explains else None
    texts = _ranks_by_text(a.waited if a.kind == brief else a.text for a in arrivals)
    summaries = [
        f"rank {sender}: {arrival.summary}"
        for sender, arrival in enumerate(arrivals)
        if arrival.summary and arrival.kind != brief
        if arrival.kind == FAILED or FAILED not in kinds
    ]
    parts = [
        (
            numbers_text("rank", ranks),
            own if own is not None and text == arrivals[rank].text else text,
        )
        for text, ranks in texts.items()
    ]
    parts += [
        (f"{numbers_text('rank', ranks)}, captured", text)
        for text, ranks in _ranks_by_text(outputs).items()
    ]
    return RanksReport(head, parts, summaries[0] if summaries else head, place)


def _ranks_by_text(texts: Iterable[str]) -> dict[str, list[int]]:
    """Returns the ranks that say each text, given what each rank says; empty is nothing said."""
    return {text: ranks for text, ranks in grouped(texts).items() if text}


def places_apart(arrivals: Sequence[Arrival]) -> str:
    """Returns where the ranks are, which is not all at one place; empty where it is."""
    if len({arrival.place for arrival in arrivals}) == 1:
        return ""
    if not any(arrival.stage for arrival in arrivals):
        lines = [f"rank {rank}: {arrival.place}" for rank, arrival in enumerate(arrivals)]
        return "\n".join(["the ranks are at different tests", *lines])
    ended = _ranks_by_text((a.text or "no more tests") if a.stage else "" for a in arrivals)
    others = next(arrival.place for arrival in arrivals if not arrival.stage)
    lines = [
        f"{numbers_text('rank', ranks)} ended the session: {text}" for text, ranks in ended.items()
    ]
    return "\n".join([*lines, f"the others stop at {others}"])
