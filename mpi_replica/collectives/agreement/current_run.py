"""A run that is under way, as the agreement knows it."""

from __future__ import annotations

import numpy as np


class CurrentRun:
    """A run, to the agreement."""

    ordinal = 0
    #: Why it is over before its end; set by the agreement.
    doom: BaseException | None = None
    #: Whether that is an exception of a replica, and not a disagreement.
    a_replica_failed = True

    def is_here(self) -> bool:
        """Returns whether the code that calls is the one that performs its calls."""
        raise NotImplementedError

    def will_draw(self, generator: np.random.Generator) -> None:
        """Notes that a ``merge_fn`` uses the generator that all ranks have alike."""
        raise NotImplementedError

    def meeting(self) -> tuple[tuple[int, ...], str]:
        """Returns the replicas of this rank that have not come to a call, and that of others."""
        raise NotImplementedError
