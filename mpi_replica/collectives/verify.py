"""verify: what should be the same on all replicas is compared, and the first difference is told.

One header tells that all is the same: a digest of everything travels in it. Where it is not, the
ranks narrow the difference down, to a leaf and then to an element of it. Of a `PerReplica` a rank
has a component for each of its replicas; of anything else one value, which is that of all of them.
"""

from __future__ import annotations

import hashlib
import marshal
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from ..core import nest
from ..core.digests import DIGEST_BYTES
from ..core.exceptions import DivergenceError
from ..core.layout import Layout, grouped
from ..core.options import CommunicationOptions
from ..core.values import DistributedValues, PerReplica
from .agreement.call import Call
from .agreement.group import Group
from .agreement.site import CallSite
from .agreement.stand import LeafDescription
from .agreement.steps import Agree, Raise, Steps, Texts
from .contents import Content, content_of, element_name, element_texts
from .difference_search import SMALL_BYTES, Difference, differing_units, search

# More groups of replicas, or leaves, are counted only.
_MOST_SHOWN = 8
# For values of ranks, and of replicas.
_ADVICE = (
    "What is mirrored must be given the same value on all {}: what all_reduce, reduce or"
    " broadcast_to returned, or what is computed alike from it."
)


class _Compared(NamedTuple):
    """A leaf that is compared."""

    path: str
    #: Of a variable.
    name: str | None
    #: That of each local replica, or one of them all.
    values: Sequence[Any]
    is_per_replica: bool

    def contents(self) -> list[Content]:
        return [content_of(value, self.path) for value in self.values]


class Verification(Call):
    """The comparison of a nest between the replicas.

    Parameters
    ----------
    name_of : callable
        Gives a name for a variable, the same on all ranks; None for any other leaf.
    layout : Layout
        That of the strategy.
    """

    kind = "verify"

    def __init__(
        self,
        site: CallSite,
        options: CommunicationOptions,
        value: Any,
        detail: str,
        name_of: Callable[[Any], str | None],
        layout: Layout,
    ) -> None:
        super().__init__(site, options)
        self.detail = detail
        leaves, self.structure = nest.flatten(value)
        self.names = tuple(
            "PerReplica" if isinstance(leaf, PerReplica) else name_of(leaf) for leaf in leaves
        )
        self.leaves: list[_Compared] = []
        paths = nest.leaf_paths(self.structure)
        for leaf, path, name in zip(leaves, paths, self.names, strict=True):
            if isinstance(leaf, PerReplica):
                leaf.require(layout.num_replicas)
                components = leaf.components(layout.local_replica_ids)
                self.leaves.append(_Compared(path, None, components, True))
            elif not isinstance(leaf, DistributedValues):
                self.leaves.append(_Compared(path, name, [leaf], False))
            elif leaf.components(()) is None:  # others have a component for each replica
                self.leaves.append(_Compared(path, name, [leaf.shared_value()], False))
        self.identify((detail, nest.key(self.structure), self.names))

    def leaves_in_words(self, position: int) -> tuple[LeafDescription, ...]:
        return tuple(LeafDescription(name or "value") for name in self.names)

    def prepare(
        self, group: Group, calls: Sequence[Verification]
    ) -> tuple[bytes, tuple[bytes, list[bytes]]]:
        layout = group.layout
        count = layout.counts[layout.rank]
        is_alone = layout.size == 1
        has_digests = not is_alone or any(len(leaf.values) > 1 for leaf in self.leaves)
        columns = []
        for leaf in self.leaves:
            contents = leaf.contents()
            if has_digests:
                digests = [content.digest() for content in contents]
                columns.append(digests * (count // len(digests)))
        rows = [b"".join(row) for row in zip(*columns, strict=True)] or [b""]
        mine = hashlib.blake2b(rows[0], digest_size=DIGEST_BYTES).digest()
        mine += b"\1" * (len(set(rows)) > 1)  # so that all other ranks see a difference
        return mine, (mine, rows)

    def steps(
        self, group: Group, calls: Sequence[Verification], prepared: tuple[bytes, list[bytes]]
    ) -> Steps[None] | None:
        mine, rows = prepared
        if len(set(rows)) == 1 and all(one == mine for one in group.payloads()):
            return None
        return self._tell_difference(group.layout, rows)

    def _tell_difference(self, layout: Layout, digests: Sequence[bytes]) -> Steps[None]:
        """Finds the first difference, and raises it; all ranks come here, and to the same text."""
        rows = yield from self._exchange(layout, digests)
        differing = differing_units(rows, DIGEST_BYTES)
        contents = yield Agree(lambda: (b"", self.leaves[differing[0]].contents()))
        difference = None
        mine = [f"{content.kind}\0{content.text}".encode() for content in contents]
        heads = yield from self._exchange(layout, mine)
        kinds, _, texts = zip(*(head.decode().partition("\0") for head in heads), strict=True)
        if len(set(kinds)) == 1:
            difference = yield from self._search(layout, contents)
        if difference is not None:
            where, sides = _place_and_sides(difference, contents[0])
        elif len(set(kinds)) == 1:
            where, sides = "it was changed while the ranks compared it", {}
        else:
            where, sides = "", grouped(texts)
        at = differing[0] * DIGEST_BYTES
        groups = list(grouped(row[at : at + DIGEST_BYTES] for row in rows).values())
        yield Raise(DivergenceError(self._text(differing, groups, where, sides, layout)))

    def _text(
        self,
        differing: Sequence[int],
        groups: Sequence[Sequence[int]],
        where: str,
        sides: Mapping[str, Sequence[int]],
        layout: Layout,
    ) -> str:
        """Returns the text of the error.

        `differing` are the leaves that differ; `groups` the replicas that hold the same in the
        first of them; `sides` those that hold the same at its first difference, by what they hold.
        """
        path, name, _, is_per_replica = self.leaves[differing[0]]
        what = f"value{path}" if name is None else f"{name} (value{path})"
        held = _listed([f"{text} on {layout.describe(ids)}" for text, ids in sides.items()], "; ")
        text = f"verify at {self.site.line}: {what} differs: {where}{held}."
        if list(sides.values()) != groups:
            those = _listed([layout.describe(ids) for ids in groups], " and ")
            text += f" As a whole it differs between {those}."
        if len(differing) > 1:
            further = _listed([f"value{self.leaves[index].path}" for index in differing[1:]], ", ")
            text += f" Further leaves that differ: {further}."
        remedy = "rank 0 has: value = strategy.extended.broadcast_to(value)"
        if name is not None:
            remedy = "rank 0 has: variable.assign(variable) in cross-replica context"
        elif is_per_replica:
            remedy = (
                "replica 0 has: value = strategy.extended.broadcast_to("
                "strategy.experimental_local_results(value)[0])"
            )
        advice = _ADVICE.format("replicas" if is_per_replica else "ranks")
        return f"{text} {advice} To go on with what {remedy}."

    def _search(self, layout: Layout, contents: Sequence[Content]) -> Steps[Difference | None]:
        searches = [search(content.data, _unit_bytes(content)) for content in contents]
        wanted = [next(one) for one in searches]
        while True:
            rows = yield from self._exchange(layout, wanted)
            try:
                wanted = [one.send(rows) for one in searches]
            except StopIteration as end:  # all of them come to the same
                return end.value  # type: ignore[no-any-return]

    def _exchange(self, layout: Layout, mine: Sequence[bytes]) -> Steps[list[bytes]]:
        """Returns what each replica gives: `mine` of the local ones, or one for them all."""
        if len(set(mine)) == 1:
            mine = mine[:1]
        texts = yield Texts(marshal.dumps(list(mine)))
        each = zip(map(marshal.loads, texts), layout.counts, strict=True)
        return [part for parts, count in each for part in parts * (count // len(parts))]


def _listed(words: Sequence[str], separator: str) -> str:
    more = [f"{len(words) - _MOST_SHOWN} more"] if len(words) > _MOST_SHOWN else []
    return separator.join([*words[:_MOST_SHOWN], *more])


def _unit_bytes(content: Content) -> int:
    """Returns how much is compared as one: an element; of large ones, as strings can be, a byte."""
    itemsize = content.dtype.itemsize
    return itemsize if itemsize <= SMALL_BYTES else 1


def _place_and_sides(difference: Difference, content: Content) -> tuple[str, dict[str, list[int]]]:
    """Returns the words for where the first difference is, and the replicas by what they hold."""
    unit_bytes = _unit_bytes(content)
    groups = grouped(difference.units)
    texts = element_texts(content, list(groups))
    sides = dict(zip(texts, groups.values(), strict=True))
    total = content.data.size // unit_bytes
    if total == 1:
        return "", sides
    units = "elements" if unit_bytes == content.dtype.itemsize else "bytes"
    number = f"{'' if difference.is_exact else 'at least '}{difference.number} of {total} {units}"
    return f"{number}, first {element_name(content, unit_bytes, difference.position)}: ", sides
