"""tf.distribute.ReplicaContext, line by line: the class, its attributes, and merge_call.

With `mr` for tf.distribute and numpy for tf. ``pair`` has two replicas, as the examples have;
``strategy`` has every layout. What the pages print is in tests/test_seeds_as_printed.py.
"""

import numpy as np
import pytest

import mpi_replica as mr
from seeds import assert_works_on, context, each, replica_id, two_replicas


@pytest.fixture
def pair(passed_everywhere):
    yield from two_replicas(passed_everywhere)


class TestReplicaContext:
    """A class with a collection of APIs that can be called in a replica context."""

    def test_example(self, pair):
        def func():
            replica_context = mr.get_replica_context()
            return replica_context.replica_id_in_sync_group

        result = pair.run(func)
        assert isinstance(result, mr.PerReplica)
        rows = ",\n".join(f"  {i}: {i}" for i in pair.local_replica_ids)
        assert repr(result) == f"PerReplica:{{\n{rows}\n}}"

    def test_get_replica_context_gives_an_instance_inside_run(self, strategy):
        def func():
            first = mr.get_replica_context()
            first.all_reduce("SUM", 1.0)
            return type(first), mr.get_replica_context() is first

        for _, found in each(strategy, strategy.run(func)):
            assert found == (mr.ReplicaContext, True)

    def test_get_replica_context_is_none_in_cross_replica_context(self, strategy):
        with strategy.scope():
            assert mr.get_replica_context() is None

    @pytest.mark.parametrize("call", ["all_reduce", "all_gather", "merge_call"])
    def test_its_calls_are_refused_after_run(self, strategy, call):
        kept = strategy.experimental_local_results(strategy.run(context))[0]
        calls = {
            "all_reduce": lambda: kept.all_reduce("SUM", 1.0),
            "all_gather": lambda: kept.all_gather(np.ones(1), axis=0),
            "merge_call": lambda: kept.merge_call(lambda strategy: None),
        }
        with pytest.raises(mr.errors.ContextError, match=call) as outside:
            calls[call]()
        assert isinstance(outside.value, RuntimeError)
        with strategy.scope(), pytest.raises(mr.errors.ContextError, match=call) as caught:
            calls[call]()
        assert_works_on(strategy, caught)


class TestArgs:
    """Args: strategy, replica_id_in_sync_group."""

    def test_strategy_and_id_are_kept(self, strategy):
        made = mr.ReplicaContext(strategy, replica_id_in_sync_group=0)
        assert made.strategy is strategy
        assert made.replica_id_in_sync_group == 0
        assert made.num_replicas_in_sync == strategy.num_replicas_in_sync

    @pytest.mark.parametrize("scalar", [np.int32, np.int64, np.array], ids=lambda t: t.__name__)
    def test_id_may_be_a_scalar_of_numpy_and_is_read_as_an_int(self, strategy, scalar):
        last = strategy.num_replicas_in_sync - 1
        made = mr.ReplicaContext(strategy, scalar(last))
        assert made.replica_id_in_sync_group == last
        assert type(made.replica_id_in_sync_group) is int

    def test_id_may_be_none_and_then_can_not_be_read(self, strategy):
        made = mr.ReplicaContext(strategy, None)
        with pytest.raises(ValueError, match="None"):
            _ = made.replica_id_in_sync_group

    @pytest.mark.parametrize("wrong", ["0", 1.5, np.array([0, 1]), np.float64(1)], ids=repr)
    def test_id_of_another_type_is_refused(self, strategy, wrong):
        with pytest.raises(ValueError, match="replica_id_in_sync_group"):
            mr.ReplicaContext(strategy, wrong)

    @pytest.mark.parametrize("wrong", ["x", None, mr.MPIStrategy], ids=repr)
    def test_what_is_no_strategy_is_refused(self, wrong):
        with pytest.raises(
            TypeError, match=r"ReplicaContext needs a strategy, got .*first"
        ) as caught:
            mr.ReplicaContext(wrong, 0)
        assert repr(wrong) in str(caught.value)

    def test_it_is_a_context_manager(self, strategy):
        made = mr.ReplicaContext(strategy, 0)
        with made:
            assert mr.get_replica_context() is made
            assert not mr.in_cross_replica_context()
            assert mr.get_strategy() is strategy
        assert mr.get_replica_context() is not made

    def test_its_collectives_need_one_replica(self, strategy):
        with mr.ReplicaContext(strategy, 0) as made:
            if strategy.num_replicas_in_sync == 1:
                assert made.all_reduce("SUM", 3.0) == 3.0
                assert made.merge_call(lambda strategy, x: x, args=(4,)) == 4
            else:
                with pytest.raises(mr.errors.ContextError, match="made by hand"):
                    made.all_reduce("SUM", 3.0)


class TestAttributes:
    """Attributes: devices, num_replicas_in_sync, replica_id_in_sync_group, strategy."""

    def test_devices_is_a_tuple_of_strings_and_deprecated(self, strategy):
        with pytest.warns(DeprecationWarning, match="devices"):
            result = strategy.run(lambda: [context().devices])
        local = strategy.experimental_local_results(result)
        for (devices,) in local:
            assert isinstance(devices, tuple)
            assert all(isinstance(device, str) for device in devices)
        # where tf has nested lists, as [["GPU:0"]], this has the name that the strategy gives
        assert tuple(devices[0] for (devices,) in local) == strategy.extended.worker_devices

    def test_num_replicas_in_sync_is_the_number_of_replicas_of_all_ranks(self, strategy):
        ones = strategy.run(lambda: context().all_reduce("SUM", 1))
        told = strategy.run(lambda: context().num_replicas_in_sync)
        for (_, number), (_, count) in zip(each(strategy, told), each(strategy, ones), strict=True):
            assert number == count == strategy.num_replicas_in_sync
            assert type(number) is int

    def test_replica_ids_range_from_0_to_num_replicas_in_sync_minus_1(self, strategy):
        def func():
            assert type(replica_id()) is int
            return context().all_gather(np.array([replica_id()]), axis=0)

        for _, ids in each(strategy, strategy.run(func)):
            assert ids.tolist() == list(range(strategy.num_replicas_in_sync))

    def test_strategy_is_the_current_strategy(self, strategy):
        def func():
            return context().strategy is strategy, mr.get_strategy() is strategy

        for _, found in each(strategy, strategy.run(func)):
            assert found == (True, True)


class TestMergeCall:
    """merge_call: Merge args across replicas and run merge_fn in a cross-replica context."""

    def test_merge_fn_runs_in_a_cross_replica_context(self, strategy):
        def merge_fn(given):
            return (
                given is strategy,
                mr.get_strategy() is strategy,
                mr.in_cross_replica_context(),
                mr.get_replica_context() is None,
            )

        for _, found in each(strategy, strategy.run(lambda: context().merge_call(merge_fn))):
            assert found == (True, True, True, True)

    @pytest.mark.parametrize("sequence", [tuple, list])
    def test_args_and_kwargs_are_given_as_per_replica(self, strategy, sequence):
        seen = []

        def merge_fn(_, ids, nest, *, name):
            seen.append((ids, nest, name))

        def func():
            args = sequence((replica_id(), {"a": [np.array([replica_id()]), "same"]}))
            return context().merge_call(merge_fn, args=args, kwargs={"name": f"r{replica_id()}"})

        assert strategy.run(func) is None
        count = strategy.num_replicas_in_sync
        ((ids, nest, name),) = seen  # once on each rank, with the values of all replicas
        leaves = [ids, *nest["a"], name]
        assert all(isinstance(leaf, mr.PerReplica) for leaf in leaves)
        assert [leaf.values for leaf in leaves] == [
            tuple(range(count)),
            tuple(np.array([i]) for i in range(count)),
            ("same",) * count,
            tuple(f"r{i}" for i in range(count)),
        ]

    @pytest.mark.parametrize("length", [2, 20_000])
    def test_args_of_any_size_print_as_per_replica(self, strategy, length):
        texts = []

        def merge_fn(_, x):
            texts.append(repr(x))

        def func():
            context().merge_call(merge_fn, args=(np.full(length, float(replica_id())),))

        strategy.run(func)
        first, *rows, last = texts[0].split("\n")
        assert (first, last) == ("PerReplica:{", "}")
        ids = [f"  {i}" for i in range(strategy.num_replicas_in_sync)]
        assert [row.partition(":")[0] for row in rows] == ids

    def test_it_allows_communication_between_the_calls_of_the_step_fn(self, strategy):
        """The example to which the page points: see strategy.run for an explanation."""

        def merge_fn(strategy, three_plus_replica_id):
            return sum(strategy.experimental_local_results(three_plus_replica_id))

        def step_fn():
            three_plus_replica_id = replica_id() + 3
            merged = context().merge_call(merge_fn, args=(three_plus_replica_id,))
            return merged + three_plus_replica_id

        total = sum(3 + i for i in range(strategy.num_replicas_in_sync))
        for i, value in each(strategy, strategy.run(step_fn)):
            assert value == total + 3 + i

    def test_per_replica_values_that_merge_fn_returns_are_unpacked(self, strategy):
        def merge_fn(_, x, y):
            return {"x": x, "nest": [y, (x, 3, None, "s")]}

        def func():
            x, y = 10 * replica_id(), np.array([replica_id()])
            merged = context().merge_call(merge_fn, args=(x, y))
            assert merged["nest"][0].tolist() == [replica_id()]
            return merged["x"], merged["nest"][1] == (x, 3, None, "s")

        for i, found in each(strategy, strategy.run(func)):
            assert found == (10 * i, True)

    @pytest.mark.parametrize("value", [42, None, "text", (1, [2.0])], ids=repr)
    def test_other_values_that_merge_fn_returns_are_returned_as_they_are(self, strategy, value):
        def func():
            return context().merge_call(lambda _: value) == value

        assert all(strategy.experimental_local_results(strategy.run(func)))

    def test_mirrored_values_that_merge_fn_returns_are_unpacked_too(self, strategy):
        def merge_fn(strategy, x):
            return strategy.extended.reduce_to("SUM", x, None)

        def func():
            total = context().merge_call(merge_fn, args=(float(replica_id()),))
            return isinstance(total, mr.DistributedValues), total

        for _, found in each(strategy, strategy.run(func)):
            assert found == (False, sum(range(strategy.num_replicas_in_sync)))

    def test_outside_of_a_distributed_scope_it_calls_merge_fn_in_a_cross_replica_context(self):
        def merge_fn(strategy, *args, **kwargs):
            assert strategy is mr.get_strategy()
            assert mr.in_cross_replica_context()
            assert mr.get_replica_context() is None
            assert not mr.has_strategy()
            return args, kwargs

        ctx = mr.get_replica_context()
        array = np.arange(2)
        args, kwargs = ctx.merge_call(merge_fn, args=[1, array], kwargs={"b": "c"})
        assert args[0] == 1
        assert args[1] is array
        assert kwargs == {"b": "c"}
        assert not mr.in_cross_replica_context()
        assert mr.get_replica_context() is ctx

    def test_outside_of_a_distributed_scope_its_exception_passes(self):
        def merge_fn(strategy):
            raise ZeroDivisionError("in merge_fn")

        with pytest.raises(ZeroDivisionError, match="in merge_fn"):
            mr.get_replica_context().merge_call(merge_fn)
        assert not mr.in_cross_replica_context()

    @pytest.mark.parametrize(
        ("args", "kwargs"), [("ab", None), (5, None), (None, None), ((), [1])], ids=repr
    )
    def test_args_are_a_list_or_tuple_and_kwargs_a_dict(self, strategy, args, kwargs):
        def merge_fn(strategy, *args, **kwargs):
            pass

        with pytest.raises(ValueError, match="args") as caught:
            strategy.run(lambda: context().merge_call(merge_fn, args, kwargs))
        assert_works_on(strategy, caught)
