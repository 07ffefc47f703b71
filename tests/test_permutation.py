"""The order of a shuffle: a bijection for every length, as good as random, with nothing held."""

import itertools
import math
import tracemalloc
from collections import Counter

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from mpi_replica.data import Dataset
from mpi_replica.data.plans.random_order import MOST_ROWS, RandomOrder

AWKWARD = [1, 2, 3, 5, 7, 13, 97, 641, 1009, 4099, 65521] + [
    2**power + more for power in (2, 4, 7, 10, 12, 16) for more in (-1, 0, 1)
]


def numbers(length, seed, epoch=0):
    return RandomOrder(length, seed=seed, epoch=epoch)(np.arange(length))


def excess(counts, expected):
    """How far a chi-square statistic is above its mean, in standard deviations."""
    statistic = np.sum((counts - expected) ** 2 / expected)
    freedom = counts.size - 1
    return (statistic - freedom) / math.sqrt(2 * freedom)


# A bijection.


@pytest.mark.parametrize("length", AWKWARD)
def test_each_number_comes_once(length):
    for seed, epoch in [(0, 0), (1, 5), (2**70, 2**40)]:
        np.testing.assert_array_equal(np.sort(numbers(length, seed, epoch)), np.arange(length))


@given(st.integers(1, 3000), st.integers(0, 2**64), st.integers(0, 2**64))
def test_each_number_comes_once_for_any_length_seed_and_epoch(length, seed, epoch):
    assert set(numbers(length, seed, epoch).tolist()) == set(range(length))


@given(st.integers(1, MOST_ROWS), st.integers(0, 100), st.data())
def test_far_positions_of_any_length_have_different_numbers_within_it(length, seed, data):
    positions = st.integers(0, length - 1)
    asked = data.draw(st.lists(positions, min_size=1, max_size=20, unique=True))
    found = RandomOrder(length, seed=seed, epoch=0)(np.array(asked))
    assert found.dtype == np.int64
    assert len(set(found.tolist())) == len(asked)
    assert found.min() >= 0
    assert found.max() < length


@given(st.integers(1, 3000), st.integers(0, 9), st.data())
def test_a_part_of_the_positions_gives_that_part_of_the_order(length, seed, data):
    start = data.draw(st.integers(0, length - 1))
    stop = data.draw(st.integers(start, length))
    part = RandomOrder(length, seed=seed, epoch=2)(np.arange(start, stop))
    np.testing.assert_array_equal(part, numbers(length, seed, 2)[start:stop])


def test_many_positions_at_once_are_those_of_their_parts():
    order = RandomOrder(10**6, seed=1, epoch=0)
    positions = np.arange(0, 10**6, 7)
    parts = [order(part) for part in np.split(positions, [1000, 90_000])]
    np.testing.assert_array_equal(order(positions), np.concatenate(parts))


def test_the_positions_asked_for_are_left_as_they_were():
    positions = np.arange(100)
    RandomOrder(100, seed=0, epoch=0)(positions)
    np.testing.assert_array_equal(positions, np.arange(100))


def test_the_order_of_a_seed_and_epoch_stays_the_same_for_ever():
    """A checkpoint in mid-epoch goes on in it, perhaps with a later release."""
    assert numbers(10, 0, 0).tolist() == [9, 0, 7, 8, 2, 3, 1, 4, 6, 5]
    far = RandomOrder(10**12, seed=1, epoch=2)(np.array([0, 1, 10**12 - 1]))
    assert far.tolist() == [282124303416, 318133023964, 768911723604]


# As good as random. Seeds are fixed, so these give the same answer always; the bounds are 5
# standard deviations.


@pytest.mark.parametrize("length", [2, 3, 4, 5])
def test_all_orders_of_few_come_equally_often(length):
    count = 20 * math.factorial(length)
    seen = Counter(tuple(numbers(length, seed).tolist()) for seed in range(count))
    counts = np.array([seen[order] for order in itertools.permutations(range(length))])
    assert excess(counts, count / counts.size) < 5


@pytest.mark.parametrize("length", [10, 64, 1000, 5000, 2**16 + 1])
@pytest.mark.parametrize("by_epoch", [False, True], ids=["seeds", "epochs"])
def test_each_position_goes_everywhere_equally_often(length, by_epoch):
    bins = min(length, 10)
    positions = np.array([0, 1, length // 2, length - 1])
    orders = [
        RandomOrder(length, seed=7 if by_epoch else n, epoch=n if by_epoch else 3)
        for n in range(2000)
    ]
    found = np.array([order(positions) for order in orders])
    for column in found.T:
        counts = np.bincount(column * bins // length, minlength=bins)
        widths = np.bincount(np.arange(length) * bins // length, minlength=bins)
        assert excess(counts, len(orders) * widths / length) < 5


@pytest.mark.parametrize("length", [300, 4096, 5000, 10**5])
@pytest.mark.parametrize("apart", [1, 2, 64, 256])
def test_neighbours_go_to_places_that_have_nothing_to_do_with_each_other(length, apart):
    bins = 5
    seeds = range(max(1, 40_000 // length))
    joint = np.zeros((bins, bins))
    for seed in seeds:
        places = numbers(length, seed) * bins // length
        np.add.at(joint, (places[:-apart], places[apart:]), 1)
    assert excess(joint.ravel(), joint.sum() / bins**2) < 5
    order = numbers(length, 0)
    correlation = np.corrcoef(order[:-apart], order[apart:])[0, 1]
    assert abs(correlation) < 5 / math.sqrt(length - apart)


@pytest.mark.parametrize("length", [100, 5000, 10**5])
def test_neighbours_stay_neighbours_as_rarely_as_chance_has_it(length):
    seeds = range(max(10, 20_000 // length))
    steps = np.concatenate([np.diff(numbers(length, seed)) for seed in seeds])
    # Two of them on average in each order, as many as a Poisson distribution of that mean has.
    assert np.sum(np.abs(steps) == 1) == pytest.approx(
        2 * len(seeds), abs=5 * math.sqrt(2 * len(seeds))
    )


@pytest.mark.parametrize("length", [100, 5000])
def test_orders_of_other_seeds_and_epochs_have_nothing_in_common(length):
    keys = [*itertools.product(range(8), range(8)), (2**64, 0), (0, 2**64)]
    orders = np.array([numbers(length, seed, epoch) for seed, epoch in keys])
    assert len({order.tobytes() for order in orders}) == len(keys)
    same = [(one == other).sum() for one, other in itertools.combinations(orders, 2)]
    # Two random orders agree at one place on average.
    assert np.mean(same) == pytest.approx(1, abs=0.2)
    assert max(same) < 10


# Memory.


def test_a_shuffle_of_a_billion_rows_holds_no_order():
    dataset = Dataset.range(10**9).shuffle(seed=0).batch(100)
    tracemalloc.start()
    try:
        _, first = next(dataset.batches(epoch=0))
        _, far = next(dataset.batches(epoch=1, start=9_999_999))
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 2**20
    assert len({*first.tolist(), *far.tolist()}) > 190
    assert first.max() > 10**8


def test_the_longest_dataset_can_be_shuffled():
    dataset = Dataset.range(MOST_ROWS).shuffle(seed=0)
    assert all(0 <= number < MOST_ROWS for number in itertools.islice(dataset, 5))
