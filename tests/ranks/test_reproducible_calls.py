"""reproducible=True: every call that reduces gives the bits of one sum in numpy (in_order.py).

And what options there are for it, in a strategy and in a call.
"""

import numpy as np
import pytest

import mpi_replica as mr
from contributions import build, native
from everywhere import (
    check_works,
    cost_of,
    culprits,
    gathered,
    holds_everywhere,
    needs_two_ranks,
    needs_two_replicas,
    raises_everywhere,
)
from hard_numbers import Hard, Scalar
from in_order import COMBINES, bits, combined, reduced_in_order
from mpi_replica.core.nest import map_structure

CALL = mr.errors.CollectiveMismatchError

# What travels in headers, in a message, in parts, and in a merge_fn only when it is looked at.
NEST = {
    "large": Hard("float32", (149, 151), 1, 1),
    "medium": [Hard("float16", (300,), 2, 2), Hard("float64", (400,), 3)],
    "small": (Scalar("float64", (), 4), Hard("complex64", (2, 3), 5)),
    "whole": Hard("int32", (3,), 6),
}


def mine():
    return mr.get_replica_context().replica_id_in_sync_group


def values(nest=NEST):
    """Return what the replica that calls has."""
    return build(nest, lambda leaf: leaf.of(mine()))


def expected(strategy, op, nest=NEST):
    replicas = range(strategy.num_replicas_in_sync)
    return build(nest, lambda leaf: reduced_in_order(op, [leaf.of(i) for i in replicas]))


def check_bits(results, right):
    """Check results of this rank: one a replica, or one."""
    holds_everywhere(lambda: [_same(bits(result), bits(right)) for result in results])


def _same(found, right):
    assert found == right


def plain(nest):
    return map_structure(lambda leaf: leaf.value if isinstance(leaf, mr.Mirrored) else leaf, nest)


def reduced(strategy, op):
    return strategy.reduce(op, strategy.run(values), axis=None)


def reduced_to_all(strategy, op):
    return plain(strategy.extended.reduce_to(op, strategy.run(values), None))


def reduced_in_a_batch(strategy, op):
    given = strategy.run(values)
    pairs = [(given[name], None) for name in NEST]
    return dict(zip(NEST, map(plain, strategy.extended.batch_reduce_to(op, pairs)), strict=True))


def reduced_in_a_merge_fn(strategy, op):
    """Small components are at hand there, large ones are not."""
    return merged(strategy, lambda strategy, x: strategy.reduce(op, x, axis=None))


def reduced_where_all_are_at_hand(strategy, op):
    def merge_fn(strategy, x):
        map_structure(lambda leaf: leaf.values, x)
        return plain(strategy.extended.reduce_to(op, x, None))

    return merged(strategy, merge_fn)


def merged(strategy, merge_fn):
    results = []

    def step():
        mr.get_replica_context().merge_call(
            lambda strategy, x: results.append(merge_fn(strategy, x)), (values(),)
        )

    strategy.run(step)
    (result,) = results
    return result


WAYS = [
    *(reduced, reduced_to_all, reduced_in_a_batch),
    *(reduced_in_a_merge_fn, reduced_where_all_are_at_hand),
]


@pytest.mark.parametrize("op", ["SUM", "MEAN"])
@pytest.mark.parametrize("way", WAYS)
def test_what_is_reduced_from_above_has_the_bits(reproducible, way, op):
    check_bits([way(reproducible, op)], expected(reproducible, op))


def test_what_one_rank_gets_has_the_bits(reproducible):
    last = reproducible.size - 1
    given = reproducible.run(values)
    result = reproducible.extended.reduce_to("SUM", given, last)
    if reproducible.rank == last:
        assert bits(result) == bits(expected(reproducible, "SUM"))
    else:
        assert result is None


def along(op, leaves, axis):
    """The reference of a reduction along axes: extents differ, and MEAN weighs by elements."""
    rows = [np.ascontiguousarray(native(leaf)) for leaf in leaves]
    wide = "float32" if rows[0].dtype == "float16" else rows[0].dtype
    with np.errstate(all="ignore"):
        totals = [np.add.reduce(row, axis=axis, dtype=wide) for row in rows]
        total = combined(COMBINES[op], totals)
        if op == "MEAN":
            total = total / (sum(row.size for row in rows) // totals[0].size)
        total = np.where(np.isnan(total), np.nan, total)
        return total.astype(wide).astype(rows[0].dtype)[()]


@pytest.mark.parametrize("op", ["SUM", "MEAN"])
@pytest.mark.parametrize(("axis", "shape"), [(0, (0, 7)), (-2, (3, 0, 501)), ((0, 1), (0, 3))])
def test_what_is_reduced_along_axes_has_the_bits(reproducible, axis, shape, op):
    """In whatever order the components are in memory."""
    along_rows = {"axis": shape.index(0), "extents": (5, 9, 2, 1)}
    nest = [Hard(dtype, shape, 1, 1, **along_rows) for dtype in ("float32", "float16", "float64")]
    given = reproducible.run(values, (nest,))
    with np.errstate(over="ignore"):  # where the sum is rounded to float16
        found = reproducible.reduce(op, given, axis)
    right = [along(op, leaf.of_all(reproducible.num_replicas_in_sync), axis) for leaf in nest]
    check_bits([found], right)


@pytest.mark.parametrize("aggregation", [mr.VariableAggregation.SUM, mr.VariableAggregation.MEAN])
def test_variables_have_the_bits_where_they_are_assigned_to_or_read(reproducible, aggregation):
    on_read = {"synchronization": mr.VariableSynchronization.ON_READ}
    for leaf in (Hard("float32", (3,), 1), Hard("float16", (500,), 2), NEST["large"]):
        with reproducible.scope():
            zeros = np.zeros(leaf.shape, leaf.dtype)
            mirrored = mr.Variable(zeros, aggregation=aggregation)
            combined_on_read = mr.Variable(zeros, aggregation=aggregation, **on_read)

        def step(leaf=leaf, both=(mirrored, combined_on_read)):
            for variable in both:
                variable.assign(leaf.of(mine()))

        reproducible.run(step)
        found = [np.asarray(mirrored)]
        if reproducible.num_replicas_in_sync > 1:  # the only component is read as it is
            found.append(np.asarray(combined_on_read))
        check_bits(found, expected(reproducible, aggregation.name, leaf))


def test_indexed_slices_are_those_of_all_replicas_in_order(reproducible):
    leaf = Hard("float32", (2, 3), 1)
    count = reproducible.num_replicas_in_sync
    results = []

    def step():
        slices = mr.IndexedSlices(np.array(native(leaf.of(mine()))), [mine(), 0], (count, 3))
        results.append(mr.get_replica_context().all_reduce("SUM", slices))

    reproducible.run(step)
    right = np.concatenate([native(leaf.of(i)) for i in range(count)])
    check_bits([result.values for result in results], right)


# Options


def step_of(leaf, results, **options):
    given = mr.CommunicationOptions(**options)

    def step():
        results.append(mr.get_replica_context().all_reduce("SUM", leaf.of(mine()), given))

    return step


@pytest.mark.parametrize("dtype", ["complex64", "complex128", "longdouble", "float16", "int16"])
def test_a_leaf_that_is_alone_has_the_bits_in_one_piece_and_in_several(reproducible, dtype):
    """With NaN in it, of which a complex number has two."""
    large = 1_400_000 if reproducible.size <= 32 else 700_000  # each rank makes those of all
    for nbytes in (1 << 16, large):  # of what they accumulate in
        leaf, results = Hard(dtype, (nbytes // max(4, np.dtype(dtype).itemsize) + 11,), 1), []
        reproducible.run(step_of(leaf, results))
        check_bits(results, expected(reproducible, "SUM", leaf))


def test_one_call_alone_can_be_reproducible(strategy):
    for leaf in (NEST["large"], Hard("float32", (3,), 1)):
        results = []
        strategy.run(step_of(leaf, results, reproducible=True))
        check_bits(results, expected(strategy, "SUM", leaf))


def test_one_call_alone_can_go_without_and_costs_as_in_any_strategy(reproducible):
    needs_two_ranks(reproducible)
    counts = {"replicas_per_rank": len(reproducible.local_replica_ids)}
    step = step_of(NEST["large"], [], reproducible=False, implementation="ALLREDUCE")
    without = step_of(NEST["large"], [], reproducible=False)
    with mr.MPIStrategy(**counts) as plain_strategy:
        expected = cost_of(plain_strategy, lambda: plain_strategy.run(step_of(NEST["large"], [])))
    assert cost_of(reproducible, lambda: reproducible.run(step)) == expected
    assert cost_of(reproducible, lambda: reproducible.run(without)) == expected
    by_window = step_of(NEST["large"], [], implementation="SHARED_MEMORY")
    reproducible.run(by_window)  # it may open it
    assert cost_of(reproducible, lambda: reproducible.run(by_window)) != expected


def test_the_library_s_own_order_can_not_be_reproducible(reproducible):
    """Where the call asks for it, on all replicas or on one; and where the options do."""
    for culprit in (None, *culprits(reproducible)):

        def step(culprit=culprit):
            wrong = {"implementation": "ALLREDUCE"} if culprit in (None, mine()) else {}
            options = mr.CommunicationOptions(**wrong)
            return mr.get_replica_context().all_reduce("SUM", 1.0 * mine(), options)

        error = raises_everywhere(ValueError, lambda step=step: reproducible.run(step))
        assert "reproducible=True can't be had with implementation=ALLREDUCE" in str(error)
        check_works(reproducible)
    with pytest.raises(ValueError, match="AUTO, SHARED_MEMORY or ALLTOALL"):
        mr.CommunicationOptions(reproducible=True, implementation="allreduce")


def test_a_strategy_in_the_library_s_own_order_has_no_reproducible_calls():
    options = mr.CommunicationOptions(implementation="ALLREDUCE")
    with mr.MPIStrategy(replicas_per_rank=2, communication_options=options) as strategy:
        step = step_of(NEST["large"], [], reproducible=True)
        raises_everywhere(ValueError, lambda: strategy.run(step))
        check_works(strategy)


@pytest.mark.parametrize(
    ("some", "others", "words"),
    [
        ({"reproducible": True}, {}, ["reproducible"]),
        ({"implementation": "ALLTOALL"}, {}, ["implementation=ALLTOALL"]),
        (
            {"implementation": "ALLTOALL"},
            {"implementation": "SHARED_MEMORY"},
            ["implementation=ALLTOALL", "implementation=SHARED_MEMORY"],
        ),
    ],
)
@pytest.mark.parametrize("size", [3, 20_011])
def test_replicas_that_differ_in_it_are_told_apart_on_every_rank(
    strategy, some, others, words, size
):
    needs_two_replicas(strategy)
    for culprit in culprits(strategy):

        def step(culprit=culprit):
            options = mr.CommunicationOptions(**(some if mine() == culprit else others))
            return mr.get_replica_context().all_reduce("SUM", np.full(size, mine()), options)

        error = raises_everywhere(CALL, lambda step=step: strategy.run(step))
        assert [word for word in words if word not in str(error)] == [], str(error)
        check_works(strategy)


def test_ranks_that_differ_in_it_get_no_strategy():
    ranks = len(gathered(None))
    if ranks == 1:
        pytest.skip("a single rank has nobody to differ from")

    def make():
        from mpi4py import MPI

        options = mr.CommunicationOptions(reproducible=MPI.COMM_WORLD.rank == ranks - 1)
        return mr.MPIStrategy(communication_options=options)

    error = raises_everywhere(ValueError, make)
    assert "reproducible=True" in str(error)
    assert "reproducible=False" in str(error)
