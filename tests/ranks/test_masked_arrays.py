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
