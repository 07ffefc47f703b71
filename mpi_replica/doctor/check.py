"""A check: something that was looked at, what was found, and what to do about it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, NamedTuple

__all__ = ["Check", "Verdict", "would_work"]

Verdict = Literal["ok", "warn", "fail"]


class Check(NamedTuple):
    """One line of the report."""

    name: str
    value: str
    verdict: Verdict = "ok"
    #: What to do; empty where there is nothing to do.
    advice: str = ""


def would_work(checks: Iterable[Check]) -> bool:
    """Return whether a job would work.

    Examples
    --------
    >>> would_work([Check("a", "1"), Check("b", "2", "warn", "look at it")])
    True
    """
    return all(check.verdict != "fail" for check in checks)
