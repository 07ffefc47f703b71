"""Objects that replicas of a rank get as one, in the arguments of a run."""

from __future__ import annotations

import abc
from collections.abc import Hashable
from typing import Any, Generic, TypeVar

from ..core.exceptions import ContextError

#: What names an object among the shared ones.
Name = TypeVar("Name", bound=Hashable)


class SharedObjects(abc.ABC, Generic[Name]):
    """Objects each of which one replica of a rank alone may change in a run, or a merge_fn.

    What several change depends on how many they are.
    """

    def __init__(self) -> None:
        self._changed_by: dict[Name, int] = {}
        self._seen = self._look()

    @abc.abstractmethod
    def _look(self) -> dict[Name, Any]:
        """Returns what tells each object from itself after a change."""

    @abc.abstractmethod
    def _error(self, changed: Name, replica_id: int, first: int) -> ContextError:
        """Returns the error for one that a replica has changed, and before it the `first`."""

    def renew(self) -> None:
        """Takes all as they are now: a merge_fn may have changed them, once on each rank."""
        self._seen = self._look()

    @abc.abstractmethod
    def entered_by(self, replica_id: int) -> None:
        """Notes that the replica begins, or goes on where it has waited."""

    def left_by(self, replica_id: int) -> None:
        """Notes what the replica has changed since another one ran: it waits or ends now.

        Raises
        ------
        ContextError
            Another one has changed that in this run, too.
        """
        now, before = self._look(), self._seen
        if now == before:
            return
        for name in {**before, **now}:
            if now.get(name) != before.get(name):
                first = self._changed_by.setdefault(name, replica_id)
                if first != replica_id:
                    raise self._error(name, replica_id, first)
        self._seen = now
