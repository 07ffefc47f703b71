"""Bytes of arrays that mean nothing, and may be anything.

They are between the fields of aligned records, and behind numbers of 80 bits, which are kept in 16
bytes.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .array_ways import Array


def without_padding(array: Array) -> Array:
    """Returns `array`, or a copy with zeros where its items have bytes that mean nothing."""
    if not _has_padding(array.dtype):
        return array
    # Not zeros_like, which leaves such bytes as they are.
    clean = np.zeros(array.shape, array.dtype)
    _copy_values(array, clean)
    return clean


def _has_padding(dtype: np.dtype[Any]) -> bool:
    """Returns whether items have bytes that mean nothing."""
    if dtype.subdtype is not None:
        return _has_padding(dtype.subdtype[0])
    if dtype.fields is not None:
        fields = [field for field, *_ in dtype.fields.values()]
        used = sum(field.itemsize for field in fields)
        return used != dtype.itemsize or any(_has_padding(field) for field in fields)
    return _extended_bytes(dtype) > 0


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
