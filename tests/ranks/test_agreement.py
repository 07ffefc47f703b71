"""Replicas that disagree (DESIGN.md section 6, decisions 12, 13 and 15).

Each mistake is an error on every rank, of the same class and with the same text, that names both
sides; and the next collective gives the right numbers.
"""

import numpy as np
import pytest

import mpi_replica as mr
from everywhere import (
    check_works,
    culprits,
    named,
    needs_two_ranks,
    needs_two_replicas,
    raises_everywhere,
    ranks_of,
)
from mpi_replica.collectives import agreement

STRUCTURE, CALL = mr.errors.StructureMismatchError, mr.errors.CollectiveMismatchError


@pytest.fixture
def fingerprints(monkeypatch):
    """The way of many ranks: one small reduction that compares, and headers only where needed.

    Before `strategy` in the arguments of a test.
    """
    monkeypatch.setattr(agreement, "_ALLGATHER_RANKS", 0)


def reduced(context, value, **options):
    return context.all_reduce("SUM", value, **options)


def first_step():
    return 1


def second_step():
    return 2


def first_fn(strategy, value=None):
    return 1


def second_fn(strategy, value=None):
    return 2


def swapped_on_two_lines(context, is_odd):
    one, other = np.ones(2), np.full(2, 10.0)
    if is_odd:
        other = reduced(context, other)
        one = reduced(context, one)
    else:
        one = reduced(context, one)
        other = reduced(context, other)
    return one, other


def swapped_through_a_loop(context, is_odd):
    values = {"one": np.ones(2), "other": np.full(2, 10.0)}
    calls = [
        lambda: reduced(context, values["one"]),
        lambda: reduced(context, values["other"]),
    ]
    return [call() for call in (calls[::-1] if is_odd else calls)]


def swapped_on_one_line(context, is_odd):
    calls = [lambda: context.all_reduce("SUM", 1.0), lambda: context.all_reduce("SUM", 10.0)]
    return [call() for call in (calls[::-1] if is_odd else calls)]


def swapped_in_one_expression(context, is_odd):
    total = context.all_reduce
    return total("SUM", 1.0) + total("SUM", 2.0) if not is_odd else total("SUM", 1.0)


def one_call_more(context, is_odd):
    for _ in range(2 + is_odd):
        context.all_reduce("SUM", 1.0)


def one_call_fewer(context, is_odd):
    for _ in range(3 - is_odd):
        context.all_reduce("SUM", 1.0)


def returns_early(context, is_odd):
    if is_odd:
        return 0.0
    return context.all_reduce("SUM", 1.0)


def one_call_at_the_end(context, is_odd):
    if is_odd:
        return context.all_reduce("SUM", 1.0)
    return 0.0


def other_axis(context, is_odd):
    return context.all_gather(np.ones((2, 2)), axis=int(is_odd))


def other_axis_from_the_end(context, is_odd):
    return context.all_gather(np.ones((2, 2)), axis=-1 if is_odd else 0)


def gather_for_reduce(context, is_odd):
    return context.all_gather(np.ones(2), 0) if is_odd else context.all_reduce("SUM", np.ones(2))


def merge_for_reduce(context, is_odd):
    return context.merge_call(first_fn) if is_odd else context.all_reduce("SUM", 1.0)


def other_names(context, is_odd):
    options = mr.CommunicationOptions(name="odd" if is_odd else "even")
    return context.all_reduce("SUM", 1.0, options=options)


def an_empty_name(context, is_odd):
    options = mr.CommunicationOptions(name="") if is_odd else None
    return context.all_reduce("SUM", 1.0, options=options)


# What each replica does, by whether it is the culprit; the error; words of both sides in its text.
MISTAKES = {
    "shape": (
        lambda context, is_odd: reduced(context, np.ones(3 if is_odd else 2)),
        STRUCTURE,
        ["[3]", "[2]"],
    ),
    "number of dimensions": (
        lambda context, is_odd: reduced(context, np.ones((2, 1) if is_odd else 2)),
        STRUCTURE,
        ["[2, 1]", "[2]"],
    ),
    "transposed": (
        lambda context, is_odd: reduced(context, np.ones((1, 2) if is_odd else (2, 1))),
        STRUCTURE,
        ["[1, 2]", "[2, 1]"],
    ),
    "scalar against array": (
        lambda context, is_odd: reduced(context, np.ones(1)[0] if is_odd else np.ones(1)),
        STRUCTURE,
        ["float64[]", "float64[1]"],
    ),
    "large shape": (
        lambda context, is_odd: reduced(context, np.ones(40000 + is_odd)),
        STRUCTURE,
        ["40000", "40001"],
    ),
    "dtype": (
        lambda context, is_odd: reduced(context, np.ones(2, "f4" if is_odd else "f8")),
        STRUCTURE,
        ["float32", "float64"],
    ),
    "numpy integer against float": (
        lambda context, is_odd: reduced(context, np.int64(1) if is_odd else np.float64(1)),
        STRUCTURE,
        ["int64", "float64"],
    ),
    "second leaf": (
        lambda context, is_odd: reduced(
            context, {"a": np.ones(2), "b": [np.ones(3), np.ones(5 if is_odd else 4)]}
        ),
        STRUCTURE,
        ["['b'][1]", "[5]", "[4]"],
    ),
    "dict keys": (
        lambda context, is_odd: reduced(context, {"odd" if is_odd else "even": np.ones(2)}),
        STRUCTURE,
        ["odd", "even"],
    ),
    "types of dict keys": (
        lambda context, is_odd: reduced(context, {1 if is_odd else "1": np.ones(2)}),
        STRUCTURE,
        ["1", "'1'"],
    ),
    "list against tuple": (
        lambda context, is_odd: reduced(context, [1.0, 2.0] if is_odd else (1.0, 2.0)),
        STRUCTURE,
        ["[*, *]", "(*, *)"],
    ),
    "nest against leaf": (
        lambda context, is_odd: reduced(context, [1.0] if is_odd else 1.0),
        STRUCTURE,
        [],
    ),
    "number of leaves": (
        lambda context, is_odd: reduced(context, [1.0] * (3 if is_odd else 2)),
        STRUCTURE,
        ["[2]"],
    ),
    "dimension of a gather": (
        lambda context, is_odd: context.all_gather(np.ones((2, 3 if is_odd else 4)), axis=0),
        STRUCTURE,
        ["3]", "4]"],
    ),
    "dtype of a gather": (
        lambda context, is_odd: context.all_gather(np.ones(2, "i4" if is_odd else "i8"), axis=0),
        STRUCTURE,
        ["int32", "int64"],
    ),
    "arguments of merge_call": (
        lambda context, is_odd: context.merge_call(first_fn, args=([1] if is_odd else 1,)),
        STRUCTURE,
        [],
    ),
    "keywords of merge_call": (
        lambda context, is_odd: context.merge_call(first_fn, kwargs={"value": 1} if is_odd else {}),
        STRUCTURE,
        ["value"],
    ),
    "op": (
        lambda context, is_odd: context.all_reduce("MEAN" if is_odd else "SUM", 1.0),
        CALL,
        ["MEAN", "SUM"],
    ),
    "axis": (other_axis, CALL, ["axis=1", "axis=0"]),
    "negative axis": (other_axis_from_the_end, CALL, ["axis=-1", "axis=0"]),
    "merge_fn": (
        lambda context, is_odd: context.merge_call(second_fn if is_odd else first_fn),
        CALL,
        ["second_fn", "first_fn"],
    ),
    "merge_fn on the same line": (
        lambda context, is_odd: context.merge_call((lambda s: 1) if is_odd else (lambda s: 2)),
        CALL,
        ["<lambda> at test_agreement.py:"],
    ),
    "all_gather for all_reduce": (gather_for_reduce, CALL, ["all_gather", "all_reduce"]),
    "merge_call for all_reduce": (merge_for_reduce, CALL, ["merge_call", "all_reduce"]),
    "two lines swapped": (swapped_on_two_lines, CALL, ["test_agreement.py:"]),
    "swapped through a helper": (swapped_through_a_loop, CALL, ["test_agreement.py:"]),
    "swapped on one line": (swapped_on_one_line, CALL, ["test_agreement.py:"]),
    "other place in one expression": (swapped_in_one_expression, CALL, ["test_agreement.py:"]),
    "other names": (other_names, CALL, ["odd", "even"]),
    "an empty name": (an_empty_name, CALL, ["(named '')", "test_agreement.py:"]),
    "one call more": (one_call_more, CALL, ["all_reduce(SUM", "returned"]),
    "one call fewer": (one_call_fewer, CALL, ["all_reduce(SUM", "returned"]),
    "an early return": (returns_early, CALL, ["all_reduce(SUM", "returned"]),
    "a call at the end": (one_call_at_the_end, CALL, ["all_reduce(SUM", "returned"]),
    "what run returns": (
        lambda context, is_odd: {"odd": 1} if is_odd else {"even": 1},
        STRUCTURE,
        ["odd", "even"],
    ),
}


CORE = ["large shape", "dtype", "op", "merge_fn", "two lines swapped", "an early return"]


def others_named(strategy, culprit):
    """Return the words for all replicas but one."""
    ids = [i for i in range(strategy.num_replicas_in_sync) if i != culprit]
    return f"replica{'s' * (len(ids) > 1)} {ids[0]}"


@pytest.mark.parametrize("mistake", CORE)
def test_a_mistake_is_an_error_on_many_ranks_too(fingerprints, strategy, mistake):
    check_mistake(strategy, mistake)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_the_same_error_on_every_rank_and_names_both_sides(strategy, mistake):
    """Decision 12, whichever replica makes it: the first, the middle or the last."""
    check_mistake(strategy, mistake)


def check_mistake(strategy, mistake):
    needs_two_replicas(strategy)
    do, kind, words = MISTAKES[mistake]
    ranks = ranks_of(strategy)
    for culprit in culprits(strategy):

        def step(culprit=culprit):
            context = mr.get_replica_context()
            return do(context, context.replica_id_in_sync_group == culprit)

        error = raises_everywhere(kind, lambda step=step: strategy.run(step))
        text = str(error)
        assert named(culprit, ranks[culprit]) in text
        assert others_named(strategy, culprit) in text
        assert "test_agreement.py:" in text
        assert [word for word in words if word not in text] == []
        check_works(strategy)


@pytest.mark.parametrize(
    "mistake", ["shape", "dict keys", "op", "axis", "merge_fn", "two lines swapped"]
)
def test_a_mistake_can_be_caught_at_the_call_where_all_replicas_are_at_one(strategy, mistake):
    needs_two_replicas(strategy)
    do, kind, _ = MISTAKES[mistake]
    count = strategy.num_replicas_in_sync
    for culprit in culprits(strategy):
        caught = []

        def step(culprit=culprit, caught=caught):
            context = mr.get_replica_context()
            mine = context.replica_id_in_sync_group
            try:
                do(context, mine == culprit)
            except kind as error:
                caught.append(str(error))
            return context.all_reduce("SUM", mine + 1)

        totals = strategy.experimental_local_results(strategy.run(step))
        assert set(totals) == {count * (count + 1) // 2}
        assert len(set(caught)) == 1
        assert len(caught) == len(strategy.local_replica_ids)
        check_works(strategy)


def test_what_one_replica_catches_and_another_does_not_is_raised_by_run(strategy):
    needs_two_replicas(strategy)

    def step():
        context = mr.get_replica_context()
        is_last = context.replica_id_in_sync_group == context.num_replicas_in_sync - 1
        try:
            reduced(context, np.ones(2 + is_last))
        except STRUCTURE:
            if is_last:
                raise
        return context.all_reduce("SUM", 1.0)

    raises_everywhere(STRUCTURE, lambda: strategy.run(step))
    check_works(strategy)


def test_kind_op_and_axis_are_compared_before_structure(strategy):
    needs_two_replicas(strategy)

    def step():
        context = mr.get_replica_context()
        if context.replica_id_in_sync_group == 0:
            return context.all_reduce("SUM", {"a": np.ones(2)})
        return context.all_reduce("MEAN", [np.ones(3)])

    raises_everywhere(CALL, lambda: strategy.run(step))
    check_works(strategy)


def test_the_error_says_that_a_name_makes_two_lines_one_call(strategy):
    """Decision 13."""
    needs_two_replicas(strategy)

    def step(options=None):
        context = mr.get_replica_context()
        if context.replica_id_in_sync_group == 0:
            return context.all_reduce("SUM", 1.0, options=options)
        return context.all_reduce("SUM", 2.0, options=options)

    error = raises_everywhere(CALL, lambda: strategy.run(step))
    line = step.__code__.co_firstlineno
    assert "options=mr.CommunicationOptions(name=" in str(error)
    assert f"test_agreement.py:{line + 3}" in str(error)
    assert f"test_agreement.py:{line + 4}" in str(error)
    totals = strategy.run(step, (mr.CommunicationOptions(name="total"),))
    expected = 2.0 * strategy.num_replicas_in_sync - 1
    assert set(strategy.experimental_local_results(totals)) == {expected}


def test_ifs_and_loops_with_the_same_outcome_everywhere_are_legal(strategy):
    """Decision 13: loops, comprehensions, recursion, helpers, uneven loops between calls."""
    count = strategy.num_replicas_in_sync

    def down(context, depth):
        return context.all_reduce("SUM", 1.0) if depth == 0 else down(context, depth - 1)

    def step():
        context = mr.get_replica_context()
        total = 0.0
        for turn in range(3):
            if turn % 2 == 0:
                total += context.all_reduce("SUM", 1.0)
        total += sum([context.all_reduce("SUM", 1.0) for _ in range(3)])
        for _ in range(context.replica_id_in_sync_group):
            total += 0.0
        return total + down(context, 4)

    results = strategy.experimental_local_results(strategy.run(step))
    assert set(results) == {6.0 * count}


def test_a_python_int_here_and_a_float_there_is_no_mistake(strategy):
    """Decision 5."""

    def step():
        context = mr.get_replica_context()
        mine = context.replica_id_in_sync_group
        return context.all_reduce("SUM", 0.5 if mine == 0 else mine)

    count = strategy.num_replicas_in_sync
    results = strategy.experimental_local_results(strategy.run(step))
    assert set(results) == {0.5 + count * (count - 1) / 2}
    assert {result.dtype for result in results} == {np.dtype("f8")}


def test_mistakes_one_after_the_other_leave_nothing_behind(strategy):
    needs_two_replicas(strategy)

    def step(number):
        context = mr.get_replica_context()
        is_odd = context.replica_id_in_sync_group == number % context.num_replicas_in_sync
        do = [swapped_on_two_lines, returns_early, gather_for_reduce, one_call_more][number % 4]
        return do(context, is_odd)

    for number in range(8):
        raises_everywhere(CALL, lambda number=number: strategy.run(step, (number,)))
    check_works(strategy)


def different_on(strategy, culprit_rank, one, other):
    return other if strategy.rank == culprit_rank else one


@pytest.fixture
def ids(strategy):
    return strategy.run(lambda: np.array([mr.get_replica_context().replica_id_in_sync_group]))


STRATEGY_LEVEL = {
    "gather for reduce": (
        lambda s, ids: s.reduce("SUM", ids, axis=None),
        lambda s, ids: s.gather(ids, axis=0),
        ["reduce(", "gather("],
    ),
    "run for reduce": (
        lambda s, ids: s.reduce("SUM", ids, axis=None),
        lambda s, ids: s.run(lambda: 1),
        ["reduce("],
    ),
    "run with a collective for reduce": (
        lambda s, ids: s.reduce("SUM", ids, axis=None),
        lambda s, ids: s.run(lambda: mr.get_replica_context().all_reduce("SUM", 1)),
        ["reduce(", "all_reduce("],
    ),
    "another function": (
        lambda s, ids: s.run(first_step),
        lambda s, ids: s.run(second_step),
        ["first_step", "second_step"],
    ),
    "another op": (
        lambda s, ids: s.reduce("SUM", ids, axis=None),
        lambda s, ids: s.reduce("MEAN", ids, axis=None),
        ["SUM", "MEAN"],
    ),
    "another axis": (
        lambda s, ids: s.reduce("SUM", ids, axis=None),
        lambda s, ids: s.reduce("SUM", ids, axis=0),
        ["axis=", "reduce(SUM"],
    ),
    "reduce_to for reduce": (
        lambda s, ids: s.extended.reduce_to("SUM", ids, None),
        lambda s, ids: s.reduce("SUM", ids, axis=None),
        ["reduce_to(", "reduce("],
    ),
    "close for reduce": (
        lambda s, ids: s.reduce("SUM", ids, axis=None),
        lambda s, ids: s.close(),
        ["reduce(", "close("],
    ),
}


@pytest.mark.parametrize("mistake", ["gather for reduce", "another function"])
def test_many_ranks_at_different_calls_of_the_strategy(fingerprints, strategy, ids, mistake):
    check_ranks_apart(strategy, ids, mistake)


@pytest.mark.parametrize("mistake", STRATEGY_LEVEL)
def test_ranks_at_different_calls_of_the_strategy(strategy, ids, mistake):
    """Decision 15: run, reduce, gather and close are collective calls."""
    check_ranks_apart(strategy, ids, mistake)


def check_ranks_apart(strategy, ids, mistake):
    needs_two_ranks(strategy)
    one, other, words = STRATEGY_LEVEL[mistake]
    for culprit in {0, strategy.size // 2, strategy.size - 1}:
        do = different_on(strategy, culprit, one, other)
        text = str(raises_everywhere(CALL, lambda do=do: do(strategy, ids)))
        assert [word for word in words if word not in text] == []
        assert f"(rank {culprit})" in text
        assert "test_agreement.py:" in text
        check_works(strategy)


def test_ranks_that_reduce_components_of_different_shapes(strategy):
    needs_two_replicas(strategy)
    ranks = ranks_of(strategy)
    for culprit in culprits(strategy):
        values = strategy.experimental_distribute_values_from_function(
            lambda context, c=culprit: np.ones(3 if context.replica_id_in_sync_group == c else 2)
        )
        error = raises_everywhere(
            STRUCTURE, lambda values=values: strategy.reduce("SUM", values, axis=None)
        )
        assert named(culprit, ranks[culprit]) in str(error)
        check_works(strategy)


def test_ranks_that_call_run_at_different_lines(strategy):
    """Decision 15: the call site of run is compared at its end."""
    needs_two_ranks(strategy)

    def at_another_line():
        return strategy.run(first_step)

    def at_a_line():
        return strategy.run(first_step)

    is_last = strategy.rank == strategy.size - 1
    raises_everywhere(CALL, at_another_line if is_last else at_a_line)
    check_works(strategy)


def test_a_name_makes_runs_at_two_lines_one_call(strategy):
    """Decision 13."""
    options = mr.CommunicationOptions(name="x")

    def at_another_line():
        return strategy.run(replica_id, options=options)

    def at_a_line():
        return strategy.run(replica_id, options=options)

    def replica_id():
        return mr.get_replica_context().replica_id_in_sync_group

    is_last = strategy.rank == strategy.size - 1
    result = (at_another_line if is_last else at_a_line)()
    assert result.values == strategy.local_replica_ids
    if strategy.size > 1:
        unlike = mr.CommunicationOptions(name="y") if is_last else options
        error = raises_everywhere(CALL, lambda: strategy.run(replica_id, options=unlike))
        assert "named 'x'" in str(error)
        assert "named 'y'" in str(error)
    check_works(strategy)


def test_a_rank_that_runs_once_more_is_told_and_works_on(strategy, ids):
    """Decision 15: after an agreed error all ranks count their runs alike."""
    needs_two_ranks(strategy)

    def twice():
        strategy.run(first_step)
        if strategy.rank == strategy.size - 1:
            strategy.run(first_step)
        strategy.reduce("SUM", ids, axis=None)

    for _ in range(3):
        raises_everywhere(CALL, twice)
    check_works(strategy)


def test_run_raises_on_every_rank_or_on_none_also_without_a_collective(strategy):
    """Decision 15."""
    for culprit in culprits(strategy):

        def step(culprit=culprit):
            if mr.get_replica_context().replica_id_in_sync_group == culprit:
                raise ValueError(f"replica {culprit} has no data")

        raises_everywhere(ValueError, lambda step=step: strategy.run(step))
        check_works(strategy)


def test_none_on_some_replicas_is_no_mistake(strategy):
    """Decision 2: None from all R replicas is None, all else a PerReplica."""

    def step():
        mine = mr.get_replica_context().replica_id_in_sync_group
        return None, (None if mine == 0 else mine)

    nothing, something = strategy.run(step)
    assert nothing is None
    if strategy.num_replicas_in_sync == 1:
        assert something is None
    else:
        ids = strategy.local_replica_ids
        assert something.values == tuple(None if i == 0 else i for i in ids)
