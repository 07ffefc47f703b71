"""A mask can't travel: it is an error on every rank, and never lost without a word."""

import numpy as np
import pytest

import mpi_replica as mr
from everywhere import check_works, culprits, raises_everywhere


@pytest.mark.parametrize("call", ["all_reduce", "all_gather"])
def test_a_masked_array_is_a_type_error_everywhere_also_on_one_replica_alone(strategy, call):
    def step(culprit):
        ctx = mr.get_replica_context()
        mine = np.arange(3.0)
        if ctx.replica_id_in_sync_group == culprit:
            mine = np.ma.masked_array(mine, [True, False, False])
        if call == "all_reduce":
            return ctx.all_reduce("SUM", mine)
        return ctx.all_gather(mine, axis=0)

    for culprit in culprits(strategy):
        error = raises_everywhere(TypeError, lambda i=culprit: strategy.run(step, args=(i,)))
        assert "filled" in str(error)
        check_works(strategy)


def test_merge_call_passes_the_mask_on(strategy):
    def merge(strategy, values):
        return sum(value.mask.sum() for value in strategy.experimental_local_results(values))

    def step():
        ctx = mr.get_replica_context()
        i = ctx.replica_id_in_sync_group
        return ctx.merge_call(merge, (np.ma.masked_less(np.arange(5), i),))

    count = strategy.num_replicas_in_sync
    results = strategy.experimental_local_results(strategy.run(step))
    assert results == (sum(min(i, 5) for i in range(count)),) * len(results)


def in_a_variable(strategy, value):
    with strategy.scope():
        mr.Variable(np.zeros(3)).assign(value)


def as_a_variable(strategy, value):
    with strategy.scope():
        mr.Variable(value)


def in_a_batch(strategy, value):
    list(strategy.experimental_distribute_dataset([value]))


def in_a_reduction_along_an_axis(strategy, value):
    strategy.reduce("SUM", strategy.run(lambda: value), axis=0)


PLACES = [in_a_variable, as_a_variable, in_a_batch, in_a_reduction_along_an_axis]


@pytest.mark.parametrize("place", PLACES, ids=lambda place: place.__name__)
def test_a_masked_array_on_the_last_rank_alone_is_a_type_error_everywhere(strategy, place):
    mine = np.arange(3.0)
    if strategy.rank == strategy.size - 1:
        mine = np.ma.masked_array(mine, [True, False, False])
    error = raises_everywhere(TypeError, lambda: place(strategy, mine))
    assert "filled" in str(error)
    check_works(strategy)


def test_broadcast_to_passes_the_mask_on(strategy):
    mine = np.ma.masked_array([1.0, 2.0], [False, strategy.rank == 0])
    assert strategy.extended.broadcast_to(mine).value.tolist() == [1.0, None]
