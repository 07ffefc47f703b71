"""Checks: what was looked at, what it is like, and what to do about it; as text, and as JSON."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

_WIDTH = 100
_NAME_WIDTH = 18


class Check(NamedTuple):
    """One line of the report."""

    name: str
    value: str
    verdict: Literal["ok", "warn", "fail"] = "ok"
    #: What to do; empty where there is nothing to do.
    advice: str = ""


def advise(name: str, value: str, advice: str) -> Check:
    """Returns a check that warns where there is something to do."""
    return Check(name, value, "warn" if advice else "ok", advice)


def would_work(checks: Iterable[Check]) -> bool:
    """Returns whether a job would work.

    Examples
    --------
    >>> would_work([Check("a", "1"), Check("b", "2", "warn", "look at it")])
    True
    """
    return all(check.verdict != "fail" for check in checks)


def text(checks: Sequence[Check]) -> str:
    """Returns one screen of text.

    Examples
    --------
    >>> print(text([Check("ranks", "2 on n1"), Check("binding", "1 core", "warn", "Bind less.")]))
    ok    ranks              2 on n1
    warn  binding            1 core
                             Bind less.
    A job would work here.
    """
    lines = []
    indent = " " * (6 + _NAME_WIDTH + 1)
    for check in checks:
        lines.append(f"{check.verdict:<5} {check.name:<{_NAME_WIDTH}} {check.value}")
        lines += textwrap.wrap(
            check.advice,
            _WIDTH,
            initial_indent=indent,
            subsequent_indent=indent,
            break_long_words=False,
            break_on_hyphens=False,
        )
    works = would_work(checks)
    lines.append("A job would work here." if works else "A job would not work here: see fail.")
    return "\n".join(lines)


def to_json(checks: Sequence[Check]) -> str:
    """Returns one line of JSON: whether a job would work, and all checks."""
    return json.dumps(
        {"would_work": would_work(checks), "checks": [check._asdict() for check in checks]}
    )


def from_json(line: str) -> list[Check]:
    """Returns the checks that `to_json` has written.

    Raises
    ------
    ValueError
        The text is something else.

    Examples
    --------
    >>> from_json(to_json([Check("ranks", "2")]))
    [Check(name='ranks', value='2', verdict='ok', advice='')]
    """
    try:
        return [Check(**about) for about in json.loads(line)["checks"]]
    except (TypeError, KeyError) as error:
        raise ValueError(f"{line!r} holds no checks") from error
