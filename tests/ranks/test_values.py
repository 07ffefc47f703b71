"""Values of replicas: what run gives, what merge_fn sees, and what stands for what."""

import collections
import functools
import operator
import random

import numpy as np
import pytest

import mpi_replica as mr
from contributions import check_everywhere
from everywhere import check_works, gathered, needs_two_replicas, raises_everywhere, shares_ranks
from mpi_replica.errors import ContextError


def my_id():
    return mr.get_replica_context().replica_id_in_sync_group


def local(strategy, value):
    return strategy.experimental_local_results(value)


def in_merge_fn(strategy, look, make):
    """What `look(strategy, value)` returns on this rank, for the values that replicas pass."""
    seen = []

    def merge_fn(inner, value):
        seen.append(look(inner, value))

    strategy.run(lambda: mr.get_replica_context().merge_call(merge_fn, (make(my_id()),)))
    (result,) = seen
    return result


# Decision 1


def test_decision_1_run_gives_the_values_of_this_ranks_replicas(strategy):
    value = strategy.run(lambda: 10 * my_id())
    assert value.replica_ids == strategy.local_replica_ids
    assert value.num_replicas == strategy.num_replicas_in_sync
    assert local(strategy, value) == tuple(10 * i for i in strategy.local_replica_ids)


def test_decision_1_merge_fn_sees_the_values_of_all_replicas(strategy):
    every = tuple(range(strategy.num_replicas_in_sync))
    ids, values, results = in_merge_fn(
        strategy,
        lambda inner, v: (v.replica_ids, v.values, inner.experimental_local_results([v])),
        lambda i: 10 * i,
    )
    assert ids == every
    assert values == tuple(10 * i for i in every)
    assert results == tuple([10 * i] for i in every)


# Decision 2


def test_decision_2_every_leaf_of_run_is_per_replica_also_the_same_object_everywhere(strategy):
    shared = object()
    result = strategy.run(lambda: {"a": shared, "b": [1.0, ("x", np.zeros(2))]})
    for leaf in (result["a"], result["b"][0], *result["b"][1]):
        assert type(leaf) is mr.PerReplica
        assert leaf.replica_ids == strategy.local_replica_ids
    assert type(strategy.run(lambda: 42)) is mr.PerReplica
    assert all(component is shared for component in result["a"].values)


def test_decision_2_none_from_all_replicas_is_none(strategy):
    assert strategy.run(lambda: None) is None
    nest = strategy.run(lambda: {"a": None, "b": my_id()})
    assert nest["a"] is None
    assert type(nest["b"]) is mr.PerReplica


def test_decision_2_none_from_some_replicas_is_a_component(strategy):
    """Which replicas of all give it must not matter, also those of one rank."""
    count = strategy.num_replicas_in_sync
    for givers in ({0}, {count - 1}, set(range(0, count, 2)), set(strategy.local_replica_ids)):
        givers = gathered(givers)[0]
        result = strategy.run(lambda g=givers: [None if my_id() in g else my_id(), None])
        assert result[1] is None
        if len(givers) == count:
            assert result[0] is None
        else:
            mine = [None if i in givers else i for i in strategy.local_replica_ids]
            assert list(result[0].values) == mine
        seen = in_merge_fn(strategy, lambda _, v: v, lambda i, g=givers: None if i in g else i)
        every = tuple(None if i in givers else i for i in range(count))
        if len(givers) == count:
            assert seen is None
        else:
            assert seen.values == every
    check_works(strategy)


def test_decision_2_a_variable_stays_itself(strategy):
    with strategy.scope():
        variable = mr.Variable(1.0)
    result = strategy.run(lambda: (variable, {"v": variable}))
    assert result[0] is variable
    assert result[1]["v"] is variable
    assert in_merge_fn(strategy, lambda _, v: v is variable, lambda i: variable)
    assert strategy.run(lambda v: v is variable, (variable,)).values[0] is True


def test_decision_2_in_merge_fn_every_leaf_has_a_component_of_every_replica(strategy):
    count = strategy.num_replicas_in_sync
    kinds, values, nothing = in_merge_fn(
        strategy,
        lambda _, v: ([type(v["a"]), type(v["b"][0])], v["a"].values, v["b"][1]),
        lambda i: {"a": 7, "b": (i, None)},
    )
    assert all(issubclass(kind, mr.PerReplica) for kind in kinds)
    assert values == (7,) * count
    assert nothing is None


def test_decision_2_repr_shows_global_ids(strategy):
    def text(ids):
        return "PerReplica:{\n" + ",\n".join(f"  {i}: {i}.5" for i in ids) + "\n}"

    assert repr(strategy.run(lambda: my_id() + 0.5)) == text(strategy.local_replica_ids)
    seen = in_merge_fn(strategy, lambda _, v: repr(v), lambda i: i + 0.5)
    assert seen == text(range(strategy.num_replicas_in_sync))


# Decision 3

CONVERSIONS = {
    "float": float,
    "int": int,
    "bool": bool,
    "np.asarray": np.asarray,
    "np.array of a dtype": lambda value: np.array(value, dtype=np.float32),
    "item": lambda value: value.item(),
}


@pytest.mark.parametrize("name", CONVERSIONS)
def test_decision_3_per_replica_converts_only_when_r_is_1(strategy, name):
    value = strategy.run(lambda: np.float64(my_id() + 2))
    convert = CONVERSIONS[name]
    if strategy.num_replicas_in_sync == 1:
        assert convert(value) == convert(np.float64(2))
        return
    with pytest.raises(TypeError) as caught:
        convert(value)
    for way in ("strategy.reduce", "gather", "experimental_local_results"):
        assert way in str(caught.value)
    error = in_merge_fn(strategy, lambda _, v: _error_of(lambda: convert(v)), float)
    assert isinstance(error, TypeError)


def _error_of(call):
    try:
        call()
    except Exception as error:
        return error
    return None


def test_decision_3_per_replica_has_no_arithmetic_also_with_one_replica(strategy):
    value = strategy.run(lambda: 2.0)
    array = np.ones(3)
    wrong = [
        lambda: value + 1,
        lambda: 1 + value,
        lambda: array * value,
        lambda: value @ array,
        lambda: -value,
        lambda: value < 1,
        lambda: len(value),
        lambda: list(value),
        lambda: value[0],
        lambda: operator.index(value),
        lambda: 2.0 in value,
        lambda: operator.setitem(value, 0, 1.0),
        lambda: operator.delitem(value, 0),
        lambda: divmod(value, 2),
        lambda: divmod(2, value),
    ]
    for call in wrong:
        with pytest.raises(TypeError) as caught:
            call()
        assert "strategy.reduce" in str(caught.value)
    with pytest.raises(TypeError):
        np.add(value, 1)


# Decision 6


def test_decision_6_every_kind_of_value_goes_in_and_comes_out_of_run(strategy):
    values = [3, 2.5, 1j, True, "text", b"bytes", np.float16(1), np.array(4), np.zeros((0, 3))]
    values += [np.ones((2, 3), order="F"), np.arange(6)[::2], np.arange(3, dtype=">i4"), {1, 2}]
    result = strategy.run(lambda *given: given, values)
    is_shared = shares_ranks(strategy)
    for leaf, value in zip(result, values, strict=True):
        for component in leaf.values:
            if is_shared and isinstance(value, np.ndarray):  # of the same memory, to be read alone
                memory, is_read_only = component.__array_interface__.pop("data")
                assert (memory, is_read_only) == (value.ctypes.data, True)
                assert (component.dtype, component.shape) == (value.dtype, value.shape)
                assert component.strides == value.strides
            else:
                assert component is value


# Decision 7


def test_decision_7_a_per_replica_within_a_replica_stands_for_its_component(strategy):
    count = strategy.num_replicas_in_sync
    ids = strategy.run(my_id)
    rows = strategy.run(lambda: np.full(my_id() + 1, my_id()))

    def step():
        ctx = mr.get_replica_context()
        total = ctx.all_reduce("SUM", {"ids": ids, "one": 1})
        seen = ctx.merge_call(lambda _, v: list(v.values), (ids,))
        return total, ctx.all_gather([rows], axis=0), seen

    every = np.arange(count)
    expected = (
        {"ids": every.sum(), "one": np.int64(count)},
        [np.repeat(every, every + 1)],
    )
    results = local(strategy, strategy.run(step))
    check_everywhere([row[:2] for row in results], expected)
    assert all(row[2] == list(range(count)) for row in results)


def test_decision_7_holds_for_what_a_step_function_returns(strategy):
    ids = strategy.run(my_id)
    assert local(strategy, strategy.run(lambda: {"ids": ids})) == tuple(
        {"ids": i} for i in strategy.local_replica_ids
    )


def test_a_mirrored_value_within_a_replica_stands_for_its_value(strategy):
    mirrored = mr.Mirrored(np.array([1.0, 2.0]))
    result = strategy.run(lambda: mr.get_replica_context().all_reduce("MEAN", mirrored))
    for mine in local(strategy, result):
        np.testing.assert_array_equal(mine, [1, 2])


# Decisions 10 and 11


def test_decision_10_a_generator_keyed_by_seed_and_replica_id_draws_the_same_in_any_layout(
    strategy,
):
    def step():
        ctx = mr.get_replica_context()
        random = np.random.default_rng([5, ctx.replica_id_in_sync_group])
        return ctx.all_gather(random.random((1, 2)), axis=0)

    replicas = range(strategy.num_replicas_in_sync)
    expected = np.stack([np.random.default_rng([5, i]).random(2) for i in replicas])
    check_everywhere(local(strategy, strategy.run(step)), expected)


def test_decision_11_a_global_batch_is_cut_into_chunks_of_n_over_r_rounded_up(strategy):
    count = strategy.num_replicas_in_sync
    for rows in (10, 1, 3 * count, 3 * count + 1):
        data = np.arange(2.0 * rows).reshape(rows, 2)
        dataset = mr.data.Dataset.from_tensor_slices(data).batch(rows)
        (batch,) = strategy.experimental_distribute_dataset(dataset)
        chunk = -(-rows // count)
        for i, part in zip(strategy.local_replica_ids, local(strategy, batch), strict=True):
            np.testing.assert_array_equal(part, data[i * chunk : (i + 1) * chunk])
            assert part.shape[1:] == (2,)
        assert strategy.reduce("SUM", batch, axis=(0, 1)) == data.sum()


# run, its arguments and its results, as in tf


def test_run_gives_each_replica_its_component_of_every_argument(strategy):
    ids = strategy.run(my_id)
    nest = {"ids": [ids], "plain": (2, None)}

    def fn(given, *, scale):
        return given["ids"][0] * scale, given["plain"]

    result = strategy.run(fn, [nest], {"scale": strategy.run(lambda: my_id() + 1)})
    assert local(strategy, result) == tuple(
        (i * (i + 1), (2, None)) for i in strategy.local_replica_ids
    )


def test_a_list_argument_that_a_replica_changes_is_its_own(strategy):
    given = [1, [2]]

    def fn(items):
        items.append(my_id())
        items[1].append(my_id())
        return len(items), len(items[1])

    assert local(strategy, strategy.run(fn, (given,))) == ((3, 2),) * len(
        strategy.local_replica_ids
    )
    assert given == [1, [2]]


def test_run_keeps_the_containers_of_what_replicas_return(strategy):
    def fn():
        i = my_id()
        return f"a{i}", [f"b{i}", {"c": f"d{i}", "e": (f"f{i}", [])}, f"g{i}"], ()

    result = strategy.run(fn)
    assert local(strategy, result) == tuple(
        (f"a{i}", [f"b{i}", {"c": f"d{i}", "e": (f"f{i}", [])}, f"g{i}"], ())
        for i in strategy.local_replica_ids
    )
    assert local(strategy, result[1][1]["e"][0]) == tuple(
        f"f{i}" for i in strategy.local_replica_ids
    )


def test_local_results_of_what_is_not_distributed(strategy):
    here = len(strategy.local_replica_ids)
    assert local(strategy, 3) == (3,)
    assert local(strategy, None) == (None,)
    assert local(strategy, [1, 2]) == ([1, 2],) * here
    assert local(strategy, []) == ([],) * here


def test_local_results_of_a_mirrored_value_are_one_for_each_replica_here(strategy):
    here = len(strategy.local_replica_ids)
    assert local(strategy, mr.Mirrored(4)) == (4,) * here
    assert local(strategy, [mr.Mirrored(4)]) == ([4],) * here

    def merge(strategy):
        return local(strategy, mr.Mirrored(4)) == (4,) * strategy.num_replicas_in_sync

    agreed = strategy.run(lambda: mr.get_replica_context().merge_call(merge))
    assert local(strategy, agreed) == (True,) * here


def test_distribute_values_makes_per_replica_leaves_of_any_nest(strategy):
    mine = strategy.local_replica_ids
    count = strategy.num_replicas_in_sync
    make = strategy.experimental_distribute_values_from_function
    shared = np.ones(2)
    same = make(lambda context: shared)
    assert type(same) is mr.PerReplica
    assert all(component is shared for component in same.values)
    ids = make(
        lambda context: range(context.num_replicas_in_sync)[context.replica_id_in_sync_group]
    )
    assert ids.values == mine
    triple = make(lambda context: (1.0, 2 * context.replica_id_in_sync_group, [count]))
    assert [leaf.values for leaf in (*triple[:2], triple[2][0])] == [
        (1.0,) * len(mine),
        tuple(2 * i for i in mine),
        (count,) * len(mine),
    ]


# Bad input


@pytest.mark.parametrize("others", [1, [1, 2], (1,), {"a": 1}, [[1]], []], ids=repr)
def test_replicas_that_return_other_nests_are_a_structure_mismatch(strategy, others):
    last = strategy.num_replicas_in_sync - 1
    if last == 0:
        pytest.skip("one replica has nobody to differ from")
    for odd in (0, last):
        raises_everywhere(
            mr.errors.StructureMismatchError,
            lambda odd=odd: strategy.run(lambda: others if my_id() == odd else [1]),
        )
    check_works(strategy)


def test_replicas_that_return_other_keys_are_told_which(strategy):
    last = strategy.num_replicas_in_sync - 1
    if last == 0:
        pytest.skip("one replica has nobody to differ from")
    error = raises_everywhere(
        mr.errors.StructureMismatchError,
        lambda: strategy.run(lambda: {"loss" if my_id() == last else "cost": 1.0}),
    )
    assert "'loss'" in str(error)
    assert "'cost'" in str(error)
    check_works(strategy)


WRONG_RUNS = {
    "args is a number": (ValueError, {"args": 3}, "args=(x,)"),
    "args is an array": (ValueError, {"args": np.ones(2)}, "args=(x,)"),
    "args is a string": (ValueError, {"args": "ab"}, "args=(x,)"),
    "args is None": (ValueError, {"args": None}, "args"),
    "args is a PerReplica": (ValueError, {"args": mr.PerReplica([1])}, "args=(x,)"),
    "kwargs is a list": (ValueError, {"kwargs": [1]}, "kwargs"),
    "fn is no function": (TypeError, {"fn": 3}, "callable"),
    "options is a number": (TypeError, {"options": 3}, "CommunicationOptions"),
    "args lacks components": (ValueError, {"args": (mr.PerReplica([1] * 99),)}, "99"),
}


@pytest.mark.parametrize("name", WRONG_RUNS)
def test_a_wrong_run_is_an_error_everywhere_also_when_one_rank_alone_makes_it(strategy, name):
    kind, wrong, word = WRONG_RUNS[name]
    for wrong_ranks in ({0}, {strategy.size - 1}, set(range(strategy.size))):
        given = {"fn": my_id} | (wrong if strategy.rank in wrong_ranks else {})
        error = raises_everywhere(kind, lambda given=given: strategy.run(**given))
        assert word in str(error)
    check_works(strategy)


def test_wrong_args_of_merge_call_are_an_error_everywhere(strategy):
    cases = [({"args": 3}, ValueError), ({"kwargs": 3}, ValueError), ({"merge_fn": 3}, TypeError)]
    for wrong, kind in cases:

        def step(wrong=wrong):
            given = {"merge_fn": lambda inner: None}
            if my_id() == strategy.num_replicas_in_sync - 1:
                given |= wrong
            return mr.get_replica_context().merge_call(**given)

        raises_everywhere(kind, lambda step=step: strategy.run(step))
    check_works(strategy)


def test_distribute_values_that_differ_in_structure_are_an_error_on_every_rank(strategy):
    """On the ranks that make them, and on a rank with one replica at its next call."""
    needs_two_replicas(strategy)

    def reduced():
        values = strategy.experimental_distribute_values_from_function(
            lambda context: [1] * (1 + context.replica_id_in_sync_group)
        )
        return strategy.reduce("SUM", values, axis=None)

    raises_everywhere(mr.errors.StructureMismatchError, reduced)
    check_works(strategy)


def test_a_default_dict_whose_function_each_replica_makes_is_one_structure(strategy):
    def step():
        given = collections.defaultdict(lambda: 0, a=my_id())
        return mr.get_replica_context().all_reduce("SUM", given)

    total = sum(range(strategy.num_replicas_in_sync))
    for result in local(strategy, strategy.run(step)):
        assert result == {"a": total}
        assert result["other"] == 0


@pytest.mark.parametrize("values", [{0: 1.0, 1: 2.0}, {1.0, 2.0}, "12", b"12"], ids=repr)
def test_components_come_in_the_order_of_ids_and_not_as_a_dict_a_set_or_a_text(values):
    with pytest.raises(TypeError, match="needs the components in the order of the replica ids"):
        mr.PerReplica(values)


# What replicas share


def test_an_array_in_args_that_replicas_of_a_rank_share_is_written_by_none_of_them(strategy):
    """It would be written once for each replica of the rank: other numbers in each layout."""
    given = {"w": [np.zeros(3)]}

    def step(given):
        given["w"][0] += 1.0
        return given["w"][0] + my_id()

    if shares_ranks(strategy):
        error = raises_everywhere(ValueError, lambda: strategy.run(step, args=(given,)))
        assert "experimental_distribute_values_from_function" in "".join(error.__notes__)
        raises_everywhere(ValueError, lambda: strategy.run(step, kwargs={"given": given}))
        assert given["w"][0].tolist() == [0.0] * 3
    else:  # each rank has an array of its own
        (found,) = local(strategy, strategy.run(step, args=(given,)))
        assert found.tolist() == [1.0 + my for my in strategy.local_replica_ids for _ in range(3)]
    assert given["w"][0].flags.writeable
    check_works(strategy)


def test_an_array_of_each_replica_may_be_written(strategy):
    arrays = strategy.experimental_distribute_values_from_function(lambda context: np.zeros(2))

    def step(array):
        array += 1.0 + my_id()

    for _ in range(2):
        strategy.run(step, args=(arrays,))
    assert [found.tolist() for found in local(strategy, arrays)] == [
        [2.0 + 2 * i] * 2 for i in strategy.local_replica_ids
    ]


def test_rows_and_columns_of_one_array_may_be_written_by_their_replicas(strategy):
    whole = np.zeros((2, strategy.num_replicas_in_sync, strategy.num_replicas_in_sync))
    make = strategy.experimental_distribute_values_from_function
    rows = make(lambda context: whole[0, context.replica_id_in_sync_group])
    columns = make(lambda context: whole[1, :, context.replica_id_in_sync_group])

    def step(row, column):
        row += my_id()
        column += my_id()

    strategy.run(step, args=(rows, columns))
    for mine in (*local(strategy, rows), *local(strategy, columns)):
        assert mine.flags.writeable
    for replica in strategy.local_replica_ids:
        assert (whole[0, replica] == replica).all()
        assert (whole[1, :, replica] == replica).all()


#: How the components of several replicas come to be one array, or parts of one.
SHARED = {
    "a value_fn": lambda shared, replica: shared,
    "equal parts": lambda shared, replica: shared[:2],
    "parts that overlap": lambda shared, replica: shared[replica : replica + 2],
    "an array and its rows": lambda shared, replica: shared[:replica] if replica else shared,
    "slices": lambda shared, replica: mr.IndexedSlices(shared, np.arange(len(shared))),
}


@pytest.mark.parametrize("made_by", ["run", *SHARED])
def test_one_array_that_is_the_component_of_several_replicas_is_written_by_none(strategy, made_by):
    shared = np.zeros(strategy.num_replicas_in_sync + 2)
    if made_by == "run":
        arrays = strategy.run(lambda: {"w": shared})
    else:
        make = strategy.experimental_distribute_values_from_function
        part = SHARED[made_by]
        arrays = {"w": make(lambda context: part(shared, context.replica_id_in_sync_group))}

    def step(given):
        mine = given["w"].values if isinstance(given["w"], mr.IndexedSlices) else given["w"]
        mine += 1.0
        return mine + 0.0

    if shares_ranks(strategy):
        error = raises_everywhere(ValueError, lambda: strategy.run(step, args=(arrays,)))
        assert "experimental_distribute_values_from_function" in "".join(error.__notes__)
        assert len(strategy.local_replica_ids) == 1 or not shared.any()
    else:
        (found,) = local(strategy, strategy.run(step, args=(arrays,)))
        assert set(found.tolist()) == {1.0}
    assert shared.flags.writeable
    check_works(strategy)


#: What a replica gets as another argument, of the memory in which it has a row of its own.
OTHERS = {
    "the whole": lambda rows, replica: rows,
    "a row of another one": lambda rows, replica: rows[replica - 1],
    "all but its own row": lambda rows, replica: rows[replica + 1 :],
}


@pytest.mark.parametrize("kind", [*OTHERS, "the whole, plain", "the whole, mirrored"])
def test_memory_of_what_others_get_as_another_argument_is_written_by_none(strategy, kind):
    number = strategy.num_replicas_in_sync
    whole = np.zeros((number, 3))
    make = strategy.experimental_distribute_values_from_function
    own = make(lambda context: whole[context.replica_id_in_sync_group])
    if kind in OTHERS:
        other = make(lambda context: OTHERS[kind](whole, context.replica_id_in_sync_group))
    else:
        other = whole if kind == "the whole, plain" else mr.Mirrored(whole)

    def step(own, other):
        own += 1.0
        return float(other.sum())

    if shares_ranks(strategy):
        run = functools.partial(strategy.run, step, args=(own, other))
        error = raises_everywhere(ValueError, run)
        assert "read-only" in str(error)
        # the first replica of a rank may have a row of which no other one there gets a part
        assert whole.sum() <= 3.0
    else:
        (found,) = local(strategy, strategy.run(step, args=(own, other)))
        gets_its_own = "the whole" in kind or (number == 1 and kind == "a row of another one")
        assert found == (3.0 if gets_its_own else 0.0)
    check_works(strategy)


def test_parts_of_the_memory_of_one_replica_alone_may_be_written_in_all_arguments(strategy):
    make = strategy.experimental_distribute_values_from_function
    arrays = [np.zeros(4) for _ in range(strategy.num_replicas_in_sync)]
    whole = make(lambda context: arrays[context.replica_id_in_sync_group])
    part = make(lambda context: arrays[context.replica_id_in_sync_group][:2])

    def step(whole, part, rate):
        whole += rate
        part += rate
        return float(whole.sum())

    found = strategy.run(step, args=(whole, part, np.ones(1)))
    assert set(local(strategy, found)) == {6.0}


#: Classes of generators, made of a seed.
GENERATORS = {
    "PCG64": lambda seed: np.random.Generator(np.random.PCG64(seed)),
    "MT19937": lambda seed: np.random.Generator(np.random.MT19937(seed)),
    "RandomState": np.random.RandomState,
    "Python's": random.Random,
}


class OwnGenerator(random.Random):
    """Of a program: where it stands can't be asked for."""

    def getstate(self):
        raise NotImplementedError


@pytest.mark.parametrize("kind", GENERATORS)
@pytest.mark.parametrize("between", [False, True], ids=["at once", "over a collective"])
def test_a_generator_in_args_that_replicas_of_a_rank_draw_from_is_an_error_there(
    strategy, kind, between
):
    """What each draws would depend on how many of them a rank hosts."""
    rng = GENERATORS[kind](5)

    def step(given):
        drawn = given["rng"].random()
        if between:
            mr.get_replica_context().all_reduce("SUM", 1.0)
        return drawn

    if shares_ranks(strategy):
        make = strategy.experimental_distribute_values_from_function
        for given in (rng, make(lambda context: rng)):
            run = functools.partial(strategy.run, step, args=({"rng": given},))
            error = raises_everywhere(ContextError, run)
            assert "has drawn from the generator in (args, kwargs)[0][0]['rng']" in str(error)
            assert "mr.get_replica_context().rng" in str(error)
    else:
        strategy.run(step, args=({"rng": rng},))  # each rank has its own
    check_works(strategy)


@pytest.mark.parametrize("kind", [np.random.Generator, np.random.RandomState])
@pytest.mark.parametrize("other", ["generators", "the bits"])
def test_generators_that_draw_from_the_same_bits_are_one(strategy, kind, other):
    bits = np.random.MT19937(1)
    rngs = strategy.experimental_distribute_values_from_function(lambda context: kind(bits))
    given = (rngs,) if other == "generators" else (kind(bits), bits)
    run = functools.partial(strategy.run, lambda rng, *_: rng.random(), args=given)
    if shares_ranks(strategy):
        error = raises_everywhere(ContextError, run)
        assert "has drawn from the generator in (args, kwargs)[0][0]" in str(error)
    else:
        strategy.run(lambda rng, *_: rng.random(), args=given)
    check_works(strategy)


def test_a_generator_that_does_not_tell_where_it_stands_may_be_given(strategy):
    found = strategy.run(lambda rng: rng.random() < 1.0, args=(OwnGenerator(1),))
    assert all(local(strategy, found))


def test_a_generator_in_args_may_be_drawn_from_by_one_replica_or_a_merge_fn(strategy):
    first, other = (np.random.default_rng(seed) for seed in (5, 6))
    wanted = np.random.default_rng(5).random(3).tolist()
    own = strategy.experimental_distribute_values_from_function(
        lambda context: np.random.default_rng(context.replica_id_in_sync_group)
    )

    def step(rng, unused, own):
        context = mr.get_replica_context()
        own.random(2)
        drawn = [rng.random() for _ in range(2)] if my_id() == 0 else []
        in_merge = context.merge_call(lambda _: other.random())
        drawn += [rng.random()] if my_id() == 0 else []
        return np.array(drawn), in_merge, own.random()

    found = strategy.experimental_local_results(strategy.run(step, args=(first, other, own)))
    for i, (drawn, in_merge, of_own) in zip(strategy.local_replica_ids, found, strict=True):
        assert drawn.tolist() == (wanted if i == 0 else [])
        assert in_merge == np.random.default_rng(6).random()
        assert of_own == np.random.default_rng(i).random(3)[2]
