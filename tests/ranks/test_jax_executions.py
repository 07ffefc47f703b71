"""Compiled functions that take their time, while replicas wait in their collectives."""

import threading

import numpy as np
import pytest

import mpi_replica as mr
from everywhere import check_works, holds_everywhere, needs_two_replicas, raises_everywhere
from mpi_replica.errors import CollectiveMismatchError

jax = pytest.importorskip("jax", reason="jax is not installed")

jax.config.update("jax_num_cpu_devices", 8)  # the tests make strategies of several sizes

import jax.numpy as jnp  # noqa: E402

from mpi_replica.replicas.jax_executions import JaxExecution  # noqa: E402

SIZE = 700


def worked_on(matrix, times=6):
    """What takes some tenths of a second, so that XLA has threads for it."""
    for _ in range(times):
        matrix = jnp.tanh(matrix @ matrix / SIZE)
    return matrix


def own_id():
    return mr.get_replica_context().replica_id_in_sync_group


@jax.jit
def two_sums(matrix, x):
    context = mr.get_replica_context()
    first = context.all_reduce("SUM", x + 0 * worked_on(matrix)[0, :3])
    matrix = worked_on(matrix + first[0])
    mean = context.all_reduce("MEAN", x + 0 * matrix[0, :3])
    return first, mean, worked_on(matrix)


@pytest.fixture(scope="module")
def matrix():
    return np.random.default_rng(0).random((SIZE, SIZE), np.float32)


@pytest.fixture
def threads(monkeypatch):
    """Whether collectives came up in the thread of their replica."""
    found = []
    perform = JaxExecution.perform

    def noted(self, call):
        found.append(threading.get_ident() == self.thread)
        return perform(self, call)

    monkeypatch.setattr(JaxExecution, "perform", noted)
    return found


def check_runs(strategy, matrix):
    """Check what compiled functions give, and a collective of the host right behind them."""
    count = strategy.num_replicas_in_sync

    def step(k):
        i = own_id()
        still_computed = worked_on(jnp.asarray(matrix), 2)
        first, mean, _ = two_sums(still_computed, jnp.full(3, 1.0 + i))
        behind = mr.get_replica_context().all_reduce("SUM", np.full(2, i + k))
        return np.asarray(first), np.asarray(mean), behind

    total = count * (count + 1) / 2
    steps = [strategy.run(step, args=(k,)) for k in range(2)]

    def are_right():
        for k, found in enumerate(steps):
            for first, mean, behind in strategy.experimental_local_results(found):
                np.testing.assert_array_equal(first, np.full(3, total))
                np.testing.assert_allclose(mean, np.full(3, total / count))
                np.testing.assert_array_equal(behind, np.full(2, total - count + k * count))

    holds_everywhere(are_right)


def test_functions_that_take_long_wait_for_their_collectives(strategy, matrix, threads):
    # XLA takes another thread than that of the replica where it has not come to the end meanwhile:
    # on a busy machine not each time.
    for count in range(1, 21):
        check_runs(strategy, matrix)
        assert len(threads) == 4 * len(strategy.local_replica_ids) * count
        if all(strategy.gather_objects(False in threads)):
            break
    assert False in threads


def test_a_mistake_in_a_thread_of_jax_is_the_same_error_on_every_rank(strategy, matrix):
    needs_two_replicas(strategy)
    last = strategy.num_replicas_in_sync - 1

    def step():
        x = jnp.ones(3)
        if own_id() == last:
            mr.get_replica_context().all_reduce("SUM", np.ones(3))
        two_sums(jnp.asarray(matrix), x)

    error = raises_everywhere(CollectiveMismatchError, lambda: strategy.run(step))
    assert "test_jax_executions.py" in str(error)
    check_works(strategy)
    check_runs(strategy, matrix)


def test_an_exception_beside_a_function_that_takes_long_is_that_of_all_ranks(strategy, matrix):
    needs_two_replicas(strategy)
    last = strategy.num_replicas_in_sync - 1

    def step():
        if own_id() == last:
            raise KeyError("mine")
        two_sums(jnp.asarray(matrix), jnp.ones(3))

    raises_everywhere(KeyError, lambda: strategy.run(step))
    check_runs(strategy, matrix)


def test_an_error_can_be_caught_where_the_function_is_called(strategy, matrix):
    needs_two_replicas(strategy)
    last = strategy.num_replicas_in_sync - 1

    def step():
        try:
            two_sums(jnp.asarray(matrix), jnp.ones(3 if own_id() < last else 4)[:3] * own_id())
            mr.get_replica_context().all_reduce("SUM" if own_id() < last else "MAX", 1)
        except CollectiveMismatchError as error:
            return type(error).__name__
        return ""

    found = strategy.run(step)
    assert set(strategy.experimental_local_results(found)) == {"CollectiveMismatchError"}
    check_runs(strategy, matrix)
