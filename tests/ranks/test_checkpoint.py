"""Checkpoints on ranks: saved by all, restored on any number of ranks and replicas."""

import collections
import enum
import os
import types

import numpy as np
import pytest

import mpi_replica as mr
from checkpoints import (
    Stateful,
    content,
    listing,
    on_other_layouts,
    on_read,
    program,
    replica_id,
    restored,
    save,
    variable,
)
from everywhere import gathered, raises_everywhere
from mpi_replica import VariableAggregation as Aggregation
from mpi_replica.core import randomness
from mpi_replica.errors import CheckpointError

SUM, MEAN, FIRST = Aggregation.SUM, Aggregation.MEAN, Aggregation.ONLY_FIRST_REPLICA


# On any layout


def test_what_was_saved_is_restored_on_any_number_of_ranks_and_replicas(strategy, world, path):
    saved = program(strategy, 7.0)
    wanted = content(saved)
    assert saved.save(path) == str(path)

    def check(other):
        checkpoint = program(other)
        kernel, bias, optimizer = checkpoint.kernel, checkpoint.nest["bias"], checkpoint.optimizer
        checkpoint.restore(path)
        assert content(checkpoint) == wanted
        assert checkpoint.kernel is kernel
        assert checkpoint.nest["bias"] is bias
        assert checkpoint.optimizer is optimizer
        assert optimizer.loads == 1
        seen = other.run(lambda: np.asarray(checkpoint.kernel).sum())
        assert set(other.experimental_local_results(seen)) == {66 * 7.0}

    on_other_layouts(world, check)
    again = program(strategy)
    again.restore(path)
    assert content(again) == wanted


def test_arrays_that_are_made_anew_lie_in_memory_as_those_that_were_saved(strategy, world, path):
    """As the bits of a sum follow from that, on any number of ranks."""
    table = np.arange(12.0).reshape(3, 4)
    arrays = {
        "c": table,
        "f": np.asfortranarray(table),
        "with gaps": np.repeat(table, 2, 1)[:, ::2],
    }
    save(strategy, path, of_object=Stateful(**arrays), read_only=mr.Mirrored(arrays["f"]))

    def check(other):
        locked = np.zeros((3, 4))
        locked.flags.writeable = False
        checkpoint = restored(other, path, of_object=Stateful(), read_only=mr.Mirrored(locked))
        found = {**checkpoint.of_object.state, "read-only": checkpoint.read_only.value}
        assert [name for name, one in found.items() if one.flags.fnc] == ["f", "read-only"]
        for one in found.values():
            np.testing.assert_array_equal(one, table)

    on_other_layouts(world, check)


HELD = {
    "the iterator": lambda dataset, iterator: {"iterator": iterator},
    "the dataset first": lambda dataset, iterator: {"dataset": dataset, "iterator": iterator},
    "the iterator first": lambda dataset, iterator: {"a": {"of it": [iterator]}, "b": dataset},
}


@pytest.mark.parametrize("taken", [0, 1, 2])
@pytest.mark.parametrize("held", HELD)
def test_a_dataset_goes_on_behind_its_restored_iterator(strategy, path, held, taken):
    rows = mr.data.Dataset.range(8).shuffle(seed=1).batch(4)

    def epoch(steps):
        return [strategy.gather(step, axis=0).tolist() for step in steps]

    def begun(epochs):
        dataset = strategy.experimental_distribute_dataset(rows)
        for _ in range(epochs):
            epoch(dataset)
        iterator = iter(dataset)
        return dataset, iterator, mr.Checkpoint(strategy, **HELD[held](dataset, iterator))

    dataset, iterator, checkpoint = begun(3)
    for _ in range(taken):
        next(iterator)
    checkpoint.save(path)
    wanted = epoch(iterator), epoch(dataset), epoch(dataset)
    for epochs in (0, 3, 5):
        dataset, iterator, checkpoint = begun(epochs)
        checkpoint.restore(path)
        assert (epoch(iterator), epoch(dataset), epoch(dataset)) == wanted
    if held != "the iterator":  # which is not the newest one any more
        checkpoint.restore(path)
        assert (epoch(iterator), epoch(dataset), epoch(dataset)) == wanted


@pytest.mark.parametrize("names", ["da", "ad"])
def test_a_dataset_that_goes_on_before_its_restored_iterator_has_the_rest_of_the_epoch(
    strategy, path, names
):
    dataset = strategy.experimental_distribute_dataset(mr.data.Dataset.range(16).batch(4))
    iterator = iter(dataset)
    next(iterator)
    checkpoint = mr.Checkpoint(strategy, **dict(zip(names, (dataset, iterator), strict=True)))
    checkpoint.save(path)
    checkpoint.restore(path)
    checkpoint.save(path)
    checkpoint.restore(path)
    found = [strategy.gather(step, axis=0).tolist() for step in dataset]
    assert found == [[4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15]]
    assert len(list(dataset)) == 4


@pytest.mark.parametrize("is_first", [True, False])
def test_a_dataset_goes_on_in_a_later_epoch_than_that_of_an_iterator_beside_it(
    strategy, path, is_first
):
    def begun():
        rows = mr.data.Dataset.range(8).shuffle(seed=1).batch(2)
        dataset = strategy.experimental_distribute_dataset(rows)
        older = iter(dataset)
        held = {"a": older, "b": dataset} if is_first else {"a": dataset, "b": older}
        return dataset, older, mr.Checkpoint(strategy, **held)

    dataset, older, checkpoint = begun()
    newest = iter(dataset)
    for iterator in (older, newest, newest):
        next(iterator)
    checkpoint.save(path)
    wanted = [[strategy.gather(step, axis=0).tolist() for step in one] for one in (older, newest)]
    dataset, older, checkpoint = begun()
    checkpoint.restore(path)
    found = [[strategy.gather(step, axis=0).tolist() for step in one] for one in (older, dataset)]
    assert found == wanted


def test_mappings_that_can_not_be_changed_are_made_anew(strategy, path):
    checkpoint = mr.Checkpoint(strategy, config=types.MappingProxyType({"x": np.ones(3), "n": 1}))
    checkpoint.save(path)
    array = np.zeros(3)
    live = types.MappingProxyType({"x": array, "n": 7})
    other = mr.Checkpoint(strategy, config=live, alias=None)
    assert "n" in str(raises_everywhere(CheckpointError, lambda: other.restore(path)))
    other = mr.Checkpoint(strategy, config=live)
    other.restore(path)
    assert type(other.config) is types.MappingProxyType
    assert other.config["n"] == 1
    assert other.config["x"] is array  # which could be changed
    assert array.tolist() == [1, 1, 1]
    fewer = mr.Checkpoint(strategy, config=types.MappingProxyType({"x": array}))
    error = raises_everywhere(CheckpointError, lambda: fewer.restore(path))
    assert "not in the program: config['n']" in str(error)


def test_a_list_of_numbers_and_texts_is_restored_at_any_length_and_stays_that_list(strategy, path):
    save(strategy, path, losses=[3.0, 2, "low", None], none=[])
    losses, none = [strategy.rank], [True, "a"]
    restored(strategy, path, losses=losses, none=none)
    assert (losses, none) == ([3.0, 2, "low", None], [])


def test_an_object_that_two_names_hold_gives_each_what_was_saved_of_it(strategy, path):
    new, old = np.full(2, 3.0), np.full(2, 2.0)
    saved = {"x": new, "before": old, "m": {"w": old}, "v": {"w": new}, "items": [[old], [new]]}
    save(strategy, path, **saved)
    zeros, nest, inner = np.full(2, float(strategy.rank)), {"w": np.zeros(2)}, [np.zeros(2)]
    here = {"x": zeros, "before": zeros, "m": nest, "v": nest, "items": [inner, inner]}
    found = restored(strategy, path, **here)
    assert all(repr(getattr(found, name)) == repr(value) for name, value in saved.items())
    assert (found.x is zeros, found.m is nest, found.items[0] is inner) == (True, True, True)
    assert found.v["w"] is not nest["w"]


def test_an_object_that_two_names_held_when_it_was_saved_stays_one(strategy, path):
    one, nest = np.arange(2.0), {"w": [np.ones(1), np.nan]}
    save(strategy, path, x=one, y=[one], m=nest, v=nest)
    one, nest = np.full(2, float(strategy.rank)), {"w": [np.zeros(1), 0.0]}
    found = restored(strategy, path, x=one, y=[one], m=nest, v=nest)
    assert found.x is found.y[0] is one
    assert found.m is found.v is nest
    assert (one.tolist(), nest["w"][0].tolist()) == ([0, 1], [1])


class Phase(str, enum.Enum):  # noqa: UP042 (`str` of it is another text)
    WARM = "warm"
    MAIN = "main"


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


class Bits(enum.IntFlag):
    ONE = 1
    TWO = 2


def test_a_member_of_an_enum_of_texts_or_numbers_comes_back_as_one(strategy, path):
    save(strategy, path, phase=Phase.WARM, nest=[Level.HIGH, (Bits.ONE | Bits.TWO,)], key={"a": 1})
    found = restored(strategy, path, phase=Phase.MAIN, nest=[Level.LOW, (Bits.ONE,)], key={"a": 0})
    assert found.phase is Phase.WARM
    assert found.nest[0] is Level.HIGH
    assert found.nest[1][0] is Bits.ONE | Bits.TWO


@pytest.mark.parametrize("value", [None, "another", 3, 2.5, np.float32(1)])
def test_what_is_no_member_of_an_enum_is_the_value_that_was_saved(strategy, path, value):
    save(strategy, path, phase=value)
    assert repr(restored(strategy, path, phase=Phase.MAIN).phase) == repr(value)


class Pair(tuple):
    def __new__(cls, x, y=0):
        return super().__new__(cls, (x, y))


class Checked(collections.namedtuple("Checked", "x y")):
    def __new__(cls, both):
        return super().__new__(cls, *both)


class Counted(tuple):
    def __new__(cls, items):
        return super().__new__(cls, list(items))


class Doubled(tuple):
    def __new__(cls, items):
        return super().__new__(cls, [2 * item for item in items])


class Sealed(tuple):
    @classmethod
    def of(cls, *items):
        return super().__new__(cls, items)

    def __new__(cls):
        raise TypeError("made by of")


TUPLES = {
    "of its items": Pair,
    "named": lambda x, y: Checked((x, y)),
    "of a list": lambda x, y: Counted([x, y]),
}


@pytest.mark.parametrize("make", TUPLES.values(), ids=TUPLES)
def test_a_tuple_of_a_class_of_its_own_is_made_as_its_constructor_does(strategy, path, make):
    save(strategy, path, x=make(1.0, np.arange(2)), a=np.arange(3))
    live = make(0.0, np.full(2, strategy.rank))
    found = restored(strategy, path, x=live, a=np.zeros(3, int))
    assert type(found.x) is type(live)
    assert found.x[1] is live[1]
    assert repr([*found.x]) == repr([1.0, np.arange(2)])


@pytest.mark.parametrize("make", [lambda: Sealed.of(6, 8), lambda: Doubled([3, 4])])
def test_a_tuple_that_can_not_be_made_is_an_error_on_all_before_anything_has_changed(
    strategy, path, make
):
    save(strategy, path, a=np.arange(3), x=(1, 2))
    array = np.full(3, strategy.rank)
    last = strategy.rank == strategy.size - 1
    here = mr.Checkpoint(strategy, a=array, x=make() if last else (3, 4))
    error = raises_everywhere(CheckpointError, lambda: here.restore(path))
    assert "that can't be made of its items here, and 2 items in the" in str(error)
    assert array.tolist() == [strategy.rank] * 3
    here.restore(path, strict=False)
    assert (array.tolist(), [*here.x]) == ([0, 1, 2], [6, 8] if last else [1, 2])


@pytest.mark.parametrize("start", [0, 1, 2])
def test_a_view_that_moves_over_an_array_named_behind_it_changes_nothing(strategy, path, start):
    """As a window of a ring buffer, of which the array is what counts."""
    saved = np.arange(6.0)
    save(strategy, path, buffer=saved, window=saved[2:4])
    buffer = np.full(6, float(strategy.rank))
    found = restored(strategy, path, window=buffer[start : start + 2], buffer=buffer)
    assert found.buffer is buffer
    assert buffer.tolist() == [0, 1, 2, 3, 4, 5]


VIEWS = {
    "a slice of all": lambda array: array[:],
    "the same shape": lambda array: array.reshape(array.shape),
    "a view of a view": lambda array: array[::-1][::-1],
}


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_two_names_of_one_memory_give_each_what_was_saved_of_it(strategy, path, view):
    save(strategy, path, w=np.arange(4.0), best=np.full(4, 7.0))
    w = np.full(4, float(strategy.rank))
    found = restored(strategy, path, w=w, best=view(w))
    assert found.w is w
    assert (w.tolist(), found.best.tolist()) == ([0, 1, 2, 3], [7] * 4)


PADDED = np.dtype("i1,f8", align=True)

# What two names hold, of one array: some of it is one memory.
PARTS = {
    "overlapping parts": lambda a: (a[:3], a[2:]),
    "a part of it": lambda a: (a, a[1:3]),
    "another shape": lambda a: (a, a.reshape(2, -1)),
    "backwards": lambda a: (a[::-1], a),
    "another dtype": lambda a: (a, a.view("i8")),
    "every other": lambda a: (a[::2], a[1:4]),
    "a matrix and its column": lambda a: (a.reshape(2, -1), a.reshape(2, -1)[:, 1]),
    "fields": lambda a: (a.view(PADDED), a.view(PADDED)[:1]),
}
NO_PARTS = {
    "columns": lambda a: (a.reshape(2, -1)[:, 0], a.reshape(2, -1)[:, 1:]),
    "one behind the other": lambda a: (a[:2], a[2:]),
    "interleaved": lambda a: (a[::2], a[1::2]),
    "nothing": lambda a: (a, a[2:2]),
    "twice nothing": lambda a: (a[1:1], a[1:1]),
}


def held(strategy, views, seed):
    """A checkpoint of what is in one memory, with numbers that are not the same on all ranks."""
    x, y = views(np.random.default_rng(seed).normal(size=4))
    return mr.Checkpoint(strategy, step=seed, x=x, y=y)


@pytest.mark.parametrize("views", [*PARTS.values(), *NO_PARTS.values()], ids=[*PARTS, *NO_PARTS])
def test_arrays_of_one_memory_are_restored_where_what_was_saved_of_them_fits(strategy, path, views):
    saved = held(strategy, views, 1)
    saved.save(path)
    found = held(strategy, views, strategy.rank + 2)
    live = found.x, found.y
    found.restore(path)
    assert (found.x is live[0], found.y is live[1]) == (True, True)
    assert repr((found.x, found.y)) == repr((saved.x, saved.y))


@pytest.mark.parametrize("views", NO_PARTS.values(), ids=NO_PARTS)
def test_arrays_beside_each_other_in_one_memory_get_what_was_saved_of_each(strategy, path, views):
    saved = held(strategy, views, 1)
    saved.y = held(strategy, views, 2).y
    saved.save(path)
    found = held(strategy, views, strategy.rank + 3)
    found.restore(path)
    assert repr((found.x, found.y)) == repr((saved.x, saved.y))


@pytest.mark.parametrize("make", [variable, lambda strategy, n: Stateful(n=n)])
def test_an_object_that_can_hold_one_state_only_is_an_error_where_two_were_saved(
    strategy, path, make
):
    one, same = make(strategy, 1.0), make(strategy, 0.0)
    mr.Checkpoint(strategy, x=one, before=make(strategy, 2.0)).save(path)
    checkpoint = mr.Checkpoint(strategy, x=same, before=same)
    error = raises_everywhere(CheckpointError, lambda: checkpoint.restore(path))
    kind = type(same).__name__
    assert f"before is the same {kind} as x here, and another one in the checkpoint" in str(error)
    mr.Checkpoint(strategy, x=one, before=one).save(path)
    checkpoint.restore(path)
    assert checkpoint.x is checkpoint.before is same


def test_what_is_no_nest_takes_the_place_of_any_other_and_a_bytearray_is_one_again(strategy, path):
    save(strategy, path, a="text", b=1.5, c=None, buffer=bytearray(b"new"), d=[bytearray(b"1"), 2])
    here = {"a": strategy.rank, "b": None, "c": b"c", "buffer": bytearray(9), "d": [bytearray(), 0]}
    found = restored(strategy, path, **here)
    assert (found.a, found.b, found.c) == ("text", 1.5, None)
    assert repr((found.buffer, found.d)) == repr((bytearray(b"new"), [bytearray(b"1"), 2]))
    found = restored(strategy, path, **here | {"a": bytearray(9), "b": bytearray(9)})
    assert (found.a, found.b) == ("text", 1.5)


def test_each_array_is_written_once_and_each_rank_writes_about_as_much(strategy, path):
    arrays = [np.full(1000, i, "i8") for i in range(2 * strategy.size)]
    v = variable(strategy, np.arange(500.0))
    mr.Checkpoint(arrays=arrays, v=v).save(path)
    sizes = [os.path.getsize(file) for file in path.parent.glob("trained.*.data-*")]
    assert len(sizes) == strategy.size
    assert sum(sizes) == sum(array.nbytes for array in arrays) + 4000
    assert max(sizes) - min(sizes) <= 8000


def test_nothing_but_numbers_and_texts_needs_no_data_file(strategy, path):
    save(strategy, path, step=3, name="trained", nothing={})
    assert listing(path) == ["trained.index"]
    checkpoint = restored(strategy, path, step=0, name="", nothing={})
    assert (checkpoint.step, checkpoint.name, checkpoint.nothing) == (3, "trained", {})
    save(strategy, path)
    restored(strategy, path)


def test_where_the_ranks_have_other_numbers_those_of_rank_0_are_saved(strategy, path):
    save(strategy, path, step=5 + strategy.rank)
    assert gathered(restored(strategy, path, step=0).step) == [5] * strategy.size


def test_saving_over_the_checkpoint_of_other_ranks_leaves_exactly_the_new_files(
    strategy, world, path
):
    program(strategy, 1.0).save(path)
    first = listing(path)
    program(strategy, 2.0).save(path)
    assert len(listing(path)) == len(first)
    assert set(first) & set(listing(path)) == {"trained.index"}
    part = world.Split(world.rank == 0)
    with mr.MPIStrategy(part) as alone:
        if world.rank == 0:
            program(alone, 3.0).save(path)
    part.Free()
    assert len(listing(path)) == 2
    checkpoint = program(strategy)
    checkpoint.restore(path)
    assert checkpoint.step == 3


# Variables synchronized on read


def test_a_sum_on_read_is_saved_summed_and_restored_in_parts(strategy, world, path):
    def make(strategy):
        return {"float": on_read(strategy, SUM), "int": on_read(strategy, SUM, 0)}

    counts = make(strategy)
    strategy.run(lambda: counts["float"].assign(replica_id() + 0.25))
    strategy.run(lambda: counts["int"].assign(3 * replica_id() + 1))
    n = strategy.num_replicas_in_sync
    totals = n * (n - 1) / 2 + 0.25 * n, 3 * n * (n - 1) // 2 + n
    mr.Checkpoint(counts=counts).save(path)

    def check(other):
        counts = make(other)
        mr.Checkpoint(counts=counts).restore(path)
        assert (float(counts["float"]), int(counts["int"])) == pytest.approx(totals)
        parts = other.run(lambda: (float(counts["float"]), int(counts["int"])))
        local = other.experimental_local_results(parts)
        assert all(
            part == pytest.approx(totals[0] / other.num_replicas_in_sync) for part, _ in local
        )
        assert all(count - totals[1] // other.num_replicas_in_sync in (0, 1) for _, count in local)
        other.run(lambda: counts["int"].assign_add(1))
        assert int(counts["int"]) == totals[1] + other.num_replicas_in_sync

    on_other_layouts(world, check)


def test_a_sum_on_read_has_the_bits_that_were_saved_on_any_layout(strategy, world, path):
    total = on_read(strategy, SUM, np.zeros(50))
    strategy.run(lambda: total.assign(np.random.default_rng(replica_id()).normal(size=50)))
    mr.Checkpoint(total=total).save(path)
    saved = total.numpy().tobytes()

    def check(other):
        total = on_read(other, SUM, np.zeros(50))
        mr.Checkpoint(total=total).restore(path)
        assert total.numpy().tobytes() == saved

    on_other_layouts(world, check)


def test_a_mean_and_the_first_on_read_are_saved_as_they_read_from_above(strategy, world, path):
    def make(strategy):
        return {"mean": on_read(strategy, MEAN), "first": on_read(strategy, FIRST)}

    variables = make(strategy)
    strategy.run(lambda: variables["mean"].assign(replica_id() + 1.0))
    strategy.run(lambda: variables["first"].assign(replica_id() + 10.0))
    mean = (strategy.num_replicas_in_sync + 1) / 2
    mr.Checkpoint(**variables).save(path)

    def check(other):
        variables = make(other)
        mr.Checkpoint(**variables).restore(path)
        seen = other.run(lambda: (float(variables["mean"]), float(variables["first"])))
        assert set(other.experimental_local_results(seen)) == {(mean, 10.0)}
        assert (float(variables["mean"]), float(variables["first"])) == (mean, 10.0)

    on_other_layouts(world, check)


@pytest.mark.parametrize("dtype", [">f4", ">f8", "<f4"])
@pytest.mark.parametrize("shape", [(), (2,)])
def test_variables_of_either_byte_order_are_restored_again_and_again(strategy, path, dtype, shape):
    modes = (Aggregation.SUM, Aggregation.MEAN, Aggregation.ONLY_FIRST_REPLICA)
    array = np.full(shape, 3, dtype)
    objects = {str(mode): on_read(strategy, mode, array) for mode in modes}
    for v in objects.values():
        strategy.run(lambda v=v: (v.assign(np.full(shape, 1.0 + replica_id())), None)[1])
    checkpoint = mr.Checkpoint(
        v=variable(strategy, array), mirrored=mr.Mirrored(array.copy()), **objects
    )

    def values():
        read = {name: np.asarray(v.value()).tolist() for name, v in objects.items()}
        mirrored = checkpoint.mirrored.value
        return read, np.asarray(checkpoint.v).tolist(), mirrored.tolist(), type(mirrored).__name__

    wanted = values()
    checkpoint.save(path)
    for _ in range(2):
        for v in (checkpoint.v, *objects.values()):
            v.assign(np.full(shape, 7, dtype))
        checkpoint.mirrored.value[...] = 7
        checkpoint.restore(path)
        assert values() == wanted
        assert {v.dtype for v in (checkpoint.v, *objects.values())} == {np.dtype(dtype)}
        assert checkpoint.mirrored.value.dtype == dtype


def test_saving_changes_no_component(strategy, path):
    total = on_read(strategy, SUM)
    strategy.run(lambda: total.assign(replica_id() + 1.0))
    mr.Checkpoint(total=total).save(path)
    own = strategy.run(lambda: float(total)).values
    assert list(own) == [i + 1.0 for i in strategy.local_replica_ids]


# Random numbers


def draws(strategy):
    """The next numbers of each local replica, by its id, and of the strategy."""
    seen = strategy.run(lambda: (replica_id(), mr.get_replica_context().rng.random()))
    return dict(strategy.experimental_local_results(seen)), strategy.rng.random()


def test_random_numbers_go_on_as_if_never_stopped(strategy, world, path):
    draws(strategy)
    strategy.rng.integers(10, dtype=np.int32)  # half of a word is left
    save(strategy, path)
    of_ranks = gathered(draws(strategy))
    wanted = {i: x for of_rank, _ in of_ranks for i, x in of_rank.items()}
    shared = of_ranks[0][1]
    restored(strategy, path)
    assert draws(strategy) == (of_ranks[strategy.rank][0], shared)

    def check(other):
        restored(other, path)
        own, of_strategy = draws(other)
        assert of_strategy == shared
        known = {i: x for i, x in own.items() if i in wanted}
        assert known == {i: wanted[i] for i in known}
        # Replicas beyond those that saved begin with the seed, and apart from all others.
        assert len(set(own.values()) | set(wanted.values())) == len(set(own) | set(wanted))

    on_other_layouts(world, check)


def test_generators_that_a_program_holds_go_back_too(strategy, path):
    shared, own = strategy.rng, {}
    strategy.run(lambda: own.update({replica_id(): mr.get_replica_context().rng}))

    def drawn():
        every = [shared, *shared.spawn(2), *own.values()]
        return [rng.random() for rng in every]

    draws(strategy)
    save(strategy, path)
    wanted = drawn()
    drawn()
    for _ in range(2):
        restored(strategy, path)
        assert drawn() == wanted
    assert strategy.rng is shared


def spawned(strategy):
    """What the next child of each generator draws."""

    def first():
        return mr.get_replica_context().rng.spawn(1)[0].random()

    found = strategy.experimental_local_results(strategy.run(first))
    return strategy.rng.spawn(1)[0].random(), found


def test_the_children_of_generators_are_those_that_they_would_have_had(strategy, path):
    spawned(strategy)
    save(strategy, path)
    wanted = [spawned(strategy) for _ in range(2)]
    for _ in range(2):
        restored(strategy, path)
        assert [spawned(strategy) for _ in range(2)] == wanted


def test_a_checkpoint_that_does_not_tell_of_children_can_be_restored(strategy, path, monkeypatch):
    wanted = spawned(strategy)
    with monkeypatch.context() as patch:  # as before it was told
        patch.setattr(randomness, "state_of", lambda generator: generator.bit_generator.state)
        save(strategy, path)
    restored(strategy, path)
    assert spawned(strategy) == wanted


@pytest.mark.parametrize("kind", [np.random.PCG64, np.random.MT19937])
def test_the_children_of_generators_of_a_program_are_those_that_they_would_have_had(
    strategy, path, kind
):
    def generator():
        return np.random.Generator(kind(np.random.SeedSequence(5, pool_size=8)))

    rng, untouched = generator(), generator()
    rng.spawn(3)
    untouched.random()
    save(strategy, path, rng=rng, untouched=untouched)
    wanted = [one.spawn(1)[0].random() for one in (rng, untouched)]
    rngs = {"rng": generator(), "untouched": generator()}
    for one in (rng, untouched, *rngs.values()):
        one.spawn(7)
    for others in (rngs, {"rng": rng, "untouched": untouched}):
        restored(strategy, path, **others)
        assert [one.spawn(1)[0].random() for one in others.values()] == wanted
    strategy.verify(rng)


def test_the_children_of_a_generator_stay_where_a_checkpoint_of_an_older_version_is_restored(
    strategy, path
):
    rng = np.random.default_rng(5)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(randomness, "state_of", lambda generator: generator.bit_generator.state)
        save(strategy, path, rng=rng)
    wanted = np.random.default_rng(5).spawn(3)[2].random()
    rng.spawn(2)
    restored(strategy, path, rng=rng)
    assert rng.spawn(1)[0].random() == wanted


def test_a_generator_that_can_not_spawn_goes_on_where_it_was(strategy, path):
    rng = np.random.Generator(np.random.RandomState(5)._bit_generator)
    other = np.random.default_rng(5).bit_generator.seed_seq
    assert rng.bit_generator.seed_seq is None
    save(strategy, path, rng=rng)
    wanted = rng.random()
    restored(strategy, path, rng=rng)
    assert rng.random() == wanted
    again = np.random.Generator(np.random.MT19937(other))
    again.spawn(1)
    restored(strategy, path, rng=again)
    assert again.random() == wanted


def test_generators_that_nobody_asked_for_begin_with_the_seed(strategy, path):
    save(strategy, path)
    wanted = draws(strategy)
    restored(strategy, path)
    assert draws(strategy) == wanted
