"""Mirrored variables in expressions and calls: read like arrays, written only by assignments."""

import copy
import pickle
import re

import numpy as np
import pytest

import mpi_replica as mr
from everywhere import (
    check_works,
    gathered,
    raises_everywhere,
)
from mpi_replica import VariableAggregation as Aggregation


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


# Reading


def test_what_was_read_before_stays_what_it_was(strategy):
    v = variable(strategy, [1.0, 2.0], aggregation=Aggregation.SUM)
    snapshots = [v.value(), v.numpy(), v.read_value(), np.asarray(v), v[:]]
    in_replicas = strategy.run(lambda: (v.value(), v.assign_add([1.0, 1.0]))[0])
    v.assign([7.0, 7.0])
    for snapshot in [*snapshots, *in_replicas.values]:
        assert snapshot.tolist() == [1.0, 2.0]


def test_it_acts_like_an_array_in_expressions(strategy):
    a = np.array([[1.0, 2.0], [3.0, 4.0]])
    v = variable(strategy, a)
    for result, expected in [
        (v + 1, a + 1),
        (1 - v, 1 - a),
        (v * v, a * a),
        (2 / v, 2 / a),
        (v**2, a**2),
        (-v, -a),
        (abs(v), abs(a)),
        (v @ a, a @ a),
        (a @ v, a @ a),
        (v == a, a == a),
        (v < 2, a < 2),
        (v[0], a[0]),
        (v[:, 1], a[:, 1]),
        (np.exp(v), np.exp(a)),
        (np.sum(v, axis=0), a.sum(axis=0)),
        (np.mean(v), a.mean()),
        (np.add.reduce(v), np.add.reduce(a)),
        (np.concatenate([v, a]), np.concatenate([a, a])),
        (np.linalg.norm(v), np.linalg.norm(a)),
        (np.where(v > 2, v, 0), np.where(a > 2, a, 0)),
        (np.array(v, dtype=np.float32), a.astype(np.float32)),
    ]:
        assert not isinstance(result, mr.Variable)
        np.testing.assert_array_equal(result, expected)
    assert len(v) == 2
    assert [row.tolist() for row in v] == a.tolist()


def test_a_scalar_converts_to_a_python_number(strategy):
    v = variable(strategy, 3)
    assert (float(v), int(v), bool(v), [10, 20, 30, 40][v]) == (3.0, 3, True, 40)
    assert isinstance(v.value(), np.integer)
    with pytest.raises(TypeError):
        float(variable(strategy, [1.0, 2.0]))


def test_it_is_written_only_by_assignments(strategy):
    v = variable(strategy, [1.0, 2.0], name="w")
    with pytest.raises(TypeError, match=r"w can't be changed in place.*assign"):
        v[0] = 5.0
    with pytest.raises(TypeError, match="in place"):
        v += 1
    with pytest.raises(TypeError, match="in place"):
        np.add(v, 1, out=v)
    with pytest.raises(TypeError, match="in place"):
        np.add.at(v, 0, 1)
    for view in (v.value(), np.asarray(v), v[:]):
        with pytest.raises(ValueError, match="read-only"):
            view[0] = 5.0
    np.array(v)[0] = 5.0  # a copy
    assert everywhere(v) == [1.0, 2.0]


def test_the_assigned_array_stays_the_callers(strategy):
    value = np.array([1.0, 2.0])
    v = variable(strategy, [0.0, 0.0])
    v.assign(value)
    strategy.run(lambda: v.assign(value))
    value[0] = 100.0 + strategy.rank
    assert everywhere(v) == [1.0, 2.0]


def test_reading_needs_no_other_rank(strategy):
    v = variable(strategy, [1.0], name="w")
    if strategy.rank == 0:
        assert float(v[0]) == 1.0
        assert repr(v) == "<mr.Variable 'w' shape=(1,) dtype=float64, value=array([1.])>"
    v.assign([2.0])
    assert everywhere(v) == [2.0]


def test_it_can_be_neither_copied_nor_pickled_and_is_told_by_identity(strategy):
    v = variable(strategy, 1.0)
    for make in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match=r"read its value|Read its value"):
            make(v)
    assert {v: "found"}[v] == "found"
    assert v not in {variable(strategy, 1.0)}


# Variables in calls


def test_a_variable_stays_itself_as_argument_and_result_of_run_and_merge_call(strategy):
    v, w = variable(strategy, 1.0), variable(strategy, 2.0)

    def merge(strategy, x, *, pair):
        assert x is v
        assert pair["w"] is w
        assert pair["list"][0] is v
        return {"v": x, "w": pair["w"], "n": 3}

    def step(x, *, pair):
        assert x is v
        assert pair["w"] is w
        assert pair["list"][0] is v
        merged = mr.get_replica_context().merge_call(merge, args=(x,), kwargs={"pair": pair})
        assert merged["v"] is v
        assert merged["w"] is w
        assert merged["n"] == 3
        return merged["w"], x, replica_id()

    results = strategy.run(step, args=(v,), kwargs={"pair": {"w": w, "list": [v]}})
    assert results[0] is w
    assert results[1] is v
    assert results[2].values == strategy.local_replica_ids


def test_reduce_gather_and_local_results_of_a_mirrored_variable(strategy):
    v = variable(strategy, [1.0, 2.0])
    np.testing.assert_array_equal(strategy.reduce("MEAN", v, axis=None), [1.0, 2.0])
    assert_fails(strategy, ValueError, "SUM", lambda: strategy.reduce("SUM", v, axis=None))
    assert_fails(strategy, ValueError, "gather", lambda: strategy.gather(v, axis=0))
    for value in (v, [v]):  # one for each replica here, in a nest or not, as tf has it
        local = strategy.experimental_local_results(value)
        np.testing.assert_array_equal(
            np.reshape(local, (-1, 2)), [[1.0, 2.0]] * len(strategy.local_replica_ids)
        )


def test_all_reduce_of_a_variable_counts_it_once_for_each_replica(strategy):
    v = variable(strategy, [1.0, 2.0])
    total = strategy.run(lambda: mr.get_replica_context().all_reduce("SUM", v))
    for value in total.values:
        np.testing.assert_array_equal(value, np.array([1.0, 2.0]) * strategy.num_replicas_in_sync)


def test_variable_created_in_scope_and_value_container(strategy):
    v = variable(strategy, 1.0)
    alone = mr.Variable(1.0)
    assert strategy.extended.variable_created_in_scope(v) is True
    assert strategy.extended.variable_created_in_scope(alone) is False
    with pytest.raises(ValueError, match="Variable"):
        strategy.extended.variable_created_in_scope(np.ones(1))
    assert strategy.extended.value_container(v) is v
    values = strategy.run(lambda: 1.0)
    assert strategy.extended.value_container(values) is values
