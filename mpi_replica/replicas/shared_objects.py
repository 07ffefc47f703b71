"""Objects that replicas of a rank get as one, in the arguments of a run."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import Any

from ..core.exceptions import ContextError


class SharedObjects(abc.ABC):
    """Objects each of which one replica of a rank alone may change in a run, or a merge_fn.

    What several change depends on how many they are.

    Parameters
    ----------
    objects : sequence
    """

    def __init__(self, objects: Sequence[Any]) -> None:
        self._objects = objects
        self._changed_by: dict[int, int] = {}
        self._versions = self._versions_now()

    @abc.abstractmethod
    def _versions_now(self) -> list[Any]:
        """Returns what tells each object from itself after a change."""

    @abc.abstractmethod
    def _error(self, changed: Any, replica_id: int, first: int) -> ContextError:
        """Returns the error for one that a replica has changed, and before it the `first`."""

    def renew(self) -> None:
        """Takes all as they are now: a merge_fn may have changed them, once on each rank."""
        self._versions = self._versions_now()

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
        before = self._versions
        self._versions = self._versions_now()
        if self._versions == before:
            return
        for changed, one, other in zip(self._objects, before, self._versions, strict=True):
            if one != other:
                first = self._changed_by.setdefault(id(changed), replica_id)
                if first != replica_id:
                    raise self._error(changed, replica_id, first)
