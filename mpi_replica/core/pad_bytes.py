"""Bytes of arrays that mean nothing, and may be anything.

They are between the fields of aligned records, and behind numbers of 80 bits, which are kept in 16
bytes.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
import numpy.typing as npt

from .array_ways import Array


def without_padding(array: Array) -> Array:
    """Returns `array`, or a copy with zeros where its items have bytes that mean nothing."""
    if not _has_padding(array.dtype):
        return array
    # Not zeros_like, which leaves such bytes as they are.
    clean = np.zeros(array.shape, array.dtype)
    _copy_values(array, clean)
    return clean


@functools.lru_cache(maxsize=1024)
def _has_padding(dtype: np.dtype[Any]) -> bool:
    """Returns whether items have bytes that mean nothing."""
    if dtype.subdtype is None and dtype.fields is None:  # texts and bytes may be of any size
        return _extended_bytes(dtype) > 0
    return not _bytes_with_meaning(dtype).all()


def _bytes_with_meaning(dtype: np.dtype[Any]) -> npt.NDArray[np.bool_]:
    """Returns of each byte of an item whether it means something; fields may overlap."""
    if dtype.subdtype is not None:
        item, shape = dtype.subdtype
        return np.tile(_bytes_with_meaning(item), math.prod(shape))
    if dtype.fields is not None:
        has_meaning = np.zeros(dtype.itemsize, np.bool_)
        for field, offset, *_ in dtype.fields.values():
            has_meaning[offset : offset + field.itemsize] |= _bytes_with_meaning(field)
        return has_meaning
    has_meaning = np.ones(dtype.itemsize, np.bool_)
    if extended := _extended_bytes(dtype):
        has_meaning.reshape(-1, extended)[:, 10:] = False
    return has_meaning


def _extended_bytes(dtype: np.dtype[Any]) -> int:
    """Returns the bytes of a real number of 80 bits, which is kept in more; 0 for other dtypes."""
    if dtype.kind not in "fc" or dtype.itemsize <= (8 if dtype.kind == "f" else 16):
        return 0
    return dtype.itemsize // (2 if dtype.kind == "c" else 1) if np.finfo(dtype).nmant == 63 else 0


def _copy_values(source: Array, target: Array) -> None:
    if source.dtype.fields is not None:
        for name in source.dtype.fields:
            _copy_values(source[name], target[name])
        return
    extended = _extended_bytes(source.dtype)
    target[...] = source
    if extended and source.size:
        items = target if target.flags.c_contiguous else target.copy(order="C")
        items.reshape(-1).view(np.uint8).reshape(-1, extended)[:, 10:] = 0
        if items is not target:
            target[...] = items
