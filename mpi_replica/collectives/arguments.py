"""How the arguments of a ``merge_call`` travel: as plain data, which tells what to make of it.

Arrays, also those of torch, JAX and others, go as their bytes, and other objects pickled. Of
arrays of `LAZY_BYTES` and more only dtype and shape go.
"""

from __future__ import annotations

import dataclasses
import io
import marshal
import math
import pickle
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..core.array_libraries import (
    Origin,
    copy_of,
    dtype_of,
    from_numpy,
    origin_of,
    to_numpy,
)
from ..core.array_ways import Array
from ..core.indexed_slices import IndexedSlices
from ..core.units import in_units
from ..core.values import DistributedValues, read_only
from .blobs import loaded

#: Array leaves of this size are gathered when somebody looks at them.
LAZY_BYTES = 1 << 16

_NONE, _PLAIN, _OBJECT, _ARRAY, _SCALAR, _LAZY, _DTYPE_PICKLED = "npoasld"

# marshal writes them as they are, at a tenth of the price of pickle.
_PLAIN_TYPES = frozenset({int, float, complex, bool, str, bytes})
_NUMPY_NUMBERS = frozenset(np.dtype(code).type for code in "?bBhHiIlLqQefdFD")

#: What the leaves of a replica are, and the bytes of those that are arrays.
_Table = list[tuple[Any, ...]]
Packed = tuple[_Table, bytes]


@dataclasses.dataclass(slots=True, eq=False)
class Held:
    """A component that is here; `is_large` where it must be gathered to the other ranks yet."""

    value: Any
    is_large: bool = False

    def refuse_writes(self) -> None:
        """Has it refuse writes, as it does where it comes from."""
        self.value = read_only(self.value)


@dataclasses.dataclass(slots=True, eq=False)
class Elsewhere:
    """An array that is still with its replica.

    Parameters
    ----------
    dtype, shape : numpy.dtype, and tuple of int
    origin : Origin, optional
        Which library's it is, if not numpy's.
    beside : object, optional
        This rank's own argument, on the device of which it is put.
    """

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    origin: Origin | None = None
    beside: Any = None
    _refuses_writes: bool = False

    def refuse_writes(self) -> None:
        """Has its values refuse writes, as they do where they come from."""
        self._refuses_writes = True

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def as_passed(self, array: Array) -> Any:
        """Returns its values, which have come, as an array of its library."""
        if self.origin is not None:
            return from_numpy(array, self.origin, self.beside)
        return read_only(array) if self._refuses_writes else array


def refuses_writes(leaf: Any) -> bool:
    """Returns whether an array, record or rows of numpy can't be written into."""
    if isinstance(leaf, IndexedSlices):
        leaf = leaf.values
    return isinstance(leaf, (np.ndarray, np.void)) and not leaf.flags.writeable


def own_copy(leaf: Any, entry: tuple[Any, ...] | None = None) -> Any:
    """Returns what comes of a leaf on another rank, for a replica that shares it with others.

    `entry` is its one in the table of `pack`, if there is one. An object is then what the other
    ranks get: as it was when its replica gave it, and not as those behind it have changed it.
    """
    if leaf is None or isinstance(leaf, DistributedValues) or type(leaf) in _PLAIN_TYPES:
        return leaf
    if type(leaf) in _NUMPY_NUMBERS or refuses_writes(leaf):
        return leaf
    if isinstance(leaf, IndexedSlices):
        return leaf.changed(own_copy)
    if isinstance(leaf, np.ndarray) and not leaf.dtype.hasobject:
        return leaf.copy(order="K")
    if origin_of(leaf) is not None and _dtype_if_any(leaf) is not None:
        return copy_of(leaf)
    if entry is not None and entry[0] == _OBJECT:
        return _unpickled(entry[1])
    return _unpickled(pickle.dumps(leaf, protocol=5))


def _unpickled(data: bytes) -> Any:
    """Returns a leaf that was pickled; one of numpy can be written into."""
    value = loaded(io.BytesIO(data))
    if isinstance(value, IndexedSlices):
        return value.changed(np.copy)  # other replicas have refused writes when it was pickled
    return value


def require_packable(leaves: Sequence[Any]) -> None:
    """Raises as `pack` does, and copies nothing: where nobody gets the bytes."""
    for leaf in leaves:
        if isinstance(leaf, np.ndarray) and not leaf.dtype.hasobject:
            continue
        if leaf is None or isinstance(leaf, DistributedValues) or type(leaf) in _PLAIN_TYPES:
            continue
        if origin_of(leaf) is None or _dtype_if_any(leaf) is None:
            buffers: list[pickle.PickleBuffer] = []
            data = pickle.dumps(leaf, protocol=5, buffer_callback=buffers.append)
            pickle.loads(data, buffers=buffers)


def pack(leaves: Sequence[Any]) -> Packed:
    """Returns the leaves of a replica as plain data: a table of what they are, then their bytes."""
    table: _Table = []
    data: list[bytes] = []
    for leaf in leaves:
        kind = type(leaf)
        if leaf is None or isinstance(leaf, DistributedValues):
            table.append((_NONE,))
        elif kind in _PLAIN_TYPES:
            table.append((_PLAIN, leaf))
        elif kind is np.ndarray and not leaf.dtype.hasobject and leaf.itemsize:
            how = _LAZY if leaf.nbytes >= LAZY_BYTES else _ARRAY
            table.append((how, *_dtype_on_wire(leaf.dtype), leaf.shape))
            if how == _ARRAY:
                data.append(leaf.tobytes())
        elif kind in _NUMPY_NUMBERS:
            table.append((_SCALAR, *_dtype_on_wire(leaf.dtype), ()))
            data.append(leaf.tobytes())
        else:
            table.append(_pack_object(leaf, data))
    return table, b"".join(data)


def _pack_object(leaf: Any, data: list[bytes]) -> tuple[Any, ...]:
    """Returns what is in the table for an array of another library, or for any object."""
    origin = origin_of(leaf)
    if origin is not None:
        dtype = _dtype_if_any(leaf)
        if dtype is not None:
            shape = tuple(leaf.shape)
            how = _LAZY if math.prod(shape) * dtype.itemsize >= LAZY_BYTES else _ARRAY
            if how == _ARRAY:
                data.append(to_numpy(leaf).tobytes())
            return how, *_dtype_on_wire(dtype), shape, *origin
    pickle_of_leaf = pickle.dumps(leaf, protocol=5)
    pickle.loads(pickle_of_leaf)  # here, where it is known whose it is: not all can be
    return _OBJECT, pickle_of_leaf


def _dtype_if_any(leaf: Any) -> np.dtype[Any] | None:
    """Returns numpy's dtype for another library's array; None where only pickle knows it."""
    try:
        return dtype_of(leaf)
    except TypeError as error:
        try:
            data = pickle.dumps(leaf, protocol=5)
            if str(getattr(leaf, "layout", "")) == "torch.strided":
                pickle.loads(data)  # torch pickles dtypes (float8) that it can't load
        except Exception:
            raise error from None
        return None


def _dtype_on_wire(dtype: np.dtype[Any]) -> tuple[str, bytes | str]:
    # Others than numpy's, as ml_dtypes' bfloat16, have no text of their own, or share one ("<f1").
    if dtype.kind in "biufcSUmM" and dtype.type.__module__ == "numpy":
        return _ARRAY, dtype.str
    return _DTYPE_PICKLED, pickle.dumps(dtype, protocol=5)


def joined(packed: Sequence[Packed]) -> tuple[list[_Table], bytes]:
    """Returns the tables and the bytes of the local replicas; one table where all are alike.

    What travels then does not grow with the replicas of a rank.
    """
    tables = [table for table, _ in packed]
    # Not by comparing them: 1, True and 1.0 are equal. Version 2 writes equal things alike.
    if len(tables) > 1 and len({marshal.dumps(table, 2) for table in tables}) == 1:
        tables = tables[:1]
    return tables, b"".join([data for _, data in packed])


def largest(packed: Sequence[Packed]) -> tuple[str, int | None]:
    """Returns the words for what takes most of a message, and which leaf it is, if it is one."""
    sizes = [
        (len(entry[1]), index, type(entry[1]).__name__ if entry[0] == _PLAIN else "a pickle")
        for table, _ in packed
        for index, entry in enumerate(table)
        if entry[0] == _OBJECT or (entry[0] == _PLAIN and isinstance(entry[1], (bytes, str)))
    ]
    size, index, name = max(sizes, default=(0, 0, ""))
    together = sum(len(data) for _, data in packed)
    if together > size:
        return f"{in_units(together)} in small arrays", None
    return f"{name} of {in_units(size)}", index


def held_by(leaves: Sequence[Any], table: _Table) -> list[Held | Elsewhere]:
    """Returns the leaves of a replica of this rank, of which `pack` has made this table."""
    return list(map(Held, leaves, [entry[0] == _LAZY for entry in table]))


def unpack_all(
    tables: Sequence[_Table], data: bytes, count: int, beside: Sequence[Any]
) -> list[list[Held | Elsewhere]]:
    """Returns the leaves of a rank's replicas, out of what `joined` gave there.

    `beside` are the leaves of a replica of this rank.
    """
    rows = []
    start = 0
    for table in tables if len(tables) == count else [*tables] * count:
        row: list[Held | Elsewhere] = []
        for entry, own in zip(table, beside, strict=True):
            if entry[0] == _PLAIN:  # as it is mostly: without a call
                row.append(Held(entry[1]))
                continue
            held, start = _unpack(entry, own, data, start)
            row.append(held)
        rows.append(row)
    return rows


def _unpack(
    entry: tuple[Any, ...], beside: Any, data: bytes, start: int
) -> tuple[Held | Elsewhere, int]:
    """Returns a leaf, an array as one of the library it is of, and where the next one begins."""
    kind, *rest = entry
    if kind == _NONE:
        return Held(None), start
    if kind == _OBJECT:
        return Held(_unpickled(rest[0])), start
    coding, name, shape, *library = rest  # nothing more of an array of numpy
    dtype = pickle.loads(name) if coding == _DTYPE_PICKLED else np.dtype(name)
    origin = Origin(*library) if library else None
    if kind == _LAZY:
        return Elsewhere(dtype, shape, origin, beside), start
    size = math.prod(shape)
    array = np.frombuffer(data, dtype, size, start)
    # copied: arrays of other replicas are as writable as one's own
    value = array[0] if kind == _SCALAR else array.reshape(shape).copy()
    if origin is not None:
        value = from_numpy(value, origin, beside)
    return Held(value), start + size * dtype.itemsize


def bytes_of(array: Any) -> Array:
    """Returns the bytes of an array in C order, in its own byte order."""
    return np.asarray(to_numpy(array), order="C").reshape(-1).view(np.uint8)
