"""A collective call on its way: what every kind of call has in common."""

from __future__ import annotations

import abc
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from ..options import CommunicationOptions
from .callsite import CallSite
from .standing import CallDescription

__all__ = ["Call", "FailedCall"]

# The same few calls come again and again; a program that makes new ones all the time (uneven
# shapes) must not grow.
_CACHE_SIZE = 4096
_known: dict[Hashable, tuple[int, str]] = {}


class Call(abc.ABC):
    """What one replica, or a rank in cross-replica context, asks for.

    Making one does all that can fail without the others: checks and conversions.
    """

    #: "all_reduce"
    kind: str
    #: "calls", or "returned" for the end of a run
    status: str = "calls"
    #: Ids of the replicas that call: one, or all local ones in cross-replica context.
    replica_ids: tuple[int, ...] = ()
    #: What went wrong while it was made; such a call only tells the others.
    error: BaseException | None = None
    #: Whether the components agree that a cross-replica call has for each replica of this rank.
    agrees: bool = True

    def __init__(self, site: CallSite, options: CommunicationOptions) -> None:
        self.site = site
        self.options = options
        self.fingerprint = 0
        #: The call and its place, as "all_reduce(SUM, 12 leaves, 4.1 MB) at train.py:88".
        self.text = ""
        # How the messages are cut, and whether they are waited for in a loop, must be the same.
        self._wire = ""
        if options.bytes_per_pack or options.timeout_seconds is not None:
            packs = f"bytes_per_pack={options.bytes_per_pack}" if options.bytes_per_pack else ""
            waits = "" if options.timeout_seconds is None else "with a timeout"
            self._wire = ", ".join(filter(None, [packs, waits]))

    def identify(self, key: Hashable, describe: Callable[[], CallDescription]) -> None:
        """Set the fingerprint; `key` and the site tell this call from every other one."""
        name = self.options.name
        place = self.site.digest if name is None else name
        whole = (self.kind, place, self._wire, key)
        known = _known.get(whole)
        if known is None:
            if len(_known) >= _CACHE_SIZE:
                _known.clear()
            description = describe()
            text = f"{description.what} at {description.where}"
            known = _known[whole] = (description.fingerprint(), text)
        self.fingerprint, self.text = known

    def describe(self, position: int = 0) -> CallDescription:
        """Return the call in words, as the replica at `position` of `replica_ids` makes it."""
        return self.words(position)._replace(wire=self._wire)

    @abc.abstractmethod
    def words(self, position: int = 0) -> CallDescription:
        """Return what `describe` gives, without what all kinds of call have in common."""

    def promote(self, leaves: Sequence[int]) -> None:
        """Make these leaves float64: some replicas hold a Python int there, others a float."""
        raise NotImplementedError

    @abc.abstractmethod
    def perform(self, engine: Any, calls: Sequence[Any]) -> list[Any]:
        """Do the call for `calls`, which agree, one for each local replica; return their results.

        Cross-replica calls come alone. `engine` is an `Engine`, which is made of agreement and
        so of calls.
        """


class FailedCall(Call):
    """A call that could not even be made on this replica."""

    def __init__(
        self, kind: str, error: BaseException, site: CallSite, options: CommunicationOptions
    ) -> None:
        super().__init__(site, options)
        self.kind = kind
        self.error = error

    def words(self, position: int = 0) -> CallDescription:
        return CallDescription(self.kind, "", self.site, self.options.name)

    def perform(self, engine: Any, calls: Sequence[Any]) -> list[Any]:
        raise NotImplementedError  # the agreement raises its error instead
