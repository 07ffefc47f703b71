"""The plan of all_reduce: every item of every leaf travels exactly once, in small pieces."""

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from mpi_replica.collectives.packing import plan
from mpi_replica.dtypes import accumulation
from mpi_replica.options import ReduceOp

DTYPES = [np.dtype(name) for name in ("int8", "int64", "float16", "float32", "float64")]
SIGNATURES = st.lists(
    st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 300), max_size=2).map(tuple)),
    max_size=12,
).map(tuple)
OPS = st.sampled_from([ReduceOp.SUM, ReduceOp.MEAN, ReduceOp.MIN])
PIECES = st.sampled_from([0, 1, 7, 64, 1000, 1 << 16])


@given(SIGNATURES, OPS, PIECES)
def test_every_leaf_travels_once_in_the_dtype_that_it_accumulates_in(signature, op, bytes_per_pack):
    steps = plan(signature, op, bytes_per_pack)
    travelling = {}
    for pack in steps.packs:
        assert pack.slots[0].start == 0
        assert pack.slots[-1].stop == pack.length
        for before, after in zip(pack.slots, pack.slots[1:], strict=False):
            assert before.stop == after.start
        for slot in pack.slots:
            assert slot.leaf not in travelling
            travelling[slot.leaf] = (pack.dtype, slot.stop - slot.start)
    for stream in steps.streams:
        assert stream.leaf not in travelling
        assert stream.piece >= 1
        travelling[stream.leaf] = (stream.dtype, stream.length)
    assert travelling == {
        leaf: (accumulation(dtype, op)[0], int(np.prod(shape, dtype=int)))
        for leaf, (dtype, shape) in enumerate(signature)
    }


@given(SIGNATURES, OPS, PIECES)
def test_results_have_the_shapes_of_the_leaves_and_the_dtypes_of_decision_5(signature, op, pieces):
    results = plan(signature, op, pieces).results
    assert results == tuple((accumulation(dtype, op)[1], shape) for dtype, shape in signature)


@given(SIGNATURES, OPS, st.sampled_from([8, 64, 1000, 1 << 16]))
def test_no_message_is_larger_than_bytes_per_pack(signature, op, bytes_per_pack):
    steps = plan(signature, op, bytes_per_pack)
    sizes = [pack.size_bytes for pack in steps.packs]
    sizes += [stream.piece * stream.dtype.itemsize for stream in steps.streams]
    assert max(sizes, default=0) <= bytes_per_pack


@given(SIGNATURES, OPS, PIECES)
def test_scratch_holds_every_pack_and_piece_and_what_lies_behind_it_is_aligned(
    signature, op, pieces
):
    steps = plan(signature, op, pieces)
    for pack in steps.packs:
        assert pack.size_bytes <= steps.scratch_bytes
    for stream in steps.streams:
        items = min(stream.piece, stream.length)
        assert items * stream.dtype.itemsize <= steps.scratch_bytes
    assert steps.scratch_bytes % np.dtype("longdouble").alignment == 0


def test_scratch_stays_small_whatever_the_nest():
    signature = ((np.dtype(np.float32), (25_000_000,)), (np.dtype(np.float64), (10**9,))) * 50
    assert plan(signature, ReduceOp.SUM).scratch_bytes <= 4 << 20


def test_small_bytes_are_told_where_all_leaves_are_small():
    signature = ((np.dtype(np.float32), (3,)), (np.dtype(np.int8), ()))
    assert plan(signature, ReduceOp.SUM).small_bytes == 13
    assert plan(signature, ReduceOp.MEAN).small_bytes == 20
    assert plan(((np.dtype(np.float32), (100_000,)),), ReduceOp.SUM).small_bytes is None


def test_leaves_of_one_dtype_share_a_pack():
    signature = tuple((np.dtype(np.float32), (10 + n,)) for n in range(20))
    (pack,) = plan(signature, ReduceOp.SUM).packs
    assert pack.length == sum(10 + n for n in range(20))


def test_a_dtype_that_can_not_be_reduced_is_a_type_error():
    with pytest.raises(TypeError):
        plan(((np.dtype("U3"), (2,)),), ReduceOp.SUM)


def test_no_piece_is_too_long_for_the_counts_of_mpi():
    signature = ((np.dtype(np.int8), (1 << 33,)),)
    (stream,) = plan(signature, ReduceOp.SUM, 1 << 34).streams
    assert stream.piece < 1 << 31
