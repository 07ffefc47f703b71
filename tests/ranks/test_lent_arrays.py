"""Arrays that replicas of a rank share, and write while others wait that have given them away."""

import numpy as np
import pytest

import mpi_replica as mr
from everywhere import (
    check_equal,
    check_works,
    gathered,
    holds_everywhere,
    raises_everywhere,
    shares_ranks,
)
from mpi_replica.errors import ContextError

ADVICE = "strategy.experimental_distribute_values_from_function"


def my_id():
    return mr.get_replica_context().replica_id_in_sync_group


def sum_of(value):
    return mr.get_replica_context().all_reduce("SUM", value)


def sum_of_rows(value):
    return sum_of(mr.IndexedSlices(value, np.arange(len(value)), value.shape)).to_dense()


def component_0(value):
    def merge_fn(strategy, value):
        return strategy.experimental_local_results(value)[0] + 0

    return mr.get_replica_context().merge_call(merge_fn, args=(value,))


#: What is done with a value of each replica, and what comes of it, by the values of all.
WAYS = {
    "all_reduce": (sum_of, sum),
    "all_reduce into out": (
        lambda value: mr.get_replica_context().all_reduce("SUM", value, out=value + 0),
        sum,
    ),
    "a nest": (lambda value: sum_of({"a": [1.0, value]})["a"][1], sum),
    "all_gather": (
        lambda value: mr.get_replica_context().all_gather(value[None], axis=0).sum(axis=0),
        sum,
    ),
    "merge_call": (component_0, lambda values: values[0]),
    "slices": (sum_of_rows, sum),
    "mean_over_global_batch": (
        lambda value: mr.mean_over_global_batch(value, 1),
        lambda values: sum(values) / len(values),
    ),
}

#: Which part of a buffer is given away: all of it, or less.
PARTS = {"whole": np.s_[:], "reshaped": np.s_[None], "part": np.s_[1:]}


@pytest.mark.parametrize("way", WAYS)
def test_a_buffer_that_replicas_of_a_rank_fill_in_turn_is_never_a_wrong_sum(strategy, way):
    use, expected = WAYS[way]
    buffer = np.zeros(3)

    def step():
        buffer[:] = my_id() + 1.0
        return use(buffer)

    if shares_ranks(strategy):
        error = raises_everywhere(ValueError, lambda: strategy.run(step))
        assert "read-only" in str(error)
        assert ADVICE in "".join(error.__notes__)
    else:
        numbers = [np.full(3, i + 1.0) for i in range(strategy.num_replicas_in_sync)]
        for found in strategy.experimental_local_results(strategy.run(step)):
            assert found.tolist() == expected(numbers).tolist()
    buffer[:] = 0.0  # it can be written again
    check_works(strategy)


@pytest.mark.parametrize("size", [3, 100_000], ids=["small", "large"])
@pytest.mark.parametrize("part", PARTS)
def test_a_part_of_a_buffer_is_none_either(strategy, part, size):
    buffer = np.zeros((size, 1))

    def step():
        buffer[:] = my_id() + 1.0
        return float(sum_of({"k": buffer[PARTS[part]]})["k"].max())

    if shares_ranks(strategy):
        error = raises_everywhere((ValueError, ContextError), lambda: strategy.run(step))
        assert ADVICE in "".join([str(error), *error.__notes__])
        assert isinstance(error, ContextError) == (part == "part")
        assert part != "part" or "value['k'] of replica" in str(error)
    else:
        n = strategy.num_replicas_in_sync
        assert strategy.run(step).values == (n * (n + 1) / 2,)
    buffer[:] = 0.0
    check_works(strategy)


@pytest.mark.parametrize("size", [3, 100_000], ids=["small", "large"])
@pytest.mark.parametrize("way", WAYS)
def test_nor_is_one_that_is_filled_through_a_view_that_was_made_before(strategy, way, size):
    use, expected = WAYS[way]
    buffer = np.zeros(size)
    weights = buffer.reshape(1, -1)

    def step():
        weights[:] = my_id() + 1.0
        return float(use(buffer).max())

    if shares_ranks(strategy):
        error = raises_everywhere(ContextError, lambda: strategy.run(step))
        assert "was written while it waited" in str(error)
    else:
        numbers = [np.full(size, i + 1.0) for i in range(strategy.num_replicas_in_sync)]
        found = strategy.run(step).values
        assert found == (expected(numbers).max(),) * len(found)
    weights[:] = 0.0
    check_works(strategy)


def test_nor_is_one_that_is_filled_through_the_memory_of_another_object(strategy):
    buffers = [np.zeros(3), np.zeros(3)]
    memory = memoryview(buffers[1])

    def step():
        memory[1] = my_id() + 1.0
        return float(sum_of({"k": buffers})["k"][1].max())

    if shares_ranks(strategy):
        error = raises_everywhere(ContextError, lambda: strategy.run(step))
        assert "value['k'][1] of replica" in str(error)
    else:
        n = strategy.num_replicas_in_sync
        assert strategy.run(step).values == (n * (n + 1) / 2,)
    check_works(strategy)


def test_nor_is_one_that_they_return_and_fill_through_a_view(strategy):
    buffer = np.zeros(3)
    weights = buffer[None]

    def step():
        weights[:] = my_id()
        return {"found": buffer}

    if shares_ranks(strategy):
        error = raises_everywhere(ContextError, lambda: strategy.run(step))
        assert "returned was written" in str(error)
    else:
        value = strategy.run(step)["found"]
        assert value.values[0].tolist() == [float(strategy.local_replica_ids[0])] * 3
    check_works(strategy)


def test_nor_is_one_into_which_numpy_writes_although_it_is_read_only(strategy):
    """As ufunc.at of numpy before 2.5 does, and scipy's overwrite options."""

    def step(counts):
        np.add.at(counts, [0], 1.0)
        return sum_of(counts)

    counts = np.zeros(2)
    if shares_ranks(strategy):
        error = raises_everywhere(
            (ContextError, ValueError), lambda: strategy.run(step, args=(counts,))
        )
        is_found = "was written while" in str(error) and type(error) is ContextError
        assert is_found or "read-only" in str(error)
    else:
        n = strategy.num_replicas_in_sync
        assert strategy.run(step, args=(counts,)).values[0].tolist() == [n, 0]
    check_works(strategy)


def test_lists_and_dicts_that_they_return_may_be_filled_anew_by_the_next(strategy):
    found = {"ids": [0, 0], "more": {"twice": 0}}

    def step():
        found["ids"][1] = my_id()
        found["more"]["twice"] = 2 * my_id()
        return found

    n = strategy.num_replicas_in_sync
    value = strategy.run(step)
    totals = strategy.reduce("SUM", value, axis=None)
    assert totals == {"ids": [0, n * (n - 1) / 2], "more": {"twice": n * (n - 1)}}
    assert found["ids"] is not value["ids"]
    assert found["more"]["twice"] == 2 * strategy.local_replica_ids[-1]


@pytest.mark.parametrize("part", PARTS)
def test_records_with_a_mask_may_be_given_and_returned(strategy, part):
    records = np.ma.masked_array(np.zeros(3, [("a", float), ("b", "i1")]))

    def step():
        mine = records[PARTS[part]]
        total = mr.get_replica_context().merge_call(lambda strategy, x: 1, (mine,))
        return total, mine

    assert set(strategy.run(step)[0].values) == {1}


class Own(np.ndarray):
    """As `numpy.memmap` is one."""


def test_nor_is_an_array_of_a_class_of_its_own(strategy):
    buffer = np.zeros(3).view(Own)

    def step():
        buffer[:] = my_id() + 1.0
        return sum_of(buffer)

    if shares_ranks(strategy):
        error = raises_everywhere(ValueError, lambda: strategy.run(step))
        assert ADVICE in "".join(error.__notes__)
    else:
        strategy.run(step)
    buffer[:] = 0.0
    check_works(strategy)


def test_nor_is_what_was_computed_of_a_file(strategy, path):
    file = f"{path}.{strategy.rank}"
    np.zeros(20_000).tofile(file)
    buffer = np.memmap(file, "f8", "r").astype("f4")  # of that class, and in no file

    def step():
        buffer[1] = my_id() + 1.0
        return mr.get_replica_context().merge_call(lambda strategy, x: 1, (buffer,))

    if shares_ranks(strategy):
        error = raises_everywhere(ValueError, lambda: strategy.run(step))
        assert ADVICE in "".join(error.__notes__)
    else:
        strategy.run(step)
    check_works(strategy)


@pytest.mark.parametrize("part", PARTS)
def test_nor_is_a_buffer_that_they_return(strategy, part):
    buffer = np.zeros(3)

    def step():
        buffer[:] = my_id()
        return {"found": buffer[PARTS[part]]}

    if shares_ranks(strategy):
        error = raises_everywhere((ValueError, ContextError), lambda: strategy.run(step))
        assert ADVICE in "".join([str(error), *error.__notes__])
    else:
        value = strategy.run(step)["found"]
        assert {float(x) for x in value.values[0].ravel()} == {float(strategy.local_replica_ids[0])}
    buffer[:] = 0.0
    check_works(strategy)


@pytest.mark.parametrize("how", ["assign", "assign_add", "scatter_add"])
@pytest.mark.parametrize("aggregation", ["SUM", "MEAN", "ONLY_FIRST_REPLICA"])
def test_nor_is_a_buffer_that_they_assign(strategy, aggregation, how):
    with strategy.scope():
        v = mr.Variable(np.zeros(2), aggregation=mr.VariableAggregation[aggregation])
    buffer = np.zeros(2)

    def step():
        buffer[:] = my_id() + 1.0
        rows = mr.IndexedSlices(buffer, [0, 1])
        getattr(v, how)(rows if how == "scatter_add" else buffer)

    if shares_ranks(strategy):
        raises_everywhere(ValueError, lambda: strategy.run(step))
        assert v.numpy().tolist() == [0.0, 0.0]
    else:
        strategy.run(step)
        n = strategy.num_replicas_in_sync
        total = {"SUM": n * (n + 1) / 2, "MEAN": (n + 1) / 2, "ONLY_FIRST_REPLICA": 1.0}
        assert v.numpy().tolist() == [total[aggregation]] * 2
    check_works(strategy)


def test_rows_of_each_replica_in_one_array_may_be_written_and_given(strategy):
    rows = np.zeros((strategy.num_replicas_in_sync, 2))

    def step():
        mine = rows[my_id()]
        for _ in range(2):
            mine += 1.0 + my_id()
            total = sum_of(mine)
        return mine, total

    n = strategy.num_replicas_in_sync
    mine, total = strategy.run(step)
    for i, found in zip(strategy.local_replica_ids, mine.values, strict=True):
        assert found.tolist() == [2.0 * (i + 1)] * 2
    assert {tuple(found) for found in total.values} == {(n * (n + 1.0),) * 2}
    assert rows.flags.writeable
    assert all(found.flags.writeable for found in mine.values)


def test_an_array_that_all_give_and_none_writes_may_be_shared(strategy):
    weights = np.arange(4.0).reshape(2, 2)
    owner = weights.base

    def step():
        total = sum_of({"a": weights, "b": [owner, weights.T]})
        return total["a"], weights

    n = strategy.num_replicas_in_sync
    total, same = strategy.run(step)
    holds_everywhere(lambda: check_equal(total.values[0].tolist(), [[0, n], [2 * n, 3 * n]]))
    assert all(found is weights for found in same.values)
    assert weights.flags.writeable
    assert owner.flags.writeable


def test_what_was_given_can_be_written_again_after_the_call_and_after_any_error(strategy):
    buffers = [np.zeros(2) for _ in range(4)]

    def step(fails):
        ctx, mine = mr.get_replica_context(), np.zeros(2)
        for turn in range(3):
            mine += ctx.all_reduce("SUM", mine + 1.0)
            mine[0] = turn
            ctx.all_gather(mine, axis=0)
        if fails and my_id() == strategy.num_replicas_in_sync - 1:
            raise KeyError("of one replica")
        ctx.all_reduce("SUM", buffers)

    strategy.run(step, args=(False,))
    raises_everywhere(KeyError, lambda: strategy.run(step, args=(True,)))
    gathered(None)
    assert all(buffer.flags.writeable for buffer in buffers)
    check_works(strategy)


def test_a_merge_fn_may_write_into_what_it_closes_over(strategy):
    buffer = np.zeros(2)

    def merge_fn(strategy, value):
        buffer[:] += 1.0
        return float(buffer[0])

    def step():
        return mr.get_replica_context().merge_call(merge_fn, args=(buffer,))

    assert strategy.run(step).values == (1.0,) * len(strategy.local_replica_ids)
