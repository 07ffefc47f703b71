"""Mirrored variables: one value everywhere, whatever replicas assign, on all layouts."""

import contextlib
import functools
import re
import warnings

import hypothesis.strategies as st
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given

import mpi_replica as mr
from everywhere import (
    check_works,
    gathered,
    named,
    needs_two_ranks,
    needs_two_replicas,
    raises_everywhere,
    ranks_of,
)
from mpi_replica import VariableAggregation as Aggregation
from mpi_replica.errors import ContextError
from mpi_replica.replicas.assignment import lose_values

COMBINED = {
    Aggregation.SUM: lambda rows: np.sum(rows, axis=0),
    Aggregation.MEAN: lambda rows: np.mean(rows, axis=0),
    Aggregation.ONLY_FIRST_REPLICA: lambda rows: rows[0],
}
WRITTEN = {
    "assign": lambda old, value: value,
    "assign_add": lambda old, value: old + value,
    "assign_sub": lambda old, value: old - value,
}

every_aggregation = pytest.mark.parametrize("aggregation", Aggregation, ids=lambda a: a.name)


def replica_id():
    return mr.get_replica_context().replica_id_in_sync_group


def variable(strategy, *args, **kwargs):
    with strategy.scope():
        return mr.Variable(*args, **kwargs)


def everywhere(v):
    """The value of a mirrored variable, which must be the same on all ranks."""
    values = gathered(np.asarray(v).tolist())
    assert all(value == values[0] for value in values), values
    return values[0]


def assert_fails(strategy, kind, pattern, call):
    """`call` raises the same on all ranks, and the next collectives give the right numbers."""
    error = raises_everywhere(kind, call)
    assert re.search(pattern, str(error)), error
    check_works(strategy)


# Creation


def test_replica_0s_initial_value_is_everywhere(strategy):
    v = variable(strategy, np.array([1.0, 2.0]) + 10 * strategy.rank, name="weights")
    assert everywhere(v) == [1.0, 2.0]
    assert (v.name, v.shape, v.dtype, v.ndim, v.size) == ("weights", (2,), np.float64, 1, 2)
    assert v.trainable
    assert v.aggregation is Aggregation.NONE


def test_a_per_replica_initial_value_gives_that_of_replica_0(strategy):
    values = strategy.run(lambda: replica_id() + 7.0)
    assert everywhere(variable(strategy, values)) == 7.0


def test_an_initializer_is_called_once_per_strategy(strategy):
    calls = []

    def initializer():
        calls.append(strategy.rank)
        return 100.0 * (1 + strategy.rank)

    v = variable(strategy, initializer)
    assert sum(gathered(len(calls))) == 1
    assert everywhere(v) == 100.0


@pytest.mark.parametrize("is_callable", [False, True])
def test_a_variable_made_in_replicas_has_replica_0s_value_and_is_one_variable(
    strategy, is_callable
):
    calls = []

    def step():
        initial = replica_id() + 5.0

        def initializer():
            calls.append(replica_id())
            return initial

        v = mr.Variable(initializer if is_callable else initial, aggregation=Aggregation.SUM)
        first = float(v)
        v.assign_add(1.0)
        return v, first, float(v)

    v, firsts, seconds = strategy.run(step)
    R = strategy.num_replicas_in_sync
    assert isinstance(v, mr.Variable)
    assert set(firsts.values) == {5.0}
    assert set(seconds.values) == {5.0 + R}
    assert everywhere(v.assign_add(1.0)) == 6.0 + R
    assert sum(gathered(len(calls))) == int(is_callable)


def test_dtype_is_that_asked_for_or_that_of_the_value(strategy):
    assert variable(strategy, [1, 2], dtype=np.float32).dtype == np.float32
    assert variable(strategy, np.int16(3)).dtype == np.int16
    assert variable(strategy, 1.0).dtype == np.float64
    assert everywhere(variable(strategy, [255, 0], dtype=np.uint8)) == [255, 0]
    assert everywhere(variable(strategy, 2**70, dtype=np.float32)) == 2.0**70
    assert variable(strategy, [], dtype=np.int32).dtype == np.int32
    assert everywhere(variable(strategy, 1.5, dtype=ml_dtypes.bfloat16)) == 1.5
    assert everywhere(variable(strategy, 2, dtype=ml_dtypes.float8_e4m3fn)) == 2
    assert everywhere(variable(strategy, [7, -8], dtype=ml_dtypes.int4)) == [7, -8]
    assert variable(strategy, lambda: np.ones(2, np.complex64)).dtype == np.complex64


@pytest.mark.parametrize(
    ("value", "dtype", "kind"),
    [
        (300, "u1", OverflowError),
        ([300, -1], "u1", OverflowError),
        (2**40, "i4", OverflowError),
        (np.array([2**63], "u8"), "i8", OverflowError),
        (1.7, int, TypeError),
        ([np.nan], int, TypeError),
        (1 + 2j, float, TypeError),
        (2, bool, TypeError),
        ("1.5", float, TypeError),
        ([2**64, 1], "u8", OverflowError),
        ([2**63, -1], "u8", OverflowError),
        ([2**63, 1], "i8", OverflowError),
        ([2**63, 1.5], "u8", TypeError),
        ([[2**63], [1.0]], "u8", TypeError),
        (0, [("a", "f4")], TypeError),
        (1.5, "M8[s]", TypeError),
        ([1 + 2j], ml_dtypes.bfloat16, TypeError),
        ([3.7, 1.0], ml_dtypes.int4, TypeError),
        (3.7, ml_dtypes.uint4, TypeError),
        ([7, -9], ml_dtypes.int4, OverflowError),
        (16, ml_dtypes.uint4, OverflowError),
        (-1, ml_dtypes.uint4, OverflowError),
        (300, ml_dtypes.int4, OverflowError),
        (-9, ml_dtypes.int4, OverflowError),
        ([2**64, 1], ml_dtypes.int4, OverflowError),
    ],
    ids=repr,
)
def test_what_the_dtype_can_not_hold_is_an_error_everywhere(strategy, value, dtype, kind):
    text = "^w got .* a variable of dtype"
    assert_fails(strategy, kind, text, lambda: variable(strategy, value, dtype=dtype, name="w"))


def test_the_variable_does_not_alias_its_initial_value(strategy):
    initial = np.zeros(2)
    v = variable(strategy, initial)
    initial += 1 + strategy.rank
    assert everywhere(v) == [0.0, 0.0]


def test_an_initial_value_may_be_a_variable(strategy):
    v = variable(strategy, variable(strategy, [3.0]))
    v.assign([4.0])
    assert everywhere(v) == [4.0]


def test_initial_shapes_that_depend_on_the_replica_are_an_error_everywhere(strategy):
    needs_two_replicas(strategy)

    def step():
        return mr.Variable(np.zeros(1 + replica_id()))

    assert_fails(strategy, mr.errors.StructureMismatchError, "shape", lambda: strategy.run(step))


def test_initial_shapes_that_depend_on_the_rank_are_an_error_everywhere(strategy):
    needs_two_ranks(strategy)

    def make():
        variable(strategy, np.zeros(1 + strategy.rank))

    assert_fails(strategy, mr.errors.StructureMismatchError, "shape", make)


def test_what_only_some_ranks_mark_as_trainable_is_a_mismatch(strategy):
    needs_two_ranks(strategy)
    for default in (None, True):
        given = default if strategy.rank else False
        assert_fails(
            strategy,
            mr.errors.CollectiveMismatchError,
            "trainable=False",
            lambda given=given: variable(strategy, 1.0, trainable=given),
        )
    assert_fails(strategy, TypeError, "trainable", lambda: variable(strategy, 1.0, trainable=1))


def test_settings_that_do_not_fit_are_a_value_error_everywhere(strategy):
    for kwargs in (
        {"initial_value": 1, "aggregation": Aggregation.MEAN},
        {"initial_value": True, "aggregation": Aggregation.MEAN},
        {"initial_value": 1.0, "aggregation": "SUM"},
        {"initial_value": 1.0, "aggregation": 7},
        {"initial_value": 1.0, "synchronization": mr.VariableSynchronization.NONE},
        {"initial_value": 1.0, "synchronization": "ON_READ"},
    ):
        assert_fails(strategy, ValueError, "", lambda kwargs=kwargs: variable(strategy, **kwargs))


def test_a_string_in_the_place_of_an_enum_is_told_which_members_fit(strategy):
    text = r"'SUM' is no mr\.VariableAggregation\. Use mr\.VariableAggregation\.NONE, .*\.SUM, "
    assert_fails(strategy, ValueError, text, lambda: variable(strategy, 1.0, aggregation="SUM"))
    text = r"Use mr\.VariableSynchronization\.AUTO, mr\.VariableSynchronization\.ON_WRITE, "
    sync = "ON_READ"
    assert_fails(strategy, ValueError, text, lambda: variable(strategy, 1.0, synchronization=sync))


def test_the_method_value_is_not_hidden_by_what_is_meant_as_an_assignment(strategy):
    v = variable(strategy, 1.0, name="w")

    def step():
        with pytest.raises(AttributeError, match=r"w\.value can't be set.*w\.assign\(x\)"):
            v.value = v.value() * 2 + replica_id()
        return v.value()

    assert set(strategy.gather_objects(strategy.run(step))) == {1.0}
    assert everywhere(v.assign(3.0)) == 3.0


@pytest.mark.parametrize("name", ["T", "copy", "item", "mean", "reshape", "sum", "tolist"])
def test_what_is_the_values_and_not_the_variables_is_told_where_to_find_it(strategy, name):
    on_read = mr.VariableSynchronization.ON_READ
    v = variable(strategy, [1.0, 2.0], name="w", synchronization=on_read)

    def step():
        v.assign(v.value() + replica_id())
        text = rf"w has no {name}: .*w\.value\(\)\.{name}"
        with pytest.raises(AttributeError, match=text):
            getattr(v, name)
        assert not hasattr(v, name)
        return v.value().sum(), np.sum(v), np.mean(v) * 2, np.reshape(v, (2, 1)).sum()

    found = strategy.gather_objects(strategy.run(step))
    assert list(found) == [(3.0 + 2 * i,) * 4 for i in range(strategy.num_replicas_in_sync)]


def test_an_initializer_that_raises_where_replica_0_is_raises_everywhere(strategy):
    def initializer():
        raise OSError("no weights")

    assert_fails(strategy, OSError, "no weights", lambda: variable(strategy, initializer))


def test_a_list_of_ints_keeps_each_of_them_whatever_their_range(strategy):
    """numpy makes floats of those that have no dtype of integers in common."""
    first, second = [[2**64 - 1, 1], [0, 2**63]], [[1, 2**63 + 1], [True, np.uint64(3)]]
    v = variable(strategy, first, dtype=np.uint64)
    assert everywhere(v) == first
    strategy.run(v.assign, args=(second,))
    assert everywhere(v) == second


def test_only_numbers_are_held(strategy):
    for value in ("text", None, np.array([object()])):
        assert_fails(strategy, TypeError, "number", lambda value=value: variable(strategy, value))


@pytest.mark.parametrize("dtype", ["x", "\ud800", 1.5], ids=ascii)
def test_what_is_no_dtype_is_told_with_the_name_of_the_variable(strategy, dtype):
    text = "w: dtype must be one of numpy's, got "
    assert_fails(strategy, TypeError, text, lambda: variable(strategy, 1.0, dtype=dtype, name="w"))


def test_lists_of_unlike_lengths_are_told_with_the_name_of_the_variable(strategy):
    ragged = [[1.0], [2.0, 3.0]]
    assert_fails(strategy, ValueError, "^w: ", lambda: variable(strategy, ragged, name="w"))
    v = variable(strategy, [1.0, 2.0], name="w")
    for call in (lambda: v.assign(ragged), lambda: strategy.run(lambda: v.assign(ragged))):
        assert_fails(strategy, ValueError, r"^w\.assign: ", call)


def test_outside_of_any_strategy_a_variable_works_alone():
    v = mr.Variable(1.0, aggregation=Aggregation.SUM)
    v.assign_add(2.0)
    v.assign_sub(v * 0.5)
    assert float(v) == 1.5


# Assignment


@pytest.mark.parametrize("aggregation", COMBINED, ids=lambda a: a.name)
def test_what_replicas_assign_is_combined_by_the_aggregation(strategy, aggregation):
    rows = [[i + 5.0, -2.0 * i] for i in range(strategy.num_replicas_in_sync)]
    for how, written in WRITTEN.items():
        v = variable(strategy, [1.0, 2.0], aggregation=aggregation)

        def step(how=how, v=v):
            returned = getattr(v, how)(rows[replica_id()])
            return returned, v.value()

        returned, seen = strategy.run(step)
        assert returned is v
        expected = written(np.array([1.0, 2.0]), np.array(COMBINED[aggregation](rows)))
        np.testing.assert_allclose(everywhere(v), expected, rtol=1e-14)
        for value in seen.values:
            np.testing.assert_array_equal(value, np.asarray(v))


@every_aggregation
def test_a_cross_replica_assignment_takes_rank_0s_value_whatever_the_aggregation(
    strategy, aggregation
):
    for how, written in WRITTEN.items():
        for context in (strategy.scope(), contextlib.nullcontext()):
            v = variable(strategy, 2.0, aggregation=aggregation)
            with context:
                assert getattr(v, how)(6.0 + strategy.rank) is v
            assert everywhere(v) == written(2.0, 6.0)


@every_aggregation
def test_an_assignment_in_a_merge_fn_is_made_once(strategy, aggregation):
    R = strategy.num_replicas_in_sync
    for how, written in WRITTEN.items():
        v = variable(strategy, 1.0, aggregation=aggregation)

        def merge(strategy, x, how=how, v=v):
            return getattr(v, how)(strategy.reduce("SUM", x, axis=None))

        def step(merge=merge):
            return mr.get_replica_context().merge_call(merge, args=(replica_id() + 1.0,))

        assert strategy.run(step) is v
        assert everywhere(v) == written(1.0, R * (R + 1) / 2)


def test_what_tf_says_beside_the_value_is_taken_and_the_result_can_be_left_away(strategy):
    for how in WRITTEN:
        v = variable(strategy, 1.0)

        def change(how=how, v=v):
            assert getattr(v, how)(1.0, use_locking=True, name="step") is v
            assert getattr(v, how)(1.0, False, None, False) is None
            assert getattr(v, how)(1.0, read_value=False) is None

        change()
        assert strategy.run(change) is None
        strategy.extended.update(v, lambda _, change=change: change())
        written = 1.0
        for _ in range(9):
            written = WRITTEN[how](written, 1.0)
        assert everywhere(v) == written


def test_under_none_replicas_that_assign_the_same_value_assign_it_once(strategy):
    for how, written in WRITTEN.items():
        v = variable(strategy, [1, 2])
        strategy.run(lambda how=how, v=v: getattr(v, how)(np.array([5, 6])))
        assert everywhere(v) == written(np.array([1, 2]), np.array([5, 6])).tolist()


def test_a_literal_counts_once_for_each_replica_under_sum_and_once_otherwise(strategy):
    for aggregation in Aggregation:
        v = variable(strategy, 1.0, aggregation=aggregation)
        strategy.run(lambda v=v: v.assign(5.0))
        times = strategy.num_replicas_in_sync if aggregation is Aggregation.SUM else 1
        assert everywhere(v) == 5.0 * times


def test_a_step_counter_counts_steps(strategy):
    counters = [
        variable(strategy, 0),
        variable(strategy, 0, aggregation=Aggregation.ONLY_FIRST_REPLICA),
    ]

    def step():
        before = [int(counter) for counter in counters]
        for counter in counters:
            counter.assign_add(1)
        return before, [int(counter) for counter in counters]

    for number in range(3):
        before, after = strategy.run(step)
        assert {x for part in before for x in part.values} == {number}
        assert {x for part in after for x in part.values} == {number + 1}
    assert [everywhere(counter) for counter in counters] == [3, 3]


def test_a_gradient_step_under_none_may_read_before_it_assigns(strategy):
    v = variable(strategy, np.array([4.0, -8.0]))
    R = strategy.num_replicas_in_sync

    def step():
        gradient = v * (replica_id() + 1)
        v.assign_sub(0.25 * mr.get_replica_context().all_reduce("MEAN", gradient))
        return v.assign(v * 1.0)

    strategy.run(step)
    np.testing.assert_allclose(everywhere(v), np.array([4.0, -8.0]) * (1 - 0.25 * (R + 1) / 2))


@pytest.mark.parametrize("size", [1, 20_000], ids=["small", "large"])
def test_different_values_under_none_are_a_value_error_that_says_what_to_choose(strategy, size):
    needs_two_replicas(strategy)
    v = variable(strategy, np.zeros(size), name="weights")
    pattern = "weights.*differ.*MEAN.*SUM.*ONLY_FIRST_REPLICA"
    for how in WRITTEN:

        def step(how=how):
            value = np.ones(size)
            value[-1] = replica_id()
            return getattr(v, how)(value)

        assert_fails(strategy, ValueError, pattern, lambda step=step: strategy.run(step))
        assert not np.any(everywhere(v)), "an assignment that failed changed the variable"


def test_an_assignment_that_not_all_replicas_made_is_taken_back_and_no_other(strategy):
    last = strategy.num_replicas_in_sync - 1
    v = variable(strategy, 1.0)

    def step():
        v.assign_add(1.0)
        if replica_id() == last:
            raise ValueError("bad row")
        v.assign_add(1.0)

    assert_fails(strategy, ValueError, "bad row", lambda: strategy.run(step))
    assert everywhere(v) == 2.0, "all of them made the first one, and not all the second"


@every_aggregation
def test_replicas_can_assign_to_a_variable_that_was_lost(strategy, aggregation):
    v = variable(strategy, 1.0, aggregation=aggregation)
    lose_values([v])
    assert_fails(strategy, mr.errors.RankLostError, "", lambda: strategy.run(lambda: float(v)))

    if aggregation is Aggregation.NONE and strategy.num_replicas_in_sync > 1:
        differ = functools.partial(strategy.run, lambda: v.assign(float(replica_id())))
        assert_fails(strategy, ValueError, "differ", differ)
        assert v.is_lost
    strategy.run(lambda: v.assign(2.0))
    total = strategy.num_replicas_in_sync if aggregation is Aggregation.SUM else 1
    assert everywhere(v) == 2.0 * total


@every_aggregation
def test_an_assignment_on_one_replica_only_is_an_error_everywhere(strategy, aggregation):
    needs_two_replicas(strategy)
    v = variable(strategy, 1.0, aggregation=aggregation)

    def step():
        if replica_id() == strategy.num_replicas_in_sync - 1:
            v.assign(2.0)

    assert_fails(strategy, mr.errors.CollectiveMismatchError, "assign", lambda: strategy.run(step))
    assert everywhere(v) == 1.0


def test_a_replica_that_does_not_assign_is_told_from_others_of_its_rank(world):
    """It is at another call while they, and all other ranks, are at the assignment."""
    if world.size == 1:
        pytest.skip("a single rank has nobody to compare what was assigned with")
    strategy = mr.MPIStrategy(replicas_per_rank=2)
    v = variable(strategy, 1.0)

    def step():
        if replica_id() != 1:
            v.assign(2.0)
        return mr.get_replica_context().all_reduce("SUM", 1.0)

    error = raises_everywhere(mr.errors.CollectiveMismatchError, lambda: strategy.run(step))
    strategy.close()
    assert "replica 1 (rank 0): all_reduce(SUM" in str(error)


@every_aggregation
def test_replicas_that_assign_to_different_variables_are_an_error_everywhere(strategy, aggregation):
    needs_two_replicas(strategy)
    pair = [variable(strategy, 1.0, aggregation=aggregation, name="same") for _ in range(2)]

    def step():
        pair[replica_id() % 2].assign(2.0)

    assert_fails(strategy, mr.errors.CollectiveMismatchError, "same", lambda: strategy.run(step))
    assert [everywhere(v) for v in pair] == [1.0, 1.0]


@every_aggregation
def test_a_wrong_shape_or_dtype_on_one_replica_is_an_error_everywhere(strategy, aggregation):
    last = strategy.num_replicas_in_sync - 1
    v = variable(strategy, np.ones(2, np.float32), aggregation=aggregation, name="w")

    def wrong_shape():
        v.assign(np.ones(3 if replica_id() == last else 2))

    def wrong_dtype():
        v.assign(np.ones(2, np.complex128 if replica_id() == last else np.float32))

    assert_fails(strategy, ValueError, r"w.*shape \(3,\)", lambda: strategy.run(wrong_shape))
    assert_fails(strategy, TypeError, "w.*complex128.*float32", lambda: strategy.run(wrong_dtype))
    assert_fails(strategy, ValueError, r"shape \(\)", lambda: v.assign(1.0))
    assert everywhere(v) == [1.0, 1.0]


def test_an_integer_variable_takes_no_float(strategy):
    v = variable(strategy, 3)
    assert_fails(strategy, TypeError, "float64.*int64", lambda: v.assign(1.5))
    assert_fails(strategy, TypeError, "float64.*int64", lambda: strategy.run(lambda: v.assign(1.5)))
    assert everywhere(v) == 3


@pytest.mark.parametrize("dtype", ["u8", "i8", "u1", "i1"])
def test_integers_take_bools(strategy, dtype):
    v = variable(strategy, np.zeros(2, dtype))
    strategy.run(v.assign, args=(np.array([True, False]),))
    assert everywhere(v) == [1, 0]


@pytest.mark.parametrize(
    "value",
    [2**40, -(2**40), [2**40, 1], np.array([1, -(2**31) - 1]), np.array([2**31, 0], "u4")],
    ids=repr,
)
def test_a_number_that_the_dtype_can_not_hold_is_an_error_everywhere(strategy, value):
    """It is never wrapped around."""
    counts = variable(strategy, np.zeros(np.shape(value), np.int32), name="counts")
    for change in (counts.assign, counts.assign_add):
        error = raises_everywhere(
            OverflowError, lambda change=change: strategy.run(change, args=(value,))
        )
        assert "counts.assign" in str(error)
        assert "int32 can't hold" in str(error)
    np.testing.assert_array_equal(counts.numpy(), np.zeros(np.shape(value)))
    check_works(strategy)


@pytest.mark.parametrize(
    ("dtype", "fits", "does_not", "kind"),
    [
        (ml_dtypes.bfloat16, [1.5, True], np.array([1 + 2j, 3j]), TypeError),
        (ml_dtypes.float8_e4m3fn, np.array([2, 3], "i1"), np.array([1j, 3]), TypeError),
        (ml_dtypes.bfloat16, np.array([1, -2], ml_dtypes.int4), np.array(["1", "2"]), TypeError),
        (ml_dtypes.int4, np.array([7, -8], "i1"), [3.7, np.nan], TypeError),
        (ml_dtypes.int4, [True, False], np.array([1, 2], ml_dtypes.bfloat16), TypeError),
        (ml_dtypes.int4, np.array([1, -2], "i8"), np.array([1, 200]), OverflowError),
        (ml_dtypes.uint4, np.array([15, 0], "u8"), np.array([1, 16], "u1"), OverflowError),
        (ml_dtypes.int2, np.array([1, -2]), np.array([1, 2], "i1"), OverflowError),
    ],
    ids=str,
)
def test_dtypes_that_numpy_gets_from_others_hold_what_fits_alone(
    strategy, dtype, fits, does_not, kind
):
    w = variable(strategy, np.zeros(2, dtype), name="w")
    for value in (np.array(fits, dtype), w.value(), fits):
        w.assign(value)
    for give in (w.assign, lambda value: strategy.run(w.assign, args=(value,))):
        assert_fails(strategy, kind, f"w.*{w.dtype.name}", lambda give=give: give(does_not))
    assert everywhere(w) == np.asarray(fits, dtype).tolist()


@pytest.mark.parametrize(
    ("dtype", "least", "greatest"),
    [(ml_dtypes.int4, -8, 7), (ml_dtypes.uint4, 0, 15), (ml_dtypes.int2, -2, 1)],
    ids=str,
)
def test_an_int_that_a_narrow_dtype_can_not_hold_is_an_error_everywhere(
    strategy, dtype, least, greatest
):
    w = variable(strategy, np.zeros((), dtype), name="w")
    for value in (least, greatest):
        w.assign(value)
        assert everywhere(w) == value
    for value in (least - 1, greatest + 1, 300):
        for change in (w.assign, w.assign_add):
            for give in (change, lambda value, change=change: strategy.run(change, args=(value,))):
                text = f"w.*{value}.*{w.dtype.name} can't hold"
                assert_fails(
                    strategy, OverflowError, text, lambda give=give, value=value: give(value)
                )
    assert everywhere(w) == greatest


def test_the_dtype_never_changes(strategy):
    R = strategy.num_replicas_in_sync
    for dtype in ("float16", "float32", "int8", "complex64"):
        v = variable(strategy, np.zeros(2, dtype), aggregation=Aggregation.SUM)
        strategy.run(lambda v=v, t=dtype: v.assign(np.array([replica_id(), 1], t)))
        strategy.run(lambda v=v, t=dtype: v.assign_add(np.ones(2, t)))
        v.assign_sub(np.array([1, 0], dtype))
        assert v.dtype == dtype
        expected = np.array([R * (R - 1) // 2 + R - 1, 2 * R]).astype(dtype)  # int8 wraps around
        assert everywhere(v) == expected.tolist()


@every_aggregation
def test_numbers_of_another_byte_order_can_be_assigned_and_added(strategy, aggregation):
    v = variable(strategy, np.arange(3, dtype=">f8"), aggregation=aggregation)
    strategy.run(lambda: v.assign_add(np.ones(3)))
    factor = strategy.num_replicas_in_sync if aggregation is Aggregation.SUM else 1
    assert everywhere(v) == [factor, 1 + factor, 2 + factor]
    v.assign_sub(np.ones(3, ">f4"))
    assert everywhere(v) == [factor - 1, factor, 1 + factor]
    assert v.dtype == ">f8"


def test_a_per_replica_is_assigned_by_component_in_replicas_and_refused_above(strategy):
    values = strategy.run(lambda: replica_id() + 1.0)
    R = strategy.num_replicas_in_sync
    v = variable(strategy, 0.0, aggregation=Aggregation.SUM)
    strategy.run(lambda: v.assign(values))
    assert everywhere(v) == R * (R + 1) / 2
    assert_fails(strategy, ValueError, "PerReplica.*reduce", lambda: v.assign(values))


def test_a_value_of_other_replicas_is_an_error_everywhere(strategy):
    foreign = mr.PerReplica(range(strategy.num_replicas_in_sync + 1))
    v = variable(strategy, 0)
    own = variable(
        strategy,
        0,
        synchronization=mr.VariableSynchronization.ON_READ,
        aggregation=Aggregation.SUM,
    )

    def merged(*args, **kwargs):
        return lambda: mr.get_replica_context().merge_call(*args, **kwargs)

    for call in (
        lambda: strategy.run(lambda: v.assign(foreign)),
        lambda: strategy.run(lambda: own.assign(foreign)),
        lambda: strategy.extended.update(own, lambda x: x.assign(foreign)),
        lambda: strategy.run(lambda: mr.Variable(foreign)),
        lambda: variable(strategy, foreign),
        lambda: strategy.run(merged(lambda strategy, x: x, (foreign,))),
        lambda: strategy.run(merged(lambda strategy: foreign)),
    ):
        assert_fails(strategy, ValueError, "a PerReplica of .* was given to a strategy", call)
    assert (everywhere(v), everywhere(own)) == (0, 0)


def test_a_mirrored_value_and_another_variable_can_be_assigned(strategy):
    v = variable(strategy, 0.0)
    other = variable(strategy, 2.0)
    assert everywhere(v.assign(other)) == 2.0
    mirrored = strategy.extended.broadcast_to(3.0 + strategy.rank)
    assert everywhere(v.assign(mirrored)) == 3.0
    strategy.run(lambda: v.assign_add(mirrored))
    assert everywhere(v) == 6.0


@every_aggregation
@pytest.mark.parametrize("where", ["replicas", "above", "update"])
def test_an_assignment_that_overflows_is_no_error(strategy, aggregation, where):
    """It would be one after the ranks have agreed, or on some ranks alone."""
    for sync in (mr.VariableSynchronization.ON_WRITE, mr.VariableSynchronization.ON_READ):
        for how in ("assign_add", "assign_sub"):
            if aggregation is Aggregation.SUM and where == "above":
                continue
            initial = np.array([np.inf, 6e4 if how == "assign_add" else -6e4], np.float16)
            v = variable(strategy, initial, synchronization=sync, aggregation=aggregation)
            delta = np.array([-np.inf if how == "assign_add" else np.inf, 6e4], np.float16)

            def change(v=v, how=how, delta=delta):
                getattr(v, how)(delta)

            with np.errstate(all="raise"), warnings.catch_warnings():
                warnings.simplefilter("error")
                if where == "replicas":
                    strategy.run(change)
                elif where == "above":
                    change()
                else:
                    strategy.extended.update(v, lambda _: change())
            seen = strategy.experimental_local_results(v)[0]
            assert np.isnan(seen[0])
            assert np.isinf(seen[1])
    check_works(strategy)


operations = st.lists(
    st.tuples(
        st.sampled_from(["replica", "above", "merge_fn", "update"]),
        st.sampled_from(sorted(WRITTEN)),
        st.integers(-9, 9),
        st.integers(-3, 3),
    ),
    max_size=6,
)


@given(aggregation=st.sampled_from(list(Aggregation)), operations=operations)
def test_any_sequence_of_assignments_gives_the_same_value_as_on_paper(
    strategy, aggregation, operations
):
    R = strategy.num_replicas_in_sync
    v = variable(strategy, 1.0, aggregation=aggregation)
    on_paper = 1.0
    for where, how, base, slope in operations:
        if where == "replica":
            slope = 0 if aggregation is Aggregation.NONE else slope
            strategy.run(lambda h=how, b=base, s=slope: getattr(v, h)(b + s * float(replica_id())))
            combine = COMBINED.get(aggregation, COMBINED[Aggregation.ONLY_FIRST_REPLICA])
            value = combine([base + slope * float(i) for i in range(R)])
        elif where == "above":
            getattr(v, how)(base + slope * strategy.rank)
            value = base
        elif where == "merge_fn":

            def merge(strategy, x, how=how):
                getattr(v, how)(strategy.reduce("MAX", x, None))

            strategy.run(
                lambda m=merge, b=base, s=slope: mr.get_replica_context().merge_call(
                    m, args=(float(b + s * replica_id()),)
                )
            )
            value = max(base, base + slope * (R - 1))
        else:
            strategy.extended.update(v, lambda w, x, h=how: getattr(w, h)(x), args=(base,))
            value = base
        on_paper = WRITTEN[how](on_paper, value)
    np.testing.assert_allclose(everywhere(v), on_paper, rtol=1e-12, atol=1e-12)


def swapped(array, one, other):
    array = array.copy()
    array[[one, other]] = array[[other, one]]
    return array


@pytest.mark.parametrize(
    "change",
    [
        lambda a: a[::-1],
        lambda a: np.roll(a, 1),
        lambda a: np.roll(a, 64),
        lambda a: swapped(a, 0, 1),
        lambda a: swapped(a, 0, 64),
        lambda a: swapped(a, 7, -7),
        lambda a: np.append(a[:-1], a[-1] + 1),
    ],
    ids=["reversed", "rolled", "rolled far", "near", "far", "ends", "last"],
)
@pytest.mark.parametrize("items", [20_000, 20_003])
def test_large_values_in_another_order_are_not_the_same_value(strategy, change, items):
    """Without aggregation all replicas must assign one value, however large."""
    needs_two_replicas(strategy)
    a = np.arange(items, dtype="f8")
    v = variable(strategy, np.zeros(items))

    def step():
        v.assign(a if replica_id() == 0 else change(a))

    assert_fails(strategy, ValueError, "differ", lambda: strategy.run(step))
    strategy.run(lambda: v.assign(a.copy()) is None)
    np.testing.assert_array_equal(v, a)


def test_what_its_name_is_made_of_does_not_matter(strategy):
    v = variable(strategy, 1.0, name="weights-\udc80.npy")  # as of a file that is no UTF-8
    strategy.run(lambda: v.assign(2.0))
    assert everywhere(v) == 2.0
    check_works(strategy)


def test_rows_that_are_assigned_are_an_error_that_says_what_takes_them(strategy):
    v = variable(strategy, np.zeros((3, 2)))
    rows = mr.IndexedSlices(np.ones((1, 2)), [1])
    for how in ("assign", "assign_add", "assign_sub"):
        call = functools.partial(getattr(v, how), rows)
        assert_fails(strategy, TypeError, "scatter_add.*to_dense", call)


@pytest.mark.parametrize("odd", [np.zeros(1), np.zeros(3, "f4")], ids=["shape", "dtype"])
def test_components_of_a_first_value_that_are_unlike_are_an_error_on_every_layout(strategy, odd):
    needs_two_replicas(strategy)
    count = strategy.num_replicas_in_sync
    for culprit in sorted({1, count - 1}):
        values = strategy.experimental_distribute_values_from_function(
            lambda c, culprit=culprit: odd if c.replica_id_in_sync_group == culprit else np.zeros(3)
        )

        def make(values=values):
            with strategy.scope():
                mr.Variable(values)

        error = raises_everywhere(mr.errors.StructureMismatchError, make)
        where = named(culprit, ranks_of(strategy)[culprit])
        assert f"{odd.dtype}[{odd.size}] on {where}" in str(error)
    check_works(strategy)


INITIALIZERS = {
    "draws from strategy.rng": lambda strategy: strategy.rng.random(),
    "Variable was called while": lambda strategy: float(mr.Variable(1.0)),
    "reduce was called while": lambda strategy: strategy.reduce("SUM", 1.0, axis=None),
}


@pytest.mark.parametrize("words", INITIALIZERS)
def test_a_callable_initial_value_does_nothing_for_all_ranks(strategy, words):
    """It is called on one of them."""

    def make():
        with strategy.scope():
            return mr.Variable(lambda: INITIALIZERS[words](strategy), name="w")

    error = raises_everywhere(mr.errors.ContextError, make)
    assert words in str(error)
    assert "the initial_value of w" in str(error)
    assert len(set(gathered(strategy.rng.random()))) == 1
    check_works(strategy)


def test_a_variable_that_was_made_outside_of_a_scope_is_told_where_to_make_it(strategy):
    outside = mr.Variable(0.0)
    for call in (lambda: outside.assign(1.0), lambda: outside.assign_add(1.0)):
        error = raises_everywhere(ContextError, lambda call=call: strategy.run(call))
        assert "Mixing different strategies: Variable.assign" in str(error)
        assert "make it in strategy.scope()" in str(error)
    check_works(strategy)


def test_a_function_that_merges_in_a_step_works_above_the_replicas_as_well(strategy):
    """There it is in the ``merge_fn`` of the default strategy, as in tf."""
    synchronization, aggregation = mr.VariableSynchronization.ON_READ, mr.VariableAggregation.SUM
    with strategy.scope():
        total = mr.Variable(0.0, synchronization=synchronization, aggregation=aggregation)
        weight = mr.Variable(1.0)

    def result():
        return mr.get_replica_context().merge_call(lambda _: total.value())

    def change(_):
        weight.assign(2.0)
        strategy.run(lambda: total.assign_add(1.0))
        with strategy.scope():
            return mr.Variable(3.0)

    strategy.run(lambda: total.assign_add(1.0))
    number = strategy.num_replicas_in_sync
    assert strategy.experimental_local_results(strategy.run(result))[0] == number
    assert result() == number
    assert mr.get_replica_context().merge_call(change).strategy is strategy
    assert (weight.value(), result()) == (2.0, 2 * number)
    with mr.get_strategy().scope():
        assert result() == 2 * number
    check_works(strategy)


def test_a_step_that_writes_into_a_value_is_told_how_to_assign(strategy):
    with strategy.scope():
        weight = mr.Variable(np.zeros(3))

    def step():
        weight.value()[0] = 1.0

    error = raises_everywhere(ValueError, lambda: strategy.run(step))
    assert any("variable.assign" in note for note in error.__notes__)
    np.testing.assert_array_equal(weight, 0.0)
    check_works(strategy)


def test_an_assignment_is_told_alike_where_ranks_wait_in_it_and_where_they_wrote_before(strategy):
    options = mr.CommunicationOptions(reproducible=True)
    other = mr.MPIStrategy(strategy.communicator, num_replicas=6, communication_options=options)
    with other.scope():
        v = mr.Variable(0.0, name="v")

    def step():
        context = mr.get_replica_context()
        if context.replica_id_in_sync_group == 3:
            context.all_reduce("SUM", 77)
        v.assign(1.0)
        context.all_reduce("SUM", 5.0)

    with pytest.raises(mr.errors.CollectiveMismatchError) as raised:
        other.run(step)
    told = str(raised.value)
    assert told.count("Variable.assign(variable 0 'v', reproducible)") == 1
    assert told.count("Variable.assign") == 1
    other.close()
