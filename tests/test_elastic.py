"""Who keeps copies for whom, what is said of losses, and snapshots of a program's state."""

import collections
import collections.abc
import copy
import enum
import gc
import http
import pickle
import types
import typing

import hypothesis
import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import ml_dtypes
import numpy as np
import pytest

import mpi_replica as mr
from checkpoints import Stateful
from mpi_replica.core.layout import Layout
from mpi_replica.ranks.survivors import Member
from mpi_replica.replicas.assignment import lose_components
from mpi_replica.strategy.elastic.buddies import buddy_of, givers
from mpi_replica.strategy.elastic.losses import Loss, new_layout_text
from mpi_replica.strategy.elastic.replica_objects import held_in, moved
from mpi_replica.strategy.elastic.snapshot import put_back, take
from mpi_replica.strategy.elastic.state import objects_of, replace_objects

# Buddies

hosts = st.lists(st.sampled_from("abcd"), min_size=1, max_size=12)
# As launchers place ranks: host by host, or in turns.
filled = st.lists(st.integers(1, 4), min_size=1, max_size=5).map(
    lambda counts: [f"host {i}" for i, count in enumerate(counts) for _ in range(count)]
)
even = st.tuples(st.integers(1, 4), st.integers(1, 4), st.booleans()).map(
    lambda about: [
        f"host {i // about[1] if about[2] else i % about[0]}" for i in range(about[0] * about[1])
    ]
)


@hypothesis.settings(max_examples=200)
@hypothesis.given(hosts | filled | even)
def test_a_buddy_is_another_rank_on_another_host_where_there_is_one(hosts):
    for rank, here in enumerate(hosts):
        buddy = buddy_of(rank, hosts)
        assert 0 <= buddy < len(hosts)
        assert buddy != rank or len(hosts) == 1
        assert hosts[buddy] != here or len(set(hosts)) == 1


@hypothesis.given(even)
def test_each_rank_keeps_copies_for_one_other_where_hosts_are_alike(hosts):
    assert sorted(buddy_of(rank, hosts) for rank in range(len(hosts))) == list(range(len(hosts)))


@hypothesis.given(filled)
def test_ranks_of_one_host_have_different_buddies_where_there_are_enough(hosts):
    for host in set(hosts):
        here = [rank for rank, other in enumerate(hosts) if other == host]
        buddies = {buddy_of(rank, hosts) for rank in here}
        if len(hosts) >= 2 * len(here) and hosts == sorted(hosts):
            assert len(buddies) == len(here)


holdings = st.dictionaries(st.integers(0, 5), st.sets(st.integers(0, 9)))


@hypothesis.given(holdings, holdings, st.sets(st.integers(0, 9)))
def test_what_is_needed_is_given_by_its_owner_if_that_is_left_or_else_by_who_keeps_it(
    own, kept, needed
):
    found = givers(needed, own, kept)
    for i in needed:
        owners = [rank for rank, held in own.items() if i in held]
        keepers = [rank for rank, held in kept.items() if i in held]
        assert (i in found) == bool(owners or keepers)
        if i in found:
            assert found[i] in (owners or keepers)
    assert set(found) <= needed


@hypothesis.given(hosts | filled | even, st.data())
def test_any_one_rank_and_any_one_host_may_be_lost(hosts, data):
    """Unless it is the only host."""
    size = len(hosts)
    number = data.draw(st.integers(size, size + 4))
    layout = Layout.even(number, size, 0)
    kept = {rank: set() for rank in range(size)}
    for rank in range(size):
        kept[buddy_of(rank, hosts)] |= set(layout.replica_ids(rank))
    groups = [{rank} for rank in range(size)] if size > 1 else []
    if len(set(hosts)) > 1:
        groups += [{rank for rank in range(size) if hosts[rank] == host} for host in set(hosts)]
    for lost in groups:
        left = [rank for rank in range(size) if rank not in lost]
        own = {rank: layout.replica_ids(rank) for rank in left}
        found = givers(range(number), own, {rank: kept[rank] for rank in left})
        assert set(found) == set(range(number))


# What is said


def test_a_loss_says_who_where_and_how_it_goes_on():
    lost = [Member(3, "node2", 4711), Member(5, "node3", 12)]
    loss = Loss.of_members(lost, 200, 0.1234, Layout((2, 2, 1), 1))
    assert str(loss) == (
        "lost rank 3 (host node2, pid 4711), rank 5 (host node3, pid 12); goes on at step 200 after"
        " 0.123 s, with replicas 0-1 on rank 0, 2-3 on rank 1, 4 on rank 2."
    )
    assert (loss.ranks, loss.hosts, loss.pids) == ((3, 5), ("node2", "node3"), (4711, 12))
    assert (loss.step, loss.replicas_per_rank) == (200, (2, 2, 1))


def test_a_loss_after_which_a_checkpoint_was_restored_says_so():
    loss = Loss.of_members([Member(0, "a", 1)], None, 1.0, Layout((1,), 0))
    assert "goes on at the last checkpoint after 1.000 s, with replica 0 on rank 0." in str(loss)


def test_the_new_layout_in_words():
    assert new_layout_text((1,)) == "replica 0 on rank 0"
    assert new_layout_text((3, 1)) == "replicas 0-2 on rank 0, 3 on rank 1"


# Snapshots

AUTO, ON_READ = mr.VariableSynchronization.AUTO, mr.VariableSynchronization.ON_READ
SUM = mr.VariableAggregation.SUM


@pytest.fixture
def strategy():
    with mr.MPIStrategy(num_replicas=3, seed=1) as strategy:
        yield strategy


def variable(strategy, value, **settings):
    with strategy.scope():
        return mr.Variable(value, **settings)


def bits(value):
    """Something that is equal for values that are the same to the bit, of the same types."""
    if isinstance(value, mr.Variable):
        if value.synchronization is ON_READ:
            return "variable", [bits(part) for part in value.components((0, 1, 2))]
        return "variable", bits(np.asarray(value.value()))
    if isinstance(value, mr.PerReplica):
        return "PerReplica", value.replica_ids, [bits(part) for part in value.values]
    if isinstance(value, mr.Mirrored):
        return "Mirrored", bits(value.value)
    if isinstance(value, np.ndarray | np.generic):
        return type(value).__name__, value.dtype, value.shape, np.asarray(value).tobytes()
    if isinstance(value, float):
        return value.hex()
    if isinstance(value, dict):
        return {key: bits(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value), [bits(item) for item in value]
    if isinstance(value, Stateful):
        return bits(value.state)
    return type(value), value


def go_back(strategy, objects, snapshot):
    """Put everything back, as after a loss."""
    return put_back(strategy, objects, snapshot.shared, snapshot.own)


dtypes = st.sampled_from(
    [*("?", "i1", "<u2", ">i4", "<i8", "<f2", ">f4", "<f8", "<c16", "S3", "<U2", "<M8[s]")]
).map(np.dtype) | st.just(np.dtype(ml_dtypes.bfloat16))


@st.composite
def arrays(draw):
    """Arrays of all layouts: a view, Fortran's order, negative steps, 0-d, empty, read-only."""
    dtype = draw(dtypes)
    shape = draw(hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4))
    seed = draw(st.integers(0, 99))
    size = int(np.prod(shape)) * dtype.itemsize
    data = np.random.default_rng(seed).integers(0, 2 if dtype == "?" else 128, size, np.uint8)
    array = data.view(dtype).reshape(shape) if size else np.empty(shape, dtype)
    if dtype.kind == "f" and size:
        array.reshape(-1)[0] = np.nan
    kind = draw(st.sampled_from(["own", "view", "fortran", "backwards", "read-only", "broadcast"]))
    if kind == "view":
        whole = np.zeros((*shape, 2), dtype)
        whole[..., 0] = array
        return whole[..., 0]
    if kind == "fortran":
        return np.asfortranarray(array)
    if kind == "backwards" and array.ndim:
        return array[::-1]
    if kind == "broadcast":
        return np.broadcast_to(array, (2, *shape))
    array = array.copy()
    array.flags.writeable = kind != "read-only"
    return array


numbers = st.integers() | st.floats() | st.booleans() | st.none() | st.text(max_size=3)
nests = st.recursive(
    numbers | arrays() | st.sampled_from([np.float16(0.1), np.int8(3), np.complex128(1j)]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=2) | st.integers(), inner, max_size=3)
    ),
    max_leaves=6,
)


def changed(value, seed):
    """Change what can be changed in place, let lists and dicts grow, and return another value."""
    if isinstance(value, np.ndarray):
        if value.flags.writeable:
            value[...] = np.zeros((), value.dtype)
            return value
        return value[..., None]
    if isinstance(value, dict):
        for number, key in enumerate(list(value)):
            if (number + seed) % 3 == 0:
                del value[key]
            else:
                value[key] = changed(value[key], seed)
        value["added"] = [np.ones(2), 1]
        return value
    if isinstance(value, list):
        value[:] = [changed(item, seed) for item in value]
        if seed % 2:
            value.append({"added": np.ones(1)})
        elif value:
            value.pop()
        return value
    if isinstance(value, tuple):
        return tuple(changed(item, seed) for item in value)
    return "another"


@hypothesis.settings(max_examples=200)
@hypothesis.given(value=nests, own=nests, seed=st.integers(0, 5))
def test_what_is_put_back_has_the_bits_of_the_commit(strategy, value, own, seed):
    ids = (0, 1, 2)
    objects = {"value": value, "own": mr.PerReplica([own, seed, None], ids)}
    before = {name: bits(item) for name, item in objects.items()}
    snapshot = take(strategy, objects)
    for _ in range(2):
        objects["value"] = changed(objects["value"], seed)
        mine = [changed(part, seed) for part in objects["own"].values]
        objects["own"] = mr.PerReplica(mine, ids)
        objects = go_back(strategy, objects, snapshot)
        assert {name: bits(item) for name, item in objects.items()} == before


@hypothesis.given(first=nests, second=nests, seed=st.integers(0, 5))
def test_a_snapshot_that_is_used_again_spoils_no_other(strategy, first, second, seed):
    objects = {"first": first, "second": [second]}
    oldest = take(strategy, objects)
    objects["second"] = changed(objects["second"], seed)
    before = bits(objects)
    newer = take(strategy, objects)
    objects["first"] = changed(objects["first"], seed)
    after = bits(objects)
    newest = take(strategy, objects, reuse=oldest)
    for snapshot, wanted in ((newer, before), (newest, after), (newer, before)):
        objects = go_back(strategy, objects, snapshot)
        assert bits(objects) == wanted


def test_objects_are_changed_and_not_replaced(strategy):
    """Another part of the program may hold them, too."""
    array, inner, items = np.arange(4.0), {"x": 1}, [1, 2]
    objects = {"nest": {"array": array, "inner": inner, "items": items}}
    snapshot = take(strategy, objects)
    array[:] = 0
    inner["y"] = 2
    items.append(3)
    found = go_back(strategy, objects, snapshot)["nest"]
    assert found["array"] is array
    assert found["inner"] is inner
    assert found["items"] is items
    assert (array.tolist(), inner, items) == ([0, 1, 2, 3], {"x": 1}, [1, 2])


#: Arrays of the shape (3, 4) of a program when it goes back; and whether it keeps them where the
#: commit had one in C's order, and one in Fortran's.
IN_MEMORY = {
    "C": (lambda: np.zeros((3, 4)), True, False),
    "F": (lambda: np.zeros((3, 4), order="F"), False, True),
    "with gaps": (lambda: np.zeros((4, 9)).T[:3], True, True),
    "gone": (lambda: None, False, False),
}


@pytest.mark.parametrize("is_spare", [False, True])
@pytest.mark.parametrize("kind", IN_MEMORY)
def test_an_array_that_goes_back_lies_in_memory_as_that_of_the_commit(strategy, kind, is_spare):
    """Where the program has one in another order, as a spare may, it is made anew."""
    committed = np.arange(12.0).reshape(3, 4)
    objects = {"c": committed, "f": np.asfortranarray(committed)}
    part = take(strategy, objects).shared
    if is_spare:
        part = pickle.loads(pickle.dumps(part.for_another_rank(), 5))
    make, keeps_c, keeps_f = IN_MEMORY[kind]
    here = {"c": make(), "f": make()}
    found = put_back(strategy, {**here}, part, {})
    assert [found[name] is here[name] for name in "cf"] == [keeps_c, keeps_f]
    for name, one in found.items():
        np.testing.assert_array_equal(one, committed)
        assert one.flags.fnc == (name == "f" and kind != "with gaps")


def test_an_array_that_changed_its_order_between_commits_stays_the_programs_own(strategy):
    """The copy of the commit before the last one, which is written again, has the other order."""
    objects = {"x": np.zeros((2, 3))}
    first = take(strategy, objects)
    objects["x"] = np.arange(6.0).reshape(3, 2).T
    take(strategy, objects)
    snapshot = take(strategy, objects, reuse=first)
    mine, expected = objects["x"], objects["x"].copy()
    mine[:] = 0
    assert go_back(strategy, objects, snapshot)["x"] is mine
    np.testing.assert_array_equal(mine, expected)


def test_objects_that_became_one_since_the_commit_are_two_again(strategy):
    objects = {"cur": np.ones(2), "prev": np.zeros(2), "window": [np.zeros(1), np.ones(1)]}
    objects |= {
        "own": [variable(strategy, 0.0, synchronization=ON_READ, aggregation=SUM)] * 2
    }  # these were one
    before = bits(objects)
    snapshot = take(strategy, objects)
    objects["prev"] = objects["cur"]  # and the loss comes in what makes the new one
    objects["window"] = [objects["window"][1]] * 2
    objects = go_back(strategy, objects, snapshot)
    assert bits(objects) == before
    assert objects["own"][0] is objects["own"][1]


def test_equal_objects_that_became_one_since_the_commit_are_two_again(strategy):
    objects = {"a": np.ones(2), "b": np.ones(2), "p": {"x": [1.0]}, "q": {"x": [1.0]}}
    first, snapshot = objects["p"], take(strategy, objects)
    objects["b"], objects["q"] = objects["a"], objects["p"]
    objects = go_back(strategy, objects, snapshot)
    assert objects["p"] is first
    objects["a"] += 1
    objects["p"]["x"][0] += 1
    assert (objects["b"].tolist(), objects["q"]) == ([1, 1], {"x": [1.0]})


@pytest.mark.parametrize("is_spare", [False, True])
def test_places_that_held_one_object_at_the_commit_hold_one_again(strategy, is_spare):
    array, items = np.ones(2), {"x": [1.0]}
    objects = {"a": array, "b": [(array, 1)], "p": items, "q": {1: items}, "r": items["x"]}
    part = take(strategy, objects).shared
    if is_spare:
        part = pickle.loads(pickle.dumps(part.for_another_rank(), 5))
    here = dict.fromkeys(objects) if is_spare else copy.deepcopy(objects) | {"p": items}
    found = put_back(strategy, here, part, {})
    assert is_spare or found["p"] is items
    assert found["b"][0][0] is found["a"]
    assert found["q"][1] is found["p"]
    assert found["r"] is found["p"]["x"]
    assert bits(found) == bits(objects)


def test_what_the_program_holds_stays_under_a_name_that_still_has_it(strategy):
    array = np.ones(2)
    objects = {"best": array, "current": array}
    snapshot = take(strategy, objects)
    objects["best"] = array + 1
    found = go_back(strategy, objects, snapshot)
    assert found["best"] is found["current"] is array
    assert array.tolist() == [1, 1]


class MadeWhenAsked(collections.abc.Mapping):
    """As `shelve` does: no item lives longer than who asks for it."""

    def __getitem__(self, key):
        return np.full(64, float(key))

    def __iter__(self):
        return iter(map(str, range(6)))

    def __len__(self):
        return 6


def test_only_what_is_one_object_is_one_again(strategy):
    array = np.ones((2, 2))
    objects = {"array": array, "matrix": array.view(np.matrix), "made": MadeWhenAsked()}
    part = take(strategy, objects).shared.for_another_rank()
    found = put_back(strategy, dict.fromkeys(objects), part, {})
    assert [*map(type, found.values())] == [np.ndarray, np.matrix, dict]
    assert [array[0] for array in found["made"].values()] == [0, 1, 2, 3, 4, 5]


def test_dicts_have_the_order_of_the_commit(strategy):
    objects = {"recent": collections.OrderedDict(a=1, b=np.ones(1), c=[3]), "plain": {1: 1, 2: 2}}
    recent, before = objects["recent"], bits(objects)
    snapshot = take(strategy, objects)
    recent.move_to_end("a")
    del recent["b"]
    objects["plain"][1] = objects["plain"].pop(1)
    objects = go_back(strategy, objects, snapshot)
    assert bits(objects) == before
    assert objects["recent"] is recent
    assert [list(recent), list(objects["plain"])] == [["a", "b", "c"], [1, 2]]


class Record(typing.NamedTuple):
    """One that a program keeps in a list."""

    step: int
    loss: object


class Phase(enum.StrEnum):
    """What a program is at."""

    WARM = "warm"


KINDS = {
    "named tuple": lambda: Record(1, [np.ones(2), Record(2, 0.5)]),
    "ordered": lambda: collections.OrderedDict(b=1, a=Record(2, 0.5)),
    "default": lambda: collections.defaultdict(int, a=1, b=(1, Record(3, 0.5))),
    "bytearray": lambda: bytearray(b"ab"),
    "member": lambda: (Phase.WARM, http.HTTPStatus.OK),
    "mirrored": lambda: mr.Mirrored(np.ones(2)),
    "matrix": lambda: np.ones((2, 2)).view(np.matrix),
    "list": lambda: [1, [2], (3, Record(4, 0.5))],
    "tuple": lambda: (1, (2,), [3, Record(4, 0.5)]),
}


def typed(value):
    """Something that is equal for values of the same types."""
    if isinstance(value, dict):
        factory = getattr(value, "default_factory", None)
        return type(value), factory, [(key, typed(item)) for key, item in value.items()]
    if isinstance(value, list | tuple):
        return type(value), [typed(item) for item in value]
    return bits(value)


OTHERS = {
    "None": lambda live: None,
    "array": lambda live: np.ones(2),
    "list": lambda live: [*live] if isinstance(live, tuple | list) else [1],
    "tuple": lambda live: (*live,) if isinstance(live, tuple | list) else (1,),
    "dict": lambda live: {**live} if isinstance(live, dict) else {"a": 1},
}


@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("kind", KINDS)
def test_what_goes_back_is_of_the_type_of_the_commit_whatever_stands_there_now(
    strategy, kind, other
):
    value, change = KINDS[kind], OTHERS[other]
    weights = variable(strategy, 1.0)
    objects = {"x": value(), "nest": [value()], "held": {"a": (value(), weights)}}
    before = typed({name: objects[name] for name in ("x", "nest")})
    snapshot = take(strategy, objects)
    shared = pickle.loads(pickle.dumps(snapshot.shared.for_another_rank(), 5))  # as for a spare
    for part in (snapshot.shared, shared):
        objects["x"], objects["nest"][0] = change(objects["x"]), change(objects["nest"][0])
        objects["held"]["a"] = change(objects["held"]["a"])
        objects = put_back(strategy, objects, part, snapshot.own)
        held = objects.pop("held")
        assert typed(objects) == before
        assert held["a"][1] is weights
        assert typed(held["a"][0]) == typed(value())
        objects["held"] = held


def test_what_is_of_the_type_of_the_commit_is_changed_and_not_replaced(strategy):
    objects = {name: make() for name, make in KINDS.items()}
    lasting = {name: objects[name] for name in ("ordered", "default", "matrix", "list")}
    snapshot = take(strategy, objects)
    objects = {name: changed(value, 1) for name, value in objects.items()}
    objects = go_back(strategy, objects, snapshot)
    for name, value in lasting.items():
        assert objects[name] is value


def test_a_type_that_can_not_be_sent_to_a_spare_is_no_error(strategy):
    objects = {"x": collections.defaultdict(lambda: 7, a=1)}
    shared = take(strategy, objects).shared.for_another_rank()
    objects = put_back(strategy, objects, pickle.loads(pickle.dumps(shared, 5)), {})
    assert objects["x"]["b"] == 7
    assert put_back(strategy, {"x": None}, shared, {})["x"] == {"a": 1}


def test_a_state_has_the_names_of_the_commit(strategy):
    """Otherwise ranks that had come to set one more would commit other names than the rest."""
    state = mr.ElasticState(strategy, step=0, loss=1.0)
    snapshot = take(strategy, objects_of(state))
    del state.step
    state.best, state.step = np.ones(2), 1
    replace_objects(state, go_back(strategy, objects_of(state), snapshot))
    assert list(objects_of(state).items()) == [("step", 0), ("loss", 1.0)]
    assert not hasattr(state, "best")


def test_mirrored_values_go_back(strategy):
    objects = {"x": [mr.Mirrored(np.arange(3.0)), mr.Mirrored(np.float32(1)), mr.Mirrored((1,))]}
    before = bits(objects)
    snapshot = take(strategy, objects)
    objects["x"][0].value[:] = 7
    objects["x"][1:] = [mr.Mirrored(np.float32(2)), mr.Mirrored((2,))]
    assert bits(go_back(strategy, objects, snapshot)) == before


PLAIN = {
    "None": lambda: None,
    "number": lambda: 3,
    "array": lambda: np.arange(3.0),
    "list": lambda: [1, {"a": np.ones(2)}],
    "empty list": list,
    "dict": lambda: {"a": 1},
    "PerReplica": lambda: mr.PerReplica([np.arange(i) for i in range(3)], (0, 1, 2)),
    "list of PerReplica": lambda: [mr.PerReplica([[i], None, {"a": i}]) for i in range(2)],
    "dict of PerReplica": lambda: {"a": [mr.PerReplica([1, 2.0, "3"], (0, 1, 2))], "b": 1},
}


@pytest.mark.parametrize("after", PLAIN)
@pytest.mark.parametrize("before", PLAIN)
def test_a_value_goes_back_whether_replicas_had_one_each_or_have_now(strategy, before, after):
    objects = {"x": PLAIN[before](), "nest": [PLAIN[before]()], "gone": PLAIN[before]()}
    wanted = {name: bits(value) for name, value in objects.items()}
    snapshot = take(strategy, objects)
    objects = {"x": PLAIN[after](), "nest": [PLAIN[after]()]}
    assert bits(go_back(strategy, objects, snapshot)) == wanted


def test_a_per_replica_that_a_loss_has_made_unusable_gives_way_to_what_was_there(strategy):
    snapshot = take(strategy, {"x": None})
    own = strategy.run(lambda: mr.get_replica_context().replica_id_in_sync_group)
    strategy.engine.layout.era.is_over = True
    assert go_back(strategy, {"x": own}, snapshot) == {"x": None}


def test_objects_of_replicas_whose_places_read_alike_stay_apart_when_replicas_move():
    """Rank 0 of two, each with three replicas, has all six after rank 1 is lost."""

    def own(n):
        return mr.PerReplica([Stateful(n=n, i=i) for i in range(3)], (0, 1, 2), 6)

    objects = {"a": {"b": own(0)}, "a['b']": own(1)}
    found = moved(objects, held_in(objects), Layout((6,), 0))
    for n, value in enumerate([found["a"]["b"], found["a['b']"]]):
        assert [one.state["n"] for one in value.values] == [n] * 6


def test_objects_of_replicas_in_a_mapping_that_is_read_only_move_with_their_replicas():
    own = mr.PerReplica([Stateful(n=7, i=i) for i in range(3)], (0, 1, 2), 6)
    objects = {"a": types.MappingProxyType({"b": own, "c": 1})}
    found = moved(objects, held_in(objects), Layout((6,), 0))["a"]
    assert isinstance(found, types.MappingProxyType)
    assert [one.state["n"] for one in found["b"].values] == [7] * 6
    assert found["c"] == 1


@pytest.mark.parametrize("kind", [list, dict])
def test_an_object_that_a_state_has_lost_since_the_commit_is_an_error(strategy, kind):
    """Only its state is there, which is no value of the program."""
    objects = {"nest": {"model": Stateful(w=np.ones(2))} if kind is dict else [Stateful(a=1)]}
    snapshot = take(strategy, objects)
    objects["nest"].clear()
    with pytest.raises(mr.errors.CheckpointError, match="the state of an object"):
        go_back(strategy, objects, snapshot)


def test_mirrored_values_in_a_per_replica_go_back(strategy):
    own = mr.PerReplica([[mr.Mirrored(np.arange(i)), mr.Mirrored(i)] for i in range(3)])
    objects = {"own": own}
    before = bits(objects)
    snapshot = take(strategy, objects)
    objects["own"] = mr.PerReplica([None] * 3)
    assert bits(go_back(strategy, objects, snapshot)) == before


def test_variables_objects_and_random_numbers_go_back(strategy):
    weights = variable(strategy, np.arange(3.0))
    half = variable(strategy, np.float16(0.1))
    seen = variable(strategy, 0.0, synchronization=ON_READ, aggregation=SUM)
    model = Stateful(w=np.arange(2.0), step=3)
    objects = {"weights": weights, "nest": [half, (seen,)], "model": model, "step": 1}

    def draws():
        own = strategy.run(lambda: mr.get_replica_context().rng.random(2))
        return [part.tolist() for part in own.values], strategy.rng.random()

    def train():
        def step():
            context = mr.get_replica_context()
            seen.assign_add(context.replica_id_in_sync_group + 0.1)
            weights.assign_sub([0.1, 0.2, 0.3])

        strategy.run(step)
        half.assign(0.2)
        model.state["w"] += 1
        model.state["step"] += 1

    train()
    draws()
    before = bits(objects)
    snapshot = take(strategy, objects)
    wanted = draws()
    train()
    assert bits(objects) != before
    for _ in range(2):
        objects = go_back(strategy, objects, snapshot)
        assert bits(objects) == before
        assert draws() == wanted
        train()
    assert objects["model"] is model
    assert objects["weights"] is weights


def without_it(objects, other):
    objects["weights"] = None


def another_variable(objects, other):
    objects["weights"] = other


def an_array(objects, other):
    objects["weights"] = np.zeros(3)


def not_even_its_name(objects, other):
    del objects["weights"]


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize(
    "change", [without_it, another_variable, an_array, not_even_its_name], ids=lambda f: f.__name__
)
@pytest.mark.parametrize("synchronization", [AUTO, ON_READ])
def test_a_variable_that_the_state_no_longer_holds_goes_back_and_is_in_it_again(
    strategy, synchronization, change, nested
):
    weights = variable(strategy, np.arange(3.0), synchronization=synchronization)
    other = variable(strategy, np.arange(4.0))
    before = bits([weights, other])
    held = {"weights": weights, "step": 1}
    objects = {"nest": [held, (weights,)]} if nested else held
    snapshot = take(strategy, objects)
    for _ in range(2):
        change(held, other)
        if nested:
            objects["nest"] = [held] if change is without_it else None
        strategy.run(lambda: (weights.assign_add(np.ones(3)), None)[1])
        other.assign(np.ones(4))
        objects = go_back(strategy, objects, snapshot)
        held = objects["nest"][0] if nested else objects
        assert held["weights"] is weights
        assert bits([weights, other]) == before
        assert held["step"] == 1
        assert not nested or objects["nest"][1][0] is weights


def test_a_variable_that_this_rank_has_not_is_its_value(strategy):
    """As on a spare, where it was made in the function that trains."""
    weights = variable(strategy, np.arange(3.0))
    snapshot = take(strategy, {"weights": weights, "nest": {"seen": [weights]}})
    del weights
    gc.collect()
    objects = go_back(strategy, {"weights": None, "nest": None}, snapshot)
    assert bits(objects["weights"]) == bits(np.arange(3.0))
    assert bits(objects["nest"]) == bits({"seen": [np.arange(3.0)]})


def test_a_variable_made_since_the_commit_is_an_error_until_it_is_assigned(strategy):
    """As the weights of a layer that makes them at its first use: of then nobody has a value."""
    snapshot = take(strategy, {})
    made = [variable(strategy, 1.0, name="made", synchronization=s) for s in (AUTO, ON_READ)]
    untouched = variable(strategy, 5.0)
    for v in made:
        strategy.run(lambda v=v: (v.assign_add(1.0), None)[1])
    for in_state in ({}, {"made": made}):
        go_back(strategy, in_state, snapshot)
        lose_components(strategy)  # as where replicas move
        for v in made:
            with pytest.raises(mr.errors.RankLostError, match=r"'made' has no .* before run_ela"):
                strategy.run(v.value)
        assert untouched.numpy() == 5.0
        for v in made:
            v.assign(3.0)
            assert strategy.run(v.value).values == (3.0,) * 3


def test_components_come_from_a_rank_that_held_more_variables(strategy):
    """As garbage, which each rank collects at a time of its own."""
    garbage = variable(strategy, 2.0, synchronization=ON_READ)
    kept = variable(strategy, 1.0, synchronization=ON_READ)
    theirs = take(strategy, {}).own
    del garbage
    gc.collect()
    mine = take(strategy, {}).shared
    kept.assign(9.0)
    put_back(strategy, {}, mine, theirs)
    assert strategy.run(kept.value).values == (1.0,) * 3


@pytest.mark.parametrize("in_state", [False, True])
def test_variables_of_two_strategies_go_back_each_to_its_own_value(strategy, in_state):
    """Each strategy counts its variables: those of two have the same names."""
    others = mr.MPIStrategy(num_replicas=2)
    mine, other = variable(strategy, 1.0), variable(others, 100.0)
    assert mine.identity == other.identity
    objects = {"other": other, "mine": mine} if in_state else {"other": other}
    snapshot = take(strategy, objects)
    for v in (mine, other):
        v.assign(7.0)
    objects = go_back(strategy, objects, snapshot)
    assert objects["other"] is other
    assert (mine.numpy(), other.numpy()) == (1.0, 100.0)


@pytest.mark.parametrize("synchronization", [AUTO, ON_READ])
def test_a_variable_that_has_taken_the_place_of_another_one_gets_its_value(
    strategy, synchronization
):
    """The program may hold it elsewhere, too, and goes on with it there."""
    first = variable(strategy, 1.0, synchronization=synchronization)
    snapshot = take(strategy, {"weights": first})
    later = variable(strategy, 2.0, synchronization=synchronization)
    strategy.run(lambda: (later.assign_add(1.0), None)[1])
    objects = go_back(strategy, {"weights": later}, snapshot)
    assert objects["weights"] is later
    assert bits([later, first]) == bits([first, first])
    assert strategy.run(first.value).values == (1.0,) * 3


def test_on_a_spare_a_variable_gets_what_one_had_that_it_lacks(strategy):
    """One that has been put in its place while the spare waited."""
    weights, best = variable(strategy, 1.0), variable(strategy, 0.0)
    later = variable(strategy, 5.0)
    shared = take(strategy, {"weights": weights, "best": later}).shared.for_another_rank()
    assert best.numpy() == 0.0
    del later
    gc.collect()
    weights.assign(7.0)
    objects = put_back(strategy, {"weights": weights, "best": best}, shared, {})
    assert objects["best"] is best
    assert (weights.numpy(), best.numpy()) == (1.0, 5.0)


@pytest.mark.parametrize("in_state", [False, True])
@pytest.mark.parametrize("synchronization", [AUTO, ON_READ])
def test_an_object_gets_its_state_when_variables_have_gone_back(
    strategy, synchronization, in_state
):
    weights = variable(strategy, 1.0, synchronization=synchronization)

    class Watcher(Stateful):
        def load_state_dict(self, state):
            super().load_state_dict(state)
            self.seen = strategy.run(weights.value).values

    objects = {"a": Watcher(step=1), **({"weights": weights} if in_state else {})}
    snapshot = take(strategy, objects)
    strategy.run(lambda: (weights.assign_add(1.0), None)[1])
    go_back(strategy, objects, snapshot)
    assert objects["a"].seen == (1.0,) * 3


@pytest.mark.parametrize("dtype", [">f4", ">i8", "<f4"])
@pytest.mark.parametrize("shape", [(), (2,)])
def test_values_of_either_byte_order_go_back(strategy, dtype, shape):
    array = np.full(shape, 3, dtype)
    objects = {"v": variable(strategy, array), "mirrored": [mr.Mirrored(array.copy())]}
    objects["seen"] = variable(strategy, array, synchronization=ON_READ, aggregation=SUM)
    before = bits(objects)
    snapshot = take(strategy, objects)
    for _ in range(2):
        objects["v"].assign(np.zeros(shape, dtype))
        objects["seen"].assign(np.zeros(shape, dtype))
        objects["mirrored"][0].value[...] = 0
        objects = go_back(strategy, objects, snapshot)
        assert bits(objects) == before


def test_the_children_of_a_generator_go_back(strategy):
    rng = np.random.default_rng(5)
    rng.spawn(1)
    snapshot = take(strategy, {"rng": rng})
    wanted = rng.spawn(2)[1].random()
    rng.spawn(4)
    objects = go_back(strategy, {"rng": rng}, snapshot)
    assert objects["rng"] is rng
    assert rng.spawn(2)[1].random() == wanted


def epochs_of(strategy):
    dataset = mr.data.Dataset.range(12).shuffle(seed=1).batch(3)
    return strategy.experimental_distribute_dataset(dataset)


def rows(steps):
    return [[part.tolist() for part in step.values] for step in steps]


def test_a_loop_over_a_dataset_goes_on_in_its_middle(strategy):
    dataset = epochs_of(strategy)
    loop = iter(dataset)
    next(loop)
    snapshot = take(strategy, {})
    wanted = rows(loop), rows(dataset)
    for _ in range(2):
        go_back(strategy, {}, snapshot)
        assert (rows(dataset), rows(dataset)) == wanted


@pytest.mark.parametrize("steps", [0, 1, 4])
def test_a_dataset_made_since_the_commit_begins_with_its_first_batch(strategy, steps):
    """As the program may have kept it, and iterates what it has not made anew."""
    wanted = rows(epochs_of(strategy))
    snapshot = take(strategy, {})
    dataset = epochs_of(strategy)
    loop = iter(dataset)
    for _ in range(steps):
        next(loop)
    for _ in range(2):
        go_back(strategy, {}, snapshot)
        assert rows(dataset) == wanted


@pytest.mark.parametrize("in_state", [False, True])
def test_a_dataset_of_which_a_loop_was_left_goes_on_with_the_next_epoch(strategy, in_state):
    dataset = epochs_of(strategy)
    for i, _ in enumerate(dataset):
        if i == 1:
            break
    objects = {"data": dataset} if in_state else {}
    snapshot = take(strategy, objects)
    wanted = rows(dataset)
    for _ in range(2):
        go_back(strategy, objects, snapshot)
        assert rows(dataset) == wanted


def test_a_dataset_begins_the_next_epoch_beside_an_iterator_that_is_in_the_state(strategy):
    dataset = epochs_of(strategy)
    objects = {"nest": [iter(dataset)]}
    next(objects["nest"][0])
    snapshot = take(strategy, objects)
    wanted = rows(objects["nest"][0]), rows(dataset)
    for _ in range(2):
        go_back(strategy, objects, snapshot)
        assert (rows(objects["nest"][0]), rows(dataset)) == wanted


def test_generators_that_nobody_had_used_begin_anew(strategy):
    with mr.MPIStrategy(num_replicas=2, seed=9) as fresh:
        snapshot = take(fresh, {})
        assert all(part.is_empty for part in snapshot.own.values())
        first = fresh.run(lambda: mr.get_replica_context().rng.random()).values
        go_back(fresh, {}, snapshot)
        assert fresh.run(lambda: mr.get_replica_context().rng.random()).values == first


def in_place(array):
    array[...] = -1


CHANGES = {
    "the array itself": lambda whole, part: in_place(whole),
    "through a view": lambda whole, part: in_place(part),
    "read-only for a while": lambda whole, part: (setattr_writeable(whole), in_place(whole)),
    "resized": lambda whole, part: in_place(whole.reshape(-1)),
}


def setattr_writeable(array):
    array.flags.writeable = False
    array.flags.writeable = True


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("of", ["whole", "part", "read-only view", "PerReplica", "object"])
def test_no_later_change_of_the_program_changes_a_snapshot(strategy, name, of):
    whole = np.arange(6.0)
    part = whole[1:5].reshape(2, 2)
    view = part.view()
    view.flags.writeable = False
    value = {
        "whole": whole,
        "part": part,
        "read-only view": view,
        "PerReplica": mr.PerReplica([whole, part, view]),
        "object": Stateful(part=part, view=view),
    }[of]
    objects = {"x": value}
    before = bits(objects)
    snapshot = take(strategy, objects)
    CHANGES[name](whole, part)
    objects = go_back(strategy, objects, snapshot)
    assert bits(objects) == before


def test_an_array_that_is_read_only_at_the_commit_and_writable_again_later(strategy):
    array = np.arange(3.0)
    array.flags.writeable = False
    snapshot = take(strategy, {"x": array})
    array.flags.writeable = True
    array[:] = 7
    found = go_back(strategy, {"x": array}, snapshot)["x"]
    np.testing.assert_array_equal(found, np.arange(3.0))


@pytest.mark.parametrize("how", ["assign", "assign_add", "assign_sub"])
@pytest.mark.parametrize("synchronization", [AUTO, ON_READ])
def test_no_later_assignment_changes_a_snapshot(strategy, how, synchronization):
    v = variable(strategy, np.arange(3.0), synchronization=synchronization)
    before = bits(v)
    snapshot = take(strategy, {"v": v})
    for _ in range(3):
        strategy.run(lambda: getattr(v, how)(np.full(3, 2.0)))
    assert bits(v) != before
    go_back(strategy, {"v": v}, snapshot)
    assert bits(v) == before
    strategy.run(lambda: getattr(v, how)(np.full(3, 2.0)))  # nor one after it was put back
    go_back(strategy, {"v": v}, snapshot)
    assert bits(v) == before


def test_what_the_program_read_before_stays_what_it_was(strategy):
    v = variable(strategy, np.arange(3.0))
    snapshot = take(strategy, {"v": v})
    strategy.run(lambda: v.assign([5.0, 6.0, 7.0]))
    read = v.value()
    go_back(strategy, {"v": v}, snapshot)
    np.testing.assert_array_equal(read, [5.0, 6.0, 7.0])


# What a commit costs


def held_arrays(snapshot):
    own = [part.arrays for part in snapshot.own.values()]
    return [array for arrays in (snapshot.shared.arrays, *own) for array in arrays.values()]


def test_a_commit_of_variables_copies_nothing(strategy):
    mirrored = variable(strategy, np.arange(1000.0))
    seen = variable(strategy, np.zeros(1000), synchronization=ON_READ, aggregation=SUM)
    snapshot = take(strategy, {"a": mirrored, "b": seen})
    assert snapshot.copies == {}
    held = held_arrays(snapshot)
    assert len(held) == 4
    for array in (mirrored.value(), *seen.components((0, 1, 2))):
        assert any(np.shares_memory(array, other) for other in held)


def test_a_commit_of_arrays_writes_into_those_of_an_older_one(strategy):
    objects = {"x": np.arange(1000.0), "own": mr.PerReplica([np.ones(10), np.ones(3), 1])}
    first = take(strategy, objects)
    second = take(strategy, objects, reuse=first)
    places = {id(array) for array in held_arrays(first)}
    assert len(places) == 3
    assert {id(array) for array in held_arrays(second)} == places
    third = take(strategy, objects, reuse=None)
    assert not any(np.shares_memory(a, b) for a in held_arrays(second) for b in held_arrays(third))


def test_an_array_of_another_shape_or_dtype_is_not_written_into_an_older_one(strategy):
    first = take(strategy, {"x": np.arange(4.0)})
    for array in (np.arange(5.0), np.arange(4, dtype=np.int64), np.arange(4.0).reshape(2, 2)):
        objects = {"x": array}
        before = bits(objects)
        snapshot = take(strategy, objects, reuse=first)
        array[...] = 9
        assert bits(go_back(strategy, objects, snapshot)) == before


# What cannot be kept


def test_what_cannot_be_kept_is_named(strategy):
    with pytest.raises(TypeError, match=r"state\.x\['a'\]\[1\]"):
        take(strategy, {"x": {"a": [0, object()]}})


@pytest.mark.parametrize(
    ("then", "words"),
    [
        (lambda s: variable(s, np.zeros(4)), "float64[4]"),
        (lambda s: Stateful(), "Stateful"),
    ],
)
def test_objects_that_are_others_than_at_the_commit_are_an_error_that_says_what_to_do(
    strategy, then, words
):
    snapshot = take(strategy, {"x": variable(strategy, np.zeros(3))})
    with pytest.raises(
        mr.errors.CheckpointError, match="Make the objects of an ElasticState before"
    ) as caught:
        go_back(strategy, {"x": then(strategy)}, snapshot)
    assert words in str(caught.value)
