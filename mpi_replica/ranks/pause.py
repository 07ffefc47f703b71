"""What a rank does between two looks at what it waits for: it leaves the core to others."""

from __future__ import annotations

import os
from collections.abc import Callable

# The module of MPI, which comes with the first strategy, takes it from here: a program's test may
# have patched `time` by then.
from time import monotonic as monotonic
from time import sleep

#: Who waits for a late rank asks again and again for so long.
SECONDS_BEFORE_SLEEP = 0.02
# Who has waited long may wait a little longer, and leaves the core to others. It begins with this,
# and grows with the time: data that takes seconds goes on only where ranks ask, and 33 ranks on two
# cores took 5 s in place of 1.4 for 40 MB where they slept 5 ms from the first second on (MPICH).
_FIRST_SLEEP_SECONDS = 0.0004
_LONGEST_SLEEP_SECONDS = 0.005

# macOS does not have it.
_give_core_away: Callable[[], None] = getattr(os, "sched_yield", lambda: sleep(0))


def pause(waited_seconds: float, seconds_before_sleep: float = SECONDS_BEFORE_SLEEP) -> None:
    """Lets others use the core, for longer the longer the wait has been."""
    _give_core_away()
    if waited_seconds > seconds_before_sleep:
        sleep_seconds = _FIRST_SLEEP_SECONDS * waited_seconds / seconds_before_sleep
        sleep(min(sleep_seconds, _LONGEST_SLEEP_SECONDS))
