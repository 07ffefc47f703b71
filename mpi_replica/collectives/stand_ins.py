"""What a ``merge_fn`` gets in the place of some arrays, so that it gets alike ones on every rank.

From another rank an array comes in C order and in memory of its own. So it does from here: where it
lies in another order, or crosses another argument, a copy stands in for it. What is written into
the copy is written into the argument afterwards.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Self, TypeVar

import numpy as np

from ..core.array_libraries import (
    copied_in_c_order,
    dtype_of,
    is_in_c_order,
    is_strided,
    to_numpy,
    written,
)
from ..core.array_ways import Array, TorchWay
from ..core.digests import digest_of
from ..core.object_state import LEAF_TYPES
from .arguments import refuses_writes
from .outputs import bounds_of

T = TypeVar("T")

#: From where to where an array lies, and its place.
_Span = tuple[int, int, int]

_NO_ARRAYS = LEAF_TYPES - {np.ndarray}


class StandIn(NamedTuple):
    """A copy of an argument, in C order, and in memory of its own.

    The order of additions, and so the bits of a sum, follow from that in memory.
    """

    original: Any
    copy: Any
    #: Of the copy, as it was made.
    digest: int

    @classmethod
    def of(cls, value: Any) -> Self:
        copy = copied_in_c_order(value)
        return cls(value, copy, digest_of(copy))

    @property
    def is_written(self) -> bool:
        """Whether something was written into the copy."""
        return digest_of(self.copy) != self.digest

    @property
    def is_original(self) -> bool:
        """Whether the argument holds the same values now."""
        return digest_of(self.copy) == digest_of(self.original)

    def written_elements(self) -> Array:
        """Returns which elements of the copy are other than those of the argument."""
        bits = _bits(to_numpy(self.original)) != _bits(to_numpy(self.copy))
        found: Array = bits.any(axis=1).reshape(tuple(self.copy.shape))
        return found

    def write_back(self, where: Array) -> None:
        """Writes into the argument these elements of its copy."""
        if isinstance(self.original, np.ndarray):
            np.copyto(self.original, self.copy, where=where)
            return
        # Of elements in the same memory, as those of an expanded tensor, one is written.
        apart = tuple([slice(0, None if step else 1) for step in self.original.stride()])
        values = np.array(to_numpy(self.original[apart]))
        np.copyto(values, to_numpy(self.copy[apart]), where=where[apart])
        written(self.original[apart], values)


class StandIns:
    """The arguments of one replica as its own rank gets them, where some are copies.

    Parameters
    ----------
    leaves : list
        What the replica has given; of what torch records, constants.
    originals : dict
        What it has given, by the ids of these constants. Copies come to it.
    """

    def __init__(self, leaves: list[Any], originals: dict[int, Any]) -> None:
        self._given = leaves
        #: As a ``merge_fn`` gets them.
        self.leaves = leaves
        self.originals = originals
        #: By their places.
        self.copies: dict[int, StandIn] = {}
        # Of copies of what is in the memory of other replicas' arguments, too.
        self._places_of_several: set[int] = set()
        #: Whether some may be in memory of others.
        self.may_cross = False
        if _NO_ARRAYS.issuperset(map(type, leaves)):
            return
        places = set()
        for place, leaf in enumerate(leaves):
            if type(leaf) is np.ndarray:
                flags = leaf.flags
                if not flags.owndata:
                    self.may_cross = True
                if not flags.c_contiguous and not leaf.dtype.hasobject:
                    places.add(place)
            elif type(leaf) not in _NO_ARRAYS and is_strided(leaf):
                self.may_cross = True
                if not is_in_c_order(leaf):
                    places.add(place)
        if len(leaves) > 1 and (self.may_cross or len({*map(id, leaves)}) < len(leaves)):
            for group in _crossing(self.spans):
                if self.can_be_written(group):
                    places.update(group)
        if places:
            self.may_cross = True
            self.leaves = list(leaves)
            for place in sorted(places):
                self.put(place, self.leaves)

    @functools.cached_property
    def spans(self) -> list[_Span]:
        """From where to where each array lies that the replica has given, and its place; sorted."""
        spans = []
        for place, leaf in enumerate(self._given):
            if type(leaf) is np.ndarray:
                if leaf.nbytes and not leaf.dtype.hasobject:
                    spans.append((*bounds_of(leaf), place))
            elif type(leaf) not in _NO_ARRAYS and is_strided(leaf):
                spans.append((*TorchWay.bounds(leaf), place))
        spans.sort()
        return spans

    def can_be_written(self, places: Iterable[int]) -> bool:
        """Returns whether some of the arrays there can be."""
        return not all([refuses_writes(self._given[place]) for place in places])

    def put(self, place: int, leaves: list[Any]) -> None:
        """Puts a copy into `leaves`; not of an array of which numpy can't see the values."""
        leaf = leaves[place]
        if isinstance(leaf, np.ndarray) or _has_dtype(leaf):
            self.copies[place] = found = StandIn.of(leaf)
            leaves[place] = found.copy
            self.originals[id(found.copy)] = self.originals.get(id(leaf), leaf)

    def put_for_several(self, place: int, leaves: list[Any]) -> None:
        """Puts a copy of an array in the memory of other replicas' into `leaves`, if it is none."""
        if place not in self.copies:
            self.put(place, leaves)
        if place in self.copies:
            self._places_of_several.add(place)

    def forget_overwritten(self) -> None:
        """Forgets of which arguments copies are where other replicas have written into these."""
        for place in self._places_of_several:
            copy = self.copies[place]
            if not copy.is_original:
                self.originals.pop(id(copy.copy), None)


def separate(replicas: Sequence[StandIns], rows: Sequence[list[Any]]) -> None:
    """Puts copies into the rows of a rank's replicas, of arrays in memory that several give.

    Where a row has another object than its replica has given, that is a copy already.
    """
    if not any([one.may_cross for one in replicas]):
        return
    spans = [
        (begin, end, (replica, place))
        for replica, one in enumerate(replicas)
        for begin, end, place in one.spans
    ]
    for group in _crossing(sorted(spans)):
        held = [
            (replicas[replica], rows[replica], place)
            for replica, place in group
            if place in replicas[replica].copies
            or rows[replica][place] is replicas[replica].leaves[place]
        ]
        can_be_written = any([one.can_be_written([place]) for one, _, place in held])
        if can_be_written and len({id(one) for one, _, _ in held}) > 1:
            for one, row, place in held:
                one.put_for_several(place, row)


def write_back(replicas: Iterable[StandIns]) -> bool:
    """Writes into arguments what was written into their copies; of one element, the last.

    Returns whether anything was.
    """
    copies = itertools.chain.from_iterable([one.copies.values() for one in replicas])
    found = [(copy, copy.written_elements()) for copy in copies if copy.is_written]
    for copy, where in found:
        copy.write_back(where)
    return bool(found)


def _crossing(spans: Sequence[tuple[int, int, T]]) -> list[list[T]]:
    """Returns groups of what crosses, out of sorted spans.

    Arrays that cross, and share no memory, are columns and the like: they are in no C order.
    """
    if all([end <= begin for (_, end, _), (begin, _, _) in itertools.pairwise(spans)]):
        return []
    groups: list[list[T]] = []
    last = 0
    for begin, end, name in spans:
        if begin >= last:
            groups.append([])
        groups[-1].append(name)
        last = max(last, end)
    return [group for group in groups if len(group) > 1]


def _has_dtype(tensor: Any) -> bool:
    try:
        return dtype_of(tensor) is not None
    except TypeError:
        return False


def _bits(array: Array) -> Array:
    """Returns the bytes of each element, in C order."""
    flat = np.ascontiguousarray(array.reshape(-1))
    return flat.view(np.uint8).reshape(flat.size, -1)
