"""Where fresh results lie: whatever their sizes, each is an array of its own to the user."""

import itertools

import hypothesis.strategies as st
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from numpy.lib.array_utils import byte_bounds

from mpi_replica.collectives.memory import Allocation
from mpi_replica.core.memory_pool import Loan, MemoryPool

KIB = 1 << 10
MIB = 1 << 20
DTYPES = [np.dtype(name) for name in ("bool", "f2", ml_dtypes.bfloat16, "f4", "f8", "c16", "g")]


@st.composite
def results(draw):
    """Draw dtypes and shapes; sizes are around those where the way changes."""
    found = []
    for _ in range(draw(st.integers(0, 9))):
        dtype = draw(st.sampled_from(DTYPES))
        size = draw(st.sampled_from([0, 64, 512 * KIB, 512 * KIB, 2 * MIB, 4 * MIB, 16 * MIB]))
        items = max(0, size // dtype.itemsize + draw(st.integers(-1, 2)))
        shapes = [(items,), (1, items), (items, 1, 1), (items // 3, 3)]
        found.append((dtype, draw(st.sampled_from([*shapes, ()]))))
        if draw(st.booleans()):
            found.append(None)  # its memory is the caller's
    return found


def arrays_of(wanted):
    """The arrays that there are, and that have items."""
    return [
        array
        for array in Allocation(wanted).make(MemoryPool().lend)
        if array is not None and array.size
    ]


# What is not touched takes no memory, so nothing is written here but the first and the last item.


@given(results())
def test_arrays_have_the_dtypes_and_shapes_and_are_c_contiguous_aligned_and_writable(wanted):
    for about, array in zip(wanted, Allocation(wanted).make(MemoryPool().lend), strict=True):
        if about is None:
            assert array is None
        else:
            assert type(array) is np.ndarray
            assert (array.dtype, array.shape) == about
            assert array.flags.carray


@given(results())
def test_arrays_share_no_byte_with_each_other_nor_with_those_of_the_next_time(wanted):
    allocation = Allocation(wanted)
    pool = MemoryPool()
    kept = [*allocation.make(pool.lend), *allocation.make(pool.lend)]
    spans = sorted(byte_bounds(array) for array in kept if array is not None and array.size)
    assert all(stop <= start for (_, stop), (start, _) in itertools.pairwise(spans))


@given(results())
def test_an_array_may_be_written_from_its_first_to_its_last_item(wanted):
    made = arrays_of(wanted)
    for number, array in enumerate(made):
        array.reshape(-1)[[0, -1]] = number % 2
    for number, array in enumerate(made):
        assert (array.reshape(-1)[[0, -1]] == number % 2).all()


@given(results())
def test_a_result_of_less_than_half_a_mebibyte_that_is_kept_keeps_nothing_else(wanted):
    for array in arrays_of(wanted):
        if array.nbytes < 512 * KIB:
            assert array.base is None


@given(results())
def test_a_result_that_is_kept_keeps_16_mib_at_most_beside_its_own(wanted):
    for array in arrays_of(wanted):
        kept = array
        while kept.base is not None:
            kept = kept.base.block.memory if isinstance(kept.base, Loan) else kept.base
        assert kept.nbytes <= max(16 * MIB, array.nbytes) + 2 * MIB + 64 * len(wanted)


@pytest.mark.parametrize(("count", "items"), [(1, MIB), (3, MIB // 2), (8, 70_000), (1, 3 * MIB)])
def test_where_results_have_4_mib_together_they_begin_where_the_system_has_large_pages(
    count, items
):
    made = Allocation([(np.dtype("f8"), (items,))] * count).make(MemoryPool().lend)
    assert made[0].ctypes.data % (2 * MIB) == 0
    assert len({id(array.base) for array in made}) == 1
