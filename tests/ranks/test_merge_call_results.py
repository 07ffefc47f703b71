"""What merge_call gives each replica is its own, and a merge_fn that failed has had its say."""

import numpy as np
import pytest

import mpi_replica as mr
from everywhere import check_works, needs_two_replicas, raises_everywhere


@pytest.mark.parametrize("wrap", [lambda x: x, mr.Mirrored, lambda x: {"a": [x]}])
def test_writing_into_a_result_does_not_reach_other_replicas(strategy, wrap):
    def merge(strategy, x):
        return wrap(strategy.reduce("SUM", x, axis=None))

    def step():
        ctx = mr.get_replica_context()
        result = ctx.merge_call(merge, (np.ones(2),))
        array = result["a"][0] if isinstance(result, dict) else result
        array *= 2.0**ctx.replica_id_in_sync_group
        return array

    count = strategy.num_replicas_in_sync
    results = strategy.experimental_local_results(strategy.run(step))
    for replica, result in zip(strategy.local_replica_ids, results, strict=True):
        assert result.tolist() == [count * 2.0**replica] * 2


def test_a_failed_run_refuses_the_collectives_of_merge_fn_on_the_other_ranks(strategy):
    """Decision 16: one rank raises, and cleaning up on the others puts nothing out of step."""
    needs_two_replicas(strategy)
    refused = []

    def merge(strategy, x):
        if strategy.rank == strategy.size - 1:
            raise ValueError("the last rank fails")
        try:
            return strategy.extended.broadcast_to(1)
        finally:
            try:
                strategy.extended.broadcast_to(2)
            except mr.errors.ReplicaStopped as error:
                refused.append(error.__cause__)

    def step():
        return mr.get_replica_context().merge_call(merge, (1.0,))

    error = raises_everywhere(ValueError, lambda: strategy.run(step))
    assert "the last rank fails" in str(error)
    assert refused == ([] if strategy.rank == strategy.size - 1 else [error])
    check_works(strategy)


def test_errors_that_were_caught_do_not_count_as_refusals_to_stop(strategy):
    """Decision 17: only a replica that swallows the end of its run is abandoned."""
    needs_two_replicas(strategy)
    cleaned_up = []

    def step():
        ctx = mr.get_replica_context()
        for _ in range(150):
            with pytest.raises(TypeError):
                ctx.all_reduce("SUM", "text")
        if ctx.replica_id_in_sync_group == 0:
            raise ValueError("now")
        try:
            ctx.all_reduce("SUM", 1.0)
        finally:
            cleaned_up.append(ctx.replica_id_in_sync_group)

    raises_everywhere(ValueError, lambda: strategy.run(step))
    assert cleaned_up == [i for i in strategy.local_replica_ids if i != 0]
    check_works(strategy)


def test_leaves_that_travel_must_be_the_same_ones_on_all_ranks(strategy):
    if strategy.size == 1:
        pytest.skip("a single rank has nobody to disagree with")
    mine = strategy.run(lambda: float(mr.get_replica_context().replica_id_in_sync_group))
    value = {"a": mine, "b": 100.0} if strategy.rank == 0 else {"a": 100.0, "b": mine}
    error = raises_everywhere(
        mr.errors.StructureMismatchError, lambda: strategy.reduce("MEAN", value, axis=None)
    )
    assert "['a']" in str(error)
    assert "['b']" in str(error)
    check_works(strategy)
