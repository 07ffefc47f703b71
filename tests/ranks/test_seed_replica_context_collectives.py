"""tf.distribute.ReplicaContext, line by line: all_gather and all_reduce.

With `mr` for tf.distribute and numpy for tf. ``pair`` has two replicas, as the examples have;
``strategy`` has every layout. What the pages print is in tests/test_seeds_as_printed.py.
"""

import numpy as np
import pytest

import mpi_replica as mr
from seeds import assert_arrays, assert_works_on, context, each, replica_id, two_replicas


@pytest.fixture
def pair(passed_everywhere):
    yield from two_replicas(passed_everywhere)


class TestAllGather:
    """all_gather: All-gathers value across all replicas along axis."""

    def test_single_tensor_example(self, pair):
        def gather_value():
            ctx = mr.get_replica_context()
            local_value = np.array([1, 2, 3])
            return ctx.all_gather(local_value, axis=0)

        result = pair.run(gather_value)
        assert isinstance(result, mr.PerReplica)
        for value in pair.experimental_local_results(result):
            assert_arrays(value, np.array([1, 2, 3, 1, 2, 3]))

    def test_single_tensor_in_the_order_of_the_replicas(self, strategy):
        result = strategy.run(lambda: context().all_gather(np.arange(3) + 10 * replica_id(), 0))
        blocks = [np.arange(3) + 10 * i for i in range(strategy.num_replicas_in_sync)]
        for _, value in each(strategy, result):
            assert_arrays(value, np.concatenate(blocks))

    def test_list_example(self, pair):
        def gather_nest():
            ctx = mr.get_replica_context()
            value_1 = np.array([1, 2, 3])
            value_2 = np.array([[1, 2], [3, 4]])
            return ctx.all_gather([value_1, value_2], axis=0)

        result = pair.run(gather_nest)
        assert isinstance(result, list)
        assert [type(leaf) for leaf in result] == [mr.PerReplica, mr.PerReplica]
        # One page prints a tuple of one list here, of PerReplica: it is older than the other page,
        # and than what tf does now.
        local = pair.experimental_local_results(result)
        assert isinstance(local, tuple)
        assert len(local) == len(pair.local_replica_ids)
        for value_1, value_2 in local:
            assert_arrays(value_1, np.array([1, 2, 3, 1, 2, 3]))
            assert_arrays(value_2, np.array([[1, 2], [3, 4], [1, 2], [3, 4]]))

    def test_different_shapes_example(self, pair):
        values = [
            {"a": np.array([0]), "b": np.array([[0, 1]])},
            {"a": np.array([1]), "b": np.array([[2, 3], [4, 5]])},
        ]
        result = pair.run(lambda: context().all_gather(values[replica_id()], axis=0))
        for _, value in each(pair, result):
            assert list(value) == ["a", "b"]
            assert_arrays(value["a"], np.array([0, 1]))  # the page has [1, 2], a misprint
            assert_arrays(value["b"], np.array([[0, 1], [2, 3], [4, 5]]))

    def test_different_shapes_on_any_number_of_replicas(self, strategy):
        def value_of(i):
            return {"a": np.array([i]), "b": np.arange(2 * i).reshape(i, 2) + 100 * i}

        result = strategy.run(lambda: context().all_gather(value_of(replica_id()), axis=0))
        every = [value_of(i) for i in range(strategy.num_replicas_in_sync)]
        for _, value in each(strategy, result):
            assert_arrays(value["a"], np.concatenate([of["a"] for of in every]))
            assert_arrays(value["b"], np.concatenate([of["b"] for of in every]))

    def test_the_lists_of_the_page_are_nests_of_scalars_and_the_error_says_np_array(self, pair):
        values = [{"a": [0], "b": [[0, 1]]}, {"a": [1], "b": [[2, 3], [4, 5]]}]
        with pytest.raises(ValueError, match=r"np\.array\(\[") as caught:
            pair.run(lambda: context().all_gather(values[replica_id()], axis=0))
        assert_works_on(pair, caught)

    def test_shapes_may_differ_along_the_axis(self, pair):
        shapes = [(1, 2, 3), (1, 3, 3)]
        values = [np.full(shape, i) for i, shape in enumerate(shapes)]
        result = pair.run(lambda: context().all_gather(values[replica_id()], axis=1))
        for _, value in each(pair, result):
            assert value.shape == (1, 5, 3)
            assert_arrays(value, np.concatenate(values, axis=1))

    @pytest.mark.parametrize("axis", [0, 2])
    def test_shapes_must_be_the_same_in_all_other_dimensions(self, pair, axis):
        shapes = [(1, 2, 3), (1, 3, 3)]
        with pytest.raises(mr.errors.StructureMismatchError, match="all_gather") as caught:
            pair.run(lambda: context().all_gather(np.ones(shapes[replica_id()]), axis=axis))
        assert isinstance(caught.value, ValueError)
        assert_works_on(pair, caught)

    def test_rank_must_be_the_same_on_all_replicas(self, pair):
        with pytest.raises(mr.errors.StructureMismatchError, match="all_gather") as caught:
            pair.run(lambda: context().all_gather(np.ones((2,) * (1 + replica_id())), axis=0))
        assert_works_on(pair, caught)

    def test_structure_must_be_the_same_on_all_replicas(self, pair):
        with pytest.raises(mr.errors.StructureMismatchError, match="all_gather") as caught:
            pair.run(lambda: context().all_gather({"ab"[replica_id()]: np.ones(2)}, axis=0))
        assert_works_on(pair, caught)

    def test_value_must_have_a_non_zero_rank(self, strategy):
        """Note: The input value must have a non-zero rank. Otherwise, consider expand_dims."""
        with pytest.raises(ValueError, match=r"np\.array\(\[") as caught:
            strategy.run(lambda: context().all_gather(np.float32(replica_id()), axis=0))
        assert_works_on(strategy, caught)

        def mended():
            return context().all_gather(np.expand_dims(np.float32(replica_id()), 0), axis=0)

        for _, value in each(strategy, strategy.run(mended)):
            assert_arrays(value, np.arange(strategy.num_replicas_in_sync, dtype=np.float32))

    def test_it_can_only_be_called_in_replica_context_and_strategy_gather_is_its_counterpart(
        self, strategy
    ):
        rows = strategy.run(lambda: np.array([replica_id(), 7]))
        expected = np.concatenate([[i, 7] for i in range(strategy.num_replicas_in_sync)])
        assert_arrays(strategy.gather(rows, axis=0), expected)
        with pytest.raises(mr.errors.ContextError, match="all_gather") as caught:
            strategy.run(lambda: strategy.gather(rows, axis=0))
        assert_works_on(strategy, caught)

    def test_a_replica_that_does_not_participate_is_an_error_and_no_hang(self, pair):
        def func():
            if replica_id() == 0:
                context().all_gather(np.ones(1), axis=0)

        with pytest.raises(mr.errors.CollectiveMismatchError, match="all_gather") as caught:
            pair.run(func)
        assert isinstance(caught.value, RuntimeError)
        assert_works_on(pair, caught)

    def test_several_calls_need_the_same_order_on_all_replicas(self, pair):
        def first():
            context().all_gather(np.ones(1), axis=0)

        def second():
            context().all_gather(np.zeros(1), axis=0)

        def func():
            for call in (first, second) if replica_id() == 0 else (second, first):
                call()

        with pytest.raises(mr.errors.CollectiveMismatchError, match="all_gather") as caught:
            pair.run(func)
        assert_works_on(pair, caught)

    def test_value_may_be_a_distributed_values_instance(self, strategy):
        count = strategy.num_replicas_in_sync
        per_replica = strategy.experimental_distribute_values_from_function(
            lambda value_context: np.array([value_context.replica_id_in_sync_group])
        )
        with strategy.scope():
            variable = mr.Variable(np.array([1.0, 2.0]))
        mirrored = strategy.extended.reduce_to("SUM", per_replica, None)

        def func():
            return context().all_gather([per_replica, mirrored, variable], axis=0)

        for _, (ids, sums, reads) in each(strategy, strategy.run(func)):
            assert_arrays(ids, np.arange(count))
            assert_arrays(sums, np.array([sum(range(count))] * count))
            assert_arrays(reads, np.array([1.0, 2.0] * count))

    def test_value_can_not_be_indexed_slices(self, strategy):
        with pytest.raises(NotImplementedError, match="IndexedSlices") as caught:
            strategy.run(lambda: context().all_gather(mr.IndexedSlices([[1.0]], [0]), axis=0))
        assert_works_on(strategy, caught)

    @pytest.mark.parametrize("axis", [np.int32(0), np.array(0, np.int32), -1], ids=repr)
    def test_axis_may_be_a_scalar_of_numpy_and_negative(self, strategy, axis):
        result = strategy.run(lambda: context().all_gather(np.array([replica_id()]), axis))
        for _, value in each(strategy, result):
            assert_arrays(value, np.arange(strategy.num_replicas_in_sync))

    def test_returns_a_nest_of_the_structure_of_value(self, strategy):
        def func():
            value = {"x": (np.array([replica_id()]), [np.array([0.5])]), "y": np.ones((1, 2))}
            return context().all_gather(value, axis=0)

        count = strategy.num_replicas_in_sync
        for _, value in each(strategy, strategy.run(func)):
            assert list(value) == ["x", "y"]
            ids, (halves,) = value["x"]
            assert (type(value["x"]), type(value["x"][1])) == (tuple, list)
            assert_arrays(ids, np.arange(count))
            assert_arrays(halves, np.full(count, 0.5))
            assert_arrays(value["y"], np.ones((count, 2)))


class TestAllReduce:
    """all_reduce: All-reduces value across all replicas."""

    def test_example(self, pair):
        def step_fn():
            ctx = mr.get_replica_context()
            value = np.float32(1.0)
            return ctx.all_reduce(mr.ReduceOp.SUM, value)

        for value in pair.experimental_local_results(pair.run(step_fn)):
            assert isinstance(value, np.float32)
            assert value == 2.0

    def test_list_example(self, pair):
        def step_fn():
            ctx = mr.get_replica_context()
            value1 = np.float32(1.0)
            value2 = np.float32(2.0)
            return ctx.all_reduce(mr.ReduceOp.SUM, [value1, value2])

        result = pair.run(step_fn)
        assert [type(leaf) for leaf in result] == [mr.PerReplica, mr.PerReplica]
        local = pair.experimental_local_results(result)
        assert local == ([2.0, 4.0],) * len(pair.local_replica_ids)

    @pytest.mark.parametrize("array", [np.array, list])
    @pytest.mark.parametrize(
        ("op", "a", "b"), [("SUM", 4, [42, 99]), ("MEAN", 2, [21, 49.5])], ids=["SUM", "MEAN"]
    )
    def test_example_with_two_replicas(self, pair, op, a, b, array):
        values = [{"a": 1, "b": array([40, 1])}, {"a": 3, "b": array([2, 98])}]
        result = pair.run(lambda: context().all_reduce(mr.ReduceOp[op], values[replica_id()]))
        dtype = {"SUM": np.array(1).dtype, "MEAN": np.dtype(np.float64)}[op]
        for _, value in each(pair, result):
            assert list(value) == ["a", "b"]
            assert value["a"] == a
            assert value["a"].dtype == dtype
            assert list(value["b"]) == b
            assert all(item.dtype == dtype for item in value["b"])

    @pytest.mark.parametrize("op", [mr.ReduceOp.SUM, mr.ReduceOp.MEAN, "SUM", "MEAN", "mean"])
    def test_reduce_op_may_be_an_enum_or_a_string(self, strategy, op):
        def func():
            value = {"a": 1 + 2 * replica_id(), "b": np.array([40.0, 1.0]) * replica_id()}
            return context().all_reduce(op, value)

        ids = np.arange(strategy.num_replicas_in_sync)
        combine = np.sum if op in ("SUM", mr.ReduceOp.SUM) else np.mean
        for _, value in each(strategy, strategy.run(func)):
            assert value["a"] == combine(1 + 2 * ids)
            assert_arrays(value["b"], combine(np.outer(ids, [40.0, 1.0]), axis=0))

    def test_options_specify_the_packs_and_not_the_result(self, strategy):
        options = mr.CommunicationOptions(bytes_per_pack=64)

        def func():
            values = [np.arange(50.0) * replica_id() + k for k in range(3)]
            return context().all_reduce("SUM", values, options=options)

        ids = range(strategy.num_replicas_in_sync)
        for _, values in each(strategy, strategy.run(func)):
            for k, value in enumerate(values):
                assert_arrays(value, sum(np.arange(50.0) * i + k for i in ids))

    def test_options_override_those_of_the_strategy(self):
        """Packs of the strategy's size are its default; another size is another call."""
        packs = [mr.CommunicationOptions(bytes_per_pack=size) for size in (64, 128)]
        with mr.MPIStrategy(replicas_per_rank=2, communication_options=packs[0]) as strategy:

            def func(options):
                return context().all_reduce(
                    "SUM", 1, options=options if replica_id() == 0 else None
                )

            for _, total in each(strategy, strategy.run(func, args=(packs[0],))):
                assert total == strategy.num_replicas_in_sync
            mismatch = mr.errors.CollectiveMismatchError
            with pytest.raises(mismatch, match="bytes_per_pack=128") as caught:
                strategy.run(func, args=(packs[1],))
            assert_works_on(strategy, caught)

    def test_a_replica_that_does_not_participate_is_an_error_and_no_hang(self, pair):
        def func():
            if replica_id() == 1:
                context().all_reduce("SUM", 1.0)

        with pytest.raises(mr.errors.CollectiveMismatchError, match="all_reduce") as caught:
            pair.run(func)
        assert_works_on(pair, caught)

    def test_several_calls_need_the_same_order_on_all_replicas(self, pair):
        def first():
            context().all_reduce("SUM", 1.0)

        def second():
            context().all_reduce("SUM", 2.0)

        def func():
            for call in (first, second) if replica_id() == 0 else (second, first):
                call()

        with pytest.raises(mr.errors.CollectiveMismatchError, match="all_reduce") as caught:
            pair.run(func)
        assert_works_on(pair, caught)

    def test_conditions_with_the_same_outcome_on_all_replicas_are_fine(self, strategy):
        def func(step):
            if step % 2:
                return context().all_reduce("SUM", float(replica_id()))
            return context().all_reduce("MEAN", float(replica_id()))

        total = sum(range(strategy.num_replicas_in_sync))
        for step in range(4):
            expected = total if step % 2 else total / strategy.num_replicas_in_sync
            for _, value in each(strategy, strategy.run(func, args=(step,))):
                assert value == expected

    def test_a_call_stays_the_same_call_however_often_it_runs(self, strategy):
        """The interpreter rewrites code that runs often, and not on all replicas at once."""

        class Model:
            @property
            def total(self):
                return context().all_reduce("SUM", replica_id())

            def __getitem__(self, index):
                return context().all_reduce("SUM", index)

        model = Model()

        def totals():
            for number in range(2):
                yield context().all_reduce("SUM", number)

        def step():
            through_c = tuple(context().all_reduce("SUM", k) for k in range(2))
            by_loop = 0
            for total in totals():
                by_loop += total
            return through_c, by_loop, model.total, model[3], next(totals())

        count = strategy.num_replicas_in_sync
        for _ in range(40):
            for _, found in each(strategy, strategy.run(step)):
                assert found == ((0, count), count, sum(range(count)), 3 * count, 0)

    def test_other_variants_reduce_in_cross_replica_context(self, strategy):
        """reduce_to, batch_reduce_to, and the more convenient Strategy.reduce."""
        values = strategy.run(lambda: np.array([replica_id(), 1.0]))
        count = strategy.num_replicas_in_sync
        expected = np.array([sum(range(count)), count], float)
        assert_arrays(strategy.reduce("SUM", values, axis=None), expected)
        reduced = strategy.extended.reduce_to("SUM", values, None)
        assert isinstance(reduced, mr.Mirrored)
        assert_arrays(np.asarray(reduced), expected)
        both = strategy.extended.batch_reduce_to("SUM", [(values, None), (values, values)])
        for mirrored in both:
            assert_arrays(np.asarray(mirrored), expected)

    @pytest.mark.parametrize(
        "values",
        [
            ({"a": 1}, {"b": 1}),
            ([1.0, 2.0], (1.0, 2.0)),
            ([1.0], [1.0, 2.0]),
            (np.ones(2), np.ones(3)),
            (np.ones((2, 1)), np.ones((1, 2))),
        ],
        ids=["keys", "kind", "length", "shape", "layout of the same size"],
    )
    def test_structure_and_shapes_must_be_the_same_on_all_replicas(self, pair, values):
        with pytest.raises(mr.errors.StructureMismatchError, match="all_reduce") as caught:
            pair.run(lambda: context().all_reduce("SUM", values[replica_id()]))
        assert isinstance(caught.value, ValueError)
        assert_works_on(pair, caught)

    def test_value_may_hold_indexed_slices(self, strategy):
        count = strategy.num_replicas_in_sync

        def func():
            slices = mr.IndexedSlices([[1.0, replica_id()]], [replica_id()], (count, 2))
            return context().all_reduce("SUM", {"dense": 1, "sparse": slices})

        for _, value in each(strategy, strategy.run(func)):
            assert value["dense"] == count
            assert isinstance(value["sparse"], mr.IndexedSlices)
            rows = [[1.0, i] for i in range(count)]
            assert_arrays(value["sparse"].to_dense(), np.array(rows, float))

    def test_value_may_be_a_distributed_values_instance(self, strategy):
        per_replica = strategy.run(lambda: 1.0 * replica_id())
        with strategy.scope():
            variable = mr.Variable(2.0)
        result = strategy.run(lambda: context().all_reduce("SUM", (per_replica, variable)))
        count = strategy.num_replicas_in_sync
        for _, value in each(strategy, result):
            assert value == (sum(range(count)), 2.0 * count)

    def test_returns_a_nest_of_the_structure_of_value(self, strategy):
        def func():
            return context().all_reduce("SUM", {"x": (1, [np.ones(2)]), "y": 0.5 * replica_id()})

        count = strategy.num_replicas_in_sync
        for _, value in each(strategy, strategy.run(func)):
            assert list(value) == ["x", "y"]
            assert (type(value["x"]), type(value["x"][1])) == (tuple, list)
            assert value["x"][0] == count
            assert_arrays(value["x"][1][0], np.full(2, float(count)))
            assert value["y"] == 0.5 * sum(range(count))
