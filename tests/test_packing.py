"""The plan of all_reduce: every item of every leaf travels exactly once, in small pieces."""

import itertools
import math

import hypothesis.strategies as st
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given

from mpi_replica.collectives import plan as packing
from mpi_replica.collectives.plan import ALIGNMENT, cut, pieces, signature_of
from mpi_replica.core.dtypes import accumulation
from mpi_replica.core.options import ReduceOp

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
DTYPES = [np.dtype(name) for name in ("int8", "int64", "float16", "float32", ">f8", BFLOAT16)]
SHAPES = st.lists(st.integers(0, 300), max_size=2) | st.lists(st.integers(0, 5), max_size=4)
LEAVES = st.lists(st.tuples(st.sampled_from(DTYPES), SHAPES.map(tuple)), max_size=12)
OPS = st.sampled_from([ReduceOp.SUM, ReduceOp.MEAN, ReduceOp.MIN])
BYTES = st.sampled_from([0, 1, 7, 64, 1000, 1 << 16])

FLOAT32, FLOAT64 = np.dtype(np.float32), np.dtype(np.float64)


def plan(leaves, op, bytes_per_pack=0):
    """The plan for leaves of these dtypes and shapes."""
    dtypes, shapes = zip(*leaves, strict=True) if leaves else ((), ())
    return packing.plan((dtypes, shapes), op, bytes_per_pack)


def wide_of(dtype, op):
    """Nothing is added up in the least and the greatest."""
    wide, result = accumulation(dtype, op)
    return result if op in (ReduceOp.MIN, ReduceOp.MAX) else wide


def size_bytes(leaves, op):
    """The bytes of each leaf in what it accumulates in."""
    return [math.prod(shape) * wide_of(dtype, op).itemsize for dtype, shape in leaves]


@given(LEAVES, OPS, BYTES)
def test_every_leaf_is_in_one_pack_or_stream_in_the_dtype_that_it_accumulates_in(
    leaves, op, bytes_per_pack
):
    steps = plan(leaves, op, bytes_per_pack)
    dtypes = [(leaf, pack.dtype) for pack in steps.packs for leaf in pack.leaves]
    dtypes += [(stream.leaf, stream.dtype) for stream in steps.streams]
    assert sorted(leaf for leaf, _ in dtypes) == list(range(len(leaves)))
    for leaf, wide in dtypes:
        assert wide == wide_of(leaves[leaf][0], op)
    for stream in steps.streams:
        assert (stream.result_dtype, stream.shape) == steps.results[stream.leaf]


@given(LEAVES, OPS, BYTES)
def test_the_slots_of_a_pack_cover_it_and_give_the_results_their_shapes_and_dtypes(
    leaves, op, bytes_per_pack
):
    steps = plan(leaves, op, bytes_per_pack)
    for pack in steps.packs:
        numbers = np.arange(pack.length)
        covered = []
        for start, stop, slots in pack.chunks:
            for slot in slots:
                part = numbers[start:stop][slot.where]
                covered += part.reshape(-1).tolist()
                if slot.shape is not None:
                    part = part.reshape(slot.shape)
                assert (slot.dtype or pack.dtype, part.shape) == steps.results[slot.leaf]
        assert covered == numbers.tolist()


@given(
    SHAPES,
    st.sampled_from([1, 2, 3, 7, 64, 1000, 10**6]),
    st.sampled_from([1, 2, 5]),
    st.booleans(),
    st.booleans(),
    st.booleans(),
    st.sampled_from("CF"),
)
def test_the_pieces_of_a_stream_are_its_items_in_c_order_each_once(
    shape, bytes_per_pack, longer, large, far, kept, order
):
    """In whatever order the array is in memory."""
    leaves = ((FLOAT32, (longer, *shape)),)
    leaf = np.arange(math.prod(leaves[0][1])).reshape(leaves[0][1]).copy(order)
    for stream in plan(leaves, ReduceOp.SUM, bytes_per_pack).streams:
        most = stream.far_piece if far else stream.large_piece if large else stream.piece
        if kept and not far:
            most = max(most, stream.kept_piece)
        assert stream.most_items(large=large, far=far, kept=kept) == most
        ends = 0
        for start, stop, where in stream.cut(most):
            assert start == ends
            assert start < stop <= start + most
            assert leaf[where].reshape(-1).tolist() == list(range(start, stop))
            ends = stop
        assert ends == leaf.size


@given(SHAPES, st.integers(1, 50))
def test_an_index_gives_a_view_of_which_each_piece_is_contiguous_in_c_order(shape, most):
    leaf = np.arange(math.prod(shape)).reshape(shape)
    found = list(pieces(tuple(shape), most))
    for start, stop, where in found:
        part = leaf[where]
        assert part.base is not None or not shape  # no copy
        assert part.flags.c_contiguous
        assert part.reshape(-1).tolist() == list(range(start, stop))
    bounds = [0, *(stop for _, stop, _ in found)]
    assert [(start, stop) for start, stop, _ in found] == list(itertools.pairwise(bounds))
    assert bounds[-1] == leaf.size


@pytest.mark.parametrize(
    "shape", [(1 << 44,), (1 << 22, 1 << 22), (2, 1 << 43), (1 << 43, 2), (1 << 14,) * 3 + (4,)]
)
def test_the_pieces_of_an_array_that_says_to_have_any_size_are_made_when_asked_for(shape):
    """A list of them would fill the memory."""
    (stream,) = plan(((FLOAT64, shape),), ReduceOp.SUM, 64).streams
    leaf = np.broadcast_to(np.float64(1), shape)
    for large in (False, True):
        for _ in range(2):  # anew for each call
            first = list(itertools.islice(stream.cut(stream.most_items(large=large)), 3))
            assert [(start, stop) for start, stop, _ in first] == [(0, 8), (8, 16), (16, 24)]
            assert [leaf[where].size for _, _, where in first] == [8, 8, 8]


@given(LEAVES, OPS, BYTES)
def test_results_have_the_shapes_of_the_leaves_and_the_dtypes_of_decision_5(
    leaves, op, bytes_per_pack
):
    results = plan(leaves, op, bytes_per_pack).results
    assert results == tuple((accumulation(dtype, op)[1], shape) for dtype, shape in leaves)


@given(LEAVES, OPS, st.sampled_from([8, 64, 1000, 1 << 16]))
def test_no_message_is_larger_than_bytes_per_pack(leaves, op, bytes_per_pack):
    steps = plan(leaves, op, bytes_per_pack)
    sizes = [pack.size_bytes for pack in steps.packs]
    for stream in steps.streams:
        sizes += [stream.piece * stream.dtype.itemsize]
        sizes += [max(stream.large_piece, stream.kept_piece) * stream.dtype.itemsize]
        sizes += [stream.far_piece * stream.dtype.itemsize]
    assert max(sizes, default=0) <= bytes_per_pack


@given(LEAVES, OPS, BYTES)
def test_scratch_holds_every_pack_and_piece_aligned(leaves, op, bytes_per_pack):
    steps = plan(leaves, op, bytes_per_pack)
    sizes = [pack.size_bytes for pack in steps.packs]
    for stream in steps.streams:
        if stream.is_ordered:  # whoever moves it cuts it
            continue
        most = max(stream.piece, stream.large_piece, stream.far_piece, stream.kept_piece)
        items = min(most, math.prod(stream.shape))
        sizes.append(items * stream.dtype.itemsize)
    assert max(sizes, default=0) + ALIGNMENT <= steps.scratch_bytes


@pytest.mark.parametrize("op", [ReduceOp.SUM, ReduceOp.MEAN, ReduceOp.MIN])
def test_scratch_stays_small_whatever_the_nest(op):
    dtypes = [np.dtype(name) for name in ("float16", "float32", "float64", "int8")]
    leaves = tuple((dtype, (10**9,)) for dtype in dtypes) * 50
    assert plan(leaves, op).scratch_bytes <= 7 << 20


def test_small_bytes_are_told_where_all_leaves_are_small():
    leaves = ((FLOAT32, (3,)), (np.dtype(np.int8), ()))
    assert plan(leaves, ReduceOp.SUM).small_bytes == 13
    assert plan(leaves, ReduceOp.MEAN).small_bytes == 20
    assert plan((), ReduceOp.SUM).small_bytes == 0
    assert plan(((FLOAT32, (100_000,)),), ReduceOp.SUM).small_bytes == math.inf


@given(LEAVES, OPS)
def test_small_bytes_are_those_of_all_leaves_in_what_they_accumulate_in(leaves, op):
    steps = plan(leaves, op)
    small = sum(size_bytes(leaves, op))
    assert steps.small_bytes == (math.inf if steps.streams else small)


def test_a_signature_is_dtypes_and_shapes_in_the_order_of_the_leaves():
    arrays = [np.ones((2, 3), ">i4"), np.ones(()), np.ones((0, 5), BFLOAT16)]
    for leaves in (arrays, arrays[:1], []):
        dtypes, shapes = signature_of(leaves)
        assert list(zip(dtypes, shapes, strict=True)) == [
            (leaf.dtype, leaf.shape) for leaf in leaves
        ]


# Results of 2.5 KiB and of 60 KiB beside small ones: 64 KiB of them share memory.
MANY = st.lists(st.sampled_from([(), (3,), (0,), (640,), (5, 128), (15_000,)]), max_size=60)


@given(MANY, st.sampled_from([FLOAT32, np.dtype(np.float16)]))
def test_a_chunk_of_a_pack_gives_the_leaves_that_the_pack_gives(shapes, dtype):
    for pack in plan([(dtype, shape) for shape in shapes], ReduceOp.SUM).packs:
        items = np.arange(pack.length, dtype=pack.dtype) % 2048
        parts = [None] * len(shapes)
        ends = 0
        for start, stop, slots in pack.chunks:
            assert start == ends
            ends = stop
            assert len(slots) == 1 or (stop - start) * pack.dtype.itemsize <= 1 << 16
            cut(slots, items[start:stop].copy(), parts)
        assert ends == pack.length
        rest = items.astype(dtype)
        for leaf in pack.leaves:
            size = math.prod(shapes[leaf])
            expected, rest = rest[:size].reshape(shapes[leaf]), rest[size:]
            assert parts[leaf].dtype == dtype
            np.testing.assert_array_equal(parts[leaf], expected[()], strict=True)


def test_leaves_of_one_dtype_share_a_pack():
    leaves = tuple((FLOAT32, (10 + n,)) for n in range(20))
    (pack,) = plan(leaves, ReduceOp.SUM).packs
    assert pack.length == sum(10 + n for n in range(20))


@given(LEAVES, OPS)
def test_wide_numbers_come_first_so_that_all_are_aligned_one_behind_the_other(leaves, op):
    widths = [pack.dtype.itemsize for pack in plan(leaves, op).packs]
    assert widths == sorted(widths, reverse=True)


@given(LEAVES, OPS)
def test_the_plain_order_is_that_of_the_slots_where_no_leaf_is_converted(leaves, op):
    steps = plan(leaves, op)
    order = [(leaf, pack.dtype) for pack in steps.packs for leaf in pack.leaves]
    if all(leaves[leaf][0] == dtype for leaf, dtype in order):
        assert steps.plain_order == tuple(leaf for leaf, _ in order)
    else:
        assert steps.plain_order is None


@pytest.mark.parametrize(
    ("leaves", "streaming"),
    [
        ([("f8", 4096)], []),
        ([("f8", 4097)], [0]),
        ([("f2", 8193)], [0]),  # it accumulates in float32
        ([("f8", 4097), ("f8", 1)], []),  # it shares the pack
        ([("f8", 4097), ("f4", 1)], [0]),
        ([("f8", 4097), ("f4", 8193), ("i1", 32_768)], [0, 1]),
        ([("f4", 9000), ("f2", 9000)], [0, 1]),  # both accumulate in float32, one of them in order
        ([("f8", 8191), ("f8", 8192)], [0, 1]),  # the large one shares no pack
        ([("f8", 8191), ("f8", 8191)], []),
    ],
)
def test_a_leaf_of_more_than_32_kib_that_would_be_alone_in_its_pack_is_a_stream(leaves, streaming):
    leaves = [(np.dtype(dtype), (items,)) for dtype, items in leaves]
    steps = plan(leaves, ReduceOp.SUM)
    alone = [pack for pack in steps.packs if len(pack.leaves) == 1]
    assert all(pack.size_bytes <= 32_768 for pack in alone)
    assert [stream.leaf for stream in steps.streams] == streaming


def test_a_dtype_that_can_not_be_reduced_is_a_type_error():
    with pytest.raises(TypeError):
        plan(((np.dtype("U3"), (2,)),), ReduceOp.SUM)


def test_no_piece_is_too_long_for_the_counts_of_mpi():
    leaves = ((np.dtype(np.int8), (1 << 33,)),)
    (stream,) = plan(leaves, ReduceOp.SUM, 1 << 34).streams
    assert max(stream.piece, stream.large_piece, stream.far_piece, stream.kept_piece) < 1 << 31
