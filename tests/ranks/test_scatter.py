"""Rows that are scattered into variables: the same on all layouts, whatever the aggregation."""

import re

import ml_dtypes
import numpy as np
import pytest

import mpi_replica as mr
from everywhere import check_works, gathered, needs_two_replicas, raises_everywhere
from mpi_replica import IndexedSlices
from mpi_replica import VariableAggregation as Aggregation

ROWS = 5
ALONE = (Aggregation.NONE, Aggregation.ONLY_FIRST_REPLICA)
COMBINE = {"scatter_add": np.add, "scatter_sub": np.subtract}
COMBINE |= {"scatter_min": np.minimum, "scatter_max": np.maximum}
HOWS = [*COMBINE, "scatter_update"]

every_how = pytest.mark.parametrize("how", HOWS)
every_aggregation = pytest.mark.parametrize("aggregation", Aggregation, ids=lambda a: a.name)


def replica_id():
    return mr.get_replica_context().replica_id_in_sync_group


def variable(strategy, aggregation=Aggregation.NONE, initial=None, **settings):
    initial = np.arange(2.0 * ROWS).reshape(ROWS, 2) if initial is None else initial
    with strategy.scope():
        return mr.Variable(initial, aggregation=aggregation, name="table", **settings)


def rows_of(i):
    """What replica `i` gives: another number of rows on each, and an index that stands twice."""
    indices = np.array([3, 0, 3] + [1] * i)
    return IndexedSlices(np.arange(2.0 * len(indices)).reshape(-1, 2) - i, indices)


def on_paper(how, old, slices):
    new = np.array(old)
    for index, row in zip(slices.indices, slices.values, strict=True):
        new[index] = COMBINE[how](new[index], row) if how in COMBINE else row
    return new


def assert_is(v, expected):
    for found in gathered(np.array(v)):
        np.testing.assert_array_equal(found, expected)


def assert_fails(strategy, kind, pattern, call):
    error = raises_everywhere(kind, call)
    assert re.search(pattern, str(error)), error
    check_works(strategy)


@every_how
@pytest.mark.parametrize("aggregation", ALONE, ids=lambda a: a.name)
def test_in_replicas_rows_are_scattered_once_where_nothing_is_added_up(strategy, how, aggregation):
    v = variable(strategy, aggregation)
    before = v.value()

    def step():
        mine = rows_of(1 if aggregation is Aggregation.NONE else replica_id())
        return getattr(v, how)(mine), np.array(v)

    returned, seen = strategy.run(step)
    assert returned is v
    expected = on_paper(how, before, rows_of(aggregation is Aggregation.NONE))
    assert_is(v, expected)
    for found in seen.values:
        np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(before, np.arange(2.0 * ROWS).reshape(ROWS, 2))


@pytest.mark.parametrize("how", ["scatter_add", "scatter_sub"])
def test_in_replicas_the_rows_of_all_add_up_or_their_mean_does(strategy, how):
    number = strategy.num_replicas_in_sync
    for aggregation, divisor in ((Aggregation.SUM, 1), (Aggregation.MEAN, number)):
        v = variable(strategy, aggregation)
        expected = np.array(v)
        for i in range(number):
            mine = rows_of(i)
            mine = IndexedSlices(mine.values / divisor, mine.indices)
            expected = on_paper(how, expected, mine)
        strategy.run(lambda v=v: getattr(v, how)(rows_of(replica_id())))
        assert_is(v, expected)


def test_integers_add_up_as_in_tf(strategy):
    needs_two_replicas(strategy)
    v = variable(strategy, Aggregation.SUM, np.zeros(3, int))
    strategy.run(
        lambda: v.scatter_add(IndexedSlices([min(replica_id(), 2)], [min(replica_id(), 2)]))
    )
    number = strategy.num_replicas_in_sync
    assert_is(v, [0, 1, 2 * (number - 2)])


@every_how
def test_on_read_a_replica_scatters_into_its_own_component(strategy, how):
    v = variable(strategy, Aggregation.SUM, synchronization=mr.VariableSynchronization.ON_READ)
    before = np.array(strategy.experimental_local_results(v)[0])
    strategy.run(lambda: getattr(v, how)(rows_of(replica_id())) if replica_id() else None)
    local = zip(strategy.local_replica_ids, strategy.experimental_local_results(v), strict=True)
    for i, found in local:
        np.testing.assert_array_equal(found, on_paper(how, before, rows_of(i)) if i else before)


@every_how
@every_aggregation
def test_from_above_the_rows_of_rank_0_count(strategy, how, aggregation):
    for sync in (mr.VariableSynchronization.ON_WRITE, mr.VariableSynchronization.ON_READ):
        v = variable(strategy, aggregation, synchronization=sync)
        before = np.array(strategy.experimental_local_results(v)[0])

        def scatter(v=v):
            return getattr(v, how)(rows_of(strategy.rank))

        if sync is mr.VariableSynchronization.ON_READ and aggregation is Aggregation.SUM:
            assert_fails(strategy, ValueError, "summed on read", scatter)
            continue
        assert scatter() is v
        for found in strategy.experimental_local_results(v):
            np.testing.assert_array_equal(found, on_paper(how, before, rows_of(0)))


@every_how
def test_in_update_they_must_be_the_same_on_all_ranks(strategy, how):
    v = variable(strategy, Aggregation.MEAN)
    before = np.array(v)
    strategy.extended.update(v, lambda v, rows: getattr(v, how)(rows), args=(rows_of(1),))
    assert_is(v, on_paper(how, before, rows_of(1)))
    if strategy.size > 1:

        def update():
            mine = rows_of(1)
            mine.values[-1, -1] += strategy.rank
            strategy.extended.update(v, lambda v: getattr(v, how)(mine))
            strategy.extended.broadcast_to(0)

        assert_fails(strategy, ValueError, f"update.*{how}.*table.*differ", update)
        assert_is(v, on_paper(how, before, rows_of(1)))


@every_how
def test_under_none_other_rows_or_indices_are_an_error_everywhere(strategy, how):
    needs_two_replicas(strategy)
    v = variable(strategy)
    before = np.array(v)
    last = strategy.num_replicas_in_sync - 1

    def other_values():
        return IndexedSlices(np.ones((2, 2)) * (1 + (replica_id() == last)), [0, 1])

    def other_indices():
        return IndexedSlices(np.ones((2, 2)), [0, 1 + (replica_id() == last)])

    for mine in (other_values, other_indices):
        assert_fails(
            strategy,
            ValueError,
            "table.*differ.*SUM",
            lambda mine=mine: strategy.run(lambda: getattr(v, how)(mine())),
        )
        assert_is(v, before)


@every_aggregation
def test_what_does_not_fit_on_one_replica_is_an_error_everywhere(strategy, aggregation):
    last = strategy.num_replicas_in_sync - 1
    v = variable(strategy, aggregation)
    before = np.array(v)
    right = IndexedSlices(np.ones((1, 2)), [0])
    for kind, pattern, wrong in [
        (IndexError, r"index 5 \(indices\[1\]\).*shape \(5, 2\).*0 to 4", ([[1, 1]] * 2, [0, 5])),
        (IndexError, r"index -1 ", ([[1, 1]], [-1])),
        (ValueError, r"shape \(1, 3\).*rows", ([[1, 1, 1]], [0])),
        (ValueError, r"dense_shape \(9, 2\)", ([[1, 1]], [0], (9, 2))),
        (TypeError, "complex128", ([[1j, 1]], [0])),
        (TypeError, "IndexedSlices", None),
    ]:
        bad = np.ones((ROWS, 2)) if wrong is None else IndexedSlices(*wrong)

        def step(bad=bad):
            v.scatter_add(bad if replica_id() == last else right)

        pattern = f"table.scatter_add.*{pattern}"
        assert_fails(strategy, kind, pattern, lambda step=step: strategy.run(step))
        assert_fails(strategy, kind, pattern, lambda bad=bad: v.scatter_add(bad))
    assert_is(v, before)


@pytest.mark.parametrize("how", ["scatter_min", "scatter_max", "scatter_update"])
def test_what_has_no_meaning_under_sum_and_mean_is_an_error_everywhere(strategy, how):
    for aggregation in (Aggregation.SUM, Aggregation.MEAN):
        v = variable(strategy, aggregation)
        assert_fails(
            strategy,
            NotImplementedError,
            f"table.{how}.*{aggregation.name}.*ONLY_FIRST_REPLICA",
            lambda v=v: strategy.run(lambda: getattr(v, how)(rows_of(0))),
        )


def test_variables_that_have_no_rows_or_no_numbers_are_an_error_everywhere(strategy):
    scalar = variable(strategy, initial=1.0)
    flags = variable(strategy, initial=np.zeros(3, bool))
    points = variable(strategy, initial=np.zeros(3, "c8"))
    one = IndexedSlices(np.array([True]), [2])
    assert_fails(strategy, ValueError, "no rows.*assign", lambda: scalar.scatter_add(one))
    assert_fails(strategy, TypeError, "table.scatter_add.*bool", lambda: flags.scatter_add(one))
    assert_fails(strategy, TypeError, "scatter_min.*complex", lambda: points.scatter_min(one))
    assert_is(flags.scatter_update(one), [False, False, True])


@pytest.mark.parametrize("dtype", ["i1", "u8", "f2", "f4", "c16", ml_dtypes.bfloat16])
def test_the_dtype_never_changes_and_narrow_floats_add_up_wide(strategy, dtype):
    v = variable(strategy, Aggregation.SUM, np.full(2, 64, dtype))
    quarters = np.full(8, 1, dtype)
    if np.dtype(dtype).kind in "fV":
        quarters = (quarters / 4).astype(dtype)
    strategy.run(lambda: v.scatter_add(IndexedSlices(quarters, [1] * 8)))
    assert v.dtype == dtype
    added = strategy.num_replicas_in_sync * float(quarters.astype(complex).sum().real)
    assert_is(v, np.array([64, 64 + added]).astype(dtype))
