"""More replicas in one process than Python's stack is deep."""

import numpy as np
import pytest

import mpi_replica as mr

REPLICAS = 1200
IDS = np.arange(REPLICAS)


@pytest.fixture(scope="module")
def strategy():
    with mr.MPIStrategy(num_replicas=REPLICAS) as strategy:
        yield strategy


def each(strategy, call):
    """Return what ``call(context, id)`` gives on each replica."""

    def step():
        context = mr.get_replica_context()
        return call(context, context.replica_id_in_sync_group)

    return strategy.experimental_local_results(strategy.run(step))


@pytest.mark.parametrize("reproducible", [False, True])
@pytest.mark.parametrize(
    ("op", "expected"), [("SUM", IDS.sum()), ("MEAN", IDS.mean()), ("MAX", IDS.max())]
)
@pytest.mark.parametrize("items", [1, 20_000])
def test_reductions_take_all_of_them(strategy, op, expected, items, reproducible):
    options = mr.CommunicationOptions(reproducible=reproducible)
    totals = []

    def reduce(context, i):
        totals.append(context.all_reduce(op, np.full(items, float(i)), options)[-1])

    each(strategy, reduce)
    assert totals == [expected] * REPLICAS


def test_narrow_sums_and_extremes_take_all_of_them(strategy):
    half = each(strategy, lambda context, i: context.all_reduce("SUM", np.float16(i % 2)))
    small = each(strategy, lambda context, i: context.all_reduce("SUM", np.int8(i % 2)))
    least = each(strategy, lambda context, i: context.all_reduce("MIN", np.float32(i - 7)))
    assert set(half) == {np.float16(REPLICAS // 2)}
    assert set(small) == {np.int64(REPLICAS // 2).astype(np.int8)}
    assert set(least) == {np.float32(-7)}


@pytest.mark.parametrize("reproducible", [False, True])
@pytest.mark.parametrize("op", ["SUM", "MEAN", "PROD"])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "complex64", "int16"])
def test_the_bits_of_a_number_do_not_depend_on_how_many_are_beside_it(
    strategy, op, dtype, reproducible
):
    options = mr.CommunicationOptions(reproducible=reproducible)
    totals = set()

    def reduce(context, i):
        value = np.array(1 + np.sin(i) / 16 + 1j * np.cos(i) / 16)
        value = (value if dtype == "complex64" else value.real).astype(dtype)
        for items in (1, 7, 1000):
            totals.add(context.all_reduce(op, np.full(items, value), options)[-1].tobytes())
        totals.add(context.all_reduce(op, value, options).tobytes())

    each(strategy, reduce)
    assert len(totals) == 1


def test_gathers_and_merge_calls_have_a_row_of_each(strategy):
    rows = each(strategy, lambda context, i: context.all_gather(np.full(i % 3, i), 0)[-1])
    assert set(rows) == {IDS[IDS % 3 > 0][-1]}
    sums = each(
        strategy,
        lambda context, i: context.merge_call(lambda strategy, x: sum(x.values), args=(i,)),
    )
    assert set(sums) == {IDS.sum()}


def test_a_mistake_of_each_is_a_text_of_a_few_lines(strategy):
    with pytest.raises(mr.errors.StructureMismatchError) as caught:
        each(strategy, lambda context, i: context.all_reduce("SUM", np.ones(i)))
    assert len(str(caught.value)) < 2000
    with pytest.raises(mr.errors.StructureMismatchError) as caught:
        each(strategy, lambda context, i: context.all_reduce("SUM", np.ones(i % 2)))
    assert len(str(caught.value)) < 2000
    assert set(each(strategy, lambda context, i: context.all_reduce("SUM", 1))) == {REPLICAS}
