"""What calls send on thousands of ranks, of which one is real: all others do what it does."""

import numpy as np
import pytest

import mpi_replica as mr
from benchmarks.mirror import mirrored
from everywhere import cost_of

pytestmark = pytest.mark.mpi_skip  # it takes the place of all ranks itself

RANKS = 3000
WORDS_BYTES = 24
REPRODUCIBLE = mr.CommunicationOptions(reproducible=True)


def costs_and_results(*calls):
    """What each call takes in a run, beside the run; and what it gives, of one of many ranks."""
    found = []
    with mirrored(RANKS) as strategy:
        for call in calls:

            def step(call=call):
                context = mr.get_replica_context()
                call(context)  # windows are opened
                found.append([cost_of(strategy, lambda: found.append(call(context)))])

            strategy.run(step)
    return [(cost, result) for result, (cost,) in zip(found[::2], found[1::2], strict=True)]


@pytest.mark.parametrize("items", [1, 16, 128])
def test_a_small_reproducible_sum_is_one_message_that_all_give_to_all(items):
    ((cost, total),) = costs_and_results(
        lambda context: context.all_reduce("SUM", np.full(items, 0.1), REPRODUCIBLE)
    )
    assert cost == (2, WORDS_BYTES + 8 * items)
    rows = np.full(RANKS, 0.1)
    while len(rows) > 1:  # along the tree
        pairs = len(rows) // 2
        rows = np.append(rows[: 2 * pairs : 2] + rows[1 : 2 * pairs : 2], rows[2 * pairs :])
    np.testing.assert_array_equal(total, np.full(items, rows[0]), strict=True)


def test_what_a_rank_gives_to_a_larger_one_does_not_grow_with_the_ranks():
    items = 100_003
    ((cost, _),) = costs_and_results(
        lambda context: context.all_reduce("SUM", np.ones(items), REPRODUCIBLE)
    )
    assert cost[0] <= 5
    assert 8 * items <= cost[1] <= 8 * items + WORDS_BYTES + 2 * 8 * items / RANKS


def test_other_calls_take_as_many_messages_as_on_few_ranks():
    found = costs_and_results(
        lambda context: context.all_reduce("MAX", np.ones(10)),
        lambda context: context.all_gather(np.arange(3.0), axis=0),
        lambda context: context.merge_call(lambda strategy, x: sum(x.values), args=(1,)),
    )
    assert [cost[0] for cost, _ in found] == [2, 2, 2]
    (_, most), (_, rows), (_, number) = found
    np.testing.assert_array_equal(most, np.ones(10), strict=True)
    np.testing.assert_array_equal(rows, np.tile(np.arange(3.0), RANKS), strict=True)
    assert number == RANKS
