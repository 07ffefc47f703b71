"""What a ``merge_fn`` gets in the place of some arrays, so that it gets alike ones on every rank.

From another rank an array comes in C order and in memory of its own. So it does from here: where it
lies in another order, is not aligned, or crosses another argument, a copy stands in for it. What is
written into the copy is written into the argument afterwards.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Self, TypeVar

import numpy as np

from ..core.array_libraries import (
    copied,
    copy_of,
    dtype_of,
    is_in_c_order,
    is_strided,
    to_numpy,
    values_of,
    written,
)
from ..core.array_ways import Array, TorchWay
from ..core.object_state import LEAF_TYPES
from .arguments import bytes_of, refuses_writes
from .outputs import bounds_of

T = TypeVar("T")

#: From where to where an array lies, and its place among the arguments.
_Extent = tuple[int, int, int]

_NO_ARRAYS = LEAF_TYPES - {np.ndarray}


class StandIn(NamedTuple):
    """A copy of an argument, in C order, and in memory of its own.

    The order of additions, and so the bits of a sum, follow from that in memory.
    """

    original: Any
    copy: Any
    #: What was in the copy when it was made.
    first: Array

    @classmethod
    def of(cls, value: Any) -> Self:
        copy = copied(value, "C")
        return cls(value, copy, bytes_of(copy).copy())

    def writes(self) -> _Writes | None:
        """Returns what has been written into the copy; None where nothing was.

        Raises
        ------
        ValueError
            It is no array of that shape and dtype any more, or the argument refuses writes.
        """
        was, is_now = self.original, self.copy
        if tuple(was.shape) != tuple(is_now.shape) or was.dtype != is_now.dtype:
            raise ValueError(
                f"merge_fn has made an argument of shape {tuple(was.shape)} and {was.dtype} one of"
                f" {tuple(is_now.shape)} and {is_now.dtype}, in place. It is a copy, since the"
                " replica's own is in another order than C's, not aligned, or in memory of another"
                " argument. Make a new array of it, and return that."
            )
        last = bytes_of(is_now)
        places = last != self.first
        if not places.any():
            return None
        if refuses_writes(was):
            raise ValueError(
                "merge_fn has written into an argument that refuses writes. It is a copy, as the"
                " replica's own is in another order than C's, not aligned, or in memory of another"
                " argument."
            )
        return _Writes(self, _of_whole_numbers(places, to_numpy(is_now).dtype), last)

    def of_replica(self, given: Any) -> Any:
        """Returns `given`, which the replica has given, in new memory with what it holds now."""
        if given is self.original or isinstance(given, np.ndarray):  # or of a file
            return copied(given, "K")
        copy = copy_of(given)  # with its graph, in which the numbers are not
        written(values_of(copy), np.array(to_numpy(self.original)))
        return copy


class _Writes(NamedTuple):
    """What a ``merge_fn`` has written into a copy: the numbers in it that are other ones now."""

    of: StandIn
    #: For each byte, whether it is one of these.
    places: Array
    last: Array

    def repeat(self) -> None:
        """Writes it into the argument."""
        self._put(self.last)

    def undo(self) -> None:
        """Has the argument hold there what it had when the copy was made."""
        self._put(self.of.first)

    def _put(self, data: Array) -> None:
        original = self.of.original
        now = np.array(to_numpy(original), order="C")
        np.copyto(now.reshape(-1).view(np.uint8), data, where=self.places)
        if isinstance(original, np.ndarray):
            elements = _by_elements(self.places, now.itemsize)
            np.copyto(original, now, where=elements.reshape(now.shape))
        else:
            # Of elements in the same memory, as those of an expanded tensor, one is written.
            apart = tuple([slice(0, None if step else 1) for step in original.stride()])
            written(values_of(original)[apart], now[(*apart, ...)].copy())


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
        #: What the replica has given.
        self.given = leaves
        #: These, with a copy of each that is in another order.
        self.leaves = leaves
        self.originals = originals
        #: By their places.
        self.copies: dict[int, StandIn] = {}
        #: Those for arrays in memory that other replicas of the rank give, too.
        self.of_several: list[StandIn] = []
        # The places of arrays, which have elements there.
        self._arrays: list[int] = []
        #: Whether some may be in memory of others, or of other replicas' arguments.
        self.may_cross = False
        if _NO_ARRAYS.issuperset(map(type, leaves)):
            return
        places = []
        for place, leaf in enumerate(leaves):
            if type(leaf) is np.ndarray:
                if not leaf.nbytes or leaf.dtype.hasobject:
                    continue
                is_owner, is_ordered = leaf.flags.owndata, is_in_c_order(leaf)
            elif type(leaf) in _NO_ARRAYS or not is_strided(leaf):
                continue
            else:
                is_owner, is_ordered = False, is_in_c_order(leaf)
            self._arrays.append(place)
            if not is_owner:
                self.may_cross = True
            if not is_ordered:
                places.append(place)
        if places:
            self.leaves = list(leaves)
            for place in places:
                self.put(place, self.leaves)
        if self.copies or len({*map(id, leaves)}) < len(leaves):
            self.may_cross = True

    def extents(self) -> Iterator[_Extent]:
        """Yields where the arrays lie that the replica has given."""
        for place in self._arrays:
            leaf = self.given[place]
            bounds = bounds_of if type(leaf) is np.ndarray else TorchWay.bounds
            yield *bounds(leaf), place

    def take_writes_as_given(self) -> None:
        """Has copies be written where that can be for which they stand in.

        Once all replicas have come to their calls: until then what they have given refuses writes.
        """
        for one in self.copies.values():
            if isinstance(one.copy, np.ndarray):
                one.copy.setflags(write=one.original.flags.writeable)

    def put(self, place: int, row: list[Any]) -> StandIn | None:
        """Puts a copy of an array into `row`; none where numpy can't see its values.

        Returns it, also where it was there before.
        """
        found = self.copies.get(place)
        leaf = self.given[place]
        if found is None and (isinstance(leaf, np.ndarray) or _has_dtype(leaf)):
            self.copies[place] = found = StandIn.of(leaf)
            row[place] = found.copy
            self.originals[id(found.copy)] = self.originals.get(id(leaf), leaf)
        return found


def separate(replicas: Sequence[StandIns], rows: Sequence[list[Any]]) -> None:
    """Puts copies into the rows of a rank's replicas, so that no two arrays share memory.

    But for one that several give, each once, and that crosses nothing else.
    """
    if not any([one.may_cross for one in replicas]):
        return
    extents = [
        (begin, end, (replica, place))
        for replica, one in enumerate(replicas)
        for begin, end, place in one.extents()
    ]
    for group in _crossing(sorted(extents)):
        leaves = [replicas[replica].given[place] for replica, place in group]
        number = len({replica for replica, _ in group})
        is_one = len({*map(id, leaves)}) == 1 and number == len(group)
        has_copies = any([place in replicas[replica].copies for replica, place in group])
        if (is_one and not has_copies) or all(map(refuses_writes, leaves)):
            continue
        for replica, place in group:
            found = replicas[replica].put(place, rows[replica])
            if found is not None and number > 1:
                replicas[replica].of_several.append(found)


def write_back(replicas: Sequence[StandIns], *, has_failed: bool = False) -> None:
    """Writes into arguments what was written into their copies; of one number, the last.

    Where others have written into the memory of a replica's argument, it gets this as it would be
    without that, if the function returns it.

    Parameters
    ----------
    has_failed : bool
        Whether the function has: its error is told then, and not what is wrong with a copy.

    Raises
    ------
    ValueError
        What was done with a copy can't be done with the argument.
    """
    found: list[list[_Writes]] = []
    for one in replicas:
        found.append([])
        for copy in one.copies.values():
            try:
                writes = copy.writes()
            except ValueError:
                if not has_failed:
                    raise
                continue
            if writes is not None:
                found[-1].append(writes)
    if not any(found):
        return
    own: list[tuple[StandIns, StandIn, Any]] = []
    for one, its in zip(replicas, found, strict=True):
        if one.of_several:
            for writes in its:
                writes.repeat()
            once: dict[int, Any] = {}  # what is given twice is one thing
            for copy in one.of_several:
                given = one.originals[id(copy.copy)]
                if id(given) not in once:
                    once[id(given)] = copy.of_replica(given)
                own.append((one, copy, once[id(given)]))
            for writes in its:
                writes.undo()
    for writes in itertools.chain.from_iterable(found):
        writes.repeat()
    for one, copy, mine in own:
        if (bytes_of(values_of(mine)) != bytes_of(values_of(copy.original))).any():
            one.originals[id(copy.copy)] = mine


def _of_whole_numbers(places: Array, dtype: np.dtype[Any]) -> Array:
    """Returns the bytes of the numbers, and texts, of which some byte is in `places`.

    Half of the bytes of one number and half of another one would be a third one.
    """
    parts = _parts_of(dtype)
    if parts == [(0, dtype.itemsize)]:
        return np.repeat(_by_elements(places, dtype.itemsize), dtype.itemsize)
    rows = places.reshape(-1, dtype.itemsize)
    whole = np.zeros_like(rows)  # what is between fields is in no part
    for begin, end in parts:
        whole[:, begin:end] |= rows[:, begin:end].any(axis=1, keepdims=True)
    return whole.reshape(-1)


def _parts_of(dtype: np.dtype[Any], begin: int = 0) -> list[tuple[int, int]]:
    """Returns from where to where the numbers and texts lie of which an element is made."""
    if dtype.subdtype is not None:
        base, shape = dtype.subdtype
        starts = range(begin, begin + math.prod(shape) * base.itemsize, base.itemsize or 1)
        return [part for start in starts for part in _parts_of(base, start)]
    if dtype.fields is not None:
        fields = [(field[0], begin + field[1]) for field in dtype.fields.values()]
        return [part for of, start in fields for part in _parts_of(of, start)]
    if dtype.kind == "c":
        middle = begin + dtype.itemsize // 2
        return [(begin, middle), (middle, begin + dtype.itemsize)]
    return [(begin, begin + dtype.itemsize)]


def _by_elements(places: Array, size: int) -> Array:
    """Returns, for each element of so many bytes, whether one of these is in `places`."""
    if size in (1, 2, 4, 8):  # in a tenth of the time
        return np.asarray(places.view(f"u{size}") != 0)
    return np.asarray(places.reshape(-1, size).any(axis=1))


def _crossing(extents: Sequence[tuple[int, int, T]]) -> list[list[T]]:
    """Returns groups of what crosses, out of what lies in the order of memory.

    What crosses, and shares no memory, are columns and the like: nearly all are copied anyhow.
    """
    if all([end <= begin for (_, end, _), (begin, _, _) in itertools.pairwise(extents)]):
        return []
    groups: list[list[T]] = []
    last = 0
    for begin, end, name in extents:
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
