"""Containers of other classes than list, tuple and dict are nests, wherever a nest goes in.

Each kind here is tried in each place; a new place is a function in `PLACES`, a new kind a line in
`KINDS`.
"""

import collections
import dataclasses
import enum
import os
import types
from collections.abc import Mapping

import numpy as np
import pytest

import mpi_replica as mr
from everywhere import (
    check_works,
    error_of,
    gathered,
    needs_two_replicas,
    raises_everywhere,
    steps_of,
)


class Rows(list):
    pass


class Shape(tuple):
    __slots__ = ()


class Options(dict):
    pass


class Ordered(collections.OrderedDict):
    pass


class Wrapped(collections.UserDict):
    pass


@dataclasses.dataclass
class Output(collections.OrderedDict):
    """A dict with attributes, as models of other libraries return it."""

    x: object = None
    y: object = None

    def __post_init__(self):
        given = self.x if isinstance(self.x, dict) else {"x": self.x, "y": self.y}
        for name, value in given.items():
            setattr(self, name, value)
            self[name] = value


class Frozen(Mapping):
    """No dict; mappings in it are frozen when they are looked at."""

    def __init__(self, items):
        self._items = dict(items)

    def __getitem__(self, key):
        item = self._items[key]
        return Frozen(item) if isinstance(item, dict) else item

    def __iter__(self):
        return iter(self._items)

    def __len__(self):
        return len(self._items)


class FrozenInFrozen(Frozen):
    pass


def both(x, y):
    return {"y": y, "x": x}


# What makes a container of two values, and what comes out where it is made anew.
KINDS = {
    "Rows": (lambda x, y: Rows([x, y]), list),
    "Shape": (lambda x, y: Shape([x, y]), tuple),
    "Options": (lambda x, y: Options(both(x, y)), Options),
    "Ordered": (lambda x, y: Ordered(both(x, y)), Ordered),
    "Counter": (lambda x, y: collections.Counter(both(x, y)), collections.Counter),
    "Wrapped": (lambda x, y: Wrapped(both(x, y)), Wrapped),
    "mappingproxy": (lambda x, y: types.MappingProxyType(both(x, y)), types.MappingProxyType),
    "ChainMap": (lambda x, y: collections.ChainMap({"x": x}, {"y": y}), collections.ChainMap),
    "Output": (Output, Output),
    "Frozen": (lambda x, y: Frozen(both(x, y)), Frozen),
    "in each other": (
        lambda x, y: FrozenInFrozen({"x": x, "z": {"y": Shape([y])}}),
        FrozenInFrozen,
    ),
}


def items(container, kind):
    """Return the two values in it."""
    assert type(container) is kind
    if isinstance(container, Frozen) and "z" in container:
        (y,) = container["z"]["y"]
        return container["x"], y
    return container if kind in (list, tuple) else (container["x"], container["y"])


def my_id():
    return mr.get_replica_context().replica_id_in_sync_group


def rows_of(i):
    """The values of a replica."""
    return np.array([i, 1.0]), np.full((i + 1, 2), i)


def values(strategy, make):
    """A container of what the replicas have."""
    plain = strategy.run(lambda: rows_of(my_id()))
    return make(*plain)


def equal(found, wanted):
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(one, other)


def count(strategy):
    return strategy.num_replicas_in_sync


def total(strategy):
    return np.array([sum(range(count(strategy))), count(strategy)])


def all_rows(strategy):
    return np.concatenate([rows_of(i)[1] for i in range(count(strategy))])


def in_run_arguments(strategy, make, kind):
    def step(one, other):
        equal(items(one, kind), rows_of(my_id()))
        equal(items(other, kind), rows_of(my_id()))

    strategy.run(step, (values(strategy, make),), {"other": values(strategy, make)})


def in_run_results(strategy, make, kind):
    found = items(strategy.run(lambda: make(*rows_of(my_id()))), kind)
    for index, value in enumerate(found):
        assert isinstance(value, mr.PerReplica)
        own = strategy.experimental_local_results(value)
        equal(own, [rows_of(i)[index] for i in strategy.local_replica_ids])


def in_local_results(strategy, make, kind):
    found = strategy.experimental_local_results(values(strategy, make))
    for i, own in zip(strategy.local_replica_ids, found, strict=True):
        equal(items(own, kind), rows_of(i))


def in_all_reduce(strategy, make, kind):
    def step():
        x, _ = rows_of(my_id())
        value = make(x, 2 * x)
        out = make(np.empty(2), np.empty(2))
        context = mr.get_replica_context()
        equal(items(context.all_reduce("SUM", value), kind), (total(strategy), 2 * total(strategy)))
        assert context.all_reduce("SUM", value, out=out) is out

    strategy.run(step)


def in_all_reduce_of_slices(strategy, make, kind):
    def step():
        x, _ = rows_of(my_id())
        value = make(x, mr.IndexedSlices(x[None], [0], (1, 2)))
        found, slices = items(mr.get_replica_context().all_reduce("SUM", value), kind)
        equal((found, slices.to_dense()[0]), (total(strategy), total(strategy)))

    strategy.run(step)


def in_all_gather(strategy, make, kind):
    def step():
        x, y = rows_of(my_id())
        found = mr.get_replica_context().all_gather(make(x, y), axis=0)
        equal(items(found, kind)[1:], [all_rows(strategy)])

    strategy.run(step)


def in_reduce(strategy, make, kind):
    x = strategy.run(lambda: rows_of(my_id())[0])
    for axis, wanted in ((None, total(strategy)), (0, total(strategy).sum())):
        found = strategy.reduce("SUM", make(x, x), axis)
        equal(items(found, kind), (wanted, wanted))


def in_reduce_to(strategy, make, kind):
    x = strategy.run(lambda: rows_of(my_id())[0])
    found = items(strategy.extended.reduce_to("SUM", make(x, x)), kind)
    equal([value.value for value in found], [total(strategy)] * 2)


def in_gather(strategy, make, kind):
    equal(items(strategy.gather(values(strategy, make), axis=0), kind)[1:], [all_rows(strategy)])


def in_merge_call_arguments(strategy, make, kind):
    def merge_fn(strategy, value, *, other):
        for index, found in enumerate(items(value, kind)):
            equal(found.values, [rows_of(i)[index] for i in range(count(strategy))])
        items(other, kind)

    def step():
        mine = make(*rows_of(my_id()))
        mr.get_replica_context().merge_call(merge_fn, (mine,), {"other": mine})

    strategy.run(step)


def in_merge_call_results(strategy, make, kind):
    def merge_fn(strategy, value):
        return make(value, 7)

    def step():
        result = mr.get_replica_context().merge_call(merge_fn, (my_id(),))
        assert items(result, kind) in ((my_id(), 7), [my_id(), 7])

    strategy.run(step)


def in_broadcast_to(strategy, make, kind):
    if kind is types.MappingProxyType:
        pytest.skip("pickle knows no mappingproxy")
    found = strategy.extended.broadcast_to(make(*rows_of(strategy.rank)))
    equal([value.value for value in items(found, kind)], rows_of(0))


def in_verify(strategy, make, kind):
    strategy.verify(make(*rows_of(1)))
    if strategy.size > 1:
        error = raises_everywhere(
            RuntimeError, lambda: strategy.verify(make(*rows_of(strategy.rank)))
        )
        assert "value[" in str(error)


def in_update(strategy, make, kind):
    with strategy.scope():
        variable = mr.Variable(np.zeros(2))
    x = strategy.run(lambda: rows_of(my_id())[0])
    with pytest.raises(ValueError, match="PerReplica"):
        strategy.extended.update(variable, lambda v, a: None, (make(x, 1),))

    def write(v, both):
        v.assign(items(both, kind)[0])

    strategy.extended.update(variable, write, (make(np.array([1.0, 2.0]), 1),))
    equal(variable.numpy(), [1.0, 2.0])


def in_values_from_function(strategy, make, kind):
    found = strategy.experimental_distribute_values_from_function(
        lambda context: make(*rows_of(context.replica_id_in_sync_group))
    )
    equal(
        strategy.experimental_local_results(items(found, kind)[0]),
        [rows_of(i)[0] for i in strategy.local_replica_ids],
    )


def in_datasets(strategy, make, kind):
    number = 2 * count(strategy)

    def both_of(x):
        return make(x, 2 * x)

    batches = [both_of(np.arange(number))]
    mapped = mr.data.Dataset.range(number).map(both_of)
    sources = [batches]
    if kind is not list:  # which is an array where a `mr.data.Dataset` makes batches
        sources += [
            mapped.batch(number),
            mr.data.Dataset.from_generator(lambda: iter(batches[:1])).unbatch().batch(number),
            mr.data.Dataset.range(number).batch(number).map(both_of),
        ]
    wanted = [[2 * i, 2 * i + 1] for i in range(count(strategy))]
    for source in sources:
        (step,) = strategy.experimental_distribute_dataset(source)
        for found, factor in zip(items(step, kind), (1, 2), strict=True):
            equal(steps_of(strategy, [found])[0], factor * np.array(wanted))


def in_datasets_of_functions(strategy, make, kind):
    def dataset_fn(context):
        rows = np.array([context.input_pipeline_id])
        return [make(rows, rows)]

    (step,) = strategy.distribute_datasets_from_function(dataset_fn)
    items(step, kind)
    # the last replicas of a rank get what is no row, as nests of the same kind
    shapes = [len(items(own, kind)[0]) for own in strategy.experimental_local_results(step)]
    assert shapes == [1] + [0] * (len(shapes) - 1)


PLACES = [value for name, value in globals().items() if name.startswith("in_")]


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("place", PLACES, ids=lambda place: place.__name__)
def test_a_container_of_any_class_is_a_nest(strategy, place, name):
    place(strategy, *KINDS[name])


# What can't be made anew


class TwoArguments(dict):
    def __init__(self, x, y):
        super().__init__(x=x, y=y)


class Forgetful(dict):
    def __init__(self, items=()):
        super().__init__(x=1)


class Doubled(collections.UserDict):
    def __setitem__(self, key, value):
        self.data[key] = [value]


def filled(container, x, y):
    container["x"], container["y"] = x, y
    return container


REFUSED = [
    lambda x, y: TwoArguments(x, y),
    lambda x, y: filled(Forgetful(), x, y),
    lambda x, y: Doubled(both(x, y)),
    lambda x, y: [{"a": TwoArguments(x, y)}],
]


@pytest.mark.parametrize("make", REFUSED)
@pytest.mark.parametrize("place", PLACES, ids=lambda place: place.__name__)
def test_what_can_not_be_made_anew_is_an_error_that_names_its_class_on_every_rank(
    strategy, place, make
):
    def call():
        place(strategy, make, None)

    local = (in_local_results, in_values_from_function, in_update)
    if place in local:
        error = error_of(call)
    else:
        error = raises_everywhere(TypeError, call)
    assert isinstance(error, TypeError), error
    assert "can't be made anew" in str(error)
    assert any(name in str(error) for name in ("TwoArguments", "Forgetful", "Doubled"))
    assert "dict(value)" in str(error)
    check_works(strategy)


def test_one_replica_alone_that_returns_such_a_thing_is_the_same_error_on_every_rank(strategy):
    last = strategy.num_replicas_in_sync - 1

    def step():
        return TwoArguments(1, 2) if my_id() == last else {"x": 1, "y": 2}

    error = raises_everywhere(TypeError, lambda: strategy.run(step))
    assert "TwoArguments" in str(error)
    check_works(strategy)


def of_file(i):
    """Return what tells of a file, with a field that is no item; another one for each replica."""
    return os.stat_result(range(i, i + 10), {"st_mtime_ns": 10**18 + i})


def test_what_has_more_fields_than_items_keeps_them_all_wherever_it_travels(strategy):
    everywhere = [10**18 + i for i in range(count(strategy))]

    def step():
        def times(_, found):
            return [one.st_mtime_ns for one in found["a"][0].values]

        value = {"a": (of_file(my_id()), 1.0)}
        merged = mr.get_replica_context().merge_call(times, (value,))
        assert [int(time) for time in merged] == everywhere
        return value

    found = strategy.run(step)
    objects = strategy.gather_objects(found)
    assert [one["a"][0].st_mtime_ns for one in objects] == everywhere
    own = [one["a"][0].st_mtime_ns for one in strategy.experimental_local_results(found)]
    assert own == [everywhere[i] for i in strategy.local_replica_ids]
    of_rank_0 = strategy.extended.broadcast_to([of_file(strategy.rank)])
    assert of_rank_0[0].value.st_mtime_ns == everywhere[0]


@pytest.mark.parametrize("call", ["all_reduce", "all_gather"])
def test_where_numbers_are_asked_for_such_a_thing_is_an_error_that_names_it_on_all(strategy, call):
    def step():
        last = my_id() == count(strategy) - 1
        value = {"a": of_file(my_id()) if last else np.zeros(10, int)}
        return IN_A_STEP[call](mr.get_replica_context(), value)

    error = raises_everywhere(TypeError, lambda: strategy.run(step))
    assert f"{call} of value['a']: os.stat_result can't be taken as its numbers" in str(error)
    check_works(strategy)


@pytest.mark.parametrize(
    ("other", "words"),
    [(Options(x=1.0, z=2.0), ["['z']"]), (Ordered(x=1.0), ["Options['x']", "Ordered['x']"])],
    ids=["keys", "class"],
)
def test_replicas_with_other_keys_or_classes_are_told_so_with_these(strategy, other, words):
    needs_two_replicas(strategy)

    def step():
        value = Options(x=1.0) if my_id() else other
        return mr.get_replica_context().all_reduce("SUM", value)

    error = raises_everywhere(mr.errors.StructureMismatchError, lambda: strategy.run(step))
    assert [word for word in words if word not in str(error)] == [], error
    check_works(strategy)


def test_the_order_of_keys_is_no_difference_and_stays_that_of_each_replica(strategy):
    def step():
        names = ["x", "y"] if my_id() % 2 else ["y", "x"]
        value = Options({name: float(name == "x") for name in names})
        found = mr.get_replica_context().all_reduce("SUM", value)
        assert list(found) == names
        return found

    result = strategy.run(step)
    for own in strategy.experimental_local_results(result):
        assert own == {"x": float(count(strategy)), "y": 0.0}


# Checkpoints look into nests by themselves


def test_a_checkpoint_puts_back_what_is_in_containers_of_any_class(strategy, path):
    def state(number):
        with strategy.scope():
            v, w = mr.Variable(number), mr.Variable(number)
        kept = TwoArguments(v, np.array([number]))
        return {
            "rows": Rows([w, number]),
            "options": Options(a=number),
            "wrapped": Wrapped(a=np.array([number])),
            "kept": kept,
        }

    mr.Checkpoint(**state(1.0)).save(path)
    later = mr.Checkpoint(**state(5.0))
    later.restore(path)
    assert later.kept["x"].numpy() == later.kept["y"][0] == 1.0
    assert later.rows[0].numpy() == later.rows[1] == 1.0
    assert later.options == {"a": 1.0}
    assert later.wrapped["a"][0] == 1.0
    kinds = [type(getattr(later, name)) for name in ("rows", "options", "wrapped", "kept")]
    assert kinds == [Rows, Options, Wrapped, TwoArguments]
    assert gathered(kinds) == [kinds] * strategy.size


def test_keys_that_are_equal_are_the_same_of_whatever_class(strategy):
    kinds = [str, np.str_]

    def step():
        context = mr.get_replica_context()
        mine = kinds[context.replica_id_in_sync_group % 2]
        return context.all_reduce("SUM", {mine("a"): 1.0, mine("b"): 2.0})

    count = strategy.num_replicas_in_sync
    for result in strategy.experimental_local_results(strategy.run(step)):
        assert result == {"a": count, "b": 2 * count}


def test_sets_as_keys_are_equal_in_whatever_order_their_parts_lie(strategy):
    """Which depends on the order in which they came, and on the process."""

    def step():
        context = mr.get_replica_context()
        numbers = frozenset([0, 8][:: (-1) ** context.replica_id_in_sync_group])
        words = frozenset(f"word {i}" for i in range(9))
        return context.all_reduce("SUM", {numbers: 1.0, (words, 0): [2.0]}) == {
            numbers: strategy.num_replicas_in_sync,
            (words, 0): [2 * strategy.num_replicas_in_sync],
        }

    assert set(strategy.experimental_local_results(strategy.run(step))) == {True}


class Layer:
    """Known by nothing but its address."""


class Rectifier:
    """Written alike, whichever it is: as many modules of torch."""

    def __repr__(self):
        return "Rectifier()"


class Color(enum.Enum):
    RED = 1
    BLUE = 2


@dataclasses.dataclass(frozen=True)
class Place:
    row: int


class Named:
    def __init__(self, name):
        self.name = name

    def __repr__(self):
        return f"Named({self.name})"


class Unordered:
    """It can't be said which of two is less."""

    def __lt__(self, other):
        raise ZeroDivisionError


NAMELESS = {
    "variables": lambda: [mr.Variable(0.0), mr.Variable(0.0)],
    "a variable": lambda: [mr.Variable(0.0)],
    "a variable of an array": lambda: [mr.Variable(np.zeros(2))],
    "variables of arrays": lambda: [mr.Variable(np.zeros(2)), mr.Variable(np.ones(2))],
    "a value per replica": lambda: [mr.PerReplica([1.0])],
    "an object": lambda: [Layer()],
    "functions": lambda: [lambda: 1, lambda: 2],
    "alike": lambda: [Rectifier(), Rectifier()],
    "what can't be compared": lambda: [Unordered(), Unordered()],
}

IN_A_STEP = {
    "all_reduce": lambda context, nest: context.all_reduce("SUM", nest),
    "all_gather": lambda context, nest: context.all_gather(nest, axis=0),
    "merge_call": lambda context, nest: context.merge_call(lambda _, nest: None, (nest,)),
    "run": lambda context, nest: nest,
}


@pytest.mark.parametrize(
    "inside", [lambda nest: nest, lambda nest: [np.ones(1), {"a": nest}]], ids=["alone", "inside"]
)
@pytest.mark.parametrize("call", IN_A_STEP)
@pytest.mark.parametrize("name", NAMELESS)
def test_keys_that_replicas_can_not_tell_apart_are_the_same_error_on_every_rank(
    strategy, name, call, inside
):
    """Their values would be mixed up: replicas meet by what is written of a key."""
    with strategy.scope():
        keys = NAMELESS[name]()

    def step():
        own = [*enumerate(keys)][:: (-1) ** my_id()]
        nest = inside({key: np.array([10.0**at]) for at, key in own})
        return IN_A_STEP[call](mr.get_replica_context(), nest)

    error = raises_everywhere(mr.errors.StructureMismatchError, lambda: strategy.run(step))
    assert f"a key of type {type(keys[0]).__name__}, which" in str(error)
    check_works(strategy)


@pytest.mark.parametrize("name", NAMELESS)
def test_above_the_replicas_such_keys_are_the_same_error_on_every_rank_too(strategy, name):
    with strategy.scope():
        keys = NAMELESS[name]()
    alike = strategy.run(lambda: float(my_id()))
    mixed = strategy.run(lambda: my_id() if my_id() else 0.5)  # the ranks report how they differ
    at_hand = mr.PerReplica([1.0] * count(strategy))
    for value in (alike, mixed, at_hand):
        nest = {key: value for key in keys}
        raises_everywhere(
            mr.errors.StructureMismatchError,
            lambda nest=nest: strategy.reduce("SUM", nest, axis=None),
        )
        check_works(strategy)


@pytest.mark.parametrize(
    "keys",
    [
        ["b", "a", "<Layer object at 0x1f>"],
        [2, 1, -0.5],
        [Color.RED],
        [("b", 1), ("a", Color.RED)],
        [Place(2), "a"],
        [None, 1],
        [float, "a"],
        [np.datetime64("2020-01-02"), np.datetime64("2020-01-01")],
        [Named("w"), 1],
        [Rectifier(), 1],
        [mr.Mirrored("name")],
    ],
    ids=repr,
)
def test_keys_that_name_what_they_are_meet_whatever_their_class_and_order(strategy, keys):
    def step():
        own = keys[:: (-1) ** my_id()]
        total = mr.get_replica_context().all_reduce(
            "SUM", {key: 10.0 ** keys.index(key) for key in own}
        )
        assert list(total) == own
        return total

    for total in strategy.experimental_local_results(strategy.run(step)):
        assert total == {key: count(strategy) * 10.0**at for at, key in enumerate(keys)}


@pytest.mark.parametrize(
    "kind",
    [dict, collections.OrderedDict, lambda items: collections.defaultdict(float, items)],
    ids=["dict", "OrderedDict", "defaultdict"],
)
@pytest.mark.parametrize("of_a_tuple", [False, True])
def test_a_key_that_equals_nothing_meets_those_of_other_replicas(strategy, kind, of_a_tuple):
    """As the NaN of a column of labels, of which each replica makes one of its own."""

    def counts():
        labels = np.unique([2.0, float("nan"), 1.0]).tolist()
        return kind([((label, 0) if of_a_tuple else label, 1.0) for label in labels])

    def step():
        total = mr.get_replica_context().all_reduce("SUM", counts())
        return {"of all": total, "own": counts()}

    expected = type(counts())
    results = strategy.run(step)
    made = strategy.experimental_distribute_values_from_function(lambda context: counts())
    for result, factor in ((results["of all"], count(strategy)), (results["own"], 1), (made, 1)):
        assert type(result) is expected
        total = strategy.reduce("SUM", result, axis=None)
        assert repr([*total]) == repr([*counts()])
        assert [*total.values()] == [factor * count(strategy)] * 3
