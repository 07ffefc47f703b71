"""Large leaves of float16 and bfloat16: added up in float32 in one order, and rounded once."""

import itertools

import hypothesis.strategies as st
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given

import mpi_replica as mr
from contributions import LAYOUTS, at_once, laid_out, reduced
from everywhere import cost_of, gathered, holds_everywhere
from in_order import reduced_in_order
from reducing import reduce_everywhere

OPS = ("SUM", "MEAN", "MIN", "MAX", "PROD")
NARROW = [np.dtype(name) for name in ("float16", ml_dtypes.bfloat16)]
NARROWER = [np.dtype(name) for name in (ml_dtypes.float8_e5m2, ml_dtypes.float8_e4m3fn)]


@pytest.fixture(params=["one a rank", "some a rank"])
def world(request, passed_everywhere):
    """One replica on each rank, and two on every other one."""
    from mpi4py import MPI  # starts MPI, so not when this file is imported

    several = request.param == "some a rank" and MPI.COMM_WORLD.rank % 2 == 0
    strategy = mr.MPIStrategy(replicas_per_rank=2 if several else 1)
    yield strategy
    if passed_everywhere():
        strategy.close()


def of_replica(dtype, shape, replica):
    """Numbers of very different size: their sums depend on the order, and on each rounding."""
    random = np.random.default_rng([replica, *shape])
    numbers = random.standard_normal(shape) * 2.0 ** random.integers(-12, 5, shape)
    return numbers.astype("float32").astype(dtype)


def results_of(strategy, op, dtype, shape, layout="C", how="fresh", **options):
    """What each local replica gets; how: fresh, out or in place."""
    options = mr.CommunicationOptions(**options)

    def step():
        ctx = mr.get_replica_context()
        i = ctx.replica_id_in_sync_group
        value = laid_out(of_replica(dtype, shape, i), layout)
        out = {"fresh": None, "in place": value, "out": np.ones(shape, dtype)}[how]
        result = ctx.all_reduce(op, value, options, out=out)
        return result, out is None or result is out

    results = strategy.experimental_local_results(strategy.run(step))
    assert all(is_right for _, is_right in results)
    return [result for result, _ in results]


def check_narrow(strategy, op, dtype, shape, **settings):
    """Exact, wherever the replicas are."""
    count = strategy.num_replicas_in_sync
    wide = [of_replica(dtype, shape, i).astype("float32") for i in range(count)]
    expected = (reduced if op in ("MIN", "MAX") else reduced_in_order)(op, wide).astype(dtype)
    results = results_of(strategy, op, dtype, shape, **settings)

    def check_all():
        for result in results:
            assert (result.dtype, result.shape) == (dtype, shape)
            np.testing.assert_array_equal(result.astype("f8"), expected.astype("f8"))

    holds_everywhere(check_all)


@at_once
@given(
    op=st.sampled_from(OPS),
    dtype=st.sampled_from(NARROW),
    length=st.sampled_from([512, 521, 1021, 16_411]),
    split=st.sampled_from([1, 3, 7]),
    layout=st.sampled_from(LAYOUTS),
    bytes_per_pack=st.sampled_from([0, 0, 500, 1 << 12]),
    timeout_seconds=st.sampled_from([None, 60]),
)
def test_sums_are_those_of_float32_in_one_order_for_any_length_layout_and_op(
    world, op, dtype, length, split, **settings
):
    """Most lengths are no multiple of the number of ranks."""
    check_narrow(world, op, dtype, (length // split, split), **settings)


@pytest.mark.parametrize("dtype", NARROW, ids=str)
@pytest.mark.parametrize("how", ["fresh", "out", "in place"])
def test_the_same_holds_for_results_in_arrays_of_the_caller(world, how, dtype):
    for op, bytes_per_pack in itertools.product(OPS, (0, 1 << 10)):
        check_narrow(world, op, dtype, (13, 67), how=how, bytes_per_pack=bytes_per_pack)


def test_the_same_holds_for_several_pieces_of_mebibytes(world):
    check_narrow(world, "MEAN", NARROW[0], (530_003,))


def test_the_same_holds_for_fewer_items_than_ranks(world):
    """Some ranks add up nothing then."""
    for length in (1, 2, 3, 5):
        check_narrow(world, "MEAN", NARROW[0], (length,), bytes_per_pack=1)
        check_narrow(world, "MEAN", NARROW[0], (length, 2), bytes_per_pack=8)


@pytest.mark.parametrize("dtype", NARROWER, ids=str)
def test_the_same_holds_for_floats_of_one_byte(world, dtype):
    for op in OPS:
        check_narrow(world, op, dtype, (1021,))


@pytest.mark.parametrize("dtype", NARROW + NARROWER, ids=str)
@pytest.mark.parametrize("length", [4, 1021, 100_003])
def test_a_nan_of_any_replica_is_the_result_however_it_travels(world, dtype, length):
    def of(replica):
        values = np.full(length, 1 + replica, "float32")
        values[:4] = [-np.nan if replica == 1 else 2, 0.0, -0.0, np.nan if replica == 0 else -2]
        return values.astype(dtype)

    wide = [of(i).astype("float32") for i in range(world.num_replicas_in_sync)]
    for op in OPS:
        # What is too large for a float8_e4m3fn is a NaN, too.
        expected = np.isnan(reduced(op, wide).astype(dtype).astype("float32"))
        for result in reduce_everywhere(world, op, of):
            np.testing.assert_array_equal(np.isnan(result.astype("float32")), expected)


@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_every_replica_gets_the_same_bits(world, dtype):
    results = results_of(world, "SUM", dtype, (16_411,))
    found = gathered([result.tobytes() for result in results])
    assert len({one for of_rank in found for one in of_rank}) == 1


@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_the_order_is_that_of_the_ranks(dtype):
    """In any other one the small numbers would be lost beside the large ones."""
    with mr.MPIStrategy() as strategy:
        numbers = [2.0**15, -(2.0**15)] + [2.0**-12 * i for i in range(2, strategy.size)]
        results = reduce_everywhere(
            strategy, "SUM", lambda i: np.full(1021, numbers[i]).astype(dtype)
        )
        expected = np.full(1021, sum(numbers[: strategy.size])).astype(dtype)
        for result in results:
            assert (result == expected).all()


@pytest.mark.usefixtures("small_world")
def test_where_each_rank_has_one_replica_narrow_floats_travel_as_they_are():
    """Each rank gives its leaf to all, in parts, and then the sums of its part."""
    with mr.MPIStrategy() as strategy:
        size, rank = strategy.size, strategy.rank
        items = 16_411
        line = 16  # of the cache, in what they accumulate in: no two ranks write into one
        starts = [items * r // size // line * line for r in range(size)]
        part = [*starts, items][rank + 1] - starts[rank]
        one = cost_of(strategy, lambda: results_of(strategy, "SUM", NARROW[0], (items,)))
        empty = cost_of(strategy, lambda: results_of(strategy, "SUM", NARROW[0], (0,)))
        moved = (one[0] - empty[0], one[1] - empty[1])
        assert moved == ((2, 2 * items + 2 * part) if size > 1 else (0, 0))
