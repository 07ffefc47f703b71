"""A collective call: what every kind of call has in common.

A kind of call is three functions: `prepare` before the ranks agree, `steps` for what travels, and
`answer` for what is done with it. None of them does I/O: `driver` does the steps.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple, Self

from ...core import nest
from ...core.bounded_cache import BoundedCache
from ...core.options import CommunicationOptions
from ...core.telling_keys import require_telling_keys
from ...ranks.transport import Payload
from .group import Group
from .site import CallSite, FunctionIdentity
from .stand import CallDescription, LeafDescription
from .steps import Steps


class Known(NamedTuple):
    """What is worked out once for all calls that are alike."""

    fingerprint: int
    #: The call and its place, as "all_reduce(SUM, 12 leaves, 4.1 MB) at train.py:88".
    text: str
    #: What a kind of call needs beside; see `Call.make_plan`.
    plan: Any


_known: BoundedCache[Hashable, Known] = BoundedCache(4096)


class Call:
    """What one replica, or a rank in cross-replica context, asks for.

    Making one does all that can fail without the others: checks and conversions. One that could
    not be made is a plain `Call` with an `error`, which tells the others.
    """

    #: "all_reduce"
    kind: str = ""
    #: What of the arguments must be the same, in words.
    detail: str = ""
    #: The function that it is about, of which the code must be the same, too.
    identity: FunctionIdentity | None = None
    #: That of the nest that it takes.
    structure: nest.Structure = nest.flatten(None)[1]
    #: Where the leaves are, where these are only some of the leaves of `structure`.
    flat_paths: Sequence[str] | None = None
    #: "calls", or "returned" for the end of a run
    status: str = "calls"
    #: Ids of the replicas that call: one, or all local ones in cross-replica context.
    replica_ids: tuple[int, ...] = ()
    #: What went wrong while it was made; such a call only tells the others.
    error: BaseException | None = None
    #: Whether all ranks have raised that already: see `Agreement.was_told`.
    is_told: bool = False
    #: The exception that the replica handled when it came to the call, in words.
    handled: str = ""
    #: The call that it goes back through, where it is on the way of gradients.
    through: str = ""
    #: What to do where other replicas do not make it.
    advice: str = ""
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
        """Sets fingerprint, text and plan; `key` and the site tell this call from all others."""
        options = self.options
        whole = (self.kind, self.site.digest, options.name, options.wire, key)
        known = _known.get(whole)
        if known is None:
            plan = self.make_plan()
            description = self.describe()
            text = f"{description.what} at {description.where}"
            known = Known(description.fingerprint(), text, plan)
            _known.keep(whole, known, self.structure.num_leaves)
        self.fingerprint, self.text, self.plan = known

    def make_plan(self) -> Any:
        """Returns what depends on nothing but the key of this call."""
        return None

    @property
    def title(self) -> str:
        """The call and its place in words, also where it was not identified."""
        return self.text or f"{self.kind} at {self.site.line}"

    def describe(self, position: int = 0) -> CallDescription:
        """Returns the call in words, as the replica at `position` of `replica_ids` makes it."""
        description = self.words(position)
        return description._replace(
            wire=self.options.wire,
            handled=self.handled,
            through=self.through,
            advice=self.advice,
        )

    def words(self, position: int = 0) -> CallDescription:
        """Returns what `describe` gives, without what all kinds of call have in common."""
        require_telling_keys(self.structure)
        identity = self.identity
        code, text = (b"", "") if identity is None else (identity.digest, identity.text)
        return CallDescription(
            self.kind,
            f"{self.detail}{text}",
            self.site,
            self.options.name,
            nest.structure_text(self.structure),
            self.paths,
            self.leaves_in_words(position),
            code=code.hex(),
        )

    @property
    def paths(self) -> tuple[str, ...]:
        """Where each leaf is."""
        paths = self.flat_paths
        return nest.leaf_paths(self.structure) if paths is None else tuple(paths)

    def leaves_in_words(self, position: int) -> tuple[LeafDescription, ...]:
        """Returns what `words` tells of the leaves of the replica at `position`."""
        return ()

    @property
    def lent(self) -> Sequence[Any]:
        """What the replica gives to it that may change nowhere else until it is performed."""
        return ()

    def promote(self, change: Sequence[Any]) -> None:
        """Changes what the replicas don't have in common, as reports say; it is made again then."""
        raise NotImplementedError

    def prepare(self, group: Group, calls: Sequence[Self]) -> tuple[Payload, Any] | None:
        """Returns what travels with the header, and what `steps` needs; None for no header.

        `calls` agree, one for each local replica; calls in cross-replica context come alone. An
        error here is raised on all ranks, and the strategy works on. Without a header the ranks
        compare with the next one what stands in the notes of the group.
        """
        return b"", None

    def steps(self, group: Group, calls: Sequence[Self], prepared: Any) -> Steps[Any] | Any:
        """Returns the results, where all came with the header, or the steps that lead to them.

        No function of the program may run here but in an `Agree`: an error ends the strategy.
        """
        return None

    def answer(self, calls: Sequence[Self], results: Any) -> list[Any]:
        """Returns the result of each of `calls`. An error here is the replica's own."""
        return [results] * len(calls)
