"""Replicas that disagree (DESIGN.md section 6, decisions 12, 13 and 15).

Each mistake is an error on every rank, of the same class and with the same text, that names both
sides; and the next collective gives the right numbers. test_misuse.py makes all of them.
"""

import signal

import numpy as np
import pytest

import mpi_replica as mr
from everywhere import (
    check_mistake,
    check_works,
    needs_two_ranks,
    needs_two_replicas,
    raises_everywhere,
)
from mistakes import MISTAKES
from mpi_replica.collectives.agreement import agreement
from mpi_replica.replicas.returned_values import RunEnd

STRUCTURE, CALL = mr.errors.StructureMismatchError, mr.errors.CollectiveMismatchError


@pytest.fixture
def fingerprints(monkeypatch):
    """The way of many ranks: one small reduction that compares, and headers only where needed.

    Before `strategy` in the arguments of a test.
    """
    monkeypatch.setattr(agreement, "_ALLGATHER_RANKS", 0)


class Total:
    """At its end it adds something up, and swallows what was raised."""

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.value = mr.get_replica_context().all_reduce("SUM", 1.0)
        return True


def test_a_call_that_all_replicas_come_to_on_different_ways_is_one_call(strategy):
    """Behind an exception or not: Python has the code of ``finally`` and ``with`` for each way."""

    def step():
        context = mr.get_replica_context()
        fails = context.replica_id_in_sync_group == 1
        with Total() as total:
            if fails:
                raise ValueError("no rows")
        try:
            try:
                if fails:
                    raise ValueError("no rows")
            finally:
                again = context.all_reduce("SUM", 1.0)
        except ValueError:
            pass
        return total.value + again

    count = strategy.num_replicas_in_sync
    assert set(strategy.experimental_local_results(strategy.run(step))) == {2.0 * count}


# What tests/ranks/test_misuse.py makes in its layouts must be seen in the others, too.
CORE = [
    *("other shape, large", "other dtype of as many bytes", "other dict key", "sum against mean"),
    *("other merge fn", "swapped on two lines", "returns early", "raises between collectives"),
    *("gather for reduce", "runs another function"),
]


@pytest.mark.parametrize("name", CORE)
def test_a_mistake_is_an_error_on_many_ranks_too(fingerprints, strategy, name):
    make_mistake(strategy, name)


@pytest.mark.parametrize("name", CORE)
def test_a_mistake_is_an_error_in_uneven_layouts_too(strategy, name):
    make_mistake(strategy, name)


def make_mistake(strategy, name):
    (mistake,) = (one for one in MISTAKES if one.name == name)
    (needs_two_ranks if mistake.outside else needs_two_replicas)(strategy)
    check_mistake(strategy, mistake)


def first_step():
    return 1


def test_what_one_replica_catches_and_another_does_not_is_raised_by_run(strategy):
    needs_two_replicas(strategy)

    def step():
        context = mr.get_replica_context()
        is_last = context.replica_id_in_sync_group == context.num_replicas_in_sync - 1
        try:
            context.all_reduce("SUM", np.ones(2 + is_last))
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


def test_none_from_all_replicas_is_none_also_after_one_of_them_returned_a_value(strategy):
    values = [1.0, None, None, 2.0, None]

    def step(value):
        return None if mr.get_replica_context().replica_id_in_sync_group else value

    # one call site, as in the loop of a training
    found = [strategy.run(step, args=(value,)) for value in values]
    assert [one is None for one in found] == [one is None for one in values]


def test_ctrl_c_at_the_end_of_a_run_leaves_nothing_for_the_next_one(strategy, monkeypatch):
    needs_two_ranks(strategy)
    promote = RunEnd.promote

    def interrupted(end, change):
        promote(end, change)
        if strategy.rank == strategy.size - 1:
            signal.raise_signal(signal.SIGINT)

    def run(value):
        return strategy.run(step, args=(value,))

    def step(value):
        return None if mr.get_replica_context().replica_id_in_sync_group else value

    assert run(None) is None
    with monkeypatch.context() as patched:
        patched.setattr(RunEnd, "promote", interrupted)
        raises_everywhere(KeyboardInterrupt, lambda: run(1.0))
    assert run(None) is None
    assert run(2.0) is not None
    check_works(strategy)


def test_what_a_replica_returned_is_told_alike_whoever_shares_its_rank(strategy):
    needs_two_replicas(strategy)

    def step():
        ctx = mr.get_replica_context()
        return 5.0 if ctx.replica_id_in_sync_group == 0 else ctx.all_reduce("SUM", 1.0)

    error = raises_everywhere(CALL, lambda: strategy.run(step))
    assert "none" not in str(error)
    assert "value" in str(error)
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
