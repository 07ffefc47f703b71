"""What the program has assigned behind its last header: compared where it ends."""

from __future__ import annotations

import pickle

from ...core.exceptions import mark_reporter
from ...core.layout import Layout
from ...ranks.transport import Transport
from .agreement import Agreement
from .judgement import note_difference
from .stand import Report, Stand


def require_same_last_values(agreement: Agreement, transport: Transport, layout: Layout) -> None:
    """Raises where all ranks have left a strategy, and had not assigned the same. Collective.

    Raises
    ------
    ValueError, CollectiveMismatchError
        As the next call would have, on every rank.
    """
    if not agreement.last_values_differ:
        return
    here = Stand(layout.local_replica_ids, "calls")
    report = Report((here,), agreement.notes.values, 0)
    texts = transport.all_gather_bytes(pickle.dumps(report, 5))
    reports: list[Report] = [pickle.loads(text) for text in texts]
    error = note_difference(reports, layout)
    if error is not None:
        mark_reporter(error, layout.rank == 0)
        raise error
