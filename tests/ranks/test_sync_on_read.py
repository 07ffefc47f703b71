"""Variables synchronized on read: a component for each replica, combined when read from above."""

import functools
import re
import weakref

import numpy as np
import pytest

import mpi_replica as mr
from everywhere import check_works, culprits, gathered, needs_two_ranks, raises_everywhere
from mpi_replica import VariableAggregation as Aggregation
from mpi_replica.errors import RankLostError
from mpi_replica.replicas.assignment import lose_components

SUM, MEAN = Aggregation.SUM, Aggregation.MEAN
FIRST, NONE = Aggregation.ONLY_FIRST_REPLICA, Aggregation.NONE

COMBINED = {SUM: np.sum, MEAN: np.mean, FIRST: lambda row: row[0]}
combined_on_read = pytest.mark.parametrize("aggregation", COMBINED, ids=lambda a: a.name)
every_aggregation = pytest.mark.parametrize("aggregation", Aggregation, ids=lambda a: a.name)


def replica_id():
    return mr.get_replica_context().replica_id_in_sync_group


def variable(strategy, aggregation, initial=0.0, **kwargs):
    with strategy.scope():
        return mr.Variable(
            initial,
            synchronization=mr.VariableSynchronization.ON_READ,
            aggregation=aggregation,
            **kwargs,
        )


def counted(strategy, aggregation):
    """A variable whose component is the replica's id + 1, and all components."""
    v = variable(strategy, aggregation)
    strategy.run(lambda: v.assign(replica_id() + 1.0))
    return v, np.arange(1.0, strategy.num_replicas_in_sync + 1)


def own(strategy, v):
    """The components of this rank, as its replicas read them."""
    return list(strategy.run(lambda: float(v)).values)


def assert_fails(strategy, kind, pattern, call):
    """`call` raises the same on all ranks, and the next collectives give the right numbers."""
    error = raises_everywhere(kind, call)
    assert re.search(pattern, str(error)), error
    check_works(strategy)


def on_all_ranks(value):
    values = gathered(np.asarray(value).tolist())
    assert all(x == values[0] for x in values), values
    return values[0]


# Reading


@every_aggregation
def test_all_components_begin_with_replica_0s_initial_value(strategy, aggregation):
    v = variable(strategy, aggregation, lambda: 3.0 + strategy.rank)
    assert set(own(strategy, v)) == {3.0}
    assert v.trainable is False
    assert variable(strategy, aggregation, trainable=True).trainable is True


@every_aggregation
def test_a_replica_reads_and_writes_its_own_component(strategy, aggregation):
    v, components = counted(strategy, aggregation)

    def step():
        before = float(v)
        v.assign_add(1.0)
        v.assign_sub(3.0 * v)
        return before, v.value(), float(v + 1), np.asarray(v)

    before, after, plus_one, as_array = strategy.run(step)
    expected = [components[i] for i in strategy.local_replica_ids]
    assert list(before.values) == expected
    assert list(after.values) == [-2 * (x + 1) for x in expected]
    assert list(plus_one.values) == [1 - 2 * (x + 1) for x in expected]
    assert list(as_array.values) == list(after.values)


def test_a_context_made_by_hand_has_no_component_on_any_rank(strategy):
    """Also not on the rank that hosts the replica."""
    v, components = counted(strategy, SUM)
    if len(components) > 1:
        for call in (lambda: v.assign(7.0), v.value):

            def by_hand(call=call):
                with mr.ReplicaContext(strategy, len(components) - 1):
                    call()

            assert_fails(strategy, mr.errors.ContextError, "by hand", by_hand)
    assert on_all_ranks(v.value()) == components.sum()


def test_assigning_in_a_replica_is_no_collective_call(strategy):
    last = strategy.num_replicas_in_sync - 1
    v = variable(strategy, SUM)

    def step():
        for _ in range(replica_id()):
            v.assign_add(1.0)
        if replica_id() == last:
            v.assign_add(100.0)

    strategy.run(step)
    assert on_all_ranks(v) == last * (last + 1) / 2 + 100.0


@combined_on_read
@pytest.mark.parametrize("in_scope", [True, False])
def test_read_from_above_it_is_the_combination_of_all_components(strategy, aggregation, in_scope):
    v, components = counted(strategy, aggregation)
    expected = COMBINED[aggregation](components)

    def read():
        return [v.value(), v.numpy(), v.read_value(), float(v), np.asarray(v), v + 0, np.add(0, v)]

    if in_scope:
        with strategy.scope():
            found = read()
    else:
        found = read()
    for value in found:
        np.testing.assert_allclose(on_all_ranks(value), expected, rtol=1e-14)
    np.testing.assert_allclose(v + 1, expected + 1, rtol=1e-14)


@combined_on_read
def test_read_in_a_merge_fn_it_is_the_combination(strategy, aggregation):
    v, components = counted(strategy, aggregation)

    def merge(strategy, x):
        assert x is v
        return float(x)

    found = strategy.run(lambda: mr.get_replica_context().merge_call(merge, args=(v,)))
    for value in found.values:
        np.testing.assert_allclose(value, COMBINED[aggregation](components), rtol=1e-14)


def test_under_none_there_is_no_value_above_and_the_error_says_what_there_is(strategy):
    v, components = counted(strategy, NONE)
    with strategy.scope():
        assert_fails(strategy, ValueError, "NONE.*experimental_local_results", v.value)
    local = strategy.experimental_local_results(v)
    assert list(local) == [components[i] for i in strategy.local_replica_ids]


def test_reading_on_one_rank_only_is_an_error_everywhere(strategy):
    needs_two_ranks(strategy)
    v, components = counted(strategy, SUM)
    values = strategy.run(lambda: 1.0)

    def one_reads():
        return float(v) if strategy.rank == 0 else strategy.reduce("SUM", values, axis=None)

    assert_fails(strategy, mr.errors.CollectiveMismatchError, "read", one_reads)
    assert float(v) == components.sum()


def test_reading_two_variables_in_another_order_is_an_error_everywhere(strategy):
    needs_two_ranks(strategy)
    pair = [counted(strategy, SUM)[0] for _ in range(2)]
    mine = pair[0] if strategy.rank == 0 else pair[1]
    assert_fails(strategy, mr.errors.CollectiveMismatchError, "read", lambda: float(mine))


def test_a_mean_of_float16_does_not_overflow(strategy):
    v = variable(strategy, MEAN, np.float16(0))
    strategy.run(lambda: v.assign(np.float16(60_000)))
    assert float(v) == float(np.float16(60_000))


# Assigning from above


@combined_on_read
def test_what_is_assigned_above_is_what_is_read_above(strategy, aggregation):
    v, _ = counted(strategy, aggregation)
    R = strategy.num_replicas_in_sync
    assert v.assign(10.0 + strategy.rank) is v
    np.testing.assert_allclose(on_all_ranks(v), 10.0, rtol=1e-14)
    np.testing.assert_allclose(own(strategy, v), 10.0 / R if aggregation is SUM else 10.0)


def test_integers_assigned_above_are_shared_out_without_loss(strategy):
    v = variable(strategy, SUM, np.array([0, 0]))
    v.assign([10, -7])
    assert on_all_ranks(v) == [10, -7]
    assert v.dtype == np.int64


TOTALS = {
    "f8": [0.1, -1e23, 1.7976931348623157e308, 5e-324, 0.0, -0.0, np.inf, -np.inf, np.nan, 1 / 3],
    "f4": [0.1, -1e10, 3.4028235e38, 1e-45, 0.0, -0.0, np.inf, np.nan, 1 / 3, 16777217],
    "f2": [0.1, -1e4, 65504, 6e-8, 0.0, -0.0, np.inf, np.nan, 1 / 3, 7],
    "c16": [0.1 - 1e-300j, complex(1e308, -0.0), complex(np.inf, 0.3), 1j],
    "i8": [2**63 - 1, -(2**63), 7, 0],
    "u1": [255, 254, 1, 0],
}


@pytest.mark.parametrize("dtype", TOTALS)
@pytest.mark.parametrize("replicas", [5, 7, 10])
def test_a_sum_has_the_bits_that_were_assigned_above_for_any_number_of_replicas(
    world, dtype, replicas
):
    total = np.array(TOTALS[dtype], dtype)
    more = world.size if world.size > replicas else 0
    with mr.MPIStrategy(num_replicas=replicas + more) as strategy:
        v = variable(strategy, SUM, np.zeros_like(total))
        strategy.run(lambda: v.assign(np.full_like(total, replica_id())))
        v.assign(total)
        found = np.where(
            np.isnan(total) & np.isnan(v), total, v
        )  # NaN has other bits here and there
        assert gathered(found.tobytes()) == [total.tobytes()] * strategy.size
        for part in strategy.experimental_local_results(v):
            assert not np.shares_memory(part, total)
        strategy.run(lambda: v.assign_add(np.ones_like(total)))


@pytest.mark.parametrize("how", ["assign_add", "assign_sub"])
def test_adding_above_is_refused_for_a_sum_and_done_to_each_component_otherwise(strategy, how):
    sign = 1 if how == "assign_add" else -1
    v, _ = counted(strategy, SUM)
    assert_fails(strategy, ValueError, f"{how}.*in a replica", lambda: getattr(v, how)(1.0))
    for aggregation in (MEAN, FIRST, NONE):
        v, components = counted(strategy, aggregation)
        getattr(v, how)(1.0 + strategy.rank)
        assert own(strategy, v) == [components[i] + sign for i in strategy.local_replica_ids]


@every_aggregation
def test_a_per_replica_is_assigned_in_replicas_and_refused_above(strategy, aggregation):
    v = variable(strategy, aggregation)
    values = strategy.run(lambda: replica_id() + 5.0)
    strategy.run(lambda: v.assign(values))
    assert own(strategy, v) == [i + 5.0 for i in strategy.local_replica_ids]
    assert_fails(strategy, ValueError, "PerReplica", lambda: v.assign(values))


@every_aggregation
def test_a_wrong_shape_or_dtype_on_one_replica_is_an_error_everywhere(strategy, aggregation):
    last = strategy.num_replicas_in_sync - 1
    v = variable(strategy, aggregation, np.zeros(2), name="metric")

    def step(bad):
        v.assign(bad if replica_id() == last else np.ones(2))

    for kind, bad in ((ValueError, np.ones(3)), (TypeError, np.ones(2, complex))):
        assert_fails(strategy, kind, "metric.assign", lambda b=bad: strategy.run(step, args=(b,)))
    assert_fails(strategy, ValueError, "metric.assign.*shape", lambda: v.assign(1.0))


@every_aggregation
def test_a_run_that_fails_takes_back_what_replicas_have_assigned_on_every_layout(
    strategy, aggregation
):
    v, components = counted(strategy, aggregation)

    def step(culprit, meets):
        v.assign(-1.0)
        if meets:
            mr.get_replica_context().all_reduce("MAX", replica_id())
        v.assign_add(replica_id())
        if replica_id() == culprit:
            raise OSError("no disk")

    for culprit in culprits(strategy):
        for meets in (False, True):
            run = functools.partial(strategy.run, step, args=(culprit, meets))
            assert_fails(strategy, OSError, "no disk", run)
            assert own(strategy, v) == [components[i] for i in strategy.local_replica_ids]
    strategy.run(lambda: v.assign_add(1.0))
    assert own(strategy, v) == [components[i] + 1 for i in strategy.local_replica_ids]


def test_what_was_lost_is_lost_again_after_a_run_that_assigns_it_and_fails(strategy):
    v, _ = counted(strategy, SUM)
    lose_components(strategy)

    def step():
        v.assign(1.0)
        raise OSError("no disk")

    assert_fails(strategy, OSError, "no disk", lambda: strategy.run(step))
    assert_fails(strategy, RankLostError, "no components any more", v.value)


def test_an_error_that_a_step_catches_takes_back_nothing_that_it_has_assigned(strategy):
    v, components = counted(strategy, SUM)

    def step():
        v.assign_add(1.0)
        try:
            mr.get_replica_context().all_reduce("SUM", object())
        except TypeError:
            v.assign_add(1.0)

    strategy.run(step)
    assert own(strategy, v) == [components[i] + 2 for i in strategy.local_replica_ids]


def test_nothing_keeps_the_old_components_after_a_run(strategy):
    v, _ = counted(strategy, SUM)
    for fails in (False, True):
        old = []

        def step(fails=fails, old=old):
            v.assign(np.float64(replica_id()))
            old.append(weakref.ref(v._storage.read(replica_id())))
            v.assign_add(1.0)
            old.append(weakref.ref(v._storage.read(replica_id())))
            v.assign_add(1.0)
            if fails:
                raise OSError("no disk")

        if fails:
            assert_fails(strategy, OSError, "no disk", lambda step=step: strategy.run(step))
        else:
            strategy.run(step)
        assert len(old) >= 2
        assert not [ref for ref in old if ref() is not None]


# In other calls


@combined_on_read
def test_reduce_takes_the_components_whatever_the_aggregation(strategy, aggregation):
    v, components = counted(strategy, aggregation)
    assert on_all_ranks(strategy.reduce("SUM", v, axis=None)) == components.sum()
    np.testing.assert_allclose(strategy.reduce("MEAN", v, axis=None), components.mean())
    strategy.run(lambda: v.assign(1.0))
    assert strategy.reduce("SUM", v, axis=None) == strategy.num_replicas_in_sync


def test_gather_takes_the_components(strategy):
    v = variable(strategy, SUM, np.zeros(2))
    strategy.run(lambda: v.assign([replica_id(), -replica_id()]))
    rows = [[i, -i] for i in range(strategy.num_replicas_in_sync)]
    assert on_all_ranks(strategy.gather(v, axis=0)) == np.ravel(rows).tolist()


def test_all_reduce_and_all_gather_take_the_replicas_component(strategy):
    v, components = counted(strategy, MEAN)
    w = variable(strategy, SUM, np.zeros(1))

    def step():
        w.assign([replica_id()])
        context = mr.get_replica_context()
        return context.all_reduce("SUM", v), context.all_gather(w, axis=0)

    total, rows = strategy.run(step)
    assert set(total.values) == {components.sum()}
    for row in rows.values:
        np.testing.assert_array_equal(row, np.arange(strategy.num_replicas_in_sync))


def test_in_merge_fn_reduce_takes_the_components_of_all_replicas(strategy):
    v, components = counted(strategy, NONE)

    def merge(strategy, x):
        return strategy.reduce("SUM", x, axis=None)

    found = strategy.run(lambda: mr.get_replica_context().merge_call(merge, args=(v,)))
    assert set(found.values) == {components.sum()}


@every_aggregation
def test_it_stays_itself_as_argument_and_result_of_run(strategy, aggregation):
    v = variable(strategy, aggregation)

    def step(x):
        assert x is v
        return x, x.assign(replica_id())

    first, second = strategy.run(step, args=(v,))
    assert first is v
    assert second is v


@every_aggregation
def test_update_calls_the_function_for_each_component(strategy, aggregation):
    v, components = counted(strategy, aggregation)
    mine = [components[i] for i in strategy.local_replica_ids]

    def double(x, plus):
        assert x is v
        x.assign(2.0 * x + plus)
        return float(x)

    mirrored = strategy.extended.broadcast_to(1.0 + strategy.rank)
    result = strategy.extended.update(v, double, args=(mirrored,), group=False)
    assert result == tuple(2 * x + 1 for x in mine)
    assert own(strategy, v) == list(result)


@every_aggregation
def test_repr_shows_the_components_here_and_needs_no_other_rank(strategy, aggregation):
    v, _ = counted(strategy, aggregation)
    if strategy.rank == strategy.size - 1:
        text = repr(v)
        assert aggregation.name in text
        for i in strategy.local_replica_ids:
            assert f"{i}: array({i + 1}.)" in text
    assert own(strategy, v) == [i + 1.0 for i in strategy.local_replica_ids]


def test_a_metric_over_steps(strategy):
    total, count = variable(strategy, SUM), variable(strategy, SUM, 0)

    def step(number):
        rows = replica_id() + number
        total.assign_add(float(rows * rows))
        count.assign_add(rows)

    for number in range(3):
        strategy.run(step, args=(number,))
    rows = [i + n for i in range(strategy.num_replicas_in_sync) for n in range(3)]
    assert float(total / count) == sum(r * r for r in rows) / sum(rows)
    total.assign(0.0)
    assert on_all_ranks(total) == 0.0


# Replicas that have moved since a rank was lost


@combined_on_read
def test_components_that_were_lost_are_an_error_on_all_ranks_until_they_are_assigned(
    strategy, aggregation
):
    v, components = counted(strategy, aggregation)
    lose_components(strategy)
    assert "lost" in repr(v)
    add = functools.partial(strategy.run, lambda: v.assign_add(1.0))
    for use in (add, v.value, lambda: own(strategy, v)):
        assert_fails(strategy, RankLostError, "Hold it in the mr.ElasticState", use)
    strategy.run(lambda: v.assign(1.0) if replica_id() == 0 else None)
    if len(components) > 1 and aggregation is not FIRST:
        assert_fails(strategy, RankLostError, "no components any more", v.value)
    strategy.run(lambda: v.assign(replica_id() + 1.0))
    assert on_all_ranks(v.value()) == COMBINED[aggregation](components)


@combined_on_read
def test_components_that_were_lost_in_part_can_be_updated(strategy, aggregation):
    v, components = counted(strategy, aggregation)
    lose_components(strategy)
    strategy.run(lambda: v.assign(1.0) if replica_id() == 0 else None)
    strategy.extended.update(v, lambda x: x.assign(2.0))
    assert set(own(strategy, v)) == {2.0}
    assert on_all_ranks(v.value()) == COMBINED[aggregation](np.full(len(components), 2.0))


def test_components_that_were_lost_can_be_assigned_from_above(strategy):
    v, _ = counted(strategy, SUM)
    lose_components(strategy)
    v.assign(12.0)
    assert on_all_ranks(v.value()) == 12.0
    strategy.run(lambda: v.assign_add(1.0))
    assert on_all_ranks(v.value()) == 12.0 + strategy.num_replicas_in_sync


def test_what_a_merge_fn_has_assigned_stays_when_the_run_fails(strategy):
    """Also on replicas that had assigned to their component before it; what they do later goes."""
    with strategy.scope():
        on_read = mr.VariableSynchronization.ON_READ
        v = mr.Variable([0.0, 0.0], synchronization=on_read, aggregation=MEAN)

    def step():
        i = replica_id()
        if i == 0:
            v.assign([5.0, 5.0])
        mr.get_replica_context().merge_call(lambda strategy: v.assign([7.0, 7.0]))
        v.assign_add([i, i])
        raise ValueError("the step fails")

    assert_fails(strategy, ValueError, "the step fails", lambda: strategy.run(step))
    found = strategy.gather_objects(strategy.run(lambda: v.numpy().tolist()))
    assert set(map(tuple, found)) == {(7.0, 7.0)}


@combined_on_read
def test_the_combined_value_has_the_variables_byte_order(strategy, aggregation):
    v = variable(strategy, aggregation, np.ones(2, ">f4"))
    assert v.value().dtype == v.dtype == np.dtype(">f4")
    assert set(v.value().tolist()) == {
        COMBINED[aggregation](np.ones(strategy.num_replicas_in_sync))
    }


@every_aggregation
def test_outside_of_any_strategy_the_one_replica_has_the_one_component(aggregation):
    """As the total of a metric that a program keeps without a strategy, too."""
    v = mr.Variable(
        [3.0, 1.0],
        synchronization=mr.VariableSynchronization.ON_READ,
        aggregation=aggregation,
    )
    assert not mr.in_cross_replica_context()
    v.assign_add([1.0, 2.0]).assign_sub([0.5, 0.5])
    v.scatter_add(mr.IndexedSlices(np.array([2.0]), np.array([0])))
    mr.get_strategy().run(lambda: v.assign_add([1.0, 1.0]))
    assert v.numpy().tolist() == [6.5, 3.5]
