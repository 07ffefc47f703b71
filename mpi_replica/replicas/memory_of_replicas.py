"""Whose memory an array is in, among the replicas of a rank, which share one process."""

from __future__ import annotations

import bisect
import itertools
import operator
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import numpy as np

from ..collectives.outputs import are_owners, bounds_of
from ..core.array_libraries import library_of
from ..core.array_ways import COMMON_TYPES, Array, TorchWay
from ..core.indexed_slices import IndexedSlices
from .shared_generators import bit_generator_of, is_generator

#: What to do where it is one memory: how each replica gets one of its own, or does without.
MADE_APART = (
    "as strategy.experimental_distribute_values_from_function makes them, or make the step in a"
    " merge_fn, which runs once on each rank"
)

#: The addresses between which an array lies, and that array.
Extent = tuple[int, int, Any]

# Arrays whose bounds cross, as those of columns, are compared by their elements: not where that is
# hard, nor with any number of them.
_MOST_WORK = 1000
_MOST_CROSSING = 64

# Types of what nobody writes.
_PLAIN = (COMMON_TYPES | {type(None), str, bytes}) - {np.ndarray}


class MemoryOfReplicas:
    """The memory that replicas hold arrays in: of each its parts, apart from each other, in order.

    Attributes
    ----------
    begins, ends : dict of list of int
        Addresses, by replica.
    crossing : dict of list of list of Extent
        What lies between these.
    """

    def __init__(self) -> None:
        self.begins: dict[int, list[int]] = {}
        self.ends: dict[int, list[int]] = {}
        self.crossing: dict[int, list[list[Extent]]] = {}

    def add(self, extents: Sequence[Extent], replica_id: int) -> None:
        """Notes that a replica holds a value, which lies there."""
        for extent in extents:
            begin, end, _ = extent
            begins = self.begins.setdefault(replica_id, [])
            ends = self.ends.setdefault(replica_id, [])
            crossing = self.crossing.setdefault(replica_id, [])
            first, last = bisect.bisect_right(ends, begin), bisect.bisect_left(begins, end)
            if first < last:
                begin, end = min(begin, begins[first]), max(end, ends[last - 1])
            begins[first:last], ends[first:last] = [begin], [end]
            crossing[first:last] = [[*itertools.chain(*crossing[first:last]), extent]]

    def is_of_another(self, extents: Sequence[Extent], replica_id: int | None) -> bool:
        """Returns whether a value that lies there may be in memory of another replica than this.

        Of any one, where that is None.
        """
        for extent in extents:
            begin, end, _ = extent
            for holder, ends in self.ends.items():
                if holder != replica_id:
                    first = bisect.bisect_right(ends, begin)
                    last = bisect.bisect_left(self.begins[holder], end)
                    for others in self.crossing[holder][first:last]:
                        if _may_share(extent, others):
                            return True
        return False


def _may_share(extent: Extent, others: Sequence[Extent]) -> bool:
    """Returns whether a value may share elements with others."""
    if len(others) > _MOST_CROSSING:
        return True
    begin, end, value = extent
    return any([a < end and begin < b and _share_elements(value, other) for a, b, other in others])


def _share_elements(one: Any, other: Any) -> bool:
    """Returns whether two values, whose bounds cross, may share elements."""
    if one is other:
        return True
    try:
        elements = _elements_of(one), _elements_of(other)
        return np.shares_memory(*elements, max_work=_MOST_WORK)  # type: ignore[arg-type]
    except RuntimeError:  # too hard, or a nested tensor
        return True


def are_apart(values: Iterable[Any]) -> bool:
    """Returns whether values that are two objects share no memory."""
    by_id = {id(value): value for value in values}
    if _have_own_memory(by_id.values()):
        return True
    extents = itertools.chain.from_iterable(map(extents_of, by_id.values()))
    bounds = sorted([(begin, end) for begin, end, _ in extents])
    return all([end <= begin for (_, end), (begin, _) in itertools.pairwise(bounds)])


def _have_own_memory(values: Collection[Any]) -> bool:
    """Returns whether these are plain values, and arrays that no other one is a part of; quick."""
    arrays = [value for value in values if type(value) is np.ndarray]
    return set(map(type, values)) <= COMMON_TYPES and are_owners(arrays)


def held_by_several(
    of_replicas: Sequence[Sequence[Any]], of_all: Iterable[Any] = ()
) -> dict[int, Any]:
    """Returns, by their ids, the values of replicas that others hold, too, or parts of them.

    `of_all` is what each of them holds. Plain numbers and texts, which nobody writes, are left out.
    Of very many whose bounds cross, as those of columns, not all pairs are looked at.
    """
    common = [value for value in of_all if not _is_plain(value)]
    own = [[value for value in mine if not _is_plain(value)] for mine in of_replicas]
    by_id = {id(value): value for value in itertools.chain(common, *own)}
    # Which replica holds a value; None where several do.
    holders: dict[int, int | None] = dict.fromkeys(map(id, common))
    for replica, mine in enumerate(own):
        for name in map(id, mine):
            if holders.setdefault(name, replica) != replica:
                holders[name] = None
    several = {name: by_id[name] for name, holder in holders.items() if holder is None}
    if _have_own_memory(by_id.values()):
        return several
    names = {*map(id, itertools.chain(*own))}
    extents = [(*extent, name) for name in names for extent in extents_of(by_id[name])]
    first = min([begin for begin, *_ in extents], default=0)
    last = max([end for _, end, *_ in extents], default=0)
    for name in by_id.keys() - names:  # of what all hold, mostly nothing lies near these
        for extent in extents_of(by_id[name]):
            if extent[0] < last and first < extent[1]:
                extents.append((*extent, name))
    extents.sort(key=operator.itemgetter(0, 1))
    for position, (_, end, value, name) in enumerate(extents, 1):
        holder = holders[name]
        for begin, _, other, other_name in extents[position : position + _MOST_CROSSING]:
            if begin >= end:
                break
            if holders[other_name] != holder and _share_elements(value, other):
                several |= {name: by_id[name], other_name: by_id[other_name]}
    return several


def _is_plain(value: Any) -> bool:
    return type(value) in _PLAIN


def extents_of(value: Any) -> Sequence[Extent]:
    """Returns where a value lies, which may be no array; nothing of what nobody can write into."""
    if _is_plain(value):
        return ()
    if isinstance(value, IndexedSlices):
        return (*extents_of(value.values), *extents_of(value.indices))
    if isinstance(value, np.void):  # an item of an array, which may be written through it
        value = np.frombuffer(value, np.uint8)
    if isinstance(value, np.ndarray):
        if value.size:
            return ((*bounds_of(value), value),)
        return ((id(value), id(value) + 1, value),)  # it can be locked, as any other one
    if (bits := bit_generator_of(value)) is not None:  # several generators may draw from one
        return ((id(bits), id(bits) + 1, bits),)
    library = library_of(value)
    if library == "jax" or (library is None and not can_be_copied(value)):
        return ()
    if library == "torch":
        begin, end = TorchWay.bounds(value)
        if begin:
            return ((begin, end, value),)
    return ((id(value), id(value) + 1, value),)  # it is known by itself alone


def can_be_copied(value: Any) -> bool:
    """Returns whether it is a set, bytearray or generator, of which a copy can be made."""
    return type(value) in (set, bytearray) or is_generator(value)


def _elements_of(value: Any) -> Array:
    """Returns an array of numpy, or a tensor as one whose dtype means nothing."""
    if isinstance(value, np.ndarray):
        return value
    return np.asarray(_ElementsOfTensor(value))


class _ElementsOfTensor:
    """Where the elements of a tensor lie, as numpy takes it; nothing is read there."""

    def __init__(self, tensor: Any) -> None:
        size = tensor.element_size()
        self.__array_interface__ = {
            "version": 3,
            "typestr": f"|V{size}",
            "shape": tuple(tensor.shape),
            "data": (tensor.data_ptr(), False),
            "strides": tuple([stride * size for stride in tensor.stride()]),
        }
