"""What merge_call gives each replica is its own, and a merge_fn that failed has had its say."""

import contextlib
import random

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


SLICES = {
    "made": lambda strategy, x: mr.IndexedSlices(np.ones((1, 1)), [0], (2, 1)),
    "reduced": lambda strategy, x: strategy.extended.reduce_to("SUM", x, None),
    "of one replica": lambda strategy, x: x.values[0],
    "in a Mirrored": lambda strategy, x: mr.Mirrored(strategy.experimental_local_results(x)[-1]),
}


@pytest.mark.parametrize("name", SLICES)
def test_a_replica_has_slices_of_its_own(strategy, name):
    def step():
        ctx = mr.get_replica_context()
        mine = ctx.replica_id_in_sync_group
        given = mr.IndexedSlices(np.ones((1, 1)), [0], (2, 1))
        result = ctx.merge_call(SLICES[name], (given,))
        result.values[...] *= 2.0 + mine
        result.indices[...] += mine
        ctx.all_reduce("SUM", 1.0)  # the others have written, too
        is_given = name == "of one replica" and not mine
        is_given |= name == "in a Mirrored" and mine == ctx.num_replicas_in_sync - 1
        return (
            (result.values[0, 0].item(), result.indices[0].item()),
            (given.values.item(), given.indices.item()) if not is_given else (1.0, 0),
        )

    found = strategy.experimental_local_results(strategy.run(step))
    assert found == tuple([((2.0 + i, i), (1.0, 0)) for i in strategy.local_replica_ids])


#: What is changed by who uses it: made of a number, and used so that it tells by how many.
CHANGED_BY_USE = {
    "Generator": (np.random.default_rng, lambda rng: rng.integers(1 << 60)),
    "RandomState": (np.random.RandomState, lambda rng: rng.randint(1 << 60)),
    "Random": (random.Random, lambda rng: rng.random()),
    "set": (lambda seed: {seed}, lambda numbers: numbers.add(-len(numbers)) or len(numbers)),
    "bytearray": (lambda seed: bytearray([seed]), lambda data: data.append(0) or len(data)),
}


@pytest.mark.parametrize("is_given", [True, False])
@pytest.mark.parametrize("kind", CHANGED_BY_USE)
def test_a_replica_has_what_is_changed_by_its_use_for_itself(strategy, kind, is_given):
    make, use = CHANGED_BY_USE[kind]

    def merge(strategy, value):
        return strategy.experimental_local_results(value)[0] if is_given else make(0)

    def step():
        ctx = mr.get_replica_context()
        mine = ctx.merge_call(merge, (make(ctx.replica_id_in_sync_group),))
        return [use(mine), use(mine)]

    again = make(0)
    expected = [use(again), use(again)]
    for first, second in zip(*[x.values for x in strategy.run(step)], strict=True):
        assert [first, second] == expected


def test_slices_that_can_not_be_written_are_so_for_all_replicas(strategy):
    rows = np.ones((1, 1))
    rows.flags.writeable = False

    def step():
        slices = mr.IndexedSlices(rows, [0])
        result = mr.get_replica_context().merge_call(lambda strategy: slices)
        return result.values.flags.writeable, result.indices.flags.writeable

    found = strategy.experimental_local_results(strategy.run(step))
    assert found == ((False, True),) * len(strategy.local_replica_ids)


def record(number):
    return np.array([(number,)], [("a", float)])[0]


RECORDS = {
    "made": lambda strategy, x: record(1.0),
    "of one replica": lambda strategy, x: x.values[0],
    "of an array": lambda strategy, x: np.rec.array([(1.0,)], [("a", float)])[0],
}


@pytest.mark.parametrize("name", RECORDS)
def test_a_replica_has_a_record_of_its_own(strategy, name):
    """It is written into as an array is."""

    def step():
        ctx = mr.get_replica_context()
        mine = ctx.replica_id_in_sync_group
        given = record(1.0)
        result = ctx.merge_call(RECORDS[name], (given,))
        result = result.copy() if name == "of one replica" and mine == 0 else result
        result["a"] += 1.0 + mine
        ctx.all_reduce("SUM", 1.0)  # the others have written, too
        return result["a"], given["a"]

    found = strategy.experimental_local_results(strategy.run(step))
    assert found == tuple([(2.0 + i, 1.0) for i in strategy.local_replica_ids])


def test_a_record_that_can_not_be_written_is_so_for_all_replicas(strategy):
    records = np.zeros(2, [("a", float)])
    records.flags.writeable = False

    def step():
        result = mr.get_replica_context().merge_call(lambda strategy: records[1])
        return type(result), result.flags.writeable

    found = strategy.experimental_local_results(strategy.run(step))
    assert found == ((np.void, False),) * len(strategy.local_replica_ids)


def test_what_merge_fn_gives_as_read_only_is_so_for_all_replicas(strategy):
    with strategy.scope():
        v = mr.Variable([1.0, 2.0])

    def step():
        value = mr.get_replica_context().merge_call(lambda strategy: v.assign_add([1, 1]).value())
        return value.flags.writeable, value.tolist()

    found = strategy.experimental_local_results(strategy.run(step))
    assert found == ((False, [2.0, 3.0]),) * len(strategy.local_replica_ids)


def test_replicas_may_change_their_arrays_with_each_other(strategy):
    """As parallel tempering does: on one rank, too, each gets the values of another one."""

    def changed(strategy, x):
        values = strategy.experimental_local_results(x)
        return mr.PerReplica(values[1:] + values[:1])

    def step():
        ctx = mr.get_replica_context()
        mine = np.full(3, float(ctx.replica_id_in_sync_group))
        mine[:] = ctx.merge_call(changed, (mine,))
        return mine

    count = strategy.num_replicas_in_sync
    results = strategy.experimental_local_results(strategy.run(step))
    for replica, result in zip(strategy.local_replica_ids, results, strict=True):
        assert result.tolist() == [(replica + 1) % count] * 3


@pytest.mark.parametrize("size", [3, 20_000])
@pytest.mark.parametrize("is_per_replica", [True, False])
def test_the_array_of_one_replica_stays_its_own_where_all_get_it(strategy, size, is_per_replica):
    last = strategy.num_replicas_in_sync - 1

    def merge(strategy, x):
        best = strategy.experimental_local_results(x)[last]
        return mr.PerReplica([best] * (last + 1)) if is_per_replica else best

    def step():
        ctx = mr.get_replica_context()
        mine = np.full(size, float(ctx.replica_id_in_sync_group))
        best = ctx.merge_call(merge, (mine,))
        best += 1 + ctx.replica_id_in_sync_group
        return mine[0], best[-1], best is mine

    results = strategy.experimental_local_results(strategy.run(step))
    for replica, found in zip(strategy.local_replica_ids, results, strict=True):
        best = last + 1.0 + replica
        assert found == (best if replica == last else replica, best, replica == last)


@pytest.mark.parametrize(
    "wrap",
    [
        lambda x: {"a": [x]},
        lambda x: x[::-1][::-1],
        lambda x: np.lib.stride_tricks.as_strided(x),
        lambda x: np.frombuffer(x.data),
    ],
    ids=["nest", "view", "strided", "buffer"],
)
def test_no_replica_writes_into_the_argument_of_another_one(strategy, wrap):
    def changed(strategy, x):
        values = strategy.experimental_local_results(x)
        return mr.PerReplica([wrap(value) for value in values[1:] + values[:1]])

    def step():
        ctx = mr.get_replica_context()
        mine = np.full(3, float(ctx.replica_id_in_sync_group))
        got = ctx.merge_call(changed, (mine,))
        array = got["a"][0] if isinstance(got, dict) else got
        array += 100
        return mine[0], array[-1]

    count = strategy.num_replicas_in_sync
    results = strategy.experimental_local_results(strategy.run(step))
    for replica, found in zip(strategy.local_replica_ids, results, strict=True):
        if count > 1:
            assert found == (replica, (replica + 1) % count + 100)
        else:
            assert found == (100, 100)  # its own


def test_what_a_replica_gets_twice_is_one_thing_on_all_replicas(strategy):
    def step():
        ctx = mr.get_replica_context()
        one, other = ctx.merge_call(lambda s, x: (s.reduce("SUM", x, None),) * 2, (np.ones(2),))
        one += 1
        return one is other

    assert set(strategy.experimental_local_results(strategy.run(step))) == {True}


@pytest.mark.parametrize("wrap", [lambda x: x, mr.Mirrored], ids=["plain", "mirrored"])
def test_parts_of_one_array_that_merge_fn_returns_are_apart_on_every_layout(strategy, wrap):
    def merge(strategy, x):
        whole = strategy.reduce("SUM", x, axis=None) * 0
        return [wrap(whole), {"part": wrap(whole[:2]), "again": wrap(whole)}]

    def step():
        whole, others = mr.get_replica_context().merge_call(merge, (np.ones(3),))
        whole[...] = 7.0
        return others["part"].tolist(), others["again"] is whole

    found = strategy.experimental_local_results(strategy.run(step))
    assert found == (([0.0, 0.0], True),) * len(strategy.local_replica_ids)


def test_arguments_that_are_parts_of_each_other_come_back_as_they_are(strategy):
    def step():
        whole = np.zeros(3)
        parts = whole[:2], whole[1:]
        found = mr.get_replica_context().merge_call(lambda strategy, *x: x, (whole, *parts))
        return [a is b for a, b in zip(found, (whole, *parts), strict=True)]

    for found in strategy.experimental_local_results(strategy.run(step)):
        assert found == [True] * 3


PARTS = {
    "rows": lambda whole, i: whole[i],
    "columns": lambda whole, i: whole[:, i],
    "columns from behind": lambda whole, i: whole[::-1, i],
    "single elements": lambda whole, i: whole.reshape(-1)[i :: len(whole)],
}


@pytest.mark.parametrize("part", PARTS.values(), ids=PARTS)
@pytest.mark.parametrize("again", [True, False], ids=["its own", "that of the next"])
def test_replicas_may_pass_parts_of_one_array_that_share_no_element(strategy, part, again):
    """What is given back is the argument on every layout; what is another one's is not."""
    count = strategy.num_replicas_in_sync
    whole = np.zeros((2 * count, 2 * count))

    def merge(strategy, x):
        values = strategy.experimental_local_results(x)
        return x if again else mr.PerReplica([*values[1:], values[0]])

    def step():
        ctx = mr.get_replica_context()
        mine = part(whole, ctx.replica_id_in_sync_group)
        mine[...] = ctx.replica_id_in_sync_group
        found = ctx.merge_call(merge, (mine,))
        number = found.flat[0]
        ctx.all_reduce("SUM", 0)  # all replicas are here
        found += 100
        ctx.all_reduce("SUM", 0)  # all replicas are here
        return found is mine, number, mine.flat[0]

    results = strategy.experimental_local_results(strategy.run(step))
    for i, found in zip(strategy.local_replica_ids, results, strict=True):
        if again or count == 1:
            assert found == (True, i, i + 100)
        else:
            assert found == (False, (i + 1) % count, i)


@pytest.mark.parametrize("size", [3, 20_000])
def test_merge_fn_may_look_at_one_component_and_broadcast_all(strategy, size):
    """Also of large arguments, which come when all ranks look at them."""
    last = strategy.num_replicas_in_sync - 1

    def merge(strategy, x):
        given = strategy.extended.broadcast_to(x)
        return float(x.component(last)[-1]), float(given.component(last)[0])

    def step():
        ctx = mr.get_replica_context()
        return ctx.merge_call(merge, (np.full(size, float(ctx.replica_id_in_sync_group)),))

    for found in strategy.experimental_local_results(strategy.run(step)):
        assert found == (last, last)

    def outside(strategy, x):
        return x.component(-1)

    def wrong():
        return mr.get_replica_context().merge_call(outside, (np.zeros(size),))

    error = raises_everywhere(ValueError, lambda: strategy.run(wrong))
    assert "none for replica -1" in str(error)
    check_works(strategy)


@pytest.mark.parametrize("nest", [{}, (), {"a": 1}, {"a": [None]}], ids=repr)
def test_local_results_in_merge_fn_are_those_of_all_replicas_for_any_nest(strategy, nest):
    def merge(strategy):
        return strategy.experimental_local_results(nest)

    def step():
        return len(mr.get_replica_context().merge_call(merge))

    lengths = strategy.experimental_local_results(strategy.run(step))
    assert set(lengths) == {strategy.num_replicas_in_sync}
    assert len(strategy.experimental_local_results(nest)) == len(strategy.local_replica_ids)


def test_large_results_of_other_shapes_on_some_ranks_are_an_error_everywhere(strategy):
    if strategy.size == 1:
        pytest.skip("one rank has one result")
    sizes = [20_000 + (rank == strategy.size - 1) for rank in range(strategy.size)]

    def apart():
        strategy.run(lambda: mr.get_replica_context().merge_call(lambda s: np.zeros(sizes[s.rank])))
        strategy.run(lambda: mr.get_replica_context().all_reduce("SUM", 1.0))

    raises_everywhere(mr.errors.CollectiveMismatchError, apart)


def test_an_object_that_can_not_travel_is_told_with_its_place_on_every_layout(strategy):
    def step():
        return mr.get_replica_context().merge_call(lambda s, x: 1, ({"a": (lambda: 1)},))

    error = raises_everywhere(TypeError, lambda: strategy.run(step))
    assert "merge_call got function for value[0][0]['a'], which can't travel" in str(error)
    check_works(strategy)


def test_an_array_of_objects_that_can_not_travel_is_told_on_every_layout(strategy):
    def step():
        value = np.array([lambda: 1], object)
        return mr.get_replica_context().merge_call(lambda s, x: 1, (value,))

    error = raises_everywhere(TypeError, lambda: strategy.run(step))
    assert "merge_call got ndarray for value[0][0], which can't travel" in str(error)
    check_works(strategy)


class ReadError(Exception):
    """As programs have them: pickle makes it anew with one argument."""

    def __init__(self, path, row):
        super().__init__(f"{path}: row {row}")


def test_an_object_that_can_not_be_made_again_is_told_with_its_place_on_every_layout(strategy):
    culprit = strategy.num_replicas_in_sync - 1

    def step():
        mine = mr.get_replica_context().replica_id_in_sync_group
        value = ReadError("a.csv", 3) if mine == culprit else 1
        return mr.get_replica_context().merge_call(lambda s, x: 1, ({"a": value},))

    error = raises_everywhere(TypeError, lambda: strategy.run(step))
    assert "merge_call got ReadError for value[0][0]['a'], which can't travel" in str(error)
    check_works(strategy)


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


def all_call():
    return mr.get_replica_context().all_reduce("SUM", 1.0)


def test_a_merge_fn_that_goes_on_behind_the_failure_of_another_rank_leaves_nothing(strategy):
    """What it assigns is taken back, and what it returns is compared with nobody's."""
    needs_two_replicas(strategy)
    with strategy.scope():
        variable = mr.Variable(np.zeros(2))
    refused = []

    def merge(strategy):
        if strategy.rank == strategy.size - 1:
            raise ValueError("the last rank fails")
        with contextlib.suppress(ValueError):
            strategy.run(all_call)
        try:
            variable.assign(np.ones(2))
        except mr.errors.ReplicaStopped as error:
            refused.append(error.__cause__)
        return 1

    def step():
        return mr.get_replica_context().merge_call(merge)

    error = raises_everywhere(ValueError, lambda: strategy.run(step))
    assert refused == ([] if strategy.rank == strategy.size - 1 else [error])
    check_works(strategy)
    assert variable.numpy().tolist() == [0, 0]


def test_no_run_begins_in_one_that_has_failed(strategy):
    """The other ranks have left it, and would take the calls of the new one for their next ones."""
    needs_two_replicas(strategy)

    def merge(strategy):
        if strategy.rank == strategy.size - 1:
            raise ValueError("the last rank fails")
        for _ in range(2):
            with contextlib.suppress(ValueError, mr.errors.ReplicaStopped):
                strategy.run(all_call)

    def step():
        return mr.get_replica_context().merge_call(merge)

    raises_everywhere(ValueError, lambda: strategy.run(step))
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


def test_what_a_merge_fn_draws_in_a_run_that_fails_is_drawn_again(strategy):
    before = strategy.rng.random()
    failing = [strategy.rank == 0]

    def merge_fn(strategy):
        if failing and failing.pop():
            raise OSError("once, on one rank")
        return strategy.rng.random()

    def step():
        return mr.get_replica_context().merge_call(merge_fn)

    raises_everywhere(OSError, lambda: strategy.run(step))
    drawn = strategy.run(step)
    every = strategy.gather_objects((before, drawn, strategy.rng.random()))
    assert len(set(every)) == 1
