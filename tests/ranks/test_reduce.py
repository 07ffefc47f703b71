"""strategy.reduce against numpy, over the values of all replicas."""

import fractions
import re
import warnings

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

import mpi_replica as mr
from contributions import (
    NARROW,
    OF_OP,
    Leaf,
    at_once,
    build,
    check_everywhere,
    native,
    nests,
    reduced,
)
from everywhere import check_works, error_of, needs_two_ranks, raises_everywhere

UFUNCS = {"SUM": np.add, "MEAN": np.add, "MIN": np.minimum, "MAX": np.maximum, "PROD": np.multiply}


def of_replicas(strategy, make):
    """A PerReplica of `make(replica_id)`."""
    return strategy.experimental_distribute_values_from_function(
        lambda context: make(context.replica_id_in_sync_group)
    )


def along(op, arrays, axis):
    """The reference for an axis: as if all components stood in one array along a new one.

    Extents along `axis` may differ, so each component is flattened along it first.
    """
    axes = axis if isinstance(axis, tuple) else (axis,)
    columns = []
    for array in arrays:
        array = native(array)
        places = sorted(place % array.ndim for place in axes)
        rest = [n for place, n in enumerate(array.shape) if place not in places]
        columns.append(np.moveaxis(array, places, range(len(places))).reshape(-1, *rest))
    whole = np.concatenate(columns)
    dtype = wide = whole.dtype
    if dtype.name in NARROW:
        wide = np.dtype("float32")
    elif op == "MEAN" and dtype.kind in "biu":
        dtype = wide = np.dtype("float64")
    result = UFUNCS[op].reduce(whole.astype(wide), axis=0, dtype=wide)
    if op == "MEAN":
        result = result / len(whole)
    return np.asarray(result, dtype)[()]


@st.composite
def calls(draw, *, along_axes):
    op = draw(st.sampled_from(sorted(OF_OP)))
    axis = None
    extents = (1,)
    if along_axes:
        axis = draw(st.sampled_from([0, 1, -1, -2, (0, 1), (-1,), (0, -1)]))
        extents = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3).map(tuple))
    leaves = st.builds(
        Leaf,
        dtype=st.sampled_from(OF_OP[op]),
        shape=st.lists(st.integers(along_axes, 3), min_size=2, max_size=3).map(tuple),
        number=st.integers(0, 99),
        layout=st.integers(0, 6),
        axis=st.just(axis[0] if isinstance(axis, tuple) else axis),
        extents=st.just(extents),
    )
    return op, draw(nests(leaves)), axis


def check_reduce(strategy, op, nest, axis):
    replicas = strategy.num_replicas_in_sync

    def reference(leaf):
        arrays = leaf.of_all(replicas)
        return reduced(op, arrays) if axis is None else along(op, arrays, axis)

    value = of_replicas(strategy, lambda i: build(nest, lambda leaf: leaf.of(i)))
    check_everywhere([strategy.reduce(op, value, axis=axis)], build(nest, reference))


@at_once
@given(call=calls(along_axes=False))
def test_decision_9_reduce_maps_over_nests_element_by_element(strategy, call):
    check_reduce(strategy, *call)


@at_once
@given(call=calls(along_axes=True))
def test_decision_9_reduce_along_axes_weighs_by_element_count(strategy, call):
    check_reduce(strategy, *call)


def test_large_components_of_uneven_extents_are_reduced(strategy):
    leaf = Leaf("float32", (1, 300), axis=0, extents=(1000, 1, 0, 37))
    for op in ("SUM", "MEAN", "MAX"):
        check_reduce(strategy, op, [leaf, leaf], 0)
    check_reduce(strategy, "MEAN", Leaf("float16", (300, 200)), None)


def test_the_rows_of_a_split_batch_are_reduced_as_in_tf(strategy):
    """Rows 1 to 6 in chunks: SUM 21, MEAN 3.5; axis None needs equal shapes."""
    replicas = strategy.num_replicas_in_sync
    chunks = np.array_split(np.arange(1.0, 7.0), replicas)
    value = of_replicas(strategy, lambda i: chunks[i])
    assert strategy.reduce("SUM", value, axis=0) == 21
    assert strategy.reduce("MEAN", value, axis=0) == 3.5
    if len({chunk.shape for chunk in chunks}) > 1:
        raises_everywhere(ValueError, lambda: strategy.reduce("SUM", value, axis=None))
        check_works(strategy)


@pytest.mark.parametrize("dtype", [float, int, np.float32])
def test_a_replica_with_more_rows_weighs_more(strategy, dtype):
    ids = np.arange(strategy.num_replicas_in_sync)
    value = of_replicas(strategy, lambda i: np.full(i + 1, i, dtype))
    total = (ids * (ids + 1)).sum()
    assert strategy.reduce("SUM", value, axis=0) == total
    assert strategy.reduce("MEAN", value, axis=0) == pytest.approx(total / (ids + 1).sum())


def test_replicas_without_rows_do_not_count(strategy):
    last = strategy.num_replicas_in_sync - 1
    value = of_replicas(strategy, lambda i: np.array([1.0, 3.0] if i == last else []))
    expected = {"SUM": 4, "MEAN": 2, "MIN": 1, "MAX": 3, "PROD": 3}
    for op, result in expected.items():
        assert strategy.reduce(op, value, axis=0) == result


@pytest.mark.parametrize("op", ["SUM", "MEAN", "PROD", "MAX"])
def test_an_overflow_is_no_error_along_an_axis_either(strategy, op):
    """What the program has set for its own arithmetic does not hold for what ranks reduce."""
    large = np.array([60000, 60000, np.inf], np.float16)
    values = strategy.run(lambda: large)
    with np.errstate(all="raise"), warnings.catch_warnings():
        warnings.simplefilter("error")
        whole = strategy.reduce(op, values, axis=None)
        along = strategy.reduce(op, values, axis=0)
    assert whole.dtype == along.dtype == np.float16
    assert along == np.inf
    check_works(strategy)


def test_nothing_anywhere_is_nan_with_one_warning_under_mean_and_an_error_under_min(strategy):
    value = strategy.run(lambda: np.ones((0, 2)))
    np.testing.assert_array_equal(strategy.reduce("SUM", value, axis=0), [0, 0])
    np.testing.assert_array_equal(strategy.reduce("PROD", value, axis=0), [1, 1])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        mean = strategy.reduce("MEAN", value, axis=0)
    assert np.isnan(mean).all()
    assert [warning.category for warning in caught] == [RuntimeWarning]
    for op in ("MIN", "MAX"):
        raises_everywhere(ValueError, lambda op=op: strategy.reduce(op, value, axis=0))
    check_works(strategy)


def test_ones_of_all_replicas_add_up_in_and_out_of_scope(strategy):
    count = strategy.num_replicas_in_sync
    ones = strategy.run(lambda: 1.0)
    assert strategy.reduce("SUM", ones, axis=None) == count
    with strategy.scope():
        assert strategy.reduce(mr.ReduceOp.SUM, ones, axis=None) == count
        result = strategy.reduce("mean", ones, axis=None)
    assert type(result) is np.float64


def test_a_tuple_of_values_is_reduced_leaf_by_leaf(strategy):
    count = strategy.num_replicas_in_sync
    pair = strategy.run(lambda: (np.ones((2, 1)), {"n": np.full(3, 2)}))
    first, second = strategy.reduce("SUM", pair, axis=0)
    np.testing.assert_array_equal(first, [2.0 * count])
    assert second["n"] == 6 * count
    assert strategy.reduce("SUM", [], axis=None) == []


@pytest.mark.usefixtures("few_ranks")
@pytest.mark.parametrize("op", ["SUM", "MEAN"])
@pytest.mark.parametrize("columns", [1, 3000])
@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_narrow_floats_along_an_axis_add_up_in_the_order_of_the_replicas(op, columns, dtype):
    """What each replica has is added in float32; in another order the ones would come out."""
    rows = {0: np.full(1025, 16384.0), 2: np.full(1025, -16384.0)}
    with mr.MPIStrategy(num_replicas=4) as strategy:
        values = of_replicas(
            strategy,
            lambda i: np.repeat(rows.get(i, np.ones(1))[:, None], columns, axis=1).astype(dtype),
        )
        result = strategy.reduce(op, values, axis=0)
    sums = [np.float32(rows.get(i, np.ones(1)).sum()) for i in range(4)]
    expected = (sums[0] + sums[1]) + (sums[2] + sums[3])
    expected = expected / np.float32(2052) if op == "MEAN" else expected
    assert result.dtype == dtype
    assert np.array_equal(result, np.full(columns, expected).astype(dtype))


@pytest.mark.usefixtures("few_ranks")
def test_a_replica_that_gives_none_is_the_same_error_on_every_layout():
    with mr.MPIStrategy(num_replicas=4) as strategy:
        values = of_replicas(strategy, lambda i: None if i == 3 else np.float64(i))
        error = raises_everywhere(TypeError, lambda: strategy.reduce("SUM", values, axis=None))
        assert "reduce got None for value" in str(error)


@pytest.mark.usefixtures("few_ranks")
@pytest.mark.parametrize(
    ("value", "text"),
    [
        (2**70, "reduce got int of dtype object for value"),
        (True, "SUM of bool has no meaning"),
        ({"a": 1.0}.values(), "a dict_values gives its values one by one, and is no array"),
    ],
)
def test_what_is_no_number_beside_floats_is_the_same_error_on_every_layout(value, text):
    """Also where the replicas of a rank could be made alike."""
    with mr.MPIStrategy(num_replicas=4) as strategy:
        for culprit in (0, 3):
            values = of_replicas(strategy, lambda i, at=culprit: value if i == at else 2.5)
            for given in (values, [strategy.run(lambda: 1.0), values]):
                error = raises_everywhere(
                    TypeError, lambda given=given: strategy.reduce("SUM", given, axis=None)
                )
                assert text in str(error)
                check_works(strategy)


def test_the_axis_may_be_a_list_or_a_numpy_integer(strategy):
    count = strategy.num_replicas_in_sync
    value = strategy.run(lambda: np.ones((2, 3)))
    for axis in ([0, 1], (np.int64(0), 1), [-1, -2]):
        assert strategy.reduce("SUM", value, axis=axis) == 6 * count
    np.testing.assert_array_equal(strategy.reduce("SUM", value, np.int8(1)), [3 * count] * 2)
    np.testing.assert_array_equal(strategy.reduce("MEAN", value, axis=()), np.ones((2, 3)))


def test_python_ints_on_some_replicas_and_floats_on_others_count_as_float64(strategy):
    ids = range(strategy.num_replicas_in_sync)
    value = of_replicas(strategy, lambda i: i if i % 2 else i + 0.5)
    result = strategy.reduce("SUM", value, axis=None)
    assert type(result) is np.float64
    assert result == sum(i if i % 2 else i + 0.5 for i in ids)


def test_decision_4_the_same_object_on_all_replicas_counts_once_for_each(strategy):
    shared = np.ones(3)
    value = of_replicas(strategy, lambda i: shared)
    result = strategy.reduce("SUM", value, axis=None)
    np.testing.assert_array_equal(result, np.full(3, strategy.num_replicas_in_sync))
    result += 1
    np.testing.assert_array_equal(shared, np.ones(3))


def test_decision_5_mean_of_bools_and_integers_is_float64_along_axes_too(strategy):
    value = of_replicas(strategy, lambda i: np.array([True, i == 0]))
    count = strategy.num_replicas_in_sync
    mean = strategy.reduce("MEAN", value, axis=0)
    assert type(mean) is np.float64
    assert mean == (count + 1) / (2 * count)
    value = of_replicas(strategy, lambda i: np.full(2, 255 - i, np.uint8))  # up to 256 replicas
    assert strategy.reduce("MEAN", value, axis=0) == 255 - (count - 1) / 2


def test_decision_3_values_of_all_replicas_need_no_message(strategy):
    """In merge_fn one rank alone may reduce and gather them."""
    count = strategy.num_replicas_in_sync
    found = []

    def merge_fn(inner, ids, rows):
        if inner.rank == 0:
            found.append(inner.reduce("SUM", ids, axis=None))
            found.append(inner.reduce("MEAN", rows, axis=0))
            found.append(inner.gather(rows, axis=0).tolist())

    def step():
        ctx = mr.get_replica_context()
        i = ctx.replica_id_in_sync_group
        ctx.merge_call(merge_fn, (i, np.full(i + 1, float(i))))

    strategy.run(step)
    ids = np.arange(count)
    rows = np.repeat(ids, ids + 1)
    expected = [ids.sum(), rows.mean(), rows.tolist()] if strategy.rank == 0 else []
    check_works(strategy)
    assert found == expected


def test_decision_3_values_of_all_and_of_local_replicas_can_stand_in_one_nest(strategy):
    count = strategy.num_replicas_in_sync
    every = mr.PerReplica([float(10**i) for i in range(count)])
    local = of_replicas(strategy, lambda i: float(10**i))
    result = strategy.reduce("SUM", {"every": every, "local": [local]}, axis=None)
    ones = float("1" * count)
    assert result == {"every": ones, "local": [ones]}


# Decision 9: plain values and Mirrored ones


def test_decision_9_mean_of_a_plain_or_mirrored_value_is_itself(strategy):
    for value in (3.0, mr.Mirrored(3.0)):
        assert strategy.reduce("MEAN", value, axis=None) == 3.0
    nest = {"loss": strategy.run(lambda: 1.0), "rate": 0.5}
    assert strategy.reduce("MEAN", nest, axis=None) == {"loss": 1.0, "rate": 0.5}


@pytest.mark.parametrize("op", ["MEAN", "MIN", "MAX"])
@pytest.mark.parametrize("axis", [None, 0])
def test_a_plain_value_that_differs_between_ranks_is_an_error_everywhere(strategy, op, axis):
    needs_two_ranks(strategy)
    plain = {"a": strategy.run(lambda: np.ones(2)), "b": np.array([1.0, strategy.rank])}

    def call():
        strategy.reduce(op, plain, axis=axis)

    assert re.search(
        "values differ between.*gather_objects", str(raises_everywhere(ValueError, call))
    )
    check_works(strategy)


@pytest.mark.parametrize("number", [0.5, 2**70, fractions.Fraction(1, 3)])
def test_a_number_that_differs_between_ranks_is_an_error_everywhere(strategy, number):
    needs_two_ranks(strategy)
    assert strategy.reduce("MAX", number, axis=None) == number
    raises_everywhere(ValueError, lambda: strategy.reduce("MAX", number + strategy.rank, None))
    check_works(strategy)


def test_a_plain_value_at_two_lines_of_callers_is_an_error_that_shows_both(strategy):
    needs_two_ranks(strategy)

    def total():
        return strategy.reduce("MEAN", 1.0, axis=None)

    def call():
        if strategy.rank == 0:
            total()
        else:
            total()
        strategy.barrier()

    text = str(raises_everywhere(mr.errors.CollectiveMismatchError, call))
    sides = re.findall(r"reduce\(MEAN, axis=None\) at (.*?)[;.] ", text)
    assert len(set(sides)) == 2, text
    check_works(strategy)


def test_a_call_with_nothing_to_send_is_checked_as_any_other(strategy):
    for op, axis, error in (("nonsense", None, ValueError), ("SUM", "x", TypeError)):
        raises_everywhere(error, lambda op=op, axis=axis: strategy.reduce(op, [], axis=axis))
    check_works(strategy)


@pytest.mark.parametrize("call", ["reduce", "gather", "batch_reduce_to"])
def test_a_call_with_nothing_to_send_is_none_with_something(strategy, call):
    """Otherwise that of one rank would go with the next one of another rank."""
    needs_two_ranks(strategy)
    one = strategy.run(lambda: np.ones(1))
    calls = {
        "reduce": lambda values: strategy.reduce("SUM", values, axis=None),
        "gather": lambda values: strategy.gather(values, axis=0),
        "batch_reduce_to": lambda values: strategy.extended.batch_reduce_to(
            "SUM", [(value, None) for value in values]
        ),
    }

    def loop():
        for step in range(3):
            calls[call]([one] if step % 2 == strategy.rank % 2 else [])

    raises_everywhere(mr.errors.CollectiveMismatchError, loop)
    check_works(strategy)
    assert calls[call]([]) == []
    check_works(strategy)


def test_decision_9_sum_of_a_plain_or_mirrored_value_is_a_value_error(strategy):
    for value in (3.0, np.ones(2), mr.Mirrored(3.0), None, [strategy.run(lambda: 1.0), 3.0]):
        for axis in (None, 0):
            error = raises_everywhere(
                ValueError, lambda v=value, a=axis: strategy.reduce("SUM", v, axis=a)
            )
            assert "strategy.run" in str(error)
    check_works(strategy)


def test_a_plain_value_on_one_rank_alone_is_an_error_everywhere(strategy):
    local = strategy.run(lambda: 1.0)
    value = 3.0 if strategy.rank == strategy.size - 1 else local
    raises_everywhere(ValueError, lambda: strategy.reduce("SUM", value, axis=None))
    check_works(strategy)


# Bad input


WRONG = [
    ("SUM", 0.5, TypeError),
    ("SUM", "x", TypeError),
    ("SUM", (0, "x"), TypeError),
    ("SUM", 2, ValueError),
    ("MEAN", -3, ValueError),
    ("MAX", (0, 5), ValueError),
    ("SUM", (0, 0), ValueError),
    ("SUM", (1, -1), ValueError),
    ("AVERAGE", 0, ValueError),
    (1, None, TypeError),
]


def test_a_wrong_axis_or_op_is_an_error_everywhere_also_on_one_rank_alone(strategy):
    value = strategy.run(lambda: np.ones((2, 3)))
    for wrong_ranks in (set(range(strategy.size)), {0}):
        for op, axis, kind in WRONG:
            given = (op, axis) if strategy.rank in wrong_ranks else ("SUM", 0)
            raises_everywhere(
                kind, lambda given=given: strategy.reduce(given[0], value, axis=given[1])
            )
    check_works(strategy)


def test_an_axis_of_scalars_is_a_value_error_that_says_axis_none(strategy):
    value = strategy.run(lambda: 1.0)
    error = raises_everywhere(ValueError, lambda: strategy.reduce("SUM", value, axis=0))
    assert "axis=None" in str(error)
    check_works(strategy)


@pytest.mark.parametrize("axis", [None, 0])
def test_what_can_not_be_summed_is_a_type_error_that_names_the_leaf(strategy, axis):
    for bad in (np.array([True]), np.array(["a"]), np.array([None])):
        value = of_replicas(strategy, lambda i, bad=bad: {"w": [bad]})
        error = raises_everywhere(
            TypeError, lambda value=value: strategy.reduce("SUM", value, axis=axis)
        )
        assert "['w'][0]" in str(error)
    check_works(strategy)


@pytest.mark.parametrize("axis", [None, 0])
def test_components_that_do_not_fit_are_a_structure_mismatch_everywhere(strategy, axis):
    last = strategy.num_replicas_in_sync - 1
    if last == 0:
        pytest.skip("one replica has nobody to differ from")
    for other in (np.ones((2, 4)), np.ones(2), np.ones((2, 3), np.float32)):
        value = of_replicas(strategy, lambda i, o=other: [o if i == last else np.ones((2, 3))])
        error = raises_everywhere(
            mr.errors.StructureMismatchError,
            lambda value=value: strategy.reduce("SUM", value, axis=axis),
        )
        assert "value[0]" in str(error)
    check_works(strategy)


def test_replicas_of_other_dtypes_that_accumulate_alike_do_not_fit_either(strategy):
    last = strategy.num_replicas_in_sync - 1
    if last == 0:
        pytest.skip("one replica has nobody to differ from")
    value = of_replicas(strategy, lambda i: np.ones(2, np.float16 if i == last else np.float32))
    for axis in (None, 0):
        raises_everywhere(
            mr.errors.StructureMismatchError,
            lambda axis=axis: strategy.reduce("SUM", value, axis=axis),
        )
    check_works(strategy)


@pytest.mark.parametrize("change", [-1, 1])
def test_a_per_replica_with_a_wrong_number_of_components_is_a_value_error(strategy, change):
    number = strategy.num_replicas_in_sync + change
    value = mr.PerReplica([np.ones(1)] * number)
    calls = [
        lambda: strategy.reduce("SUM", value, axis=None),
        lambda: strategy.reduce("SUM", [value], axis=0),
        lambda: strategy.gather(value, axis=0),
        lambda: strategy.run(lambda x: x, (value,)),
        lambda: strategy.run(lambda: mr.get_replica_context().all_reduce("SUM", value)),
        lambda: strategy.run(lambda: mr.get_replica_context().all_gather(value, axis=0)),
    ]
    for call in calls:
        error = raises_everywhere(ValueError, call)
        assert "PerReplica" in str(error)
    check_works(strategy)


MISMATCHES = (mr.errors.StructureMismatchError, mr.errors.CollectiveMismatchError)
ROWS = mr.IndexedSlices(np.ones((1, 2)), [0], (3, 2))


@pytest.mark.parametrize(
    ("call", "usual", "other", "words"),
    [
        ("reduce", np.zeros(2), np.zeros(3), r"float64\[2\].*float64\[3\]"),
        ("reduce", np.zeros((3, 2)), ROWS, "IndexedSlices"),
        ("gather", np.zeros(2), np.zeros((2, 2)), r"float64\[any\].*float64\[any, 2\]"),
    ],
)
def test_unlike_components_that_are_at_hand_are_told_with_replicas_and_ranks(
    strategy, call, usual, other, words
):
    last = strategy.num_replicas_in_sync - 1
    value = mr.PerReplica([*[usual] * last, other])  # the same on all ranks: nothing travels
    if not last:
        pytest.skip("a component alone agrees with itself")
    act = {
        "reduce": lambda: strategy.reduce("SUM", value, axis=None),
        "gather": lambda: strategy.gather(value, axis=0),
    }[call]
    with pytest.raises(MISMATCHES, match=f"(?s){words}") as caught:
        act()
    assert strategy.engine.layout.describe([last]) in str(caught.value)
    assert strategy.engine.layout.describe(range(last)) in str(caught.value)
    check_works(strategy)


@pytest.mark.parametrize("call", ["reduce", "gather"])
def test_what_is_at_hand_and_wrong_on_one_rank_is_an_error_everywhere_beside_what_travels(
    strategy, call
):
    """All ranks find it at the call, so that the next one is the same on all of them."""
    needs_two_ranks(strategy)
    local = of_replicas(strategy, lambda i: np.ones(1))

    def attempt(is_wrong):
        row = np.array([None if is_wrong else 1.0])
        nest = [mr.PerReplica([row] * strategy.num_replicas_in_sync), local]
        try:
            if call == "reduce":
                strategy.reduce("SUM", nest, axis=None)
            else:
                strategy.gather(nest, axis=0)
        except TypeError:
            error_of(lambda: strategy.reduce("MAX", local, axis=None))  # where ranks apart meet
            raise

    for culprit in (0, strategy.size - 1):
        is_wrong = strategy.rank == culprit
        error = raises_everywhere(ValueError, lambda is_wrong=is_wrong: attempt(is_wrong))
        assert "the values differ between" in str(error)
        check_works(strategy)
    raises_everywhere(TypeError, lambda: attempt(True))
    check_works(strategy)


def test_an_integer_beside_a_float_is_one_where_all_components_are_at_hand(strategy):
    count = strategy.num_replicas_in_sync
    total = strategy.reduce("SUM", mr.PerReplica([0.5, *range(1, count)]), axis=None)
    assert type(total) is np.float64
    assert total == 0.5 + sum(range(count))
