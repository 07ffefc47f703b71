"""The tests that the ranks have collected: how they differ, in words, and one order for all."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence

import pytest


def different_tests(lists: Sequence[list[str]], skipped: Sequence[list[str]]) -> str:
    """Returns how the names differ that ranks have collected; `skipped` says what some left out."""
    lines = ["the ranks collected different tests."]
    everywhere = set.intersection(*map(set, lists))
    skipped_everywhere = set.intersection(*map(set, skipped))
    for rank, names in enumerate(lists):
        extra = [name for name in names if name not in everywhere]
        tail = f", {len(extra)} of them not on all ranks: {', '.join(extra[:3])}" if extra else ""
        lines.append(f"rank {rank}: {len(names)} tests{tail}{', …' if len(extra) > 3 else ''}")
        lines += [f"  skipped {why}" for why in skipped[rank] if why not in skipped_everywhere]
    if len(set(map(frozenset, skipped))) > 1:
        lines.append("Skip a module on all ranks or on none, by what is the same on all of them.")
        return "\n".join(lines)
    lines.append(
        "Parameters must be the same on all ranks: sort what comes from a set (or start all ranks"
        " with PYTHONHASHSEED=0), and use no random numbers, times or ranks in them."
    )
    return "\n".join(lines)


def in_order(items: Sequence[pytest.Item], names: Sequence[str]) -> list[pytest.Item]:
    """Returns `items` in the order of `names`; a name may be there more than once."""
    left: defaultdict[str, deque[pytest.Item]] = defaultdict(deque)
    for item in items:
        left[item.nodeid].append(item)
    return [left[name].popleft() for name in names]
