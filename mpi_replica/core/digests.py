"""Digests, the same in every process: what is compared instead of the values themselves.

Small ones are hashed by blake2b. That takes ten times as long as reading a large array, so large
ones are cut into pieces that stay in cache, and each piece is hashed with a few passes of numpy:
the sum of its words, which no change of one word leaves as it is, and NH (of UMAC: Black et al.,
CRYPTO '99), the sum of products of two words with a key added to each. Sums alone are not enough:
those of x and -x are the same, since signs cancel in pairs, and so are those of rows in any order.
NH of two given arrays that differ is the same for one in 2**32 keys at most; the keys are fixed.
"""

from __future__ import annotations

import datetime
import functools
import hashlib
import numbers
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from . import nest
from .array_libraries import dtype_of
from .dtypes import as_plain_array
from .indexed_slices import IndexedSlices
from .more_than_numbers import has_hidden_fields, is_only_numbers
from .pad_bytes import without_padding

#: Size of a digest.
DIGEST_BYTES = 16
#: Up to this size blake2b does it.
BLAKE_BYTES = 1 << 16
# A piece, its keys and its products stay in the cache of a core. Larger pieces cost less for one
# large array, and more for many small ones: memory for the products is new each time.
_PIECE_BYTES = 1 << 17


def digest_of_bytes(data: npt.NDArray[np.uint8]) -> bytes:
    """Returns 128 bits that differ where `data` differs, the same in every process.

    Examples
    --------
    >>> x = np.linspace(-1.0, 1.0, 100_000)
    >>> digest_of_bytes(x.view(np.uint8)) == digest_of_bytes((-x).view(np.uint8))
    False
    """
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    if data.size <= BLAKE_BYTES:
        digest.update(data.tobytes())
        return digest.digest()
    keys = _keys()
    keyed = np.empty(keys.size, np.uint32)
    products = np.empty(keys.size // 2, np.uint64)
    whole = data.size // 8 * 8
    sums = []
    for start in range(0, whole, _PIECE_BYTES):
        words = data[start : min(start + _PIECE_BYTES, whole)]
        halves = words.view(np.uint32)
        half = halves.size // 2
        mixed, product = keyed[: halves.size], products[:half]
        np.add(halves, keys[: halves.size], out=mixed)
        np.multiply(mixed[:half], mixed[half:], out=product, dtype=np.uint64)
        sums += [np.add.reduce(product), np.add.reduce(words.view(np.uint64))]
    digest.update(np.array(sums, np.uint64).tobytes())
    digest.update(data[whole:].tobytes())
    return digest.digest()


@functools.cache
def _keys() -> npt.NDArray[np.uint32]:
    """Returns a key for each word of 4 bytes of a piece."""
    return np.frombuffer(hashlib.shake_128(b"mpi_replica").digest(_PIECE_BYTES), np.uint32)


def digest_of(value: Any) -> int:
    """Returns 64 bits that differ where values differ, the same in every process.

    Arrays of any library and numbers by their bits, texts, dates and ranges by their text, sets
    and arrays of objects by what is in them, nests leaf by leaf, `IndexedSlices` by their parts. Of
    any other object only the type counts, since nothing else about it is the same everywhere.
    """
    leaves, structure = nest.flatten(value)
    digest = hashlib.blake2b(nest.structure_text(structure).encode(), digest_size=8)
    for leaf in leaves:
        digest.update(_bytes_of(leaf))
    return int.from_bytes(digest.digest(), "little")


def _bytes_of(leaf: Any) -> bytes:
    """Returns what stands for a leaf in a digest."""
    if isinstance(leaf, (str, bytes, type(None))):
        return repr(leaf).encode()
    if isinstance(leaf, IndexedSlices):
        slices = digest_of([leaf.values, leaf.indices, leaf.dense_shape])
        return slices.to_bytes(8, "little")
    if not _has_bits(leaf):
        return type(leaf).__qualname__.encode() + b"".join(_parts_of(leaf))
    array = without_padding(as_plain_array(leaf))
    data = array.reshape(-1).view(np.uint8)
    bits = data.tobytes() if data.size <= BLAKE_BYTES else digest_of_bytes(data)
    return f"{array.dtype.name}{array.shape}".encode() + bits


def _parts_of(leaf: Any) -> Iterable[bytes]:
    """Returns what is the same in every process of a leaf that has no bits itself."""
    if isinstance(leaf, (set, frozenset)):
        return sorted(map(_bytes_of, leaf))
    parts: list[Any] = []
    if isinstance(leaf, (numbers.Number, range)):  # one of Python's that no dtype of numpy holds
        parts = [repr(leaf)]
    elif isinstance(leaf, (datetime.date, datetime.time, datetime.timedelta)):
        parts = [str(leaf)]  # a repr has that of the time zone, and perhaps an address
    elif isinstance(leaf, (bytearray, memoryview)):
        view = memoryview(leaf)
        has_addresses = not {"O", "P"}.isdisjoint(view.format)
        parts = [view.format, str(view.shape), b"" if has_addresses else view.tobytes()]
    elif type(leaf) is np.ndarray:  # of objects, or of texts of any length
        parts = [str(leaf.shape), *leaf.reshape(-1).tolist()]
    elif has_hidden_fields(type(leaf)):
        items, hidden = leaf.__reduce__()[1]
        parts = [*items, *hidden.values()]
    elif isinstance(leaf, np.ma.MaskedArray):
        parts = [np.ma.getmaskarray(leaf), leaf.filled(np.zeros(1, leaf.dtype)[0])]
    return map(_bytes_of, parts)


def _has_bits(leaf: Any) -> bool:
    """Returns whether it is a number, or an array of numbers or texts, of any library."""
    if isinstance(leaf, (np.ndarray, np.generic, int, float, complex)):
        return is_only_numbers(leaf) and not np.asarray(leaf).dtype.hasobject
    try:
        return dtype_of(leaf) is not None
    except TypeError:  # numpy has no such dtype
        return False
