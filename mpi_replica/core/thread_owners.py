"""Threads that stand for another one: a replica's own thread for the one that called ``run``.

Replicas run one at a time, so that what belongs to the thread of a strategy is used by one thread
at a time, whichever of these it is.
"""

from __future__ import annotations

from _thread import get_ident

_owners: dict[int, int] = {}
_at_work: dict[int, int] = {}


def owner_of_this_thread() -> int:
    """Returns the ident of the thread that this one stands for; its own, if for no other."""
    ident = get_ident()
    return _owners.get(ident, ident)


def is_stand_in() -> bool:
    """Returns whether this thread stands for another one."""
    return get_ident() in _owners


def thread_at_work(owner: int) -> int:
    """Returns the ident of the thread that works for `owner` now, or itself."""
    return _at_work.get(owner, owner)


class StandIn:
    """Has a thread stand for `owner`, while it works."""

    def __init__(self, owner: int) -> None:
        self._owner = owner

    def begin(self, ident: int) -> int | None:
        """Has the thread `ident` work for the owner; returns which one did until now."""
        before = _at_work.get(self._owner)
        _owners[ident] = self._owner
        _at_work[self._owner] = ident
        return before

    def end(self, before: int | None) -> None:
        """Has the thread work again that did before."""
        if before is None:
            _at_work.pop(self._owner, None)
        else:
            _at_work[self._owner] = before


def forget_thread(ident: int) -> None:
    """Forgets the thread `ident`, which ends: another one may get its ident."""
    _owners.pop(ident, None)
