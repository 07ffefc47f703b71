"""The integers that travel in the place of floats where the least or the greatest is looked for."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from mpi_replica.collectives.extremes import from_keys, to_keys
from mpi_replica.core.options import ReduceOp

OPS = [ReduceOp.MIN, ReduceOp.MAX]


def keys_of(op, values):
    """Return the keys, and the values that they are turned back into."""
    key = np.dtype(f"i{values.itemsize}")
    keys, spare, back = (
        np.empty(values.size, key),
        np.empty(values.size, key),
        np.empty_like(values),
    )
    is_nan = np.empty(values.size, bool)
    to_keys(op, values, keys, spare, is_nan)
    from_keys(op, keys.copy(), back, spare, is_nan)
    return keys, back


def check(op, values):
    keys, back = keys_of(op, values)
    with np.errstate(invalid="ignore"):  # of signalling NaN
        is_nan, wide = np.isnan(values), values.astype(np.float64)
        np.testing.assert_array_equal(np.isnan(back), is_nan)
    here = ~is_nan
    assert back[here].tobytes() == values[here].tobytes()
    # In the order of the keys: the floats, with -0.0 before 0.0, and NaN where it wins.
    order = np.argsort(keys[here], kind="stable")
    ranked = wide[here][order]
    assert (ranked[1:] >= ranked[:-1]).all()
    zeros = np.signbit(ranked[ranked == 0])
    assert (zeros[1:] <= zeros[:-1]).all()
    if is_nan.any() and here.any():
        beyond = keys[is_nan]
        outermost = keys[here].min() if op is ReduceOp.MIN else keys[here].max()
        assert ((beyond < outermost) if op is ReduceOp.MIN else (beyond > outermost)).all()


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_keys_of_every_narrow_float_are_ordered_like_it_and_turn_back(op, dtype):
    check(op, np.arange(1 << 16, dtype=np.uint16).view(dtype))


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", [ml_dtypes.float8_e5m2, ml_dtypes.float8_e4m3fn])
def test_keys_of_every_float_of_one_byte_are_ordered_like_it_and_turn_back(op, dtype):
    """Also where it has no infinity."""
    check(op, np.arange(1 << 8, dtype=np.uint8).view(dtype))


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@given(data=st.data())
def test_keys_of_any_floats_are_ordered_like_them_and_turn_back(op, dtype, data):
    bits = data.draw(hnp.arrays(np.dtype(f"u{np.dtype(dtype).itemsize}"), st.integers(1, 30)))
    special = np.array([np.nan, -np.nan, np.inf, -np.inf, 0.0, -0.0, 1.0, -1.0], dtype)
    check(op, np.concatenate([bits.view(dtype), special]))
