"""Large results lie in memory that comes back: what the program still sees stays as it is."""

import gc
import random
import weakref

import numpy as np
import pytest
from mpi4py import MPI

import mpi_replica as mr

ITEMS = 300_000  # of float32: more than 512 KiB


def summed(context, factor, items=ITEMS):
    return context.all_reduce("SUM", np.full(items, factor * (1 + mine(context)), np.float32))


def gathered(context, factor, items=ITEMS):
    """Gather as many items, of all replicas together."""
    length = -(-items // context.num_replicas_in_sync)
    return context.all_gather(np.full(length, factor * (1 + mine(context)), np.float32), axis=0)


def mine(context):
    return context.replica_id_in_sync_group


def address(array):
    return array.__array_interface__["data"][0]


def in_each_replica(strategy, fn):
    values = strategy.run(lambda: fn(mr.get_replica_context()))
    return strategy.experimental_local_results(values)


@pytest.mark.parametrize("call", [summed, gathered])
def test_a_large_result_gets_the_memory_of_one_that_is_gone(strategy, call):
    def addresses(context):
        return [address(call(context, 1)) for _ in range(9)]

    found = in_each_replica(strategy, addresses)
    assert len({place for places in found for place in places}) <= 2 * len(found)


def test_results_that_are_kept_are_not_written_by_later_calls(strategy):
    count = strategy.num_replicas_in_sync

    def check(context):
        draw = random.Random(7)  # as on all replicas
        kept = []
        for step in range(1, 25):
            items = draw.choice([ITEMS, 2 * ITEMS, 4 * ITEMS])
            if draw.random() < 0.5:
                result, expected = summed(context, step, items), step * count * (count + 1) / 2
            else:
                result, expected = gathered(context, step, items)[-5:], step * count
            kept.append((result, expected))
            del result
            while len(kept) > 3:
                del kept[draw.randrange(len(kept))]
            for result, expected in kept:
                assert (result == expected).all()
            result = None
        return True

    assert all(in_each_replica(strategy, check))


def test_replicas_may_write_into_their_results(strategy):
    def changed(context):
        result = summed(context, 1)
        result += 1 + mine(context)
        again = summed(context, 1)
        return float(result[0] - again[0]), float(result[-1] - again[-1])

    own = in_each_replica(strategy, changed)
    assert list(own) == [(1 + replica, 1 + replica) for replica in strategy.local_replica_ids]


def test_memory_that_is_of_no_use_goes_also_where_calls_are_small(strategy):
    in_each_replica(strategy, lambda context: summed(context, 1).size)
    pool = strategy.engine.group.pool
    assert pool._spare or pool._returned
    for _ in range(20):
        in_each_replica(strategy, lambda context: context.all_reduce("SUM", 1.0))
    assert not pool._spare
    assert not pool._returned


def test_memory_of_calls_whose_components_are_at_hand_goes_as_that_of_others():
    """Also where no other call is made, and when the strategy ends."""
    with mr.MPIStrategy() as strategy:
        pool = strategy.engine.group.pool

        def total(items):
            own = [np.full(items, 1.0 + i) for i in range(strategy.num_replicas_in_sync)]
            return strategy.reduce("SUM", mr.PerReplica(own), axis=None)[-1]

        def sums(strategy):
            found = [total(ITEMS)]
            is_kept = bool(pool._spare or pool._returned)
            return [*found, *(total(5) for _ in range(40))], is_kept, len(pool._spare)

        (found, is_kept, left), *_ = strategy.experimental_local_results(
            strategy.run(lambda: mr.get_replica_context().merge_call(sums))
        )
        count = strategy.num_replicas_in_sync
        assert found == [count * (count + 1) / 2] * 41
        assert is_kept
        assert not left
    assert not pool._spare
    assert not pool._lent


def test_results_outlive_their_strategy(strategy):
    with mr.MPIStrategy() as other:
        (result,) = in_each_replica(other, lambda context: summed(context, 2))
        pool = other.engine.group.pool
    assert not pool._spare
    assert not pool._lent
    size = MPI.COMM_WORLD.size
    assert (result == size * (size + 1)).all()


def test_no_memory_of_a_run_waits_for_a_garbage_collection(strategy):
    """What it was called with, the function and what that returned go when nobody has them."""
    living = []

    def noted(array):
        living.append(weakref.ref(array))
        return array

    def one_run():
        caught = noted(np.ones(3))
        given = mr.PerReplica([noted(np.ones(3)) for _ in range(strategy.num_replicas_in_sync)])

        def step(value, *, other):
            total = mr.get_replica_context().all_reduce("SUM", value + caught + other)
            return noted(total), noted(value + 1)

        strategy.run(step, args=(given,), kwargs={"other": noted(np.ones(3))})

    gc.collect()
    gc.disable()
    try:
        for _ in range(3):
            one_run()
        assert [array() for array in living if array() is not None] == []
    finally:
        gc.enable()
    assert len(living) > 3 * 2


def raises(context, value):
    raise ValueError(value.sum())


def raises_on_the_last(context, value):
    if mine(context) == context.num_replicas_in_sync - 1:
        raise ValueError(value.sum())
    context.all_reduce("SUM", value)


def calls_with_what_is_no_number(context, value):
    context.all_reduce("SUM", [value, object()])


def names_no_op(context, value):
    context.all_reduce("NOPE", value)


def disagrees(context, value):
    context.all_reduce("SUM", value[: 1 + mine(context)])


def raises_in_merge_fn(context, value):
    def merge(strategy, value):
        raise KeyError("no")

    context.merge_call(merge, args=(value,))


def catches_and_goes_on(context, value):
    try:
        disagrees(context, value)
    except mr.errors.CollectiveMismatchError:
        pass
    raises(context, value)


def returns_a_part_when_it_is_stopped(context, value):
    try:
        raises_on_the_last(context, value)
    except mr.errors.ReplicaStopped:
        return value[:10]


MISTAKES = [raises, raises_on_the_last, calls_with_what_is_no_number, names_no_op, disagrees]
MISTAKES += [raises_in_merge_fn, catches_and_goes_on, returns_a_part_when_it_is_stopped]


@pytest.mark.parametrize("mistake", MISTAKES)
def test_no_memory_of_a_mistake_that_is_caught_waits_for_a_garbage_collection(strategy, mistake):
    """A loop that tries again keeps what its last mistake held, and not that of each before."""
    living = []

    def step():
        value = np.ones(1000)
        living[-1].append(weakref.ref(value))
        return mistake(mr.get_replica_context(), value)

    gc.collect()
    gc.disable()
    try:
        for _ in range(4):
            living.append([])
            try:
                strategy.run(step)
            except (ValueError, TypeError, KeyError, mr.errors.CollectiveMismatchError):
                pass
        seen = [[array() is not None for array in of_run] for of_run in living]
    finally:
        gc.enable()
    assert all(seen)
    if mistake is not disagrees or strategy.num_replicas_in_sync > 1:
        assert not any(map(any, seen[:-1])), seen
