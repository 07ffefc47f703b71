"""Threads that stand for another one: a replica's own thread for the one that called ``run``.

Replicas run one at a time, so that what belongs to the thread of a strategy is used by one thread
at a time, whichever of these it is.
"""

from __future__ import annotations

from _thread import get_ident

#: How the names of threads begin that the package has for itself.
OWN_THREADS = "mpi_replica"

_owners: dict[int, int] = {}

#: By the ident of the thread that is stood for: that of the thread that works for it now.
at_work: dict[int, int] = {}


def owner_of_this_thread() -> int:
    """Returns `owner_of` the thread that calls."""
    return owner_of(get_ident())


def owner_of(ident: int) -> int:
    """Returns the ident of the thread that this one stands for; its own, if for no other."""
    return _owners.get(ident, ident)


def is_stand_in() -> bool:
    """Returns whether this thread stands for another one."""
    return get_ident() in _owners


def thread_at_work(owner: int) -> int:
    """Returns the ident of the thread that works for `owner` now, or itself."""
    return at_work.get(owner, owner)


def stand_in_for(owner: int) -> None:
    """Has the thread that calls stand for `owner`, which says in `at_work` when it does."""
    _owners[get_ident()] = owner


def forget_thread(ident: int) -> None:
    """Forgets the thread `ident`, which ends: another one may get its ident."""
    _owners.pop(ident, None)
