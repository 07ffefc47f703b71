"""What the arguments of merge_call share, in memory: on ranks of their own they share nothing."""

import numpy as np
import pytest

import mpi_replica as mr
from everywhere import check_works

SIZES = [4, 1 << 14]  # large ones are gathered when they are looked at


def sum_of_second(strategy, first, second):
    """Return what is in the second argument when the first one was written."""
    for array in strategy.experimental_local_results(first):
        array += 1
    return float(sum(array.sum() for array in strategy.experimental_local_results(second)))


def merged(strategy, merge_fn, make_args):
    def step():
        context = mr.get_replica_context()
        return context.merge_call(merge_fn, args=make_args(context.replica_id_in_sync_group))

    return strategy.experimental_local_results(strategy.run(step))


def whole_and(part):
    def make(size, order):
        array = np.ones((size, 3), order=order)
        return array, part(array)

    return make


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    ("make", "share"),
    [
        pytest.param(whole_and(lambda array: array), 3, id="itself"),
        pytest.param(whole_and(lambda array: array[1:]), 3, id="a view"),
        pytest.param(whole_and(lambda array: array.T), 3, id="its transpose"),
        pytest.param(whole_and(lambda array: np.broadcast_to(array[0], array.shape)), 3, id="rows"),
    ],
)
def test_what_a_merge_fn_writes_into_an_argument_is_not_in_another_one(
    strategy, make, share, size, order
):
    count = strategy.num_replicas_in_sync
    second = make(size, order)[1].size
    assert second % share == 0
    found = merged(strategy, sum_of_second, lambda i: make(size, order))
    assert found == (float(count * second),) * len(strategy.local_replica_ids)
    check_works(strategy)


@pytest.mark.parametrize("size", SIZES)
def test_views_of_one_array_that_replicas_of_a_rank_give_are_each_their_own(strategy, size):
    count = strategy.num_replicas_in_sync
    table = np.ones(size + count)

    def write_all(strategy, window):
        windows = strategy.experimental_local_results(window)
        for one in windows:
            one += 1
        return float(sum(one.sum() for one in windows))

    found = merged(strategy, write_all, lambda i: (table[i : i + size],))
    assert found == (2.0 * size * count,) * len(strategy.local_replica_ids)
    check_works(strategy)


def test_an_object_that_is_given_twice_is_two(strategy):
    def add(strategy, first, second):
        for one in strategy.experimental_local_results(first):
            one.add("added")
        return [sorted(one) for one in strategy.experimental_local_results(second)]

    def argument(i):
        seen = {f"replica {i}"}
        return seen, seen

    expected = [[f"replica {i}"] for i in range(strategy.num_replicas_in_sync)]
    assert list(merged(strategy, add, argument)) == [expected] * len(strategy.local_replica_ids)


def test_parts_of_one_array_that_lie_apart_are_not_copied(strategy):
    """As the layers of a model are, in one buffer."""
    buffers = {i: np.zeros(10) for i in strategy.local_replica_ids}

    def write(strategy, *layers):
        for layer in layers:
            for i, one in enumerate(strategy.experimental_local_results(layer)):
                one += i

    merged(strategy, write, lambda i: (buffers[i][:3], buffers[i][3:10:2], buffers[i][4:10:2]))
    for i, buffer in buffers.items():
        np.testing.assert_array_equal(buffer, np.full(10, float(i)))


def test_an_empty_result_is_each_replicas_own(strategy):
    """So that what one of them returns, which is locked, refuses no write of another one."""

    def step():
        lowest = mr.get_replica_context().merge_call(
            lambda strategy, rows: strategy.reduce("MIN", rows, axis=None), args=(np.zeros(0),)
        )
        lowest += 1
        return lowest

    assert strategy.gather(strategy.run(step), axis=0).shape == (0,)


@pytest.mark.parametrize("rows", [slice(None), slice(1, 30)])
def test_masked_arrays_are_in_c_order_on_every_rank(strategy, rows):
    """The bits of a sum follow from the order."""
    table = np.random.default_rng(3).normal(size=(40, 37))

    def sums(strategy, x):
        parts = strategy.experimental_local_results(x)
        assert [part.flags.c_contiguous for part in parts] == [True] * len(parts)
        return [float(np.einsum("ij->", part)) for part in parts]

    def argument(i):
        return (np.ma.masked_greater(table, 2.0).T[rows, ::-1],)

    expected = float(np.einsum("ij->", np.ascontiguousarray(argument(0)[0])))
    found = merged(strategy, sums, argument)
    count = strategy.num_replicas_in_sync
    assert list(found) == [[expected] * count] * len(strategy.local_replica_ids)


def test_what_a_merge_fn_writes_into_a_masked_array_of_another_order_is_the_replicas(strategy):
    def unmask(strategy, x):
        for i, part in enumerate(strategy.experimental_local_results(x)):
            part[0] = i
            part[1, 1] = np.ma.masked

    def step():
        mine = np.ma.masked_array(np.zeros((3, 4), order="F"), np.eye(3, 4, dtype=bool))
        mr.get_replica_context().merge_call(unmask, args=(mine,))
        return mr.get_replica_context().replica_id_in_sync_group, mine.data[0, 0], str(mine.mask)

    expected = np.eye(3, 4, dtype=bool)
    expected[0, 0] = False
    ids, firsts, masks = map(strategy.experimental_local_results, strategy.run(step))
    assert list(firsts) == [float(i) for i in ids]
    assert list(masks) == [str(expected)] * len(ids)
