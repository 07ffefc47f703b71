"""Values of each replica in a checkpoint: written by their ranks, restored wherever they are."""

import json
import os

import ml_dtypes
import numpy as np
import pytest

import mpi_replica as mr
from checkpoints import Stateful, listing, on_other_layouts, on_read, replica_id, restored, save
from everywhere import check_works, gathered, holds_everywhere, raises_everywhere
from mpi_replica.errors import CheckpointError, StructureMismatchError


def own_value(i):
    """What replica `i` has: of another shape on each, and of all kinds."""
    return {
        "rows": np.full((i, 3), i, ml_dtypes.bfloat16),
        "plain": [i, f"replica {i}", None, i + 0.5, np.float32(i), (b"bytes", 3j)],
        "empty": np.empty((0, 2)),
        "turned": np.arange(6.0 + 3 * i).reshape(-1, 3).T,
        "mirrored": [mr.Mirrored(np.arange(i)), mr.Mirrored(np.float32(i)), mr.Mirrored((i, "x"))],
    }


def values(strategy):
    ids, number = strategy.local_replica_ids, strategy.num_replicas_in_sync
    return mr.PerReplica([own_value(i) for i in ids], ids, number)


def nothing(strategy):
    ids, number = strategy.local_replica_ids, strategy.num_replicas_in_sync
    return mr.PerReplica([None] * len(ids), ids, number)


def check_restored(strategy, path):
    checkpoint = restored(strategy, path, own=[nothing(strategy), 7], step=0)
    found, seven = checkpoint.own
    assert (seven, checkpoint.step) == (7, 3)
    assert found.replica_ids == strategy.local_replica_ids
    assert found.num_replicas == strategy.num_replicas_in_sync
    for i, component in zip(found.replica_ids, found.values, strict=True):
        wanted = own_value(i)
        assert component["rows"].dtype == ml_dtypes.bfloat16
        np.testing.assert_array_equal(component["rows"], wanted["rows"])
        assert component["empty"].shape == (0, 2)
        np.testing.assert_array_equal(component["turned"], wanted["turned"])
        assert component["turned"].flags.fnc
        for kind in ("plain", "mirrored"):
            assert repr(component[kind]) == repr(wanted[kind])


def test_each_replica_gets_its_own_value_back_on_any_number_of_ranks(strategy, world, path):
    number = strategy.num_replicas_in_sync
    save(strategy, path, own=[values(strategy), 7], step=3)
    check_restored(strategy, path)

    def check_all():
        for is_here in (world.rank == 0, world.rank < world.size - 1):
            part = world.Split(is_here)
            if number >= part.size:
                with mr.MPIStrategy(part, num_replicas=number) as other:
                    check_restored(other, path)
            part.Free()

    holds_everywhere(check_all)


def test_what_a_step_returned_is_saved_as_it_is(strategy, path):
    ids = strategy.run(replica_id)
    rows = strategy.run(lambda: np.arange(replica_id() + 1))
    save(strategy, path, ids=ids, rows=rows)
    checkpoint = restored(strategy, path, ids=nothing(strategy), rows=nothing(strategy))
    assert checkpoint.ids.values == ids.values
    for found, wanted in zip(checkpoint.rows.values, rows.values, strict=True):
        np.testing.assert_array_equal(found, wanted)


class SilentText(str):
    """A text of which only its letters tell it from another one."""

    def __repr__(self):
        return "a text"


def test_values_whose_places_read_alike_do_not_get_each_others(strategy, path):
    def nest(make):
        return {
            "a": {"b": make(0), "c": {SilentText("one"): make(1), SilentText("two"): make(2)}},
            "a['b']": make(3),
            "a['b'] 0": make(4),
        }

    save(strategy, path, **nest(lambda n: strategy.run(lambda: np.full(2, 10 * n + replica_id()))))
    found = vars(restored(strategy, path, **nest(lambda n: nothing(strategy))))
    inner = found["a"]["c"]
    places = [found["a"]["b"], inner["one"], inner["two"], found["a['b']"], found["a['b'] 0"]]
    for n, place in enumerate(places):
        wanted = [[10 * n + i] * 2 for i in strategy.local_replica_ids]
        np.testing.assert_array_equal(place.values, wanted)


def test_each_rank_writes_the_values_of_its_own_replicas(strategy, path):
    own = strategy.run(lambda: np.zeros(1000 + replica_id()))
    save(strategy, path, own=own)
    mine = sum(8 * (1000 + i) for i in strategy.local_replica_ids)
    file = next(path.parent.glob(f"trained.*.data-{strategy.rank:05}-of-*"))
    assert os.path.getsize(file) == mine
    gathered(None)


def test_another_number_of_replicas_is_told_and_changes_nothing(strategy, world, path):
    number = strategy.num_replicas_in_sync
    save(strategy, path, own=values(strategy), step=3)

    def check(other):
        if other.num_replicas_in_sync == number:
            return
        with other.scope():
            checkpoint = mr.Checkpoint(own=nothing(other), step=0)
            with pytest.raises(CheckpointError) as caught:
                checkpoint.restore(path)
            words = f"own is a PerReplica of {other.num_replicas_in_sync} replicas here, and"
            assert f"{words} a PerReplica of {number} replicas in the checkpoint" in str(
                caught.value
            )
            checkpoint.restore(path, strict=False)
        assert checkpoint.step == 3
        assert set(checkpoint.own.values) == {None}

    on_other_layouts(world, check)


def test_a_value_of_each_replica_and_a_shared_one_do_not_fit_each_other(strategy, path):
    save(strategy, path, a=values(strategy), b=np.ones(2), c=3, d=values(strategy))
    number = strategy.num_replicas_in_sync
    with strategy.scope():
        like = {"a": 5, "b": nothing(strategy), "c": nothing(strategy), "d": mr.Mirrored("x")}
        checkpoint = mr.Checkpoint(**like)
        error = raises_everywhere(CheckpointError, lambda: checkpoint.restore(path))
    for words in (
        f"a is a int here, and a PerReplica of {number} replicas in the checkpoint",
        f"b is a PerReplica of {number} replicas here, and float64[2]",
        f"c is a PerReplica of {number} replicas here, and 3",
        f"d is a str here, and a PerReplica of {number} replicas in the checkpoint",
    ):
        assert words in str(error), str(error)
    check_works(strategy)


def total_of_float32(strategy):
    total = on_read(strategy, mr.VariableAggregation.SUM, np.zeros(2, np.float32))
    strategy.run(lambda: total.assign(np.full(2, replica_id(), np.float32)))
    return total


def check_holds_its_own(strategy, total):
    for i, own in zip(
        strategy.local_replica_ids,
        strategy.experimental_local_results(strategy.run(total.value)),
        strict=True,
    ):
        assert own.dtype == np.float32
        np.testing.assert_array_equal(own, [i, i])


OTHER_COMPONENTS = {
    "float64[3]": lambda: np.zeros(3),
    "float64[2]": lambda: np.zeros(2),
    "float32[3]": lambda: np.zeros(3, np.float32),
    "no array": lambda: 0.5,
    "float32[2], int32[2]": lambda: np.zeros(2, np.int32 if replica_id() else np.float32),
}


@pytest.mark.parametrize("kind", OTHER_COMPONENTS)
def test_values_of_replicas_that_a_variable_can_not_hold_are_an_error_and_change_nothing(
    strategy, path, kind
):
    if strategy.num_replicas_in_sync == 1 and ", " in kind:
        pytest.skip("all replicas have one kind")
    save(strategy, path, v=strategy.run(OTHER_COMPONENTS[kind]), step=3)
    total = total_of_float32(strategy)
    error = raises_everywhere(CheckpointError, lambda: restored(strategy, path, v=total, step=0))
    words = f"v has float32[2] for each replica here, and {kind} in the checkpoint"
    assert words in str(error), str(error)
    checkpoint = mr.Checkpoint(v=total, step=0)
    checkpoint.restore(path, strict=False)
    assert checkpoint.step == 3
    check_holds_its_own(strategy, total)


def test_values_of_another_number_of_replicas_do_not_fit_a_variable(strategy, world, path):
    number = strategy.num_replicas_in_sync
    save(strategy, path, v=strategy.run(lambda: np.zeros(2, np.float32)))

    def check(other):
        if other.num_replicas_in_sync == number:
            return
        total = total_of_float32(other)
        checkpoint = mr.Checkpoint(v=total)
        words = (
            f"v is a variable of {other.num_replicas_in_sync} replicas here, and a PerReplica of"
            f" {number} replicas in the checkpoint"
        )
        with pytest.raises(CheckpointError, match=words):
            checkpoint.restore(path)
        checkpoint.restore(path, strict=False)
        check_holds_its_own(other, total)

    on_other_layouts(world, check)


def test_what_cannot_be_saved_of_one_replica_is_an_error_on_all_ranks(strategy, path):
    culprit = strategy.num_replicas_in_sync - 1
    own = strategy.run(lambda: {"a": object() if replica_id() == culprit else 1})
    error = raises_everywhere(TypeError, lambda: save(strategy, path, own=own))
    assert f"checkpoint.own['a'] of replica {culprit}" in str(error)
    stateful = Stateful(own=strategy.run(replica_id))
    error = raises_everywhere(TypeError, lambda: save(strategy, path, stateful=stateful))
    assert "PerReplica (checkpoint.stateful.state_dict()['own'])" in str(error)
    ids, number = strategy.local_replica_ids, strategy.num_replicas_in_sync
    other = mr.PerReplica([0] * len(ids), ids, number + 1)
    error = raises_everywhere(ValueError, lambda: save(strategy, path, other=other))
    assert f"{number + 1} replicas" in str(error)
    assert listing(path) == []
    check_works(strategy)


def test_a_value_of_each_replica_on_one_rank_alone_is_a_mismatch(strategy, path):
    if strategy.size == 1:
        pytest.skip("a single rank has nobody to disagree with")
    own = values(strategy) if strategy.rank else 1
    raises_everywhere(StructureMismatchError, lambda: save(strategy, path, own=own))
    check_works(strategy)


def test_an_index_with_components_of_some_replicas_only_is_no_index(strategy, path):
    """As a faulty or hostile program could write it."""
    import zlib

    save(strategy, path, own=strategy.run(replica_id))
    if strategy.rank == 0:
        index = path.with_name("trained.index")
        told = json.loads(index.read_bytes().partition(b"\n")[0])
        (components,) = told["of_replicas"].values()
        del components["0"]
        data = json.dumps(told).encode()
        index.write_bytes(b"%s\n%08x\n" % (data, zlib.crc32(data)))
    gathered(None)
    error = raises_everywhere(
        CheckpointError, lambda: restored(strategy, path, own=nothing(strategy))
    )
    assert "is no index of a checkpoint" in str(error)
    check_works(strategy)
