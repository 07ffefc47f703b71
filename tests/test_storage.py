"""The parts into which a total is cut: they add up to its bits, in whatever order."""

import hypothesis.extra.numpy as npst
import hypothesis.strategies as st
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given

from mpi_replica.replicas.storage import part_of

FLOATS = ["f2", "f4", "f8", "c8", "c16", ml_dtypes.bfloat16]
INTEGERS = ["i1", "i4", "i8", "u1", "u8"]


@st.composite
def totals(draw):
    dtype = np.dtype(draw(st.sampled_from(FLOATS + INTEGERS)))
    if dtype == ml_dtypes.bfloat16:
        return draw(npst.arrays("u2", 3)).view(dtype)
    return draw(npst.arrays(dtype, 3))


def in_some_order(parts, draw):
    """Add up the parts as reductions may: two sums of some of them, again and again."""
    sums = list(parts)
    while len(sums) > 1:
        one = sums.pop(draw(st.integers(0, len(sums) - 1)))
        other = sums.pop(draw(st.integers(0, len(sums) - 1)))
        with np.errstate(all="ignore"):
            sums.append(one + other)
    return sums[0]


@given(totals(), st.integers(1, 12), st.data())
def test_parts_add_up_to_the_bits_of_the_total_in_any_order(total, count, data):
    parts = [part_of(total, count, index) for index in range(count)]
    assert {(part.dtype, part.shape) for part in parts} == {(total.dtype, total.shape)}
    found = in_some_order(parts, data.draw)
    same = np.where(np.isnan(total), np.isnan(found), found == total)
    assert same.all(), (found, parts)
    if total.dtype.kind == "f":
        same_sign = np.isnan(total) | (np.signbit(found) == np.signbit(total))
        assert same_sign.all(), (found, parts)


@pytest.mark.parametrize("dtype", ["f2", "f4", "f8"])
@pytest.mark.parametrize("count", [2, 3, 7, 30])
def test_parts_are_about_equal(dtype, count):
    total = np.array([1.0, -10.0, 0.1, 60000.0], dtype)
    for index in range(count):
        part = part_of(total, count, index).astype(float)
        np.testing.assert_allclose(
            part, total.astype(float) / count, count**2 * np.finfo(dtype).eps
        )


@pytest.mark.parametrize("dtype", ["i1", "u1", "i8", "u8"])
def test_parts_of_integers_differ_by_one_at_most_for_any_number_of_them(dtype):
    limits = np.iinfo(dtype)
    total = np.array([limits.min, limits.max, 7], dtype)
    parts = np.array([part_of(total, 300, index) for index in range(300)])
    assert (parts.max(axis=0).astype(object) - parts.min(axis=0) <= 1).all()
    assert [sum(column) for column in parts.astype(object).T] == total.tolist()
