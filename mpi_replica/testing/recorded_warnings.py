"""Warnings of all ranks: rank 0 reports what it has not met itself, too."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Self

from ..core.layout import numbers_text


class RecordedWarning(NamedTuple):
    """A warning that pytest has recorded on a rank: plain data."""

    category: str
    text: str
    file: str
    line: int
    #: The test, or "".
    nodeid: str

    @classmethod
    def of(cls, message: warnings.WarningMessage, nodeid: str) -> Self:
        """Returns it for what pytest tells."""
        name = message.category.__name__
        return cls(name, str(message.message), message.filename, message.lineno, nodeid)

    def named(self, ranks: Sequence[int]) -> warnings.WarningMessage:
        """Returns it as pytest takes it, with the ranks that have met it."""
        category = type(self.category, (Warning,), {})  # its own may be of a module of the test
        text = f"{self.text} (on {numbers_text('rank', ranks)})"
        return warnings.WarningMessage(text, category, self.file, self.line)


def warnings_of_others(
    of_ranks: Sequence[Sequence[RecordedWarning]],
) -> Iterator[tuple[warnings.WarningMessage, str]]:
    """Returns the warnings that rank 0 has not met, each once, and the tests in which they came."""
    own = set(of_ranks[0])
    every = {one: None for recorded in of_ranks[1:] for one in recorded if one not in own}
    for one in every:
        ranks = [rank for rank, recorded in enumerate(of_ranks) if one in recorded]
        yield one.named(ranks), one.nodeid
