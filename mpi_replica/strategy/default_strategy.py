"""The strategy that holds outside of any other."""

from __future__ import annotations

import functools
import threading
from typing import cast

from ..collectives.engine import Engine
from ..core.context import current_strategy, register_default_strategy, require_default
from ..core.layout import Layout
from ..core.options import CommunicationOptions
from ..ranks.single import SingleTransport
from .strategy import Strategy


class _DefaultEngine(Engine):
    """The engine of the default strategy, for every thread; it communicates with nobody."""

    def check_thread(self, kind: str) -> None:
        require_default(kind)

    def claim_thread(self) -> None:
        return


class _DefaultStrategy(Strategy, threading.local):
    """One replica, no MPI: what holds outside of any strategy; each thread has its own state."""

    is_default = True

    def __init__(self) -> None:
        super().__init__(_DefaultEngine(SingleTransport(), Layout((1,), 0), CommunicationOptions()))


_default_strategy = functools.cache(_DefaultStrategy)
register_default_strategy(_default_strategy)


def get_strategy() -> Strategy:
    """Return the current strategy; the default strategy outside of any (never None).

    Returns
    -------
    Strategy
        The default one has one replica, and communicates with nobody.

    Notes
    -----
    No communication. Counterpart of ``tf.distribute.get_strategy``.

    Examples
    --------
    >>> mr.get_strategy().num_replicas_in_sync
    1
    >>> with mr.MPIStrategy(num_replicas=2).scope():
    ...     mr.get_strategy().num_replicas_in_sync
    2
    """
    return cast("Strategy", current_strategy())
