"""What the program has assigned behind its last header: compared where it ends."""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING

from ...core.exceptions import mark_reporter
from .judgement import note_difference
from .stand import Report, Stand

if TYPE_CHECKING:
    from ..engine import Engine


def require_same_last_values(engine: Engine) -> None:
    """Raises where all ranks have left a strategy, and had not assigned the same. Collective.

    Raises
    ------
    ValueError, CollectiveMismatchError
        As the next call would have, on every rank.
    """
    agreement, layout = engine.agreement, engine.layout
    if not agreement.last_values_differ:
        return
    here = Stand(layout.local_replica_ids, "calls")
    report = Report((here,), agreement.notes.values, 0)
    texts = engine.transport.all_gather_bytes(pickle.dumps(report, 5))
    reports: list[Report] = [pickle.loads(text) for text in texts]
    error = note_difference(reports, layout)
    if error is not None:
        mark_reporter(error, layout.rank == 0)
        raise error
