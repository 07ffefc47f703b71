"""Assignments that the ranks compare later: few old values are held, and all are checked."""

import re
import weakref

import numpy as np
import pytest

import mpi_replica as mr
from everywhere import (
    check_works,
    cost_of,
    gathered,
    needs_two_ranks,
    needs_two_replicas,
    raises_everywhere,
)

MOST_HELD_BYTES, MOST_NOTES = 16 << 20, 64


def replica_id():
    return mr.get_replica_context().replica_id_in_sync_group


def in_replicas(strategy, change, times):
    """Every replica calls `change` so often, in one run."""
    strategy.run(lambda: [change() for _ in range(times)] and None)


def in_update(strategy, change, times):
    """Every rank calls `change` in `update`, so often."""
    for _ in range(times):
        strategy.extended.update(change.variable, lambda _: change())


class Adding:
    """Adds one to all items, and knows which of the arrays that it wrote are still there."""

    def __init__(self, strategy, items):
        with strategy.scope():
            self.variable = mr.Variable(np.zeros(items))
        self._one = np.ones(items)
        self._written = []
        self.most_alive = 0

    def __call__(self):
        self.variable.assign_add(self._one)
        self._written.append(weakref.ref(self.variable.value().base))
        alive = len({id(array) for ref in self._written if (array := ref()) is not None})
        self.most_alive = max(self.most_alive, alive)


@pytest.mark.parametrize("items", [1, 1 << 18], ids=["8 bytes", "2 MiB"])
@pytest.mark.parametrize("loop", [in_replicas, in_update])
def test_a_loop_of_assignments_holds_few_old_values(strategy, loop, items):
    add, times = Adding(strategy, items), 2 * MOST_NOTES + 5
    loop(strategy, add, times)
    held = 0 if strategy.size == 1 else min(MOST_NOTES, MOST_HELD_BYTES // (8 * items) + 1)
    assert add.most_alive <= held + 1
    assert gathered(float(add.variable[-1])) == [times] * strategy.size


@pytest.mark.usefixtures("small_world")
def test_a_step_with_a_few_small_assignments_sends_nothing_for_them(strategy):
    add = Adding(strategy, 1)
    for times in (0, 1, MOST_NOTES - 1):
        assert cost_of(strategy, lambda n=times: in_replicas(strategy, add, n)) == (1, 256)


@pytest.mark.parametrize("right", [3, MOST_NOTES - 1, MOST_NOTES, 2 * MOST_NOTES + 3])
def test_a_wrong_assignment_after_many_right_ones_is_an_error_everywhere(strategy, right):
    needs_two_replicas(strategy)
    with strategy.scope():
        v = mr.Variable(0.0, name="weights")

    def step():
        for _ in range(right):
            v.assign_add(1.0)
        v.assign_add(float(replica_id()))
        for _ in range(MOST_NOTES):
            v.assign_add(1.0)

    error = raises_everywhere(ValueError, lambda: strategy.run(step))
    assert re.search("weights.*differ.*MEAN.*SUM.*ONLY_FIRST_REPLICA", str(error))
    assert gathered(float(v)) == [right] * strategy.size
    check_works(strategy)


@pytest.mark.parametrize("right", [3, MOST_NOTES, 2 * MOST_NOTES + 3])
def test_a_wrong_update_after_many_right_ones_is_an_error_everywhere(strategy, right):
    needs_two_ranks(strategy)
    with strategy.scope():
        v = mr.Variable(0.0, name="weights")

    def updates():
        for number in range(right + MOST_NOTES):
            delta = float(strategy.rank) if number == right else 1.0
            strategy.extended.update(v, lambda v, d=delta: v.assign_add(d))

    error = raises_everywhere(ValueError, updates)
    assert re.search("update.*assign_add.*weights.*differ.*merge_call", str(error))
    assert gathered(float(v)) == [right] * strategy.size
    check_works(strategy)
