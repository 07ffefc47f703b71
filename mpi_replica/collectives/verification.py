"""verify: what should be the same on all ranks is compared, and the first difference is told.

One header tells that all is the same: a digest of everything travels in it. Where it is not, the
ranks narrow the difference down, to a leaf and then to an element of it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, NoReturn

from .. import nest
from ..errors import DivergenceError
from ..layout import Layout
from ..options import CommunicationOptions
from ..values import DistributedValues, PerReplica
from .call import Call
from .callsite import CallSite
from .contents import Content, content_of, element_name, element_texts
from .differences import SMALL_BYTES, Difference, differing_units, search
from .digests import DIGEST_BYTES
from .engine import Engine
from .judgement import Verdict
from .standing import CallDescription, LeafDescription

__all__ = ["Verification"]

# More groups of ranks, or leaves, are counted only.
_MOST_SHOWN = 8
_ADVICE = (
    "What is mirrored must be given the same value on all ranks: what all_reduce, reduce or"
    " broadcast_to returned, or what is computed alike from it."
)


class Verification(Call):
    """The comparison of a nest between the ranks.

    Parameters
    ----------
    name_of : callable
        Gives a name for a variable, the same on all ranks; None for any other leaf.
    """

    kind = "verify"

    def __init__(
        self,
        value: Any,
        detail: str,
        name_of: Callable[[Any], str | None],
        site: CallSite,
        options: CommunicationOptions,
    ) -> None:
        super().__init__(site, options)
        self.detail = detail
        leaves, self.structure = nest.flatten(value)
        self.names = tuple(name_of(leaf) for leaf in leaves)
        #: Path, name and value of the leaves that are compared.
        self.leaves: list[tuple[str, str | None, Any]] = []
        paths = nest.leaf_paths(self.structure)
        for leaf, path, name in zip(leaves, paths, self.names, strict=True):
            if isinstance(leaf, PerReplica):
                raise ValueError(
                    f"verify got a PerReplica for value{path}: it differs between replicas by"
                    " design. Reduce or gather it first: strategy.reduce(op, value, axis=None)."
                )
            if not isinstance(leaf, DistributedValues):
                self.leaves.append((path, name, leaf))
            elif leaf.components(()) is None:  # others have a component for each replica
                self.leaves.append((path, name, leaf.shared_value()))
        self.identify((detail, nest.key(self.structure), self.names))

    def words(self, position: int = 0) -> CallDescription:
        return CallDescription(
            self.kind,
            self.detail,
            self.site,
            self.options.name,
            nest.structure_text(self.structure),
            nest.leaf_paths(self.structure),
            tuple(LeafDescription(name or "value") for name in self.names),
        )

    def perform(self, engine: Engine, calls: Sequence[Verification]) -> list[Any]:
        agreement = engine.agreement
        is_alone = engine.layout.size == 1
        digests: list[bytes] = []
        with agreement.preparing(calls):
            for path, _, leaf in self.leaves:
                content = content_of(leaf, path)
                if not is_alone:
                    digests.append(content.digest())
            joined = b"".join(digests)
            mine = hashlib.blake2b(joined, digest_size=DIGEST_BYTES).digest()
        agreement.agree(calls, b"" if is_alone else mine)
        if not is_alone and any(other != mine for other in agreement.payloads()):
            self._tell_difference(engine, joined)
        return [None for _ in calls]

    def _tell_difference(self, engine: Engine, digests: bytes) -> NoReturn:
        """Find the first difference, and raise it; all ranks come here, and to the same text."""
        with engine.moving(self):
            rows = self._exchange(engine, digests)
        differing = differing_units(rows, DIGEST_BYTES)
        path, _, leaf = self.leaves[differing[0]]
        with engine.agreement.preparing([self]):
            content = content_of(leaf, path)
        engine.agreement.agree([self])  # all ranks could make it
        found = None
        with engine.moving(self):
            head = f"{content.kind}\0{content.text}"
            heads = [row.decode() for row in self._exchange(engine, head.encode())]
            kinds, _, texts = zip(*(head.partition("\0") for head in heads), strict=True)
            if len(set(kinds)) == 1:
                found = self._search(engine, content)
        if found is not None:
            where, sides = _told(found, content)
        elif len(set(kinds)) == 1:
            where, sides = "it was changed while the ranks compared it", {}
        else:
            where, sides = "", _groups(texts)
        at = differing[0] * DIGEST_BYTES
        groups = list(_groups(row[at : at + DIGEST_BYTES] for row in rows).values())
        error = DivergenceError(self._text(differing, groups, where, sides, engine.layout))
        engine.agreement.raise_agreed(error, Verdict("raise", error))

    def _text(
        self,
        differing: Sequence[int],
        groups: Sequence[Sequence[int]],
        where: str,
        sides: Mapping[str, Sequence[int]],
        layout: Layout,
    ) -> str:
        """Return the text of the error.

        `differing` are the leaves that differ; `groups` the ranks that hold the same in the first
        of them; `sides` the ranks that hold the same at its first difference, by what they hold.
        """
        path, name, _ = self.leaves[differing[0]]
        what = f"value{path}" if name is None else f"{name} (value{path})"
        held = _listed([f"{text} on {_who(ranks, layout)}" for text, ranks in sides.items()], "; ")
        text = f"verify at {self.site.line}: {what} differs: {where}{held}."
        if list(sides.values()) != groups:
            those = _listed([_who(ranks, layout) for ranks in groups], " and ")
            text += f" As a whole it differs between {those}."
        if len(differing) > 1:
            further = _listed([f"value{self.leaves[index][0]}" for index in differing[1:]], ", ")
            text += f" Further leaves that differ: {further}."
        remedy = (
            "value = strategy.extended.broadcast_to(value)"
            if name is None
            else "variable.assign(variable) in cross-replica context"
        )
        return f"{text} {_ADVICE} To go on with what rank 0 has: {remedy}."

    def _search(self, engine: Engine, content: Content) -> Difference | None:
        searching = search(content.data, _unit_bytes(content))
        wanted = next(searching)
        while True:
            try:
                wanted = searching.send(self._exchange(engine, wanted))
            except StopIteration as end:
                return end.value  # type: ignore[no-any-return]

    def _exchange(self, engine: Engine, data: bytes) -> list[bytes]:
        seconds = self.options.timeout_seconds
        return engine.carry(engine.transport.all_gather_bytes, data, seconds)


def _groups(sides: Iterable[Hashable]) -> dict[Any, list[int]]:
    """Return the ranks on each side, in the order of their first ranks."""
    groups: dict[Any, list[int]] = {}
    for rank, side in enumerate(sides):
        groups.setdefault(side, []).append(rank)
    return groups


def _who(ranks: Sequence[int], layout: Layout) -> str:
    return layout.describe(i for rank in ranks for i in layout.replica_ids(rank))


def _listed(words: Sequence[str], separator: str) -> str:
    more = [f"{len(words) - _MOST_SHOWN} more"] if len(words) > _MOST_SHOWN else []
    return separator.join([*words[:_MOST_SHOWN], *more])


def _unit_bytes(content: Content) -> int:
    """Return how much is compared as one: an element; of large ones, as strings can be, a byte."""
    itemsize = content.dtype.itemsize
    return itemsize if itemsize <= SMALL_BYTES else 1


def _told(found: Difference, content: Content) -> tuple[str, dict[str, list[int]]]:
    """Return the words for where the first difference is, and the ranks by what they hold there."""
    unit_bytes = _unit_bytes(content)
    groups = _groups(found.units)
    texts = element_texts(content, list(groups))
    sides = dict(zip(texts, groups.values(), strict=True))
    total = content.data.size // unit_bytes
    if total == 1:
        return "", sides
    units = "elements" if unit_bytes == content.dtype.itemsize else "bytes"
    number = f"{'' if found.is_exact else 'at least '}{found.number} of {total} {units}"
    return f"{number}, first {element_name(content, unit_bytes, found.position)}: ", sides
