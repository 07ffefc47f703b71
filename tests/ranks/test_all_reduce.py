"""ctx.all_reduce against numpy, over the contributions of all replicas."""

import itertools
from typing import NamedTuple

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

import mpi_replica as mr
from contributions import OF_OP, Leaf, at_once, check_everywhere, reduced, values
from everywhere import check_works, gathered, raises_everywhere
from mpi_replica.core.dtypes import accumulation
from reducing import calls, check_reduce, reduce_everywhere


@pytest.fixture
def many_ranks(monkeypatch, passed_everywhere):
    """A strategy whose ranks agree as those of large worlds do."""
    from mpi4py import MPI

    monkeypatch.setattr("mpi_replica.collectives.agreement.agreement._ALLGATHER_RANKS", 0)
    strategy = mr.MPIStrategy(replicas_per_rank=1 + MPI.COMM_WORLD.rank % 2)
    yield strategy
    if passed_everywhere():
        strategy.close()


@at_once
@given(call=calls(), bytes_per_pack=st.sampled_from([0, 0, 1, 24, 200]))
def test_decision_6_any_nest_dtype_and_layout_gives_what_numpy_gives(
    strategy, call, bytes_per_pack
):
    check_reduce(strategy, *call, bytes_per_pack=bytes_per_pack)


@at_once
@given(call=calls(), bytes_per_pack=st.sampled_from([0, 1, 200]))
def test_the_same_holds_in_large_worlds(many_ranks, call, bytes_per_pack):
    check_reduce(many_ranks, *call, bytes_per_pack=bytes_per_pack)


@pytest.mark.parametrize("op", OF_OP)
def test_every_dtype_is_reduced_alone_and_with_all_others(strategy, op):
    leaves = [Leaf(dtype, (2, 3), n, layout=n) for n, dtype in enumerate(OF_OP[op])]
    for leaf in leaves:
        check_reduce(strategy, op, leaf)
    check_reduce(strategy, op, {leaf.dtype: leaf for leaf in leaves})


# 237 bytes fit into the header; leaves from 64 KiB on, or from bytes_per_pack, go in pieces.
SIZES = [(1, 0), (29, 0), (60, 0), (1001, 100), (40_001, 1 << 15)]


@pytest.mark.parametrize(("items", "bytes_per_pack"), SIZES)
def test_a_leaf_of_any_size_is_right_however_it_travels(strategy, items, bytes_per_pack):
    for op in ("SUM", "MEAN", "MAX"):
        for dtype in ("float16", "int32", "float64"):
            leaf = Leaf(dtype, (items,), layout=6)
            check_reduce(strategy, op, leaf, bytes_per_pack=bytes_per_pack)


@pytest.mark.parametrize("items", [3, 1001, 300_001])
@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint16", "int32", "uint64"])
def test_sums_and_products_of_integers_wrap_around_as_those_of_numpy(strategy, dtype, items):
    """Open MPI's sums of small integers saturate, but for the last few items."""
    large = np.iinfo(dtype).max // 2 + 5
    count = strategy.num_replicas_in_sync
    for op, expected in {"SUM": large * count, "PROD": large**count}.items():
        nest = {"x": np.full(items, large, dtype), "other": 1.5}
        results = reduce_everywhere(strategy, op, lambda _, nest=nest: nest)
        wrapped = np.array(expected % 2**64, np.uint64).astype(dtype)
        for result in results:
            np.testing.assert_array_equal(result["x"], np.full(items, wrapped), strict=True)


@pytest.mark.parametrize("codes", ["lq", "ql", "LQ", "QL"])
@pytest.mark.parametrize("items", [3, 1000, 100_000])
def test_integers_of_64_bits_are_one_dtype_by_whatever_code_of_c_they_were_made(
    strategy, codes, items
):
    """As ``array.array("q")`` and ``np.int64``: MPI has two names for them."""
    count = strategy.num_replicas_in_sync
    expected = np.arange(items) * count + sum(range(count))

    def step(mine, theirs):
        ctx = mr.get_replica_context()
        i = ctx.replica_id_in_sync_group
        value = (np.arange(items) + i).astype(mine if i % 2 else theirs)
        out = np.empty(items, codes[0])
        return [ctx.all_reduce("SUM", value), ctx.all_reduce("SUM", value, out=out)]

    for mine, theirs in (codes, codes[1] * 2):  # of each replica another one, and all the same
        for results in strategy.experimental_local_results(strategy.run(step, (mine, theirs))):
            for result in results:
                assert result.dtype == np.dtype(codes[0])
                np.testing.assert_array_equal(result, expected)


@pytest.mark.parametrize("items", [3, 1000, 100_000])
def test_results_are_of_one_class_whatever_a_rank_has_computed_before(strategy, items):
    accumulation.cache_clear()

    def step(code):
        ctx = mr.get_replica_context()
        value = np.arange(items, dtype=code)
        results = [ctx.all_reduce(op, value) for op in ("SUM", "MEAN", "MAX")]
        return [*results, ctx.all_reduce("SUM", value[-1]), ctx.all_gather(value, axis=0)]

    mixed = ["ql"[i % 2] for i in range(strategy.num_replicas_in_sync)]
    for codes in (mixed, ["l"] * len(mixed)):
        given = mr.PerReplica(codes)
        of_replicas = strategy.experimental_local_results(strategy.run(step, (given,)))
        kinds = {"".join([result.dtype.char for result in results]) for results in of_replicas}
        rows = strategy.run(lambda code: np.arange(2, dtype=code), (given,))
        above = strategy.gather(rows, axis=0), strategy.reduce("SUM", rows, axis=0)
        kinds.add("".join([result.dtype.char for result in above]))
        assert gathered(kinds) == [{"ldlll", "ll"}] * strategy.size


def test_leaves_of_all_sizes_and_errors_are_right_in_large_worlds(many_ranks):
    for items, bytes_per_pack in SIZES:
        test_a_leaf_of_any_size_is_right_however_it_travels(many_ranks, items, bytes_per_pack)
    test_small_and_large_leaves_of_several_dtypes_travel_in_one_call(many_ranks)
    test_decision_5_python_ints_and_floats_at_one_leaf_count_as_float64(many_ranks, "SUM")
    test_a_replica_that_catches_the_error_goes_on_with_right_numbers(many_ranks)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_a_leaf_of_several_pieces_of_a_mebibyte_is_right(strategy, dtype):
    for op in ("MEAN", "MIN"):
        check_reduce(strategy, op, Leaf(dtype, (701, 1007)))


def test_small_and_large_leaves_of_several_dtypes_travel_in_one_call(strategy):
    shapes = [(3,), (20_000,), (), (0, 5), (7, 11), (130, 150)]
    dtypes = ["float32", "float64", "int16"]
    nest = [Leaf(t, s, n, layout=n) for t in dtypes for n, s in enumerate(shapes)]
    for bytes_per_pack in (0, 300, 5000):
        check_reduce(strategy, "SUM", nest, bytes_per_pack=bytes_per_pack)


def test_many_leaves_that_fill_more_than_one_pack_travel_in_one_call(strategy):
    nest = {f"{n}": Leaf("float64", (n % 7, 1500), n) for n in range(40)}
    check_reduce(strategy, "MIN", nest)


@pytest.mark.parametrize("op", OF_OP)
def test_a_nest_without_leaves_or_with_empty_ones_comes_back_as_it_is(strategy, op):
    for value in ([], {}, ()):
        for result in reduce_everywhere(strategy, op, lambda i, value=value: value):
            assert result == value
            assert type(result) is type(value)
    check_reduce(strategy, op, Leaf("float32", (0, 3)))
    check_reduce(strategy, op, [Leaf("float16", (2, 0)), Leaf("int8", (0,)), Leaf("int8", ())])


class Pair(NamedTuple):
    loss: float
    rows: object


def test_containers_keep_their_types_and_keys(strategy):
    count = strategy.num_replicas_in_sync
    for result in reduce_everywhere(strategy, "SUM", lambda i: {"z": Pair(1.0, [i]), "a": (2,)}):
        assert result == {"z": Pair(float(count), [sum(range(count))]), "a": (2 * count,)}
        assert type(result["z"]) is Pair


def test_decision_4_the_same_object_on_all_replicas_counts_once_for_each(strategy):
    count = strategy.num_replicas_in_sync
    shared = np.array([1.0, 3.0])
    for result in reduce_everywhere(strategy, "SUM", lambda i: (shared, [shared, shared])):
        np.testing.assert_array_equal(result[0], count * shared)
        np.testing.assert_array_equal(result[1], [count * shared] * 2)
    np.testing.assert_array_equal(shared, [1.0, 3.0])


@pytest.mark.parametrize("items", [1, 100, 20_000])
@pytest.mark.parametrize("op", ["SUM", "MAX"])
def test_decision_6_a_result_is_fresh_also_with_one_replica(strategy, op, items):
    given = np.arange(float(items))

    def step():
        ctx = mr.get_replica_context()
        mine = given + ctx.replica_id_in_sync_group
        result = ctx.all_reduce(op, mine)
        fresh = not np.shares_memory(result, mine)
        result += 1000 * ctx.replica_id_in_sync_group
        return fresh, result, ctx.all_reduce(op, mine)

    for replica, (fresh, mine, again) in zip(
        strategy.local_replica_ids, strategy_results(strategy, step), strict=True
    ):
        assert fresh
        np.testing.assert_array_equal(mine, again + 1000 * replica)


def strategy_results(strategy, step):
    return strategy.experimental_local_results(strategy.run(step))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_nan_of_any_replica_comes_out_of_min_and_max(strategy, dtype):
    replicas = strategy.num_replicas_in_sync

    def make(replica, items):
        array = values("float64", (items,), 7, replica)
        array[replica % 8] = (np.nan, -np.nan)[replica % 2]
        array[-1] = (np.inf, -np.inf, 0.0)[replica % 3]
        return array.astype(dtype)

    for op, items in itertools.product(("MIN", "MAX"), (9, 100, 40_000)):
        expected = reduced(op, [make(i, items) for i in range(replicas)])
        assert np.isnan(expected[: min(replicas, 8)]).all()
        assert not np.isnan(expected[8:]).any()
        results = reduce_everywhere(strategy, op, lambda i, items=items: make(i, items))
        check_everywhere(results, expected)


@pytest.mark.parametrize("items", [1, 50_000])
def test_decision_5_float16_and_bfloat16_accumulate_in_float32(strategy, items):
    replicas = strategy.num_replicas_in_sync
    for dtype, large in (("float16", 2048.0), ("bfloat16", 256.0)):
        # in its own dtype the large one would swallow each of the small ones
        def make(i, dtype=dtype, large=large):
            return np.full(items, large if i == 0 else 1.0).astype(dtype)

        expected = np.full(items, large + replicas - 1, "float32").astype(dtype)
        for result in reduce_everywhere(strategy, "SUM", make):
            assert result.dtype == dtype
            assert (result == expected).all()


def test_decision_5_float16_sums_pass_its_largest_number_on_the_way(strategy):
    for result in reduce_everywhere(strategy, "MEAN", lambda i: np.full(3, 60000, np.float16)):
        np.testing.assert_array_equal(result, np.full(3, 60000, np.float16))


@pytest.mark.parametrize("dtype", ["bool", "uint8", "int32", "int64", "uint64"])
def test_decision_5_mean_of_integers_and_bools_is_float64_whatever_r_is(strategy, dtype):
    replicas = strategy.num_replicas_in_sync
    expected = np.mean([float(np.array(i % 2 * 250).astype(dtype)) for i in range(replicas)])
    for result in reduce_everywhere(
        strategy, "MEAN", lambda i: np.array(i % 2 * 250).astype(dtype)
    ):
        assert type(result) is np.float64
        assert result == pytest.approx(expected, rel=1e-15)


def test_mean_of_uint8_does_not_wrap(strategy):
    values = [248 + i % 8 for i in range(strategy.num_replicas_in_sync)]
    for result in reduce_everywhere(strategy, "MEAN", lambda i: np.uint8(values[i])):
        assert result == sum(values) / len(values)


def test_decision_5_float32_stays_float32(strategy):
    for result in reduce_everywhere(strategy, "MEAN", lambda i: np.float32(i)):
        assert type(result) is np.float32


@pytest.mark.parametrize("op", ["SUM", "MEAN", "MIN", "MAX", "PROD"])
def test_decision_5_python_ints_and_floats_at_one_leaf_count_as_float64(strategy, op):
    def make(i):
        # of more than six replicas, products that float64 holds exactly in any order
        number = i + 1.5 if i < 6 else 2.0
        mixed = int(number) if i % 2 else number
        return {"mixed": mixed, "ints": i + 1, "rows": np.full(40, i, "int8")}

    results = reduce_everywhere(strategy, op, make)
    of_all = [make(i) for i in range(strategy.num_replicas_in_sync)]
    expected = {
        "mixed": reduced(op, [np.float64(row["mixed"]) for row in of_all]),
        "ints": reduced(op, [row["ints"] for row in of_all]),
        "rows": reduced(op, [row["rows"] for row in of_all]),
    }
    check_everywhere(results, expected)
    check_works(strategy)


def test_python_numbers_and_numpy_scalars_give_numpy_scalars(strategy):
    count = strategy.num_replicas_in_sync
    total = sum(range(count))
    for result in reduce_everywhere(
        strategy, "SUM", lambda i: (i, float(i), 1j * i, np.int8(i), np.float32(i))
    ):
        assert result == (total, total, 1j * total, (total + 128) % 256 - 128, total)
        kinds = [type(leaf) for leaf in result]
        assert kinds == [np.int64, np.float64, np.complex128, np.int8, np.float32]


def test_a_reduce_op_may_be_a_string_in_any_case_also_a_different_one_per_replica(strategy):
    spellings = ["sum", "SUM", "Sum", mr.ReduceOp.SUM]

    def step():
        ctx = mr.get_replica_context()
        i = ctx.replica_id_in_sync_group
        return ctx.all_reduce(spellings[i % len(spellings)], i)

    count = strategy.num_replicas_in_sync
    assert set(strategy_results(strategy, step)) == {sum(range(count))}


# Cases of tf.distribute, for R replicas.


def test_a_pair_of_a_scalar_and_a_vector_is_reduced_leaf_by_leaf(strategy):
    count = strategy.num_replicas_in_sync
    ids = np.arange(count)
    results = reduce_everywhere(strategy, "SUM", lambda i: (1.0 + 2 * i, np.array([39.0, 2 + i])))
    expected = (np.float64((1 + 2 * ids).sum()), np.array([39.0 * count, (2 + ids).sum()]))
    check_everywhere(results, expected)


@pytest.mark.parametrize("dtype", [int, np.int64, np.int32])
@pytest.mark.parametrize("op", ["SUM", "MEAN"])
def test_the_nest_of_integers_in_the_documentation_is_reduced_as_printed(strategy, op, dtype):
    rows = ([1, 3], [40, 2], [1, 98])  # of replicas 0 and 1, then again

    def make(i):
        a, b, c = (dtype(row[i % 2]) for row in rows)
        return {"a": a, "b": [b, c]}

    numpys = {"SUM": np.sum, "MEAN": np.mean}[op]
    a, b, c = (numpys(np.resize(row, strategy.num_replicas_in_sync)) for row in rows)
    for result in reduce_everywhere(strategy, op, make):
        assert result == {"a": pytest.approx(a), "b": pytest.approx([b, c])}


@pytest.mark.parametrize("op", ["SUM", "MEAN"])
def test_a_batch_that_is_split_over_replicas_is_reduced_row_by_row(strategy, op):
    count = strategy.num_replicas_in_sync
    factor = count if op == "SUM" else 1
    for result in reduce_everywhere(strategy, op, lambda i: np.array([2 * i + 1.0, 2 * i + 2.0])):
        np.testing.assert_array_equal(result, [factor * count, factor * (count + 1)])


# IndexedSlices: rows of all replicas, one behind the other


@pytest.mark.parametrize("dtype", ["float32", "float64", "complex64"])
def test_indexed_slices_made_dense_have_the_bits_of_a_reproducible_sum(strategy, dtype):
    def make(i):
        random = np.random.default_rng(i)
        values = random.normal(size=(40, 3)).astype(dtype) * 10.0 ** random.integers(-6, 6, (40, 1))
        return mr.IndexedSlices(values.astype(dtype), random.integers(0, 9, 40), (9, 3))

    def step():
        context = mr.get_replica_context()
        slices = make(context.replica_id_in_sync_group)
        options = mr.CommunicationOptions(reproducible=True)
        dense = context.all_reduce("SUM", slices.to_dense(), options=options)
        return dense, context.all_reduce("SUM", slices).to_dense()

    for dense, sparse in strategy.experimental_local_results(strategy.run(step)):
        assert sparse.tobytes() == dense.tobytes()


def test_indexed_slices_of_all_replicas_add_up(strategy):
    """Two tf cases: one row each at index 0; and 1, 2, 3, ... rows."""
    count = strategy.num_replicas_in_sync

    def make(i):
        rows = np.arange(i + 1)
        return mr.IndexedSlices(10.0 * i + rows, rows), mr.IndexedSlices([[1.0]], [0], (1, 1))

    for grown, ones in reduce_everywhere(strategy, "SUM", make):
        rows = [(10.0 * i + row, row) for i in range(count) for row in range(i + 1)]
        assert list(zip(grown.values, grown.indices, strict=True)) == rows
        assert grown.dense_shape is None
        np.testing.assert_array_equal(ones.to_dense(), [[count]])


@pytest.mark.parametrize("dtype", ["float32", "float16", "int32", "complex64"])
@pytest.mark.parametrize("op", ["SUM", "MEAN"])
def test_indexed_slices_made_dense_are_what_dense_arrays_give(strategy, op, dtype):
    def make(i):
        values = np.array([[1, 2], [3, 4], [5, 6]][: i % 3 + 1], dtype)
        return mr.IndexedSlices(values, [1, 3, 1][: i % 3 + 1], dense_shape=[5, 2])

    dense = [make(i).to_dense() for i in range(strategy.num_replicas_in_sync)]
    expected = reduced(op, dense)
    for result in reduce_everywhere(
        strategy, op, lambda i: {"e": make(i), "w": make(i).to_dense()}
    ):
        assert isinstance(result["e"], mr.IndexedSlices)
        assert result["e"].dense_shape == (5, 2)
        assert result["e"].values.dtype == expected.dtype
        np.testing.assert_allclose(result["e"].to_dense(), expected, rtol=1e-3)
        np.testing.assert_array_equal(result["w"], expected)


def test_indexed_slices_have_no_min_and_their_dense_shapes_must_agree(strategy):
    slices = mr.IndexedSlices(np.ones((1, 2)), [0], (3, 2))
    for op in ("MIN", "MAX", "PROD"):
        error = raises_everywhere(
            TypeError, lambda op=op: reduce_everywhere(strategy, op, lambda i: [slices])
        )
        assert "to_dense()" in str(error)
    if strategy.num_replicas_in_sync > 1:
        raises_everywhere(
            mr.errors.MPIReplicaError,
            lambda: reduce_everywhere(
                strategy, "SUM", lambda i: mr.IndexedSlices(np.ones((1, 2)), [0], (3 + i % 2, 2))
            ),
        )
    check_works(strategy)


def test_decision_7_a_per_replica_of_indexed_slices_stands_for_its_component(strategy):
    count = strategy.num_replicas_in_sync
    spread = strategy.experimental_distribute_values_from_function
    slices = spread(lambda c: mr.IndexedSlices([[1.0 + c.replica_id_in_sync_group]], [0], (2, 1)))
    dense = spread(lambda c: np.full(3, c.replica_id_in_sync_group))
    own = mr.IndexedSlices([[1.0]], [1], (2, 1))
    total = count * (count - 1) // 2
    for nest in ((slices, own), (slices, dense), (own, dense), (mr.Mirrored(own), dense)):
        for one, other in reduce_everywhere(strategy, "SUM", lambda i, nest=nest: nest):
            if nest[0] is slices:
                np.testing.assert_array_equal(one.to_dense(), [[count + total], [0]])
            else:
                np.testing.assert_array_equal(one.to_dense(), [[0], [count]])
            if nest[1] is own:
                np.testing.assert_array_equal(other.to_dense(), [[0], [count]])
            else:
                np.testing.assert_array_equal(other, [total] * 3)


def test_a_per_replica_of_another_strategy_beside_slices_is_an_error_everywhere(strategy):
    """Also where one replica alone has it, and where all catch it and go on."""
    count = strategy.num_replicas_in_sync
    own = mr.IndexedSlices([[1.0]], [0], (1, 1))
    wrong = mr.PerReplica([own] * (count + 1))
    for culprit in {0, count - 1}:

        def make(i, culprit=culprit):
            return own, wrong if i == culprit else own

        raises_everywhere(ValueError, lambda make=make: reduce_everywhere(strategy, "SUM", make))

        def step(make=make):
            context = mr.get_replica_context()
            with pytest.raises(ValueError, match="strategy that has"):
                context.all_reduce("SUM", make(context.replica_id_in_sync_group))
            return context.all_reduce("SUM", own).to_dense()

        for found in strategy.experimental_local_results(strategy.run(step)):
            np.testing.assert_array_equal(found, [[count]])
    check_works(strategy)


# Bad input: an error on every rank, with one text, and the next collective is right.

BAD_LEAVES = [
    (np.array([True]), "bool"),
    (np.array(["a"]), "all_gather"),
    ("a", "all_gather"),
    (b"a", "all_gather"),
    (np.array(["2020-01-01"], "datetime64[D]"), "numbers"),
    (np.zeros(2, [("a", "i4")]), "numbers"),
    (np.zeros(2, "V8"), "numbers"),
    (np.array([object()]), "numbers"),
    (None, "numbers"),
    ({1}, "numbers"),
]


def test_decision_5_what_is_no_number_is_a_type_error_that_names_the_leaf(strategy):
    every = range(strategy.num_replicas_in_sync)
    whose = ({0}, {every[-1]}, set(every))
    for (bad, word), wrong in itertools.product(BAD_LEAVES, whose):

        def step(bad=bad, wrong=wrong):
            ctx = mr.get_replica_context()
            mine = bad if ctx.replica_id_in_sync_group in wrong else 2.0
            return ctx.all_reduce("SUM", {"w": [1.0, mine]})

        error = raises_everywhere(TypeError, lambda step=step: strategy.run(step))
        assert word in str(error)
        assert "['w'][1]" in str(error)
    check_works(strategy)


@pytest.mark.parametrize(
    ("op", "dtype"),
    [("PROD", "bool"), ("MIN", "complex64"), ("MAX", "complex128"), ("SUM", "bool")],
)
def test_an_op_that_a_dtype_does_not_have_is_a_type_error_that_names_both(strategy, op, dtype):
    error = raises_everywhere(
        TypeError, lambda: reduce_everywhere(strategy, op, lambda i: np.zeros(2, dtype))
    )
    assert f"{op} of {dtype}" in str(error)
    check_works(strategy)


@pytest.mark.parametrize(("op", "kind"), [("AVG", ValueError), (None, TypeError), (3, TypeError)])
def test_an_unknown_op_is_an_error_that_lists_the_ops(strategy, op, kind):
    for bad in (lambda i: True, lambda i: i == strategy.num_replicas_in_sync - 1):

        def step(bad=bad):
            ctx = mr.get_replica_context()
            i = ctx.replica_id_in_sync_group
            return ctx.all_reduce(op if bad(i) else "SUM", 1.0)

        error = raises_everywhere(kind, lambda step=step: strategy.run(step))
        assert repr(op) in str(error)
        assert "SUM, MEAN, MIN, MAX, PROD" in str(error)
        check_works(strategy)


def test_a_replica_that_catches_the_error_goes_on_with_right_numbers(strategy):
    def step():
        ctx = mr.get_replica_context()
        i = ctx.replica_id_in_sync_group
        try:
            ctx.all_reduce("SUM", "text" if i == 0 else 1.0)
        except TypeError as error:
            return str(error), ctx.all_reduce("SUM", i)
        return None

    total = sum(range(strategy.num_replicas_in_sync))
    results = strategy_results(strategy, step)
    assert {number for _, number in results} == {total}
    assert len({text for text, _ in results}) == 1


@pytest.mark.parametrize("options", ["fast", 3, {"name": "x"}])
def test_options_that_are_none_are_a_type_error_everywhere(strategy, options):
    raises_everywhere(TypeError, lambda: reduce_everywhere(strategy, "SUM", lambda i: 1.0, options))
    check_works(strategy)
