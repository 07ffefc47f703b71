"""A collective call on its way: what every kind of call has in common."""

from __future__ import annotations

import abc
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

from ..options import CommunicationOptions
from .callsite import CallSite
from .standing import CallDescription

__all__ = ["Call", "FailedCall", "Known"]

# The same few calls come again and again; a program that makes new ones all the time (uneven
# shapes) must not grow.
_CACHE_SIZE = 4096
_known: dict[Hashable, Known] = {}


class Known(NamedTuple):
    """What is worked out once for all calls that are alike."""

    fingerprint: int
    #: The call and its place, as "all_reduce(SUM, 12 leaves, 4.1 MB) at train.py:88".
    text: str
    #: What a kind of call needs beside; see `Call.make_plan`.
    plan: Any


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
    #: The exception that the replica handled when it came to the call, in words.
    handled: str = ""
    #: Whether it runs functions of the program: with the context of the caller of ``run``.
    runs_user_code: bool = False
    #: Whether the components agree that a cross-replica call has for each replica of this rank.
    agrees: bool = True

    fingerprint: int = 0
    text: str = ""
    #: What all calls that are alike share beside: how the data travels, say.
    plan: Any = None

    def __init__(self, site: CallSite, options: CommunicationOptions) -> None:
        self.site = site
        self.options = options

    def identify(self, key: Hashable) -> None:
        """Set fingerprint, text and plan; `key` and the site tell this call from all others."""
        options = self.options
        whole = (self.kind, self.site.digest, options.name, options.wire, key)
        known = _known.get(whole)
        if known is None:
            plan = self.make_plan()
            if len(_known) >= _CACHE_SIZE:
                _known.clear()
            description = self.describe()
            text = f"{description.what} at {description.where}"
            known = _known[whole] = Known(description.fingerprint(), text, plan)
        self.fingerprint, self.text, self.plan = known

    def make_plan(self) -> Any:
        """Return what depends on nothing but the key of this call."""
        return None

    @property
    def title(self) -> str:
        """The call and its place in words, also where it was not identified."""
        return self.text or f"{self.kind} at {self.site.line}"

    def describe(self, position: int = 0) -> CallDescription:
        """Return the call in words, as the replica at `position` of `replica_ids` makes it."""
        return self.words(position)._replace(wire=self.options.wire, handled=self.handled)

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
