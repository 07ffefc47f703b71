"""Means over the rows of the global batch, whoever has how many of them."""

from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import mpi_replica as mr
from everywhere import check_works, holds_everywhere, raises_everywhere
from mpi_replica.errors import ContextError


def replica_id():
    return mr.get_replica_context().replica_id_in_sync_group


def results(strategy, fn):
    return strategy.experimental_local_results(strategy.run(fn))


def rows_of_replicas(strategy, counts, shape=(3,)):
    """Return rows for each replica: as many as `counts` says, in turn."""
    random = np.random.default_rng(sum(counts))
    return [
        random.standard_normal((counts[i % len(counts)], *shape))
        for i in range(strategy.num_replicas_in_sync)
    ]


COUNTS = st.lists(st.integers(0, 5), min_size=1, max_size=7).filter(lambda counts: counts[0])


@given(counts=COUNTS)
def test_the_mean_is_that_of_all_rows_and_not_of_the_means(strategy, counts):
    rows = rows_of_replicas(strategy, counts)

    def step():
        mine = rows[replica_id()]
        return mr.mean_over_global_batch({"x": mine.sum(axis=0), "n": mine.size}, len(mine))

    def check():
        every = np.concatenate(rows)
        for found in results(strategy, step):
            np.testing.assert_allclose(found["x"], every.mean(axis=0), rtol=1e-12, atol=1e-15)
            assert found["n"] == 3.0

    holds_everywhere(check)


@given(counts=COUNTS)
def test_the_parts_of_the_average_loss_and_weighted_ones_add_up_to_the_mean(strategy, counts):
    rows = rows_of_replicas(strategy, counts, ())
    weights = [np.abs(mine) for mine in rows_of_replicas(strategy, [*counts, *counts], ())]
    weights = [weight[: len(mine)] for weight, mine in zip(weights, rows, strict=True)]
    every, size = np.concatenate(rows), sum(map(len, rows))

    def step():
        context, mine, weight = mr.get_replica_context(), rows[replica_id()], weights[replica_id()]
        return context.all_reduce(
            "SUM",
            {
                "agreed": mr.compute_average_loss(mine),
                "given": mr.compute_average_loss(mine, global_batch_size=size),
                "weighted": mr.compute_average_loss(mine, weight, size),
            },
        )

    def check():
        for found in results(strategy, step):
            np.testing.assert_allclose(found["agreed"], every.mean(), rtol=1e-12, atol=1e-15)
            np.testing.assert_allclose(found["given"], every.mean(), rtol=1e-12, atol=1e-15)
            weighted = (every * np.concatenate(weights)).sum() / size
            np.testing.assert_allclose(found["weighted"], weighted, rtol=1e-12, atol=1e-15)

    holds_everywhere(check)


@pytest.mark.parametrize("dtype", ["f2", ml_dtypes.bfloat16, "f4", "f8", "c8", "c16"])
def test_floats_keep_their_dtype_and_are_divided_by_all_of_many_rows(strategy, dtype):
    dtype, count = np.dtype(dtype), strategy.num_replicas_in_sync

    def step():
        rows = 100_001 if replica_id() == 0 else 0  # more than float16 holds; odd for bfloat16
        return mr.mean_over_global_batch([np.full(2, 1000, dtype), dtype.type(1000)], rows)

    total, precision = complex(dtype.type(1000 * count)), float(ml_dtypes.finfo(dtype).eps)
    for array, scalar in results(strategy, step):
        assert (array.dtype, scalar.dtype) == (dtype, dtype)
        np.testing.assert_allclose(array.astype("c16"), total / 100_001, rtol=precision)
        np.testing.assert_allclose(complex(scalar), total / 100_001, rtol=precision)


def test_integers_get_float64_means_and_weights_may_be_fractions(strategy):
    count = strategy.num_replicas_in_sync

    def step():
        return mr.mean_over_global_batch([np.arange(3), 7], 0.5 if replica_id() else 2)

    weights = 2 + 0.5 * (count - 1)
    for array, number in results(strategy, step):
        assert array.dtype == np.float64
        np.testing.assert_allclose(array, np.arange(3) * count / weights)
        np.testing.assert_allclose(number, 7 * count / weights)


def test_rows_of_sparse_gradients_are_divided_too(strategy):
    count = strategy.num_replicas_in_sync

    def step():
        mine = mr.IndexedSlices(np.full((1, 2), 6.0), [replica_id() % 2], (2, 2))
        return mr.mean_over_global_batch({"sparse": mine, "dense": np.ones(2)}, 2).copy()

    for found in results(strategy, step):
        expected = np.repeat([[(count + 1) // 2], [count // 2]], 2, axis=1) * 6.0 / (2 * count)
        np.testing.assert_allclose(found["sparse"].to_dense(), expected)
        np.testing.assert_allclose(found["dense"], 0.5)


def test_a_reproducible_mean_has_the_same_bits_as_the_sum_in_order(reproducible):
    count = reproducible.num_replicas_in_sync
    values = (
        np.random.default_rng(5).standard_normal((count, 4000))
        * 10.0 ** np.arange(-8, 8)[np.arange(count) % 16, None]
    )

    def step():
        sums = values[replica_id()]
        total = mr.get_replica_context().all_reduce("SUM", sums)
        return mr.mean_over_global_batch(sums, replica_id() + 1), total

    for mean, total in results(reproducible, step):
        np.testing.assert_array_equal(mean, total / (count * (count + 1) / 2))


# Mistakes


def test_no_rows_at_all_are_an_error_on_every_rank(strategy):
    for call in (
        lambda: mr.mean_over_global_batch(np.zeros(2), 0),
        lambda: mr.compute_average_loss(np.zeros(0)),
    ):
        error = raises_everywhere(ValueError, lambda call=call: strategy.run(call))
        assert "no mean of nothing" in str(error)
    check_works(strategy)


@pytest.mark.parametrize(
    ("rows", "kind"),
    [
        (-1, ValueError),
        (np.nan, ValueError),
        (np.inf, ValueError),
        pytest.param(10**5000, ValueError, id="10**5000"),
        (True, TypeError),
        ("3", TypeError),
    ],
)
def test_rows_that_are_no_number_of_rows_are_told(strategy, rows, kind):
    with pytest.raises(kind, match="rows must be"):
        strategy.run(lambda: mr.mean_over_global_batch(np.ones(2), rows))
    check_works(strategy)


def test_rows_that_one_replica_counts_wrongly_are_an_error_that_all_can_catch(strategy):
    last = strategy.num_replicas_in_sync - 1

    def step():
        try:
            mr.mean_over_global_batch(np.ones(2), -1 if replica_id() == last else 1)
        except ValueError as error:
            return str(error)

    (text,) = set(results(strategy, step))
    assert "rows must be 0 or more, and finite, got -1" in text
    check_works(strategy)


@pytest.mark.parametrize("dtype", ["?", "i1", "u1", "i4", "i8"])
@pytest.mark.parametrize("weight", [2, np.uint8(2), np.full(4, 2, np.uint8)], ids=repr)
def test_weighted_losses_of_integers_do_not_wrap_around(strategy, dtype, weight):
    most = 1 if dtype == "?" else np.iinfo(dtype).max
    losses = np.full(4, most, dtype)
    for found in results(strategy, lambda: mr.compute_average_loss(losses, weight, 4)):
        assert (found.dtype, float(found)) == (np.float64, 2.0 * most)


@pytest.mark.parametrize("dtype", ["f2", ml_dtypes.bfloat16, "f4", "f8"])
@pytest.mark.parametrize("weight", [0.5, 2, np.float64(0.5), np.full(4, 0.5)], ids=repr)
def test_average_losses_have_the_dtype_of_the_losses_whatever_the_weights_are(
    strategy, dtype, weight
):
    losses = np.ones(4, dtype)
    for found in results(strategy, lambda: mr.compute_average_loss(losses, weight, 4)):
        assert (found.dtype, float(found)) == (losses.dtype, float(np.mean(weight)))


def test_average_losses_of_float16_add_up_in_float32(strategy):
    losses = np.full(4, 60000, np.float16)
    for found in results(strategy, lambda: mr.compute_average_loss(losses, None, 4)):
        assert (found.dtype, float(found)) == (np.float16, 60000)


MASKED = np.ma.masked_array([1.0, 2.0], [False, True])

NO_NUMBERS = (
    {"a": np.ones(3)},
    None,
    {1.0},
    object(),
    Fraction(1, 2),
    np.array("2020-01-01", "M8[D]"),
    np.zeros(2, "f4, i4"),
)


def test_weights_and_batch_sizes_that_make_no_sense_are_told(strategy):
    losses = np.ones((2, 3))
    for call, kind, words in (
        (lambda: mr.compute_average_loss(losses, np.ones((2, 3, 1))), ValueError, "sample_weight"),
        (lambda: mr.compute_average_loss(losses, np.ones((3, 1))), ValueError, "sample_weight"),
        (lambda: mr.compute_average_loss(losses[:1], np.ones(5)), ValueError, "sample_weight"),
        (lambda: mr.compute_average_loss(losses.mean(), None, 4), ValueError, "loss of each row"),
        (lambda: mr.compute_average_loss(1.0), ValueError, "loss of each row"),
        (lambda: mr.compute_average_loss(losses, None, 0), ValueError, "0 rows"),
        (lambda: mr.compute_average_loss(losses, None, 2.0), TypeError, "global_batch_size"),
        (lambda: mr.compute_average_loss([[1.0], [2.0, 3.0]], None, 4), ValueError, "one length"),
        *(
            (lambda no=no: mr.compute_average_loss(no, None, 4), TypeError, "per_example_loss of")
            for no in NO_NUMBERS
        ),
        (lambda: mr.compute_average_loss(losses, "ab"), TypeError, "sample_weight of"),
        (lambda: mr.compute_average_loss(MASKED, None, 4), TypeError, "per_example_loss of.*mask"),
        (lambda: mr.compute_average_loss(losses, MASKED, 4), TypeError, "sample_weight of.*mask"),
    ):
        with pytest.raises(kind, match=words):
            strategy.run(call)
    check_works(strategy)


def test_outside_of_a_replica_they_say_where_to_call_them(strategy):
    with strategy.scope():
        for call in (
            lambda: mr.mean_over_global_batch(np.ones(2), 2),
            lambda: mr.compute_average_loss(np.ones(2)),
        ):
            with pytest.raises(ContextError, match="in the function that is given to run"):
                call()
