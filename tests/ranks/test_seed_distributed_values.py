"""tf.distribute.DistributedValues, line by line: the examples and the sentences of its page.

With `mr` for tf.distribute and numpy for tf. ``pair`` has two replicas, as the examples have;
``strategy`` has every layout. What the page prints is in tests/test_seeds_as_printed.py.
"""

import numpy as np
import pytest

import mpi_replica as mr
from seeds import assert_arrays, context, each, replica_id, two_replicas


@pytest.fixture
def pair(passed_everywhere):
    yield from two_replicas(passed_everywhere)


def assert_prints(strategy, value, texts):
    """Assert that `value` prints as the page does, for the replicas of this rank."""
    rows = ",\n".join(f"  {i}: {texts[i]}" for i in strategy.local_replica_ids)
    assert repr(value) == f"PerReplica:{{\n{rows}\n}}"


class TestDistributedValues:
    """Base class for representing distributed values."""

    def test_should_never_be_instantiated_directly(self):
        for arguments in [(), ([1.0, 2.0],)]:
            with pytest.raises(TypeError, match=r"base class.*PerReplica"):
                mr.DistributedValues(*arguments)

    def test_a_subclass_is_created_by_variables_datasets_and_run(self, strategy):
        with strategy.scope():
            variable = mr.Variable(1.0)
        dataset = mr.data.Dataset.range(4).batch(4)
        batch = next(iter(strategy.experimental_distribute_dataset(dataset)))
        returned = strategy.run(lambda: 1)
        for value in (variable, batch, returned):
            assert isinstance(value, mr.DistributedValues)
            assert type(value) is not mr.DistributedValues

    def test_contains_a_value_per_replica(self, strategy):
        value = strategy.run(lambda: 10 * replica_id())
        assert value.values == tuple(10 * i for i in strategy.local_replica_ids)
        assert value.replica_ids == strategy.local_replica_ids
        assert value.num_replicas == strategy.num_replicas_in_sync

    def test_values_are_synced_on_update_on_demand_or_never(self, strategy):
        with strategy.scope():
            on_update = mr.Variable(0.0, aggregation=mr.VariableAggregation.SUM)
            on_demand = mr.Variable(
                0.0,
                synchronization=mr.VariableSynchronization.ON_READ,
                aggregation=mr.VariableAggregation.SUM,
            )

        def step():
            mine = 1.0 + replica_id()
            on_update.assign(mine)
            on_demand.assign(mine)
            return float(on_update), float(on_demand), mine

        results = strategy.run(step)
        total = sum(1.0 + i for i in range(strategy.num_replicas_in_sync))
        for i, (updated, demanded, never) in each(strategy, results):
            assert (updated, demanded, never) == (total, 1.0 + i, 1.0 + i)
        assert float(on_update) == total
        assert float(on_demand) == total
        assert results[2].values == tuple(1.0 + i for i in strategy.local_replica_ids)


class TestPerReplica:
    """PerReplica values exist on the worker devices, with a different value for each replica."""

    def test_produced_by_iterating_through_experimental_distribute_dataset(self, strategy):
        count = strategy.num_replicas_in_sync
        dataset = mr.data.Dataset.from_tensor_slices(np.arange(4 * count)).batch(2 * count)
        steps = list(strategy.experimental_distribute_dataset(dataset))
        assert [type(value) for value in steps] == [mr.PerReplica, mr.PerReplica]
        for step, value in enumerate(steps):
            for i, rows in each(strategy, value):
                first = 2 * count * step + 2 * i
                assert_arrays(rows, np.array([first, first + 1]))

    def test_produced_by_iterating_through_distribute_datasets_from_function(self, strategy):
        def dataset_fn(input_context):
            first = 100 * input_context.input_pipeline_id
            local = len(strategy.local_replica_ids)
            return mr.data.Dataset.range(first, first + 2 * local).batch(2)

        (value,) = list(strategy.distribute_datasets_from_function(dataset_fn))
        assert isinstance(value, mr.PerReplica)
        for k, (_, rows) in enumerate(each(strategy, value)):
            first = 100 * strategy.rank + 2 * k
            assert_arrays(rows, np.array([first, first + 1]))

    def test_the_typical_result_returned_by_run_also_for_equal_values(self, strategy):
        for value in (strategy.run(replica_id), strategy.run(lambda: 7)):
            assert isinstance(value, mr.PerReplica)

    def test_should_not_be_read_in_a_cross_replica_context(self, strategy):
        value = strategy.run(lambda: 1.0 + replica_id())
        reads = (float, int, np.asarray, lambda value: value.item())
        if strategy.num_replicas_in_sync == 1:  # the only replica's value is that of all
            assert [read(value) for read in reads] == [1.0] * len(reads)
            return
        for read in reads:
            with pytest.raises(TypeError, match="experimental_local_results") as caught:
                read(value)
            assert "strategy.reduce" in str(caught.value)
            assert "gather" in str(caught.value)

    @pytest.mark.parametrize(
        "operation",
        [
            lambda value: value + 1.0,
            lambda value: 1.0 + value,
            lambda value: np.ones(2) * value,
            lambda value: -value,
            lambda value: value < 1.0,
            lambda value: value[0],
            len,
            iter,
        ],
        ids=["+", "reflected +", "array *", "negative", "<", "[]", "len", "iter"],
    )
    def test_should_not_be_manipulated_in_a_cross_replica_context(self, strategy, operation):
        with pytest.raises(TypeError):
            operation(strategy.run(lambda: 1.0 + replica_id()))

    def test_is_left_unsynchronized(self, strategy):
        """Writing into one replica's component changes nobody else's."""
        value = strategy.run(lambda: np.array([1.0 * replica_id()]))

        def step(mine):
            mine += 100.0
            return context().all_gather(mine, axis=0)

        expected = np.arange(strategy.num_replicas_in_sync) + 100.0
        for _, rows in each(strategy, strategy.run(step, args=(value,))):
            assert_arrays(rows, expected)


class TestMirrored:
    """Mirrored values are like PerReplica values, except that all replicas have the same."""

    def test_the_value_on_all_replicas_is_the_same(self, strategy):
        values = strategy.run(lambda: np.array([1.0 * replica_id(), 1.0]))
        mirrored = strategy.extended.reduce_to(mr.ReduceOp.MEAN, values, None)
        assert isinstance(mirrored, mr.Mirrored)
        assert isinstance(mirrored, mr.DistributedValues)
        mean = np.mean(np.arange(strategy.num_replicas_in_sync))
        seen = strategy.run(lambda value: context().all_gather(value, axis=0), args=(mirrored,))
        for _, rows in each(strategy, seen):
            assert_arrays(rows, np.array([mean, 1.0] * strategy.num_replicas_in_sync))

    def test_can_be_read_safely_in_a_cross_replica_context(self, strategy):
        mirrored = strategy.extended.reduce_to(
            "SUM", strategy.run(lambda: 1.0 + replica_id()), None
        )
        total = sum(1.0 + i for i in range(strategy.num_replicas_in_sync))
        assert float(mirrored) == total
        assert np.asarray(mirrored) == total
        assert mirrored + 1.0 == total + 1.0
        assert strategy.experimental_local_results(mirrored) == (total,) * len(
            strategy.local_replica_ids
        )
        with strategy.scope():
            assert float(mirrored) == total

    def test_typically_represents_model_weights_which_the_strategy_keeps_synchronized(
        self, strategy
    ):
        with strategy.scope():
            weights = mr.Variable(np.zeros(2), aggregation=mr.VariableAggregation.MEAN)
        strategy.run(lambda: weights.assign_add(np.array([1.0, replica_id()])))
        mean = np.mean(np.arange(strategy.num_replicas_in_sync))
        assert_arrays(np.asarray(weights), np.array([1.0, mean]))
        seen = strategy.run(lambda: context().all_gather(np.asarray(weights), axis=0))
        for _, rows in each(strategy, seen):
            assert_arrays(rows, np.array([1.0, mean] * strategy.num_replicas_in_sync))


class TestExampleUsages:
    """The five roles. The page has two replicas; the second test of each has any number."""

    def batches(self, strategy, rows):
        dataset = mr.data.Dataset.from_tensor_slices(rows)
        dataset = dataset.batch(strategy.num_replicas_in_sync)
        return iter(strategy.experimental_distribute_dataset(dataset))

    def numbers(self, strategy):
        """Rows of two global batches: 5, 6, 7, ..."""
        return 5.0 + np.arange(2 * strategy.num_replicas_in_sync)

    def test_1_created_from_a_distributed_dataset(self, pair):
        dataset = mr.data.Dataset.from_tensor_slices([5.0, 6.0, 7.0, 8.0]).batch(2)
        dataset_iterator = iter(pair.experimental_distribute_dataset(dataset))
        distributed_values = next(dataset_iterator)
        assert_prints(pair, distributed_values, ["array([5.])", "array([6.])"])
        assert_prints(pair, next(dataset_iterator), ["array([7.])", "array([8.])"])
        with pytest.raises(StopIteration):
            next(dataset_iterator)

    def test_1_created_from_a_distributed_dataset_on_any_layout(self, strategy):
        steps = list(self.batches(strategy, self.numbers(strategy)))
        count = strategy.num_replicas_in_sync
        assert len(steps) == 2
        for step, value in enumerate(steps):
            for i, rows in each(strategy, value):
                assert_arrays(rows, np.array([5.0 + step * count + i]))

    def test_2_returned_by_run(self, pair):
        def run():
            ctx = mr.get_replica_context()
            return ctx.replica_id_in_sync_group

        distributed_values = pair.run(run)
        assert_prints(pair, distributed_values, ["0", "1"])

    def test_2_returned_by_run_on_any_layout(self, strategy):
        for i, value in each(strategy, strategy.run(lambda: {"id": [replica_id(), None]})):
            assert value == {"id": [i, None]}

    def test_3_as_input_into_run(self, pair):
        dataset = mr.data.Dataset.from_tensor_slices([5.0, 6.0, 7.0, 8.0]).batch(2)
        dataset_iterator = iter(pair.experimental_distribute_dataset(dataset))
        distributed_values = next(dataset_iterator)

        def run(input):
            return input + 1.0

        updated_value = pair.run(run, args=(distributed_values,))
        assert_prints(pair, updated_value, ["array([6.])", "array([7.])"])

    def test_3_as_input_into_run_on_any_layout(self, strategy):
        value = next(self.batches(strategy, self.numbers(strategy)))

        def run(first, nest, *, scale):
            assert first is nest["same"][0]
            return scale * (first + nest["other"])

        result = strategy.run(
            run, args=(value, {"same": [value], "other": 1.0}), kwargs={"scale": value}
        )
        for i, rows in each(strategy, result):
            assert_arrays(rows, np.array([(5.0 + i) * (6.0 + i)]))

    def test_3_what_run_returned_may_go_into_run_again(self, strategy):
        value = strategy.run(replica_id)
        for _ in range(3):
            value = strategy.run(lambda x: 2 * x + 1, args=(value,))
        for i, found in each(strategy, value):
            assert found == 8 * i + 7

    def test_4_as_input_into_reduce(self, pair):
        dataset = mr.data.Dataset.from_tensor_slices([5.0, 6.0, 7.0, 8.0]).batch(2)
        dataset_iterator = iter(pair.experimental_distribute_dataset(dataset))
        distributed_values = next(dataset_iterator)
        reduced_value = pair.reduce(mr.ReduceOp.SUM, distributed_values, axis=0)
        assert repr(reduced_value) == "np.float64(11.0)"

    @pytest.mark.parametrize("op", [mr.ReduceOp.SUM, mr.ReduceOp.MEAN])
    def test_4_as_input_into_reduce_on_any_layout(self, strategy, op):
        numbers = self.numbers(strategy)
        combine = np.sum if op is mr.ReduceOp.SUM else np.mean
        batches = np.split(numbers, 2)
        for value, batch in zip(self.batches(strategy, numbers), batches, strict=True):
            reduced = strategy.reduce(op, value, axis=0)
            assert isinstance(reduced, np.float64)
            assert reduced == combine(batch)
            assert_arrays(strategy.reduce(op, value, axis=None), np.array([combine(batch)]))

    def test_5_how_to_inspect_per_replica_values_locally(self, pair):
        dataset = mr.data.Dataset.from_tensor_slices([5.0, 6.0, 7.0, 8.0]).batch(2)
        dataset_iterator = iter(pair.experimental_distribute_dataset(dataset))
        distributed_values = next(dataset_iterator)
        per_replica_values = pair.experimental_local_results(distributed_values)
        expected = (np.array([5.0]), np.array([6.0]))
        local = tuple(expected[i] for i in pair.local_replica_ids)
        assert repr(per_replica_values) == repr(local)

    def test_5_how_to_inspect_nests_and_plain_values_locally(self, strategy):
        local = strategy.local_replica_ids
        value = strategy.run(lambda: {"id": replica_id(), "rows": [np.array([replica_id()])]})
        found = strategy.experimental_local_results(value)
        assert isinstance(found, tuple)
        assert found == tuple({"id": i, "rows": [np.array([i])]} for i in local)
        assert strategy.experimental_local_results(3) == (3,)
        assert strategy.experimental_local_results(None) == (None,)
        assert strategy.experimental_local_results([1, 2]) == ([1, 2],) * len(local)
