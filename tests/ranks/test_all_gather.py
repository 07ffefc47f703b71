"""ctx.all_gather and strategy.gather against np.concatenate over the values of all replicas."""

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

import mpi_replica as mr
from contributions import (
    OF_OP,
    OTHERS,
    STRUCTURED,
    Leaf,
    at_once,
    build,
    check_everywhere,
    gathered,
    nests,
)
from everywhere import check_works, needs_two_replicas, raises_everywhere

DTYPES = (*OF_OP["SUM"], "bool", *OTHERS)


@pytest.fixture(params=["many ranks", "large messages"])
def other_road(request, monkeypatch, passed_everywhere):
    """A strategy whose ranks agree, or move data, as they do in large worlds and messages."""
    from mpi4py import MPI

    if request.param == "many ranks":
        monkeypatch.setattr("mpi_replica.collectives.agreement.agreement._ALLGATHER_RANKS", 0)
    else:
        # A message for each: on dozens of ranks those of 64 bytes would take minutes.
        piece_bytes = 64 if MPI.COMM_WORLD.size <= 4 else 4096
        monkeypatch.setattr("mpi_replica.ranks.mpi._LARGEST_MESSAGE_BYTES", piece_bytes)
    strategy = mr.MPIStrategy(replicas_per_rank=1 + MPI.COMM_WORLD.rank % 2)
    yield strategy
    if passed_everywhere():
        strategy.close()


def gather_everywhere(strategy, axis, make):
    """What each local replica gets; `make(replica_id)` is its value."""

    def step():
        ctx = mr.get_replica_context()
        return ctx.all_gather(make(ctx.replica_id_in_sync_group), axis=axis)

    return strategy.experimental_local_results(strategy.run(step))


def check_gather(strategy, axis, nest):
    """Check all_gather, then gather, for a nest of `Leaf`."""

    def make(replica):
        return build(nest, lambda leaf: leaf.of(replica))

    replicas = strategy.num_replicas_in_sync
    expected = build(nest, lambda leaf: gathered(leaf.of_all(replicas), axis))
    check_everywhere(gather_everywhere(strategy, axis, make), expected)
    value = strategy.experimental_distribute_values_from_function(
        lambda context: make(context.replica_id_in_sync_group)
    )
    check_everywhere([strategy.gather(value, axis=axis)], expected)


@st.composite
def calls(draw):
    axis = draw(st.integers(-3, 2))
    least = axis + 1 if axis >= 0 else -axis
    leaves = st.builds(
        Leaf,
        dtype=st.sampled_from(DTYPES),
        shape=st.lists(st.integers(0, 3), min_size=least, max_size=3).map(tuple),
        number=st.integers(0, 99),
        layout=st.integers(0, 6),
        axis=st.just(axis),
        extents=st.lists(st.integers(0, 3), min_size=1, max_size=3).map(tuple),
    )
    return axis, draw(nests(leaves))


@at_once
@given(call=calls())
def test_decision_8_any_nest_dtype_axis_and_extent_gives_what_numpy_gives(strategy, call):
    check_gather(strategy, *call)


@at_once
@given(call=calls())
def test_the_same_holds_in_large_worlds_and_messages(other_road, call):
    check_gather(other_road, *call)


@pytest.mark.parametrize("axis", [0, -2])
def test_decision_8_every_fixed_size_dtype_is_gathered_along_every_axis(strategy, axis):
    for dtype in DTYPES:
        for shape in ((2, 3, 2), (9, 5, 4)):
            leaf = Leaf(dtype, shape, axis=axis, extents=(2, 0, 5))
            check_gather(strategy, axis, leaf)


# 237 bytes fit into the header; leaves of less than 64 KiB share a message; results above 1 MiB
# are confirmed by a second header.
SIZES = [1, 10, 40, 300]


@pytest.mark.parametrize("rows", SIZES)
def test_a_leaf_of_any_size_is_right_however_it_travels(strategy, rows):
    extents = (rows, 2 * rows, 0, rows + 1)
    check_gather(strategy, 0, Leaf("float64", (1, 4), axis=0, extents=extents))
    check_gather(strategy, 1, Leaf("int16", (4, 1), axis=1, extents=extents))
    nest = [Leaf("U", (1,), axis=0, extents=extents), Leaf("int8", (1, 3), axis=0)]
    check_gather(strategy, 0, nest)


def test_leaves_of_all_sizes_are_right_in_large_worlds_and_messages(other_road):
    for rows in SIZES:
        test_a_leaf_of_any_size_is_right_however_it_travels(other_road, rows)
    test_leaves_that_are_small_on_some_replicas_and_large_on_others_are_right(other_road)


@pytest.mark.parametrize("axis", [0, 1])
def test_results_above_a_mebibyte_are_right(strategy, axis):
    extents = (1200, 300, 0)
    large = Leaf("float64", (130, 130), 1, axis=axis, extents=extents)
    small = Leaf("bool", (7, 7), 2, axis=axis)
    check_gather(strategy, axis, large)
    check_gather(strategy, axis, [small, large, Leaf("U", (130, 130), 3, axis=axis), large])


def test_leaves_that_are_small_on_some_replicas_and_large_on_others_are_right(strategy):
    for extents in ((1, 3000), (3000, 1), (0, 20_000), (1, 1, 500)):
        check_gather(strategy, 0, Leaf("float64", (1, 2), axis=0, extents=extents))


def test_many_leaves_travel_in_one_call(strategy):
    dtypes = ["float32", "S", "int64", STRUCTURED]
    nest = {f"{n}": Leaf(dtypes[n % 4], (1, 3), n, axis=0, extents=(n % 5, 1)) for n in range(60)}
    check_gather(strategy, 0, nest)


def test_leaves_that_are_empty_everywhere_keep_shape_and_dtype(strategy):
    for dtype in DTYPES:
        check_gather(strategy, 1, Leaf(dtype, (3, 0, 2)))
        check_gather(strategy, 1, Leaf(dtype, (0, 2)))


def test_decision_8_the_widest_item_size_of_strings_wins(strategy):
    last = strategy.num_replicas_in_sync - 1

    def make(i):
        return np.array(["wide" * 30 if i == last else "é" * i, "x"])

    texts = np.concatenate([make(i) for i in range(last + 1)])
    assert texts.dtype == "U120"
    check_everywhere(gather_everywhere(strategy, 0, make), texts)


def test_zero_bytes_within_bytes_strings_survive(strategy):
    def make(i):
        return np.array([b"a\0b" * (i + 1), b""])

    expected = gathered([make(i) for i in range(strategy.num_replicas_in_sync)], 0)
    check_everywhere(gather_everywhere(strategy, 0, make), expected)


def test_a_structured_dtype_with_fields_out_of_order_is_gathered(strategy):
    dtype = np.dtype({"names": ["a", "b"], "formats": ["i4", "f8"], "offsets": [8, 0]})

    def make(i):
        return np.array([(i, i / 2)] * (i + 1), dtype)

    for result in gather_everywhere(strategy, 0, make):
        expected = [(i, i / 2) for i in range(strategy.num_replicas_in_sync) for _ in range(i + 1)]
        assert result.tolist() == expected
        assert result.dtype == dtype


@pytest.mark.parametrize("rows", [1, 10_000])
def test_a_field_that_is_an_array_has_its_numbers_in_whatever_byte_order_it_is(strategy, rows):
    def make(replica):
        pairs = np.zeros(rows, [("a", "i1"), ("pair", "<>"[replica % 2] + "f4", 2)])
        pairs["pair"] = [replica + 1, replica + 2]
        return pairs

    of_all = np.concatenate([make(i)["pair"] for i in range(strategy.num_replicas_in_sync)])
    for result in gather_everywhere(strategy, 0, make):
        np.testing.assert_array_equal(result["pair"], of_all)


def test_the_same_array_on_all_replicas_stands_once_for_each(strategy):
    shared = np.array([[1, 2, 3]])
    count = strategy.num_replicas_in_sync
    for axis, shape in ((0, (count, 3)), (1, (1, 3 * count))):
        for result in gather_everywhere(strategy, axis, lambda i: shared):
            assert result.shape == shape
            assert (result.reshape(-1, 3) == shared).all()


def test_the_nest_of_the_documentation_is_gathered(strategy):
    def make(i):
        return {"a": np.array([i]), "b": np.array([[0, 1]] if i == 0 else [[2, 3], [4, 5]])}

    of_all = [make(i) for i in range(strategy.num_replicas_in_sync)]
    expected = {key: np.concatenate([row[key] for row in of_all]) for key in "ab"}
    check_everywhere(gather_everywhere(strategy, 0, make), expected)


@pytest.mark.parametrize("rows", [2, 100, 40_000])
def test_decision_6_a_gathered_result_is_fresh_also_with_one_replica(strategy, rows):
    given = np.arange(float(rows))

    def step():
        ctx = mr.get_replica_context()
        result = ctx.all_gather(given, axis=0)
        result += 1 + ctx.replica_id_in_sync_group
        return result, ctx.all_gather(given, axis=0)

    results = strategy.experimental_local_results(strategy.run(step))
    for replica, (mine, again) in zip(strategy.local_replica_ids, results, strict=True):
        np.testing.assert_array_equal(again, np.tile(given, strategy.num_replicas_in_sync))
        np.testing.assert_array_equal(mine, again + 1 + replica)
    np.testing.assert_array_equal(given, np.arange(float(rows)))


# Decision 9: gather in cross-replica context


def test_decision_9_gather_maps_over_nests_of_local_and_of_all_components(strategy):
    count = strategy.num_replicas_in_sync
    mine = strategy.run(lambda: np.array([mr.get_replica_context().replica_id_in_sync_group]))
    every = mr.PerReplica([np.array([10 * i, 1]) for i in range(count)])
    result = strategy.gather({"mine": mine, "every": [every]}, axis=0)
    expected = {"mine": np.arange(count), "every": [gathered(every.values, 0)]}
    check_everywhere([result], expected)


@pytest.mark.parametrize(
    "value", [np.array([1]), 3, None, [np.array([1])], mr.Mirrored(np.ones(2))]
)
def test_decision_9_gather_of_a_plain_value_is_a_value_error(strategy, value):
    error = raises_everywhere(ValueError, lambda: strategy.gather(value, axis=0))
    assert "strategy.run" in str(error)
    check_works(strategy)


def test_gather_of_a_nest_with_one_plain_leaf_names_it(strategy):
    mine = strategy.run(lambda: np.ones(2))
    nest = {"a": mine, "b": [mine, np.ones(2)]}
    error = raises_everywhere(ValueError, lambda: strategy.gather(nest, axis=0))
    assert "['b'][1]" in str(error)
    check_works(strategy)


# Bad input: an error on every rank, with one text, and the next collective is right.


def check_refused(strategy, kind, bad, good, axis, *words, in_step="", above=""):
    """`bad` is refused whoever passes it, in both contexts."""
    every = range(strategy.num_replicas_in_sync)
    for wrong in ({0}, {every[-1]}, set(every)):

        def make(i, wrong=wrong):
            return [bad if i in wrong else good]

        error = raises_everywhere(kind, lambda m=make: gather_everywhere(strategy, axis, m))
        assert all(word in str(error) for word in (*words, in_step)), str(error)
        value = strategy.experimental_distribute_values_from_function(
            lambda context, m=make: m(context.replica_id_in_sync_group)
        )
        error = raises_everywhere(kind, lambda v=value: strategy.gather(v, axis=axis))
        assert all(word in str(error) for word in (*words, above)), str(error)
    check_works(strategy)


def test_decision_8_a_scalar_is_a_value_error_that_says_how_to_write_an_array(strategy):
    for scalar in (3, np.float32(1), np.array(7), "text", True):
        check_refused(strategy, ValueError, scalar, np.ones(1), 0, "value[0]", "np.array([")


@pytest.mark.parametrize(
    "beside", [[], [np.ones((1, 1))], [np.ones((1, 10**5))], [np.ones((1, 1))] * 60]
)
@pytest.mark.parametrize(("dtype", "axis"), [("i1", 0), ("i1", 1), ("S1", 0), ("i2", 0)])
def test_a_result_that_no_array_can_be_is_an_error_that_names_its_leaf_and_shape(
    strategy, beside, dtype, axis
):
    needs_two_replicas(strategy)
    count, most = strategy.num_replicas_in_sync, (2**63 - 1) // np.dtype(dtype).itemsize

    def make(i, most=most):
        extent = most if i == count - 1 else 1 + i
        return {"a": beside, "b": np.empty((extent, 0) if axis == 0 else (0, extent), dtype)}

    error = raises_everywhere(ValueError, lambda: gather_everywhere(strategy, axis, make))
    total = most + count * (count - 1) // 2
    shape = (total, 0) if axis == 0 else (0, total)
    assert f"all_gather of value['b'] would give an array of shape {shape}" in str(error)
    value = strategy.experimental_distribute_values_from_function(
        lambda context: make(context.replica_id_in_sync_group)
    )
    error = raises_everywhere(ValueError, lambda: strategy.gather(value, axis=axis))
    assert f"gather of value['b'] would give an array of shape {shape}" in str(error)
    at_hand = mr.PerReplica([make(i)["b"] for i in range(count)])
    raises_everywhere(ValueError, lambda: strategy.gather(at_hand, axis=axis))
    check_works(strategy)
    for found in gather_everywhere(strategy, axis, lambda i: make(i, most - total + most)):
        assert found["b"].shape == ((most, 0) if axis == 0 else (0, most))


def test_an_axis_out_of_range_is_a_value_error_that_names_leaf_and_shape(strategy):
    bad = np.ones((2, 5))
    for axis in (2, -3, 100):
        check_refused(strategy, ValueError, bad, bad, axis, str(axis), "value[0]", "(2, 5)")


def test_an_axis_that_is_no_integer_is_a_type_error(strategy):
    rows = strategy.run(np.ones, (2,))
    for axis in (0.5, "x", None, (0,), [0]):
        error = raises_everywhere(
            TypeError, lambda axis=axis: gather_everywhere(strategy, axis, lambda i: np.ones(2))
        )
        assert repr(axis) in str(error)
        raises_everywhere(TypeError, lambda axis=axis: strategy.gather(rows, axis=axis))
    check_works(strategy)


def test_an_axis_may_be_a_numpy_integer(strategy):
    check_gather(strategy, np.int32(1), Leaf("float32", (2, 3)))


def test_the_axis_must_be_given(strategy):
    raises_everywhere(
        TypeError, lambda: strategy.run(lambda: mr.get_replica_context().all_gather(np.ones(2)))
    )
    check_works(strategy)


def test_objects_are_a_type_error_that_names_the_call_for_them(strategy):
    calls = {"in_step": "merge_call", "above": "strategy.gather_objects"}
    of_nothing = np.zeros(2, np.dtype([]))
    texts = np.array(["a"], np.dtypes.StringDType())
    for bad in (None, object(), np.array([object()]), texts, of_nothing):
        check_refused(strategy, TypeError, bad, np.ones(1), 0, "value[0]", **calls)


def test_arrays_without_a_fixed_item_size_have_an_error_with_their_dtype_and_what_to_do(strategy):
    calls = {"in_step": "merge_call", "above": "strategy.gather_objects"}
    texts = np.array(["a"], np.dtypes.StringDType())
    for bad in (np.array([1, None]), texts, np.zeros(1, [("a", "O"), ("b", "f8")])):
        words = f"got ndarray of dtype {bad.dtype} for value[0]", ".astype(float) or .astype(str)"
        check_refused(strategy, TypeError, bad, np.ones(1), 0, *words, **calls)


def test_decision_8_indexed_slices_are_not_implemented(strategy):
    bad = mr.IndexedSlices(np.ones((1, 2)), [0])
    check_refused(strategy, NotImplementedError, bad, np.ones((1, 2)), 0, "value[0]")


@pytest.mark.parametrize(
    "others",
    [
        np.ones((2, 4)),
        np.ones(2),
        np.ones((2, 3, 1)),
        np.ones((2, 3), np.float32),
        np.full((2, 3), "x"),
    ],
    ids=lambda array: f"{array.dtype}{array.shape}",
)
def test_what_can_not_be_concatenated_is_a_structure_mismatch_everywhere(strategy, others):
    check_apart(strategy, others)


def test_a_mismatch_in_large_worlds_and_messages_is_told_everywhere(other_road):
    check_apart(other_road, np.ones((2, 4)))


def check_apart(strategy, others):
    last = strategy.num_replicas_in_sync - 1
    if last == 0:
        pytest.skip("one replica has nobody to differ from")

    def make(i):
        return {"w": others if i == last else np.ones((2, 3))}

    error = raises_everywhere(
        mr.errors.StructureMismatchError, lambda: gather_everywhere(strategy, 0, make)
    )
    assert "['w']" in str(error)
    assert f"replica {last}" in str(error)
    value = strategy.run(lambda: make(mr.get_replica_context().replica_id_in_sync_group))
    raises_everywhere(mr.errors.StructureMismatchError, lambda: strategy.gather(value, axis=0))
    check_works(strategy)


def test_each_replica_finds_its_own_order_of_keys(strategy):
    def step():
        context = mr.get_replica_context()
        names = ["x", "y"][:: 1 - 2 * (context.replica_id_in_sync_group % 2)]
        found = context.all_gather({name: np.ones(1) for name in names}, axis=0)
        return list(found) == names

    assert all(strategy.gather_objects(strategy.run(step)))
