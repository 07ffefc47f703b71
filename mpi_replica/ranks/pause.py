"""What a rank does between two looks at what it waits for: it leaves the core to others."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

#: Who waits for a late rank asks again and again for so long.
SECONDS_BEFORE_SLEEP = 0.02
# Who has waited long may wait a little longer, and leaves the core to others.
_SLEEP_PER_WAIT = 0.02
_LONGEST_SLEEP_SECONDS = 0.005

# macOS does not have it.
_give_core_away: Callable[[], None] = getattr(os, "sched_yield", lambda: time.sleep(0))


def pause(waited_seconds: float, seconds_before_sleep: float = SECONDS_BEFORE_SLEEP) -> None:
    """Lets others use the core, for longer the longer the wait has been."""
    _give_core_away()
    if waited_seconds > seconds_before_sleep:
        time.sleep(min(waited_seconds * _SLEEP_PER_WAIT, _LONGEST_SLEEP_SECONDS))
