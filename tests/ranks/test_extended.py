"""strategy.extended: reduce_to, batch_reduce_to, broadcast_to and update."""

import contextvars
import functools
import pickle
import re
import tracemalloc
import types

import ml_dtypes
import numpy as np
import pytest

import mpi_replica as mr
from everywhere import check_works, gathered, needs_two_ranks, needs_two_replicas, raises_everywhere


def replica_id():
    return mr.get_replica_context().replica_id_in_sync_group


def ids_plus_one(strategy):
    """A PerReplica of each replica's id + 1, and their sum."""
    R = strategy.num_replicas_in_sync
    return strategy.run(lambda: replica_id() + 1.0), R * (R + 1) / 2


def variable(strategy, *args, **kwargs):
    with strategy.scope():
        return mr.Variable(*args, **kwargs)


def assert_fails(strategy, kind, pattern, call):
    """`call` raises the same on all ranks, and the next collectives give the right numbers."""
    error = raises_everywhere(kind, call)
    assert re.search(pattern, str(error)), error
    check_works(strategy)


def on_all_ranks(value):
    values = gathered(np.asarray(value).tolist())
    assert all(x == values[0] for x in values), values
    return values[0]


# reduce_to and batch_reduce_to


def test_reduce_to_a_variable_or_a_distributed_value_or_none_gives_it_to_all(strategy):
    values, total = ids_plus_one(strategy)
    mirrored = strategy.extended.broadcast_to(1.0)
    for destinations in (None, variable(strategy, 0.0), values, mirrored):
        result = strategy.extended.reduce_to("SUM", values, destinations)
        assert isinstance(result, mr.Mirrored)
        assert on_all_ranks(result) == total


def test_reduce_to_a_rank_gives_it_to_that_rank_and_none_to_the_others(strategy):
    values, total = ids_plus_one(strategy)
    for root in range(strategy.size):
        result = strategy.extended.reduce_to(mr.ReduceOp.SUM, values, root)
        if strategy.rank == root:
            assert result == total
        else:
            assert result is None


def test_the_rank_of_reduce_to_may_be_one_of_numpys_integers(strategy):
    values, total = ids_plus_one(strategy)
    last = strategy.size - 1
    result = strategy.extended.reduce_to("SUM", values, np.int64(last))
    assert result == total if strategy.rank == last else result is None


def test_reduce_to_maps_over_nests_and_takes_every_op(strategy):
    R = strategy.num_replicas_in_sync
    values = strategy.run(lambda: {"a": np.array([replica_id(), 1.0]), "b": (replica_id(),)})
    for op, a, b in [
        ("sum", [R * (R - 1) / 2, R], R * (R - 1) // 2),
        ("MEAN", [(R - 1) / 2, 1.0], (R - 1) / 2),
        ("max", [R - 1, 1.0], R - 1),
        ("MIN", [0.0, 1.0], 0),
        ("PROD", [0.0, 1.0], 0),
    ]:
        result = strategy.extended.reduce_to(op, values, None)
        np.testing.assert_allclose(on_all_ranks(result["a"]), a)
        np.testing.assert_allclose(on_all_ranks(result["b"][0]), b)


def test_reduce_to_in_a_merge_fn(strategy):
    _, total = ids_plus_one(strategy)
    seen = []

    def merge(strategy, x):
        seen.append(strategy.extended.reduce_to("SUM", x, strategy.size - 1))
        return strategy.extended.reduce_to("SUM", x, x)

    found = strategy.run(
        lambda: mr.get_replica_context().merge_call(merge, args=(replica_id() + 1.0,))
    )
    assert set(found.values) == {total}
    assert seen == [total if strategy.rank == strategy.size - 1 else None]


def test_batch_reduce_to_gives_a_result_for_each_pair(strategy):
    R = strategy.num_replicas_in_sync
    values, total = ids_plus_one(strategy)
    rows = strategy.run(lambda: np.array([replica_id(), 2], np.int32))
    v = variable(strategy, 0.0)
    first, second, third = strategy.extended.batch_reduce_to(
        "SUM", [(values, v), (rows, None), (values, strategy.size - 1)]
    )
    assert on_all_ranks(first) == total
    assert on_all_ranks(second) == [R * (R - 1) // 2, 2 * R]
    assert isinstance(first, mr.Mirrored)
    assert third == (total if strategy.rank == strategy.size - 1 else None)
    assert strategy.extended.batch_reduce_to("SUM", []) == []


def test_destinations_that_are_none_are_an_error_everywhere(strategy):
    values, _ = ids_plus_one(strategy)
    extended = strategy.extended
    for bad, kind in [
        (strategy.size, ValueError),
        (-1, ValueError),
        ("CPU:0", TypeError),
        (True, TypeError),
        ([0], TypeError),
    ]:
        assert_fails(
            strategy, kind, "destinations", lambda b=bad: extended.reduce_to("SUM", values, b)
        )
    for pairs in ([values], [(values,)], [[values, None]]):
        assert_fails(
            strategy, ValueError, "pairs", lambda p=pairs: extended.batch_reduce_to("SUM", p)
        )


def test_destinations_that_differ_between_ranks_are_an_error_everywhere(strategy):
    needs_two_ranks(strategy)
    values, _ = ids_plus_one(strategy)
    for mine in (strategy.rank, None if strategy.rank else 0):
        assert_fails(
            strategy,
            mr.errors.CollectiveMismatchError,
            "destinations",
            lambda m=mine: strategy.extended.reduce_to("SUM", values, m),
        )


def test_reducing_what_is_no_value_per_replica_is_refused_for_a_sum(strategy):
    mirrored = strategy.extended.broadcast_to(3.0)
    extended = strategy.extended
    for value in (mirrored, 3.0):
        assert_fails(
            strategy, ValueError, "SUM", lambda v=value: extended.reduce_to("SUM", v, None)
        )
        assert on_all_ranks(extended.reduce_to("MEAN", value, None)) == 3.0


def test_these_calls_are_a_context_error_in_a_replica(strategy):
    extended = strategy.extended
    v = variable(strategy, 1.0)
    for call in (
        lambda: extended.reduce_to("SUM", 1.0, None),
        lambda: extended.batch_reduce_to("SUM", []),
        lambda: extended.broadcast_to(1.0),
        lambda: extended.update(v, lambda x: None),
    ):
        assert_fails(strategy, mr.errors.ContextError, "merge_call", lambda c=call: strategy.run(c))


# broadcast_to


@pytest.mark.parametrize("rows", [1, 1000], ids=["small", "large"])
def test_broadcast_to_gives_rank_0s_value_to_all(strategy, rows):
    value = {"a": np.full((rows, 2), strategy.rank + 1.0), "b": [strategy.rank, f"{strategy.rank}"]}
    result = strategy.extended.broadcast_to(value)
    np.testing.assert_array_equal(result["a"], np.full((rows, 2), 1.0))
    assert isinstance(result["a"], mr.Mirrored)
    assert (int(result["b"][0]), result["b"][1].value) == (0, "0")


def test_broadcast_to_gives_an_array_that_is_nobody_elses(strategy):
    value = np.zeros((2, 3), order="F")
    result = strategy.extended.broadcast_to(value)
    value += 1 + strategy.rank
    assert on_all_ranks(result) == [[0.0] * 3] * 2
    assert result.flags.c_contiguous


class Model:
    """What pickle makes anew, with large arrays in it."""

    def __init__(self, number):
        self.weights = np.full((300, 400), float(number))
        self.frozen = np.full(100_000, number)
        self.frozen.flags.writeable = False


def test_broadcast_to_gives_large_arrays_of_an_object_that_are_nobody_elses(strategy):
    mine = Model(strategy.rank)
    given = strategy.extended.broadcast_to({"m": mine, "w": mine.weights, "i": strategy.rank})
    mine.weights += 1
    found = given["m"].value
    assert (given["i"].value, found is mine) == (0, False)
    assert on_all_ranks([found.weights[0, 0], found.frozen[0], given["w"].value[0, 0]]) == [0, 0, 0]
    assert not found.frozen.flags.writeable
    found.weights += 2
    assert found.weights[-1, -1] == 2
    assert given["w"].value[-1, -1] == 0


@pytest.mark.parametrize(
    "make",
    [
        lambda number: np.full((300, 401), number, order="F"),
        lambda number: np.full((300, 402), number)[:, ::2],
        lambda number: np.full(90_000, number, ">f8"),
        lambda number: np.full(90_000, number, "M8[s]"),
        lambda number: np.full((200, 300), number, ml_dtypes.bfloat16, order="F"),
        lambda number: np.full(50_000, f"{number}é"),
        lambda number: np.array([(number, 2.0)] * 30_000, [("a", "i4"), ("b", "f8")]),
        lambda number: np.ma.masked_equal(np.arange(90_000) + number, 7),
        lambda number: np.full(20_000, number, object),
        lambda number: np.full(400_000, number)[1:],
    ],
    ids=[
        "Fortran",
        "strided",
        "big endian",
        "dates",
        "bfloat16",
        "texts",
        "records",
        "masked",
        "objects",
        "part",
    ],
)
def test_broadcast_to_gives_large_arrays_of_any_kind(strategy, make):
    given = strategy.extended.broadcast_to([make(strategy.rank), "beside"])[0].value
    expected = make(0)
    assert (type(given), given.dtype) == (type(expected), expected.dtype)
    np.testing.assert_array_equal(given, expected)
    given[...] = expected[(0,) * expected.ndim]
    assert on_all_ranks(float(given.size)) == expected.size


class OwnBuffer:
    """Pickles itself by a buffer of its own, as the classes of other libraries do."""

    def __init__(self, data):
        self.text = data if isinstance(data, str) else data.decode()

    def __reduce_ex__(self, protocol):
        return OwnBuffer, (pickle.PickleBuffer(bytearray(self.text, "ascii")),)


@pytest.mark.parametrize("length", [10, 100_000])
def test_what_pickles_itself_by_a_buffer_gets_it_back_as_from_pickle(strategy, length):
    given = strategy.extended.broadcast_to([OwnBuffer("a" * length)])[0].value
    assert on_all_ranks([given.text == "a" * length]) == [True]


def test_one_array_in_several_places_of_an_object_is_one_for_all_too(strategy):
    weights = np.full(100_000, strategy.rank)
    tied = types.SimpleNamespace(layer=weights, other=[weights])
    given = strategy.extended.broadcast_to(tied).value
    assert on_all_ranks([given.layer is given.other[0], given.layer is weights]) == [True, False]


@pytest.mark.parametrize("dtype", [np.float64, ml_dtypes.bfloat16])
def test_what_rank_0_gives_to_all_takes_memory_for_the_result_and_for_what_comes(strategy, dtype):
    """By hand it is what comes that is the result."""
    value = np.full(1_000_000, 1.0 + strategy.rank, dtype)
    with strategy.scope():
        variable = mr.Variable(np.zeros_like(value))
    calls = [variable.assign, variable.assign_add, strategy.extended.broadcast_to]
    tracemalloc.start()
    try:
        peaks = []
        for call in calls:
            strategy.barrier()
            tracemalloc.reset_peak()
            start, _ = tracemalloc.get_traced_memory()
            result = call(value)
            peaks.append((tracemalloc.get_traced_memory()[1] - start) / value.nbytes)
            del result
    finally:
        tracemalloc.stop()
    most = 1.2 if strategy.rank == 0 else 2.2
    assert max(peaks) < most, peaks


def test_a_replica_can_not_write_into_what_was_broadcast(strategy):
    """The replicas of a rank share it."""
    given = strategy.extended.broadcast_to({"w": np.arange(3.0)})

    def step(given):
        with pytest.raises(ValueError, match="read-only"):
            given["w"] += 1
        return given["w"] + 1

    for found in strategy.experimental_local_results(strategy.run(step, args=(given,))):
        assert found.tolist() == [1, 2, 3]
    assert given["w"].value.flags.writeable


def test_a_record_that_was_broadcast_is_nobody_elses_and_read_only_in_replicas(strategy):
    """An item of an array of records is written into as an array is."""
    records = np.array([(1.0,), (2.0,)], [("a", float)])
    given = strategy.extended.broadcast_to(records[strategy.rank % 2])
    given.value["a"] += 1.0

    def step(given):
        with pytest.raises(ValueError, match="read-only"):
            given["a"] += 1.0
        return given["a"]

    found = strategy.experimental_local_results(strategy.run(step, args=(given,)))
    assert found == (2.0,) * len(strategy.local_replica_ids)
    assert records.tolist() == [(1.0,), (2.0,)]


def test_broadcast_to_does_not_compare_what_other_ranks_pass(strategy):
    value = np.arange(3) if strategy.rank == 0 else None
    assert on_all_ranks(strategy.extended.broadcast_to(value)) == [0, 1, 2]


def test_broadcast_to_of_a_value_per_replica_is_an_error_everywhere(strategy):
    value = {"a": strategy.run(lambda: 1)}
    with pytest.raises(ValueError, match=r"broadcast_to got a PerReplica.*strategy\.reduce"):
        strategy.extended.broadcast_to(value)
    assert strategy.extended.broadcast_to(1).value == 1


def test_a_value_that_can_not_travel_is_an_error_everywhere(strategy):
    needs_two_ranks(strategy)
    value = (lambda: 1) if strategy.rank == 0 else 1
    text = "broadcast_to can't pickle the function of rank 0.*local object"
    assert_fails(strategy, TypeError, text, lambda: strategy.extended.broadcast_to(value))


class Unloadable:
    """Can be pickled, but not loaded."""

    def __getstate__(self):
        return {"a": 1}

    def __setstate__(self, state):
        raise RuntimeError("no way back from a pickle")


def no_way_back():
    raise RuntimeError("no way back from a pickle")


class UnloadableList(list):
    """As a namedtuple of a class that other ranks don't have: only its leaves are plain."""

    def __reduce__(self):
        return no_way_back, ()


class UnloadableKey(str):
    def __reduce__(self):
        return no_way_back, ()


class Celsius(np.float64):
    """Comes back from a pickle as one of numpy's, or as it says itself."""


class Kelvin(np.float64):
    def __reduce__(self):
        return Celsius, (float(self) - 273.0,)


class Reading(np.void):
    def __reduce__(self):
        return Celsius, (float(self["a"]),)


class UnloadableScalar(np.float64):
    def __reduce__(self):
        return no_way_back, ()


@pytest.mark.parametrize("is_in_list", [False, True])
@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (Celsius(20.0), np.float64),
        (Kelvin(293.0), Celsius),
        (np.array([20.0], np.dtype((Reading, [("a", float)])))[0], Celsius),
        (np.longlong(20), np.int64),
        (np.float64(20.0), np.float64),
    ],
    ids=["a class", "reduced", "a record", "longlong", "numpy's"],
)
def test_broadcast_to_gives_a_scalar_of_the_same_class_on_every_rank(
    strategy, value, kind, is_in_list
):
    given = [value] if is_in_list else value
    result = strategy.extended.broadcast_to(given if strategy.rank == 0 else None)
    found = (result[0] if is_in_list else result).value
    assert gathered(type(found)) == [kind] * strategy.size
    assert found == 20.0


def test_broadcast_to_gives_an_array_of_the_same_class_of_numbers_on_every_rank(strategy):
    value = np.arange(3, dtype="q") if strategy.rank == 0 else None
    found = strategy.extended.broadcast_to(value).value
    assert gathered(found.dtype.char) == ["l"] * strategy.size
    assert found.tolist() == [0, 1, 2]


def test_broadcast_to_gives_one_byte_order_on_every_rank(strategy):
    for steps in (slice(None), slice(None, None, -1), slice(None, None, 2)):  # numpy turns some
        value = np.arange(6, dtype=">i4")[steps]
        found = strategy.extended.broadcast_to(value if strategy.rank == 0 else None).value
        assert len(set(gathered((found.dtype.str, found.tobytes())))) == 1
        assert found.tolist() == value.tolist()


def test_a_scalar_that_can_not_be_loaded_is_an_error_everywhere(strategy):
    needs_two_ranks(strategy)
    given = UnloadableScalar(1.0) if strategy.rank == 0 else 1
    assert_fails(
        strategy, RuntimeError, "no way back", lambda: strategy.extended.broadcast_to(given)
    )


@pytest.mark.parametrize("rows", [1, 1000], ids=["small", "large"])
def test_containers_that_can_not_be_loaded_are_an_error_everywhere(strategy, rows):
    needs_two_ranks(strategy)
    for value in (UnloadableList([np.zeros(rows)]), {UnloadableKey("a"): np.zeros(rows)}):
        given = [value] if strategy.rank == 0 else 1
        assert_fails(
            strategy,
            RuntimeError,
            "no way back",
            lambda given=given: strategy.extended.broadcast_to(given),
        )


def test_lists_may_lie_hundreds_deep_in_each_other(strategy):
    value = functools.reduce(lambda inner, _: [inner], range(150), 1)
    assert strategy.extended.broadcast_to(value) is not None


@pytest.mark.parametrize("rows", [1, 1000], ids=["small", "large"])
def test_a_value_that_can_not_be_loaded_is_an_error_everywhere(strategy, rows):
    needs_two_ranks(strategy)
    for value in (Unloadable(), [np.zeros(rows), Unloadable()], np.full(rows, Unloadable())):
        given = value if strategy.rank == 0 else 1
        assert_fails(
            strategy,
            RuntimeError,
            "no way back",
            lambda given=given: strategy.extended.broadcast_to(given),
        )


# update


def test_update_assigns_whatever_the_aggregation_and_gives_the_functions_result(strategy):
    for aggregation in mr.VariableAggregation:
        v = variable(strategy, 1.0, aggregation=aggregation)
        assert strategy.extended.update(v, lambda x: x.assign(2.0)) is v
        assert on_all_ranks(v) == 2.0
        strategy.extended.update(v, lambda x, d: x.assign_add(d), args=(3.0,))
        strategy.extended.update(v, lambda x, *, d: x.assign_sub(d), kwargs={"d": 1.0})
        assert on_all_ranks(v) == 4.0


def test_update_gets_the_value_in_a_mirrored_argument(strategy):
    v = variable(strategy, 1.0)
    values, total = ids_plus_one(strategy)
    mirrored = strategy.extended.reduce_to("SUM", values, v)

    def add(x, nest):
        assert not isinstance(nest["d"][0], mr.Mirrored)
        x.assign_add(nest["d"][0])

    strategy.extended.update(v, add, args=({"d": [mirrored]},))
    assert on_all_ranks(v) == 1.0 + total


def test_an_update_of_components_gets_arguments_that_are_nobody_elses(strategy):
    with strategy.scope():
        v = mr.Variable(np.zeros(2), synchronization=mr.VariableSynchronization.ON_READ)
    total = strategy.extended.reduce_to("SUM", strategy.run(lambda: np.ones(2)))
    seen = []

    def apply(v, total, more):
        more["rows"].append(1)
        seen.append(len(more["rows"]))
        with pytest.raises(ValueError, match="read-only"):
            total *= 0.5
        v.assign_add(total)

    strategy.extended.update(v, apply, args=(total, {"rows": [0]}))
    assert seen == [2] * len(strategy.extended.worker_devices)
    for own in strategy.experimental_local_results(v):
        np.testing.assert_array_equal(own, np.full(2, strategy.num_replicas_in_sync))


def test_update_with_a_per_replica_argument_is_a_value_error_that_names_it(strategy):
    v = variable(strategy, 1.0)
    values, _ = ids_plus_one(strategy)

    def update(*args, **kwargs):
        strategy.extended.update(v, lambda x, *a, **k: x.assign(9.0), args, kwargs)

    assert_fails(strategy, ValueError, "PerReplica.*reduce_to", lambda: update(values))
    assert_fails(strategy, ValueError, "PerReplica.*'d'", lambda: update(d=[values]))
    assert on_all_ranks(v) == 1.0


def test_a_per_replica_that_the_updating_function_found_elsewhere_is_refused_too(strategy):
    v = variable(strategy, 1.0)
    values, _ = ids_plus_one(strategy)

    def merge(strategy, x):
        strategy.extended.update(v, lambda w: w.assign_add(x))

    def step():
        mr.get_replica_context().merge_call(merge, args=(replica_id() + 1.0,))

    update = strategy.extended.update
    assert_fails(
        strategy, ValueError, "PerReplica", lambda: update(v, lambda w: w.assign_add(values))
    )
    assert_fails(strategy, ValueError, "PerReplica", lambda: strategy.run(step))
    assert on_all_ranks(v) == 1.0


@pytest.mark.parametrize("items", [1, 9000, 1_000_003])
def test_an_update_that_differs_in_any_one_element_is_an_error_everywhere(strategy, items):
    needs_two_ranks(strategy)
    v = variable(strategy, np.zeros(items, np.float32), name="weights")
    for place in {0, items // 81, items // 2 + 1, items - 1} & set(range(items)):
        value = np.ones(items, np.float32)
        value[place] += strategy.rank == strategy.size - 1

        def update(value=value):
            strategy.extended.update(v, lambda w: w.assign(value))
            strategy.extended.broadcast_to(0)  # the ranks compare at their next call

        assert_fails(strategy, ValueError, "update.*weights.*differ.*reduce", update)
        assert not v.numpy().any()


@pytest.mark.parametrize("result", [None, 3, ("t", 4)])
def test_update_without_group_gives_a_tuple_of_results(strategy, result):
    v = variable(strategy, 1.0)
    assert strategy.extended.update(v, lambda x: result, group=False) == (result,)
    assert strategy.extended.update(v, lambda x: result) == result


def test_inside_update_the_context_is_cross_replica_and_the_variable_is_itself(strategy):
    v = variable(strategy, 1.0)

    def fn(x):
        assert x is v
        assert mr.get_replica_context() is None
        assert mr.in_cross_replica_context()
        assert mr.get_strategy() is strategy
        v.assign(8.0)
        return float(x)

    assert strategy.extended.update(v, fn) == 8.0


def test_update_of_what_is_no_variable_of_this_strategy_is_a_value_error(strategy):
    for bad in (np.ones(2), 3.0, mr.Variable(1.0)):
        assert_fails(
            strategy,
            ValueError,
            "variable|Variable",
            lambda b=bad: strategy.extended.update(b, lambda x: None),
        )


def test_a_wrong_shape_in_update_is_an_error_everywhere(strategy):
    v = variable(strategy, [1.0, 2.0])
    update = strategy.extended.update
    assert_fails(strategy, ValueError, "shape", lambda: update(v, lambda x: x.assign(1.0)))

    def merge(strategy):
        strategy.extended.update(v, lambda x: x.assign([1.0]))

    def step():
        mr.get_replica_context().merge_call(merge)

    assert_fails(strategy, ValueError, "shape", lambda: strategy.run(step))
    assert on_all_ranks(v) == [1.0, 2.0]


ON_READ = {"synchronization": mr.VariableSynchronization.ON_READ}
FIRST, SUM = mr.VariableAggregation.ONLY_FIRST_REPLICA, mr.VariableAggregation.SUM


def test_the_update_of_components_gives_a_value_per_replica_on_any_layout(strategy):
    v = variable(strategy, 1.0, aggregation=SUM, **ON_READ)
    R = strategy.num_replicas_in_sync
    strategy.run(lambda: v.assign(1.0 + replica_id()))

    def twice(x):
        x.assign_add(x.value())
        return {"value": float(x.value()), "variable": x, "none": None}

    found = strategy.extended.update(v, twice)
    assert found["variable"] is v
    assert found["none"] is None
    assert isinstance(found["value"], mr.PerReplica)
    assert strategy.reduce("SUM", found["value"], axis=None) == R * (R + 1)

    def merge(strategy):
        return strategy.extended.update(v, lambda x: float(x.value()))

    seen = strategy.run(lambda: mr.get_replica_context().merge_call(merge))
    for i, value in zip(
        strategy.local_replica_ids, strategy.experimental_local_results(seen), strict=True
    ):
        assert value == 2.0 * (1 + i)
    check_works(strategy)


@pytest.mark.parametrize("above", [True, False], ids=["above the replicas", "in a merge_fn"])
def test_what_an_update_of_components_gives_for_some_replicas_alone_is_a_value_of_each(
    strategy, above
):
    v = variable(strategy, 0.0, aggregation=SUM, **ON_READ)
    weight = variable(strategy, 3.0)
    R = strategy.num_replicas_in_sync
    strategy.run(lambda: v.assign(replica_id()))

    def gives(x):
        if x.value() == 0:
            return {"none": None, "variable": weight, "own": x, "all": weight, "value": 1.0}
        return {"value": 1.0, "all": weight, "own": 4.0, "variable": 5.0, "none": 6.0}

    def check(strategy):
        found = strategy.extended.update(v, gives)
        assert [*found] == (sorted(found) if R > 1 else [*gives(v)])
        assert found["all"] is weight
        differing = [found[key] for key in ("none", "variable", "own")]
        assert [isinstance(one, mr.PerReplica) for one in differing] == [R > 1] * 3
        return found

    if above:
        found = check(strategy)
        for key, of_first, others in (("none", None, 6.0), ("variable", 3.0, 5.0)):
            assert strategy.experimental_local_results(found[key]) == tuple(
                of_first if i == 0 else others for i in strategy.local_replica_ids
            )
    else:
        strategy.run(lambda: mr.get_replica_context().merge_call(lambda s: check(s) and None))


def test_an_update_of_components_that_raises_takes_back_all_that_it_has_assigned(strategy):
    v, other = (variable(strategy, 0.0, aggregation=SUM, **ON_READ) for _ in range(2))
    R = strategy.num_replicas_in_sync

    def assigns(x):
        x.assign_add(10.0)
        x.assign_add(10.0)
        other.assign(x.value())
        raise OSError("no disk")

    def merge(strategy):
        with pytest.raises(OSError, match="no disk"):
            strategy.extended.update(v, assigns)

    def step(fails):
        v.assign(1.0 + replica_id())
        mr.get_replica_context().merge_call(merge)
        if fails:
            raise ValueError("later")
        return v.value()

    seen = strategy.run(step, args=(False,))  # what the replicas had assigned before stays
    assert strategy.reduce("SUM", seen, axis=None) == R * (R + 1) / 2
    v.assign(0.0)
    assert_fails(strategy, ValueError, "later", lambda: strategy.run(step, args=(True,)))
    assert on_all_ranks(v.value()) == 0.0  # the run takes back what it has assigned around it
    merge(strategy)
    assert [on_all_ranks(x.value()) for x in (v, other)] == [0.0, 0.0]


@pytest.mark.parametrize("above", [True, False], ids=["above the replicas", "in a merge_fn"])
def test_an_update_of_components_that_fails_for_one_replica_is_an_error_of_all(strategy, above):
    v = variable(strategy, 0.0, aggregation=SUM, **ON_READ)
    R = strategy.num_replicas_in_sync
    strategy.run(lambda: v.assign(replica_id()))

    def raises(x):
        if x.value() == R // 2:
            raise ArithmeticError("no half")
        x.assign(10.0)

    def differs(x):
        is_half = x.value() == R // 2
        x.assign(10.0)
        return {"half" if is_half else "other": 1}

    def check(strategy):
        with pytest.raises(ArithmeticError, match="no half"):
            strategy.extended.update(v, raises)
        if R > 1:
            with pytest.raises(mr.errors.StructureMismatchError):
                strategy.extended.update(v, differs)
        strategy.extended.update(v, lambda x: x.assign(x.value() + 1.0))

    if above:
        check(strategy)
    else:
        strategy.run(lambda: mr.get_replica_context().merge_call(check))
    assert on_all_ranks(v.value()) == R * (R + 1) / 2


def test_the_update_of_a_variable_assigns_to_components_as_above_the_replicas(strategy):
    weight = variable(strategy, 1.0)
    first, total = (variable(strategy, 0, aggregation=one, **ON_READ) for one in (FIRST, SUM))
    R = strategy.num_replicas_in_sync
    strategy.extended.update(weight, lambda x: (first.assign(4), total.assign(3 * R)))
    assert on_all_ranks(first.value()) == 4
    assert on_all_ranks(total.value()) == 3 * R
    assert {int(part) for part in strategy.experimental_local_results(total)} == {3}
    assert_fails(
        strategy,
        ValueError,
        "summed on read",
        lambda: strategy.extended.update(weight, lambda x: total.assign_add(1)),
    )


def test_the_update_of_components_can_not_assign_to_what_replicas_share(strategy):
    """It would be assigned once for each replica of a rank."""
    shared = variable(strategy, 1.0, name="last")
    own = variable(strategy, 0.0, aggregation=SUM, **ON_READ)
    assert_fails(
        strategy,
        mr.errors.ContextError,
        "last.assign_add.*synchronized on read.*after the update",
        lambda: strategy.extended.update(own, lambda x: shared.assign_add(1.0)),
    )
    assert on_all_ranks(shared.value()) == 1.0


def makes_variable(strategy, shared, own):
    with strategy.scope():
        mr.Variable(0.0)


ABOVE = {
    "reduce": lambda strategy, shared, own: strategy.reduce("SUM", own, axis=None),
    "reduce_to": lambda strategy, shared, own: strategy.extended.reduce_to("SUM", own, own),
    "gather_objects": lambda strategy, shared, own: strategy.gather_objects(strategy.rank),
    "verify": lambda strategy, shared, own: strategy.verify(1),
    "run": lambda strategy, shared, own: strategy.run(replica_id),
    "last.assign_add": lambda strategy, shared, own: shared.assign_add(1.0),
    "update": lambda strategy, shared, own: strategy.extended.update(
        shared, lambda shared: shared.assign_add(1.0)
    ),
    "Variable": makes_variable,
}


@pytest.mark.parametrize("call", ABOVE)
def test_what_stands_above_the_replicas_can_not_be_called_once_for_each_of_a_rank(strategy, call):
    shared = variable(strategy, 1.0, name="last")
    own = variable(strategy, 0.0, aggregation=SUM, **ON_READ)
    strategy.run(lambda: own.assign(1.0 + replica_id()))
    before = [float(part) for part in strategy.experimental_local_results(own)]
    for function, outer in (
        (
            lambda: strategy.extended.update(
                own, lambda x: x.assign_add(ABOVE[call](strategy, shared, own))
            ),
            "that updates .*synchronized on read.*before or after the update",
        ),
        (
            lambda: strategy.experimental_distribute_values_from_function(
                lambda context: ABOVE[call](strategy, shared, own)
            ),
            "the value_fn of experimental_distribute_values_from_function .*before or after that",
        ),
    ):
        words = f"^{call} was called while .*{outer}"
        assert_fails(strategy, mr.errors.ContextError, words, function)
    assert [float(part) for part in strategy.experimental_local_results(own)] == before
    assert on_all_ranks(shared.value()) == 1.0


def test_neither_a_context_nor_another_strategy_hides_that_it_is_called_once_for_each(strategy):
    shared = variable(strategy, 1.0, name="last")
    other = mr.MPIStrategy(num_replicas=strategy.num_replicas_in_sync)
    for call in (
        lambda context: contextvars.Context().run(shared.assign_add, 1.0),
        lambda context: other.experimental_distribute_values_from_function(
            lambda context: shared.assign_add(1.0)
        ),
    ):
        assert_fails(
            strategy,
            mr.errors.ContextError,
            "^last.assign_add was called while the value_fn of",
            lambda call=call: strategy.experimental_distribute_values_from_function(call),
        )
    assert on_all_ranks(shared.value()) == 1.0
    other.close()


def test_components_of_a_strategy_with_other_replicas_are_an_error_everywhere(strategy):
    R = strategy.num_replicas_in_sync
    other = mr.MPIStrategy(num_replicas=R + strategy.size)
    v = variable(other, 1.0, aggregation=SUM, name="hits", **ON_READ)

    def in_merge_fn():
        def merge(strategy, x):
            return strategy.reduce("SUM", x, axis=None)

        strategy.run(lambda: mr.get_replica_context().merge_call(merge, args=(v,)))

    for call in (
        lambda: strategy.reduce("SUM", v, axis=None),
        lambda: strategy.experimental_local_results(v),
        lambda: strategy.experimental_local_results([v, 1]),
        in_merge_fn,
    ):
        assert_fails(strategy, ValueError, "hits has components.*Mixing different strategies", call)
    other.close()


def test_local_results_in_a_merge_fn_are_of_all_replicas_also_in_what_it_calls(strategy):
    """A sum over them would depend on the layout."""
    R = strategy.num_replicas_in_sync
    hits = variable(strategy, 1.0, aggregation=SUM, name="hits", **ON_READ)
    strategy.run(lambda: hits.assign(10.0 * replica_id()))
    total = variable(strategy, 1.0, aggregation=mr.VariableAggregation.MEAN)
    outside = strategy.experimental_distribute_values_from_function(
        lambda context: 1.0 + context.replica_id_in_sync_group
    )
    local_results = strategy.experimental_local_results

    def merge(strategy, x):
        seen = [local_results((x, {"hits": hits}, 7))]
        strategy.extended.update(total, lambda v: v.assign(sum(local_results(outside))))
        seen.append(total.numpy())
        with strategy.scope():
            seen.append(local_results(outside))
        seen.append(local_results(strategy.run(lambda: replica_id())))
        if R > 1:
            chosen = mr.PerReplica([5], replica_ids=[1], num_replicas=R)
            seen.append(local_results((outside, chosen)))
        return seen

    found = strategy.run(lambda: mr.get_replica_context().merge_call(merge, args=(replica_id(),)))
    every = tuple(range(R))
    expected = [tuple((i, {"hits": 10.0 * i}, 7) for i in every)]
    expected += [R * (R + 1) / 2, tuple(i + 1.0 for i in every), every]
    if R > 1:
        expected.append(((2.0, 5),))
    for one in local_results(found):
        assert list(one) == expected
    assert local_results(outside) == tuple([1.0 + i for i in strategy.local_replica_ids])


def test_broadcast_to_in_a_merge_fn_refuses_what_was_made_outside_of_it(strategy):
    needs_two_replicas(strategy)
    outside = strategy.experimental_distribute_values_from_function(
        lambda context: context.replica_id_in_sync_group
    )

    def merge(strategy):
        strategy.extended.broadcast_to({"x": outside})

    step = functools.partial(strategy.run, lambda: mr.get_replica_context().merge_call(merge))
    assert_fails(strategy, ValueError, "broadcast_to got a PerReplica", step)


def test_components_of_all_replicas_are_not_asked_for_in_a_function_for_each(strategy):
    needs_two_replicas(strategy)
    hits = variable(strategy, 1.0, aggregation=SUM, name="hits", **ON_READ)

    def merge(strategy):
        strategy.extended.update(
            hits, lambda v: v.assign(sum(strategy.experimental_local_results(hits)))
        )

    text = "experimental_local_results.*the function that updates hits"
    step = functools.partial(strategy.run, lambda: mr.get_replica_context().merge_call(merge))
    assert_fails(strategy, mr.errors.ContextError, text, step)


# The other names of tf


def test_the_class_has_its_public_name(strategy):
    assert type(strategy.extended) is mr.StrategyExtended
    assert isinstance(mr.get_strategy().extended, mr.StrategyExtended)


def test_names_of_devices_and_who_writes_checkpoints(strategy):
    ids = strategy.local_replica_ids
    names = tuple(f"rank:{strategy.rank}/replica:{i}" for i in ids)
    assert strategy.extended.worker_devices == names
    assert strategy.extended.parameter_devices == names
    assert strategy.extended.experimental_require_static_shapes is False
    assert strategy.extended.should_checkpoint == (strategy.rank == 0)


def test_colocate_vars_with_a_variable_of_this_strategy_changes_nothing(strategy):
    with strategy.scope():
        v = mr.Variable(1.0)
        with strategy.extended.colocate_vars_with(v):
            w = mr.Variable([2.0 + strategy.rank])
        assert on_all_ranks(w) == [2.0]
        assert strategy.extended.variable_created_in_scope(w)
        colocate = strategy.extended.colocate_vars_with(v)  # as tf, it checks when it is called
        with colocate, pytest.raises(KeyError):
            raise KeyError

    def step():
        with strategy.extended.colocate_vars_with(v):
            return float(mr.Variable(replica_id() + 3.0))

    assert strategy.reduce("SUM", strategy.run(step), None) == 3.0 * strategy.num_replicas_in_sync


def test_colocate_vars_with_anything_else_is_a_value_error(strategy):
    elsewhere = mr.Variable(1.0)
    with strategy.scope():
        for bad in (elsewhere, 3.0, None, mr.PerReplica([1.0])):
            with pytest.raises(ValueError, match=r"colocate_vars_with.*Variable of this strategy"):
                strategy.extended.colocate_vars_with(bad)


def test_colocate_vars_with_outside_of_the_scope_is_a_context_error(strategy):
    v = variable(strategy, 1.0)
    with pytest.raises(mr.errors.ContextError, match=r"with strategy\.scope\(\)"):
        strategy.extended.colocate_vars_with(v)
