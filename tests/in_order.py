"""What a reproducible reduction must give, in a few lines of numpy over all replicas."""

import numpy as np

from contributions import NARROW, native

# x87's numbers have 10 bytes, in 12 or 16 of memory.
_LONGDOUBLE_BYTES = 10 if np.finfo(np.longdouble).nmant == 63 else np.longdouble().itemsize


def product(left, right):
    """Multiply with a rounding of each step: numpy leaves some out, depending on where they lie."""
    if left.dtype.kind != "c":
        return left * right
    result = np.empty_like(left)
    result.real = left.real * right.real - left.imag * right.imag
    result.imag = left.real * right.imag + left.imag * right.real
    return result


COMBINES = {"SUM": np.add, "MEAN": np.add, "PROD": product}


def combined(combine, rows):
    """Combine rows along the tree whose left half has the largest power of two below all."""
    if len(rows) == 1:
        return rows[0]
    half = 1
    while 2 * half < len(rows):
        half *= 2
    return combine(combined(combine, rows[:half]), combined(combine, rows[half:]))


def reduced_in_order(op, values):
    """The reference of SUM, MEAN and PROD; the rules of dtypes are those of decision 5."""
    rows = [native(np.asarray(value)) for value in values]
    dtype = wide = np.result_type(*rows)
    if dtype.name in NARROW:
        wide = np.dtype("float32")
    elif op == "MEAN" and dtype.kind in "biu":
        dtype = wide = np.dtype("float64")
    with np.errstate(all="ignore"):
        total = combined(COMBINES[op], [row.astype(wide) for row in rows])
        if op == "MEAN" and len(rows) > 1:  # by 1 numpy makes NaN of complex infinities
            total = np.divide(total, len(rows))
        total = np.array(total, wide, order="C", ndmin=1)
        if wide.kind in "fc":
            parts = total.view(f"f{wide.itemsize // 2}") if wide.kind == "c" else total
            parts[np.isnan(parts)] = np.nan
        return total.reshape(rows[0].shape).astype(dtype)[()]


def extreme_in_order(op, values):
    """The reference of MIN and MAX: NaN wins, and is numpy's; -0.0 is less than 0.0."""
    rows = np.stack([native(np.asarray(value)) for value in values])
    wide = rows.astype("float64")
    index = np.lexsort((~np.signbit(wide), wide), axis=0)[-1 if op == "MAX" else 0]
    result = np.array(np.take_along_axis(rows, index[None], axis=0)[0])
    result[np.isnan(wide).any(axis=0)] = np.nan
    return result[()]


def bits(value):
    """What of a nest of arrays must be the same, bit for bit: bytes without padding, and kinds."""
    if isinstance(value, dict):
        return {key: bits(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [bits(inner) for inner in value]
    array = np.ascontiguousarray(value)
    data = array.tobytes()
    if array.dtype.type in (np.longdouble, np.clongdouble):
        numbers = np.frombuffer(data, np.uint8).reshape(-1, np.longdouble().itemsize)
        data = numbers[:, :_LONGDOUBLE_BYTES].tobytes()
    return type(value).__name__, array.dtype.name, np.shape(value), data
