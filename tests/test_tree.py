"""The order of reproducible sums: one tree over the replicas, whatever the layout."""

import itertools

import hypothesis.strategies as st
import numpy as np
from hypothesis import given

from in_order import combined
from mpi_replica.core.tree import in_a_row, tree_of

#: How many replicas each rank hosts.
COUNTS = st.lists(st.integers(1, 3) | st.integers(1, 20), min_size=1, max_size=7).map(tuple)
NUMBERS = st.integers(1, 70)


def join(one, other, out, **_):
    """Combine texts, so that the order can be read in them; with the signature of a ufunc."""
    np.frompyfunc(lambda a, b: f"({a}+{b})", 2, 1)(one, other, out=out)


def texts(count):
    return [np.array([str(i), f"{i}'"], object) for i in range(count)]


def expected(count):
    """The texts along the tree."""
    return combined(
        lambda a, b: np.array([f"({x}+{y})" for x, y in zip(a, b, strict=True)]), texts(count)
    ).tolist()


def run(order, combine, arrays, dtype):
    """Combine with as many temporaries as the order says that it needs."""
    target, *temporaries = [np.empty_like(arrays[0], dtype) for _ in range(1 + order.temporaries)]
    order.combine(combine, arrays, target, temporaries)
    return target


def over_ranks(counts, combine, arrays, dtype):
    """Do what the ranks of a layout do together."""
    tree = tree_of(counts)
    starts = [0, *itertools.accumulate(counts)]
    partials = [
        run(order, combine, arrays[start:stop][local], dtype)
        for (start, stop), of_rank in zip(itertools.pairwise(starts), tree.partials, strict=True)
        for local, order in of_rank
    ]
    assert tree.order.count == len(partials)
    return run(tree.order, combine, partials, dtype)


def nodes(start, stop):
    """All subtrees of the tree, as replicas from, to; with the one above each."""
    above = {(start, stop): None}
    waiting = [(start, stop)]
    while waiting:
        first, last = node = waiting.pop()
        if last - first > 1:
            middle = first + max(1 << n for n in range(20) if 1 << n < last - first)
            for half in ((first, middle), (middle, last)):
                above[half] = node
                waiting.append(half)
    return above


@given(COUNTS)
def test_in_every_layout_the_replicas_are_combined_along_the_same_tree(counts):
    found = over_ranks(counts, join, texts(sum(counts)), object)
    assert found.tolist() == expected(sum(counts))


@given(st.integers(1, 70))
def test_in_a_row_each_is_added_to_all_before_it(count):
    local, order = in_a_row(count)
    expected = "0"
    for i in range(1, count):
        expected = f"({expected}+{i})"
    assert run(order, join, texts(count), object)[0] == expected
    assert (local, order.count, order.temporaries) == (slice(0, count), count, 0)


def test_thousands_in_a_row_are_no_deeper_than_a_few():
    rows = list(np.arange(5000.0).reshape(-1, 1))
    assert run(in_a_row(5000).order, np.add, rows, float) == [5000 * 4999 / 2]


def test_the_order_over_many_ranks_with_as_many_replicas_has_levels():
    for ranks in (17, 33, 64):
        for replicas in (1, 2, 8):
            assert tree_of((replicas,) * ranks).order.has_levels
    assert not tree_of((1,) * 4).order.has_levels  # it would take longer
    assert not tree_of((2, 3) * 20).order.has_levels


@given(COUNTS | NUMBERS.map(lambda number: (1,) * number), st.booleans(), st.integers(1, 3))
def test_what_lies_in_rows_is_combined_level_by_level_along_the_same_tree(counts, is_first, every):
    """Also into the first of them, and where they do not lie close by each other."""
    order = tree_of(counts).order
    number = order.count
    if order.has_levels:
        rows = np.zeros((number, every), object)[:, :1]
        rows[:, 0] = [f"{i}" for i in range(number)]
        target = rows[0] if is_first else np.empty(1, object)
        order.combine_rows(join, rows, target)
        each = [np.array([f"{i}"], object) for i in range(number)]
        assert target.tolist() == run(order, join, each, object).tolist()


@given(COUNTS, st.sampled_from(["f2", "f4", "f8", "c8", "g"]), st.integers(0, 99))
def test_in_every_layout_a_sum_has_the_bits_of_the_sum_along_the_tree(counts, dtype, seed):
    """Also of numbers that accumulate in wider ones."""
    random = np.random.default_rng(seed)
    wide = "f4" if dtype == "f2" else dtype
    shape = (sum(counts), 9)
    rows = random.standard_normal(shape) * 2.0 ** random.integers(-12, 12, shape)
    rows = [row.astype(dtype) for row in rows]
    found = over_ranks(counts, np.add, rows, wide)
    total = combined(np.add, [row.astype(wide) for row in rows])
    np.testing.assert_array_equal(found, total, strict=True)


@given(COUNTS)
def test_every_replica_is_in_one_partial_of_its_rank_in_order(counts):
    for count, partials in zip(counts, tree_of(counts).partials, strict=True):
        ids = [i for local, order in partials for i in range(count)[local]]
        assert ids == list(range(count))
        assert [order.count for _, order in partials] == [
            local.stop - local.start for local, _ in partials
        ]


@given(COUNTS)
def test_a_partial_is_a_subtree_as_large_as_its_rank_hosts_whole(counts):
    above = nodes(0, sum(counts))
    starts = [0, *itertools.accumulate(counts)]
    for (start, stop), of_rank in zip(
        itertools.pairwise(starts), tree_of(counts).partials, strict=True
    ):
        for local, _ in of_rank:
            parent = above[start + local.start, start + local.stop]
            assert parent is None or parent[0] < start or parent[1] > stop


@given(COUNTS)
def test_so_few_arrays_are_needed_beside_the_target_as_the_tree_is_deep(counts):
    """Enough they are where the tests above pass: they give no more."""
    tree = tree_of(counts)
    for order in [tree.order, *(order for of_rank in tree.partials for _, order in of_rank)]:
        replicas = order.count if order is not tree.order else sum(counts)
        assert order.temporaries <= max(0, (replicas - 1).bit_length() - 1)


@given(COUNTS)
def test_a_rank_has_few_partials(counts):
    """They travel: two for each level of the tree at most."""
    for count, partials in zip(counts, tree_of(counts).partials, strict=True):
        assert len(partials) <= max(1, 2 * count.bit_length())


@given(NUMBERS)
def test_the_target_may_be_the_memory_of_the_first_array(count):
    ((_, order),) = tree_of((count,)).partials[0]
    arrays = texts(count)
    temporaries = [np.empty(2, object) for _ in range(order.temporaries)]
    order.combine(join, arrays, arrays[0], temporaries)
    assert arrays[0].tolist() == expected(count)


@given(NUMBERS)
def test_the_arrays_stay_as_they_are(count):
    ((_, order),) = tree_of((count,)).partials[0]
    arrays = texts(count)
    run(order, join, arrays, object)
    assert [array.tolist() for array in arrays] == [array.tolist() for array in texts(count)]
