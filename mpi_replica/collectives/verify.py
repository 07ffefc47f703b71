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

from ..core import nest, object_state
from ..core.digests import DIGEST_BYTES
from ..core.exceptions import DivergenceError, StructureMismatchError
from ..core.layout import Layout, grouped, listed
from ..core.options import CommunicationOptions
from ..core.values import DistributedValues, PerReplica, per_replica
from .agreement.call import Call
from .agreement.group import Group
from .agreement.site import CallSite, bytes_of
from .agreement.stand import LeafDescription
from .agreement.steps import Agree, Raise, Steps, Texts
from .contents import Content, content_of, element_name, element_texts
from .difference_search import SMALL_BYTES, Difference, differing_units, search

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
    #: The object whose state it is in, and where that is; None where it is in none.
    owner: tuple[Any, str] | None = None

    def contents(self) -> list[Content]:
        return [content_of(value, self.path) for value in self.values]


class Verification(Call):
    """The comparison of nests between the replicas.

    Parameters
    ----------
    parts : mapping
        The nests, by what they are called. Of an object in them its state is compared.
    name_of : callable
        Gives a name for a variable, the same on all ranks; None for any other leaf.
    layout : Layout
        That of the strategy.
    caller : str
        The name of the call.
    remedy : str
        What else can be done about a difference.
    """

    kind = "verify"

    def __init__(
        self,
        site: CallSite,
        options: CommunicationOptions,
        parts: Mapping[str, Any],
        detail: str,
        name_of: Callable[[Any], str | None],
        layout: Layout,
        *,
        caller: str = kind,
        remedy: str = "",
    ) -> None:
        super().__init__(site, options)
        self.kind, self.detail, self._remedy = caller, detail, remedy
        self.leaves: list[_Compared] = []
        self.names: list[str] = []
        whole = {}
        for part in sorted(parts):  # as dicts are flattened
            whole[part] = value = parts[part]
            outer, structure = nest.flatten(value)
            places = [f"{part}{path}" for path in nest.leaf_paths(structure)]
            opened = [  # `map` ends at a StopIteration
                _opened(leaf, where, caller, layout)
                for leaf, where in zip(outer, places, strict=True)
            ]
            for leaf, state, where in zip(outer, opened, places, strict=True):
                if state is leaf:
                    self._add(leaf, where, name_of(leaf), None, layout)
                    continue
                leaves, inside = nest.flatten(state)
                for inner, inner_path in zip(leaves, nest.leaf_paths(inside), strict=True):
                    self._add(inner, f"{where}{inner_path}", None, (leaf, where), layout)
            if any(state is not leaf for leaf, state in zip(outer, opened, strict=True)):
                whole[part] = nest.unflatten(structure, opened)
        # of `verify`, as the program has passed it
        self.structure = nest.flatten(whole.get("value", whole))[1]
        self.identify((detail, tuple(whole), nest.key(self.structure), tuple(self.names)))

    def _add(
        self,
        leaf: Any,
        path: str,
        name: str | None,
        owner: tuple[Any, str] | None,
        layout: Layout,
    ) -> None:
        """Notes what is to be compared of a leaf."""
        if not isinstance(leaf, DistributedValues):
            self.names.append("value")
            self.leaves.append(_Compared(path, None, [leaf], False, owner))
        elif isinstance(leaf, PerReplica):
            leaf.require(layout.num_replicas)
            components = leaf.components(layout.local_replica_ids)
            self.names.append("PerReplica")
            self.leaves.append(_Compared(path, None, components, True, owner))
        else:
            self.names.append(name or "value")
            if leaf.components(()) is None:  # others have a component for each replica
                self.leaves.append(_Compared(path, name, [leaf.shared_value()], False, owner))

    def leaves_in_words(self, position: int) -> tuple[LeafDescription, ...]:
        return tuple(map(LeafDescription, self.names))

    def prepare(
        self, group: Group, calls: Sequence[Verification]
    ) -> tuple[bytes, tuple[bytes, list[bytes]]]:
        layout = group.layout
        count = layout.counts[layout.rank]
        has_digests = layout.size > 1 or any(len(leaf.values) > 1 for leaf in self.leaves)
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
        if len(set(rows)) == 1 and all(one == mine for one in group.sizes.payloads()):
            return None
        return self._tell_difference(group.layout, rows)

    def _tell_difference(self, layout: Layout, digests: Sequence[bytes]) -> Steps[None]:
        """Finds the first difference, and raises it; all ranks come here, and to the same text."""
        rows = yield from self._exchange(layout, digests)
        differing = differing_units(rows, DIGEST_BYTES)
        contents = yield Agree(lambda: (b"", self.leaves[differing[0]].contents()))
        mine = [bytes_of(f"{content.kind}\0{content.text}") for content in contents]
        heads = yield from self._exchange(layout, mine)
        told = [head.decode(errors="surrogatepass").partition("\0") for head in heads]
        kinds, _, texts = zip(*told, strict=True)
        if len(set(kinds)) > 1:
            where, sides = "", grouped(texts)
        else:
            difference = yield from self._search(layout, contents)
            where, sides = _place_and_sides(difference, contents[0])
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
        path, name, _, is_per_replica, owner = self.leaves[differing[0]]
        what = path if name is None else f"{name} ({path})"
        held = listed([f"{text} on {layout.describe(ids)}" for text, ids in sides.items()], "; ")
        text = f"{self.kind} at {self.site.line}: {what} differs: {where}{held}."
        if list(sides.values()) != groups:
            those = listed([layout.describe(ids) for ids in groups], " and ")
            text += f" As a whole it differs between {those}."
        if len(differing) > 1:
            further = listed([self.leaves[index].path for index in differing[1:]], ", ")
            text += f" Further leaves that differ: {further}."
        advice = _ADVICE.format("replicas" if is_per_replica else "ranks")
        way_on = _way_on(name, owner, is_per_replica)
        return f"{text} {advice} To go on with what {way_on}.{self._remedy}"

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


def _opened(leaf: Any, where: str, caller: str, layout: Layout) -> Any:
    """Returns the state of an object, as a nest, in its place; anything else as it is."""
    if not isinstance(leaf, PerReplica):
        if isinstance(leaf, DistributedValues) or not object_state.has_state(leaf):
            return leaf
        return object_state.state_in(leaf)
    leaf.require(layout.num_replicas)
    ids = layout.local_replica_ids
    components = leaf.components(ids)
    if not any([object_state.holds_objects(one) for one in components]):
        return leaf
    rows, structures = [], []
    for part in components:
        state = nest.map_structure(lambda one: _opened(one, where, caller, layout), part)
        leaves, structure = nest.flatten(state)
        rows.append(leaves)
        structures.append(structure)
        if structure != structures[0]:
            raise _unlike(f"{caller} got {where}", structures, ids)
    columns = [per_replica(list(column), layout) for column in zip(*rows, strict=True)]
    return nest.unflatten(structures[0], columns)


def _unlike(
    what: str, structures: Sequence[nest.Structure], ids: Sequence[int]
) -> StructureMismatchError:
    """Returns the error of replicas of which the last one holds other leaves than the first."""
    first, last = (nest.leaf_paths(structures[i]) for i in (0, -1))
    more = [(path, ids[0]) for path in first if path not in set(last)]
    more += [(path, ids[len(structures) - 1]) for path in last if path not in set(first)]
    if not more:
        texts = [nest.structure_text(structures[i]) for i in (0, -1)]
        return StructureMismatchError(
            f"{what}, whose structure differs between replicas: {texts[0]} on replica {ids[0]},"
            f" {texts[1]} on replica {ids[len(structures) - 1]}. Make it alike on all replicas."
        )
    path, holder = more[0]
    return StructureMismatchError(
        f"{what}, whose state has other parts on replica {ids[0]} than on replica"
        f" {ids[len(structures) - 1]}: {path} is on replica {holder} alone. An optimizer's state"
        " grows at its first step: all replicas must make it."
    )


def _way_on(name: str | None, owner: tuple[Any, str] | None, is_per_replica: bool) -> str:
    """Returns who has what a program can go on with, and how."""
    if owner is not None:
        one, where = owner
        broadcast = "strategy.extended.broadcast_to({})".format
        if is_per_replica:
            state = broadcast(f"strategy.experimental_local_results({where})[0].state_dict()")
            load = "lambda one, state: one.load_state_dict(state)"
            return f"replica 0 has: strategy.run({load}, args=({where}, {state}))"
        if object_state.is_generator(one):
            return "one of them draws, give all the same seed"
        state = broadcast(f"{where}.state_dict()")
        return f"rank 0 has: strategy.run({where}.load_state_dict, args=({state},))"
    if name is not None:
        return "rank 0 has: variable.assign(variable) in cross-replica context"
    if is_per_replica:
        return (
            "replica 0 has: value = strategy.extended.broadcast_to("
            "strategy.experimental_local_results(value)[0])"
        )
    return "rank 0 has: value = strategy.extended.broadcast_to(value)"


def _unit_bytes(content: Content) -> int:
    """Returns how much is compared as one: an element; of large ones, as strings can be, a byte."""
    itemsize = content.dtype.itemsize
    return itemsize if itemsize <= SMALL_BYTES else 1


def _place_and_sides(
    difference: Difference | None, content: Content
) -> tuple[str, dict[str, list[int]]]:
    """Returns the words for where the first difference is, and the replicas by what they hold."""
    if difference is None:
        return "it was changed while the ranks compared it", {}
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
