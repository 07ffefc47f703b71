"""What combines two contributions gives the same bits wherever the two lie, and in blocks."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from in_order import bits, extreme_in_order, product
from mpi_replica.collectives.combine import combine_of
from mpi_replica.core.options import ReduceOp

FLOATS = [np.float16, ml_dtypes.bfloat16, np.float32, np.float64]
COMPLEX = [np.complex64, np.complex128, np.clongdouble]

# The last three take several blocks: along the first axis, within its rows, and along the last one.
SHAPES = [(), (0,), (1,), (3, 4), (2, 0, 3), (70000,), (3, 30000), (40000, 3)]


def numbers(rng, dtype, shape):
    """Return any bits, or zeros of either sign."""
    values = rng.bytes(int(np.prod(shape)) * np.dtype(dtype).itemsize)
    array = np.frombuffer(values, dtype).reshape(shape)
    is_zero = rng.random(shape) < 0.4
    return np.where(is_zero, np.copysign(np.zeros_like(array), array), array).astype(dtype)


def laid(array, how):
    """Return the same numbers in memory of another order."""
    if how == "Fortran":
        return np.asarray(array, order="F")
    if how == "between others":
        wide = np.zeros((*array.shape, 2), array.dtype)
        wide[..., 0] = array
        return wide[..., 0]
    return array.astype(array.dtype.newbyteorder(">")) if how == "big-endian" else array


HOW = ["as it is", "Fortran", "between others", "big-endian"]


def combine_everywhere(op, left, right, how):
    """Return what it gives into new memory, into a part of some, and in place."""
    combine, dtype = combine_of(op, left.dtype), left.dtype
    new, wide, place = np.empty(left.shape, dtype), np.empty((*left.shape, 3), dtype), left.copy()
    operands = [laid(left, how[0]), laid(right, how[1])]
    with np.errstate(all="ignore"):
        combine(*operands, out=new, dtype=dtype, casting="unsafe")
        combine(*operands, out=wide[..., 1], dtype=dtype, casting="unsafe")
        combine(place, operands[1], out=place, dtype=dtype, casting="unsafe")
    return new, wide[..., 1], place


@pytest.mark.parametrize("op", [ReduceOp.MIN, ReduceOp.MAX])
@pytest.mark.parametrize("dtype", FLOATS)
@given(
    seed=st.integers(0, 999),
    shape=st.sampled_from(SHAPES),
    how=st.tuples(*[st.sampled_from(HOW)] * 2),
)
def test_the_least_and_the_greatest_know_the_sign_of_zero_and_nan(op, dtype, seed, shape, how):
    if dtype is ml_dtypes.bfloat16:  # which has no other byte order
        how = [one if one != "big-endian" else "Fortran" for one in how]
    rng = np.random.default_rng(seed)
    left, right = numbers(rng, dtype, shape), numbers(rng, dtype, shape)
    with np.errstate(all="ignore"):  # isnan warns of some NaN
        expected = extreme_in_order(op.name, [left, right])
        for result in combine_everywhere(op, left, right, how):
            settled = np.where(np.isnan(result), dtype(np.nan), result)
            assert bits(settled.astype(dtype)) == bits(np.asarray(expected))


@pytest.mark.parametrize("dtype", COMPLEX)
@given(
    seed=st.integers(0, 999),
    shape=st.sampled_from(SHAPES),
    how=st.tuples(*[st.sampled_from(HOW)] * 2),
)
def test_a_product_of_complex_numbers_has_a_rounding_of_each_step(dtype, seed, shape, how):
    rng = np.random.default_rng(seed)
    left, right = (
        np.array(rng.normal(size=shape) + 1j * rng.normal(size=shape), dtype) for _ in range(2)
    )
    expected = product(left, right)
    for result in combine_everywhere(ReduceOp.PROD, left, right, how):
        assert np.array_equal(result, expected)
