"""IndexedSlices above the replicas: reduce, reduce_to and batch_reduce_to."""

import numpy as np
import pytest

import mpi_replica as mr
from contributions import reduced
from everywhere import check_works, needs_two_replicas, raises_everywhere

#: The calls that reduce a value above the replicas, and what all ranks get of them.
CALLS = {
    "reduce": lambda strategy, op, value: strategy.reduce(op, value, axis=None),
    "reduce_to": lambda strategy, op, value: strategy.extended.reduce_to(op, value, None),
    "batch_reduce_to": lambda strategy, op, value: strategy.extended.batch_reduce_to(
        op, [(value, None)]
    )[0],
}


def replica_id():
    return mr.get_replica_context().replica_id_in_sync_group


def rows(i, dtype="float64"):
    """One to three rows of an array of five; one of the places stands twice."""
    values = np.array([[1, 2], [3, 4], [5, 6]][: i % 3 + 1], dtype) * (i + 1)
    return mr.IndexedSlices(values, [1, 3, 1][: i % 3 + 1], dense_shape=[5, 2])


def plain(value):
    return value.value if isinstance(value, mr.Mirrored) else value


def check_rows(result, op, dtype, count):
    """`result` has the rows of all replicas, in their order; MEAN divides them by their number."""
    parts = [rows(i, dtype) for i in range(count)]
    expected = reduced(op, [part.to_dense() for part in parts])
    result = plain(result)
    assert isinstance(result, mr.IndexedSlices)
    assert result.indices.tolist() == [place for part in parts for place in part.indices]
    assert result.dense_shape == (5, 2)
    assert result.values.dtype == expected.dtype
    np.testing.assert_allclose(result.to_dense(), expected, rtol=1e-3)


@pytest.mark.parametrize("dtype", ["float32", "float16", "int32", "complex64"])
@pytest.mark.parametrize("op", ["SUM", "mean"])
@pytest.mark.parametrize("call", CALLS)
def test_reducing_slices_gives_the_rows_of_all_replicas_as_in_tf(strategy, call, op, dtype):
    value = strategy.run(lambda: rows(replica_id(), dtype))
    result = CALLS[call](strategy, op, value)
    check_rows(result, op.upper(), dtype, strategy.num_replicas_in_sync)
    assert isinstance(result, mr.Mirrored) == (call != "reduce")


@pytest.mark.parametrize("call", CALLS)
def test_a_merge_fn_reduces_sparse_gradients_and_updates_with_them(strategy, call):
    count = strategy.num_replicas_in_sync
    with strategy.scope():
        table = mr.Variable(np.zeros((5, 2)))

    def subtract(table, gradient):
        table.assign_sub(gradient.to_dense())

    def apply(strategy, gradient):
        mean = CALLS[call](strategy, "MEAN", gradient)
        check_rows(mean, "MEAN", "float64", count)
        strategy.extended.update(table, subtract, (mean,))

    strategy.run(lambda: mr.get_replica_context().merge_call(apply, (rows(replica_id()),)))
    mean = np.mean([rows(i).to_dense() for i in range(count)], axis=0)
    np.testing.assert_allclose(table.numpy(), -mean)


@pytest.mark.parametrize("op", ["SUM", "MEAN"])
def test_slices_stand_beside_dense_values_in_a_nest_and_in_a_batch(strategy, op):
    count = strategy.num_replicas_in_sync
    dense = reduced(op, [np.array([i, 2.0]) for i in range(count)])
    value = strategy.run(lambda: {"e": rows(replica_id()), "b": np.array([replica_id(), 2.0])})
    every = mr.PerReplica([rows(i) for i in range(count)])
    root = strategy.size - 1

    found = strategy.reduce(op, (value, [every]), axis=None)
    check_rows(found[0]["e"], op, "float64", count)
    np.testing.assert_array_equal(found[0]["b"], dense)
    check_rows(found[1][0], op, "float64", count)

    pairs = [(value["b"], None), (value, root), (every, None), (value["e"], value["e"])]
    first, second, *more = strategy.extended.batch_reduce_to(op, pairs)
    np.testing.assert_array_equal(first, dense)
    if strategy.rank == root:
        check_rows(second["e"], op, "float64", count)
        np.testing.assert_array_equal(second["b"], dense)
    else:
        assert second is None
    for result in more:
        check_rows(result, op, "float64", count)


def test_replicas_that_have_no_rows_give_none(strategy):
    value = strategy.run(
        lambda: mr.IndexedSlices(np.ones((replica_id() % 2, 3)), np.zeros(replica_id() % 2, int))
    )
    total = strategy.reduce("SUM", value, axis=None)
    assert total.values.tolist() == [[1.0] * 3] * (strategy.num_replicas_in_sync // 2)
    assert total.dense_shape is None


def test_slices_made_dense_have_the_bits_of_a_reproducible_sum(reproducible):
    def make(i):
        random = np.random.default_rng(i)
        values = random.normal(size=(40, 3)) * 10.0 ** random.integers(-6, 6, (40, 1))
        return mr.IndexedSlices(values, random.integers(0, 9, 40), (9, 3))

    value = reproducible.run(lambda: (make(replica_id()), make(replica_id()).to_dense()))
    sparse, dense = reproducible.reduce("SUM", value, axis=None)
    assert sparse.to_dense().tobytes() == dense.tobytes()


@pytest.mark.parametrize("dtype", ["complex64", "complex128"])
def test_a_part_of_a_complex_row_that_is_no_nan_stays_as_in_a_dense_sum(strategy, dtype):
    def make():
        infinite = np.inf if replica_id() else -np.inf
        values = [[complex(infinite, 1 + replica_id())], [complex(1 + replica_id(), infinite)]]
        slices = mr.IndexedSlices(np.array(values, dtype), [1, 0], (3, 1))
        return slices, slices.to_dense()

    sparse, dense = strategy.reduce("SUM", strategy.run(make), axis=None)
    found = sparse.to_dense()
    assert found.dtype == dense.dtype == dtype
    np.testing.assert_array_equal(found.real, dense.real)
    np.testing.assert_array_equal(found.imag, dense.imag)
    count = strategy.num_replicas_in_sync
    assert (found[0, 0].real, found[1, 0].imag) == (count * (count + 1) / 2,) * 2


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_a_mean_of_slices_is_as_quiet_as_that_of_dense_values(strategy, dtype):
    """Underflow and overflow in a reduction are no mistake of the program."""
    tiny = np.finfo(dtype).smallest_subnormal

    def make():
        return mr.IndexedSlices(np.full((1, 2), tiny), [0], (1, 2)), np.full((1, 2), tiny)

    def step():
        return mr.get_replica_context().all_reduce("MEAN", make())

    def again():
        return mr.get_replica_context().all_reduce("MEAN", step())

    with np.errstate(all="raise"):
        found = [*strategy.experimental_local_results(strategy.run(step))]
        found += strategy.experimental_local_results(strategy.run(again))
        found.append(strategy.reduce("MEAN", strategy.run(make), axis=None))
    for sparse, dense in found:
        np.testing.assert_allclose(sparse.to_dense(), dense, rtol=0, atol=2 * float(tiny))


def test_a_mean_of_slices_keeps_what_is_small_beside_float16(strategy):
    least = np.float16(6e-8)  # divided by the replicas it is no float16 but zero
    with strategy.scope():
        v = mr.Variable(np.zeros(2, "f2"), aggregation=mr.VariableAggregation.MEAN)

    def step():
        context = mr.get_replica_context()
        slices = mr.IndexedSlices(np.full(1, least), [1], dense_shape=(2,))
        v.scatter_add(slices)
        mean = context.all_reduce("MEAN", slices)
        of_rows = mr.mean_over_global_batch(slices, 1)
        again = context.all_reduce("MEAN", context.all_reduce("MEAN", slices)).to_dense()
        assert again.tolist() == [0, least]
        return mean.to_dense(), of_rows.to_dense(), mean.values.dtype

    for mean, of_rows, dtype in strategy.experimental_local_results(strategy.run(step)):
        assert mean.tolist() == of_rows.tolist() == [0, least]
        assert mean.dtype == of_rows.dtype == dtype == np.float16
    assert v.numpy().tolist() == [0, least]


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_rows_that_the_program_writes_into_are_those_that_count(strategy, dtype):
    def step():
        context = mr.get_replica_context()
        total = context.all_reduce("SUM", mr.IndexedSlices(np.ones(2, dtype), [0, 2], (3,)))
        total.values *= 0.5
        total.values[1] = 7
        return total.to_dense()

    half = strategy.num_replicas_in_sync / 2
    for found in strategy.experimental_local_results(strategy.run(step)):
        assert found.tolist() == [half, 0, half + 6.5]


def test_the_mean_of_mirrored_slices_is_themselves(strategy):
    slices = rows(0)
    assert strategy.reduce("MEAN", mr.Mirrored(slices), axis=None) is slices
    raises_everywhere(ValueError, lambda: strategy.reduce("SUM", mr.Mirrored(slices), axis=None))
    check_works(strategy)


# What has no meaning


@pytest.mark.parametrize("op", ["MIN", "MAX", "PROD"])
@pytest.mark.parametrize("call", CALLS)
def test_slices_have_no_least_greatest_or_product(strategy, call, op):
    value = strategy.run(lambda: [rows(replica_id())])
    error = raises_everywhere(TypeError, lambda: CALLS[call](strategy, op, value))
    assert "to_dense()" in str(error)
    check_works(strategy)


def test_slices_along_an_axis_are_an_error_that_says_so(strategy):
    value = strategy.run(lambda: {"w": [rows(replica_id())], "v": np.ones((2, 2))})
    mirrored = {"w": [mr.Mirrored(rows(0))]}
    for given, op, axis in ((value, "SUM", 0), (value, "MEAN", (0, -1)), (mirrored, "MEAN", 0)):
        error = raises_everywhere(
            ValueError, lambda g=given, o=op, a=axis: strategy.reduce(o, g, axis=a)
        )
        for words in ("IndexedSlices", "['w'][0]", "axis=None", "to_dense()"):
            assert words in str(error)
    check_works(strategy)


OTHERS = {
    "dense": np.ones((5, 2)),
    "another dense shape": mr.IndexedSlices(np.ones((1, 2)), [0], (6, 2)),
    "other rows": mr.IndexedSlices(np.ones((1, 3)), [0]),
    "another dtype": mr.IndexedSlices(np.ones((1, 2), np.float32), [0], (5, 2)),
}


@pytest.mark.parametrize("culprit", ["first", "last"])
@pytest.mark.parametrize("other", OTHERS)
def test_replicas_that_give_something_else_than_slices_are_named_in_every_layout(
    strategy, other, culprit
):
    needs_two_replicas(strategy)
    count = strategy.num_replicas_in_sync
    wrong = 0 if culprit == "first" else count - 1
    value = strategy.experimental_distribute_values_from_function(
        lambda context: OTHERS[other] if context.replica_id_in_sync_group == wrong else rows(0)
    )
    for call in CALLS.values():
        error = raises_everywhere(
            mr.errors.MPIReplicaError, lambda call=call: call(strategy, "SUM", [value])
        )
        assert f"replica {wrong} (rank " in str(error)
    check_works(strategy)


# Those of each pair are added up in one dtype.
@pytest.mark.parametrize(
    ("op", "dtypes"),
    [("SUM", ("f2", "f4")), ("MEAN", ("i4", "f8")), ("MEAN", ("i4", "i8")), ("MEAN", ("u1", "i8"))],
)
def test_slices_of_other_dtypes_are_a_structure_mismatch_as_dense_values_are(strategy, op, dtypes):
    needs_two_replicas(strategy)
    last = strategy.num_replicas_in_sync - 1
    value = strategy.run(lambda: {"w": rows(0, dtypes[replica_id() == last])})
    for call in CALLS.values():
        error = raises_everywhere(
            mr.errors.StructureMismatchError, lambda call=call: call(strategy, op, value)
        )
        assert "got different dtypes for value" in str(error)
        assert "['w'].values at " in str(error)
        assert f"{np.dtype(dtypes[1])}[any, 2] on replica {last}" in str(error)
    check_works(strategy)


def test_no_number_beside_slices_is_a_type_error_everywhere(strategy):
    values = strategy.run(
        lambda: [[rows(0), "x"], [rows(0), mr.IndexedSlices(np.array([[True]]), [0])]]
    )
    for value in values:
        for call in CALLS.values():
            error = raises_everywhere(
                TypeError, lambda call=call, value=value: call(strategy, "SUM", value)
            )
            assert "[1]" in str(error)
    check_works(strategy)


def test_gathering_slices_stays_not_implemented(strategy):
    value = strategy.run(lambda: {"w": rows(replica_id())})
    error = raises_everywhere(NotImplementedError, lambda: strategy.gather(value, axis=0))
    assert "['w']" in str(error)
    check_works(strategy)
