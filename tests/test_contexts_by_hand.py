"""A ReplicaContext made by hand: a replica alone, and never one of several."""

import numpy as np
import pytest

import mpi_replica as mr


@pytest.mark.parametrize("replica_id", [-1, 2, 7])
def test_an_id_that_is_none_of_the_strategy_is_a_value_error(replica_id):
    with pytest.raises(ValueError, match="from 0 to 1"):
        mr.ReplicaContext(mr.MPIStrategy(num_replicas=2), replica_id)


@pytest.mark.parametrize("aggregation", mr.VariableAggregation)
def test_variables_of_several_replicas_can_not_be_assigned_to(aggregation):
    strategy = mr.MPIStrategy(num_replicas=2)
    with strategy.scope():
        v = mr.Variable(1.0, aggregation=aggregation)
    with mr.ReplicaContext(strategy, 0), pytest.raises(mr.errors.ContextError, match=r"\.run"):
        v.assign(3.0)
    assert float(v) == 1.0


@pytest.mark.parametrize("aggregation", mr.VariableAggregation)
def test_components_of_several_replicas_can_be_neither_read_nor_assigned_to(aggregation):
    """Which are here depends on the layout."""
    strategy = mr.MPIStrategy(num_replicas=2)
    on_read = mr.VariableSynchronization.ON_READ
    with strategy.scope():
        v = mr.Variable(1.0, synchronization=on_read, aggregation=aggregation)
    for call in (v.value, lambda: v.assign(3.0), lambda: v.assign_add(3.0)):
        with mr.ReplicaContext(strategy, 0), pytest.raises(mr.errors.ContextError, match=r"\.run"):
            call()
    found = strategy.run(lambda: float(v))
    assert strategy.experimental_local_results(found) == (1.0, 1.0)


def test_the_only_replica_can_do_everything():
    strategy = mr.MPIStrategy(num_replicas=1)
    with strategy.scope():
        v = mr.Variable(1.0, aggregation=mr.VariableAggregation.SUM)
        own = mr.Variable(1.0, synchronization=mr.VariableSynchronization.ON_READ)
    with mr.ReplicaContext(strategy, 0) as ctx:
        v.assign_add(2.0)
        assert float(own.assign_add(2.0)) == 3.0
        assert ctx.all_reduce("SUM", np.float32(3)) == 3
        assert ctx.all_gather(np.arange(2), axis=0).tolist() == [0, 1]
        assert float(ctx.merge_call(lambda strategy, x: x, (4,))) == 4
    assert float(v) == 3.0
