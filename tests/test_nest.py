"""Nested structures: flatten, rebuild, name the leaves."""

import collections
import concurrent.futures
import enum
import fractions
import itertools
import os
import re
import threading
import time
import types
from typing import NamedTuple

import hypothesis.strategies as st
import numpy as np
import optree
import pytest
from hypothesis import given
from optree.registry import __GLOBAL_NAMESPACE as GLOBAL

import mpi_replica as mr
from mpi_replica.core import nest
from mpi_replica.core.containers import NAMESPACE, plain_key
from mpi_replica.core.exceptions import StructureMismatchError
from mpi_replica.core.key_order import key_order


class Point(NamedTuple):
    x: object
    y: object


LEAVES = st.integers() | st.none() | st.text(max_size=2) | st.booleans()
NESTS = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text("abc", max_size=2), inner, max_size=3)
        | st.builds(Point, inner, inner)
    ),
    max_leaves=8,
)


@given(NESTS)
def test_unflatten_is_the_inverse_of_flatten(value):
    leaves, structure = nest.flatten(value)
    again = nest.unflatten(structure, leaves)
    assert again == value
    assert repr(again) == repr(value)  # == takes a Point for a tuple


@given(NESTS)
def test_each_leaf_is_where_its_path_says(value):
    leaves, structure = nest.flatten(value)
    paths = nest.leaf_paths(structure)
    assert len(set(paths)) == len(leaves)
    for path, leaf in zip(paths, leaves, strict=True):
        assert eval(f"value{path}", {"value": value}) is leaf


@given(NESTS, NESTS)
def test_structures_have_the_same_text_only_when_they_are_the_same(one, other):
    first, second = nest.flatten(one)[1], nest.flatten(other)[1]
    same = nest.structure_text(first) == nest.structure_text(second)
    assert same == (first == second)


@given(NESTS)
def test_map_structure_makes_new_containers_and_keeps_the_given_ones(value):
    before = repr(value)
    mapped = nest.map_structure(lambda leaf: (leaf,), value)
    assert repr(value) == before
    assert [leaf for (leaf,) in _leaves_of_pairs(mapped, value)] == nest.flatten(value)[0]


def _leaves_of_pairs(mapped, value):
    structure = nest.flatten(value)[1]
    return structure.flatten_up_to(mapped)


@pytest.mark.parametrize(
    "leaf",
    [None, 1, 2.5, 1j, True, "ab", b"ab", np.float32(1), np.ones(2), {1, 2}, object(), range(3)],
    ids=lambda leaf: type(leaf).__name__,
)
def test_everything_but_containers_is_a_leaf_none_included(leaf):
    leaves, structure = nest.flatten(leaf)
    assert len(leaves) == 1
    assert leaves[0] is leaf
    assert nest.leaf_paths(structure) == ("",)


@pytest.mark.parametrize("flatten", [nest.flatten, nest.flatten_plain, nest.flatten_tensors])
@pytest.mark.parametrize(
    "leaf",
    [os.stat_result(range(10), {"st_mtime_ns": 5}), time.struct_time(range(9), {"tm_zone": "X"})],
)
def test_what_has_more_fields_than_items_is_a_leaf(flatten, leaf):
    assert flatten(leaf)[0][0] is leaf
    value = {"b": (leaf, os.terminal_size((1, 2))), "a": {"c": leaf, "d": 3}}
    leaves, structure, *_ = flatten(value)
    assert [type(one) for one in leaves] == [type(leaf), int, type(leaf), int, int]
    assert leaves[0] is leaves[2] is leaf
    paths = ("['a']['c']", "['a']['d']", "['b'][0]", "['b'][1].columns", "['b'][1].lines")
    assert nest.leaf_paths(structure) == paths
    again = nest.unflatten(structure, leaves)
    assert again == value
    assert again["b"][0] is leaf
    assert type(again["b"][1]) is os.terminal_size


def test_a_list_beside_what_has_more_fields_than_items_stays_a_leaf_where_lists_are():
    value = (os.stat_result(range(10)), [1, os.stat_result(range(10))])
    assert nest.flatten_tensors(value)[0] == [*value]


def test_values_of_replicas_and_indexed_slices_are_leaves():
    for leaf in (mr.PerReplica([1, 2]), mr.Mirrored([1]), mr.IndexedSlices([1.0], [0])):
        leaves, _ = nest.flatten([leaf])
        assert leaves[0] is leaf


def test_keys_are_visited_in_sorted_order_and_come_back_in_their_own():
    leaves, structure = nest.flatten({"b": 2, "a": 1})
    assert leaves == [1, 2]
    assert nest.leaf_paths(structure) == ("['a']", "['b']")
    assert list(nest.unflatten(structure, [10, 20]).items()) == [("b", 20), ("a", 10)]


def test_paths_of_many_keys_write_each_a_few_times():
    written = []

    class Key(int):
        def __repr__(self):
            written.append(self)
            return f"Key({int(self)})"

    structure = nest.flatten([{Key(i): 0.0 for i in range(300)}])[1]
    assert nest.leaf_paths(structure) == tuple(f"[0][{i}]" for i in range(300))
    assert len(written) <= 4 * 300


@pytest.mark.parametrize("key", [(1, "a"), ((1, b"b"), None), ()])
def test_keys_of_python_are_their_own_plain_keys(key):
    assert plain_key(key) is key


def test_dicts_that_differ_in_the_order_of_their_keys_have_one_structure():
    one, other = nest.flatten({"b": 2, "a": 1})[1], nest.flatten({"a": 1, "b": 2})[1]
    assert one == other
    assert nest.structure_text(one) == nest.structure_text(other)


def test_kinds_of_mappings_and_sequences_are_kept_and_told_apart():
    values = [
        {"a": 1},
        collections.OrderedDict(a=1),
        collections.defaultdict(int, a=1),
        [1],
        (1,),
        collections.deque([1]),
    ]
    assert len({nest.structure_text(nest.flatten(value)[1]) for value in values}) == len(values)
    for value in values:
        mapped = nest.map_structure(lambda leaf: leaf, value)
        assert type(mapped) is type(value)
        assert mapped == value


def test_a_text_names_no_address_which_differs_between_processes():
    value = collections.defaultdict(lambda: 0, a=1)
    assert "0x" not in nest.structure_text(nest.flatten(value)[1])


def test_transposed_joins_the_leaves_of_equal_nests():
    joined = nest.transposed([{"a": (1, [2])}, {"a": (3, [4])}], tuple, "here")
    assert joined == {"a": ((1, 3), [(2, 4)])}


@pytest.mark.parametrize("other", [1, [1, 2], (1,), [[1]], {"a": 1}], ids=repr)
def test_transposed_refuses_unequal_nests_in_either_order_and_names_the_caller(other):
    for values in ([[1], other], [other, [1]], [[1], [1], other]):
        with pytest.raises(mr.errors.StructureMismatchError, match="the caller"):
            nest.transposed(values, tuple, "the caller")


class Named:
    """A container with a field that is no leaf, and that no text tells."""

    def __init__(self, name, items):
        self.name = name
        self.items = items


class NameOf:
    """Metadata with a text that is the same for all."""

    def __init__(self, name):
        self.name = name

    def __eq__(self, other):
        return self.name == other.name

    def __repr__(self):
        return "NameOf"


optree.register_pytree_node(
    Named,
    lambda named: (named.items, NameOf(named.name)),
    lambda name, items: Named(name.name, [*items]),
    namespace="mpi_replica",
)


def test_what_differs_in_a_container_without_a_text_stays_with_it():
    values = [{"a": Named("one", [1, [2]]), "b": 3}, {"a": Named("other", [4, [5]]), "b": 6}]
    joined = nest.transposed(values, tuple, "here")
    assert joined["b"] == (3, 6)
    assert [(one.name, one.items) for one in joined["a"]] == [
        ("one", [1, [2]]),
        ("other", [4, [5]]),
    ]


def test_containers_that_are_alike_are_joined_leaf_by_leaf_also_round_one_that_is_not():
    values = [
        Named("both", [[None, i], Named("both", [i]), {"x": Named(i, [i, None])}, 10 * i])
        for i in (1, 2)
    ]
    joined = nest.transposed(values, tuple, "here")
    assert joined.name == "both"
    plain, alike, unlike, last = joined.items
    assert plain == [(None, None), (1, 2)]
    assert (alike.name, alike.items) == ("both", [(1, 2)])
    assert [(one.name, one.items) for one in unlike["x"]] == [(1, [1, None]), (2, [2, None])]
    assert last == (10, 20)


def test_functions_of_defaultdicts_count_as_one():
    def value(i):
        return collections.defaultdict(lambda: 0, a=[i], b=collections.defaultdict(lambda: 1, c=i))

    joined = nest.transposed([value(1), value(2)], tuple, "here")
    assert joined == {"a": [(1, 2)], "b": {"c": (1, 2)}}
    assert (joined["d"], joined["b"]["d"]) == (0, 1)


# Containers of other classes; in use they are tried in tests/ranks/test_containers.py.


class Rows(list):
    pass


class Options(dict):
    pass


@pytest.mark.parametrize("inside", [lambda x: x, lambda x: {"a": x}, lambda x: (0, [x])])
@pytest.mark.parametrize(
    ("value", "wanted"),
    [
        (Rows([2, 3]), [2, 3]),
        (Options(b=3, a=2), Options(b=3, a=2)),
        (collections.Counter(b=3, a=2), collections.Counter(b=3, a=2)),
        (types.MappingProxyType({"b": 3, "a": 2}), types.MappingProxyType({"b": 3, "a": 2})),
        (Options({1: 3, "a": 2}), Options({1: 3, "a": 2})),  # keys of which none is the less
        (Options(), Options()),
        (Rows(), []),
        (Rows([Options(a=Rows([1]))]), [Options(a=[1])]),
    ],
    ids=repr,
)
def test_subclasses_and_mappings_are_structure_too(value, wanted, inside):
    value, wanted = inside(value), inside(wanted)
    for flatten in (nest.flatten, lambda value: nest.flatten_plain(value)[:2]):
        leaves, structure = flatten(value)
        assert all(type(leaf) is int for leaf in leaves)
        for path, leaf in zip(nest.leaf_paths(structure), leaves, strict=True):
            assert eval(f"value{path}", {"value": value}) is leaf
        again = nest.unflatten(structure, leaves)
        assert again == wanted
        assert repr(again) == repr(wanted)


def test_mappings_of_other_classes_or_keys_are_told_apart_and_the_order_of_keys_is_no_difference():
    one, other = nest.flatten(Options(b=2, a=1)), nest.flatten(Options(a=1, b=2))
    assert one == other
    texts = {
        nest.structure_text(nest.flatten(value)[1])
        for value in (Options(a=1), Options(b=1), collections.Counter(a=1), {"a": 1}, Rows([1]))
    }
    assert len(texts) == 5
    assert not any("mpi_replica" in text for text in texts)


def test_nests_with_as_many_leaves_as_a_flat_dict_are_not_taken_for_one():
    for value in ({"a": 1, "b": 2}, {"a": Rows(), "b": Rows([1, 2])}, {"a": 3, "b": 4}):
        leaves, structure, _ = nest.flatten_plain(value)
        assert nest.unflatten(structure, leaves) == value


def test_what_a_program_has_registered_goes_first():
    class Box(Options):
        pass

    optree.register_pytree_node(
        Box, lambda box: ((box["x"],), None), lambda _, items: items[0], namespace="mpi_replica"
    )
    assert nest.flatten(Box(x=5, y=6))[0] == [5]


def test_mappings_that_only_show_what_lies_elsewhere_are_leaves():
    class Store(collections.abc.Mapping):
        """Like a file of h5py: it is opened by name, and reads when it is looked at."""

        def __init__(self, name):
            self.length = {"two": 2}[name]
            self.looks = 0

        def __getitem__(self, key):
            self.looks += 1
            return np.arange(3) + key

        def __iter__(self):
            if self.length < 0:
                raise RuntimeError("it is closed")
            return iter(range(self.length))

        def __len__(self):
            return self.length

    store, closed = Store("two"), Store("two")
    closed.length = -1
    for value in (store, closed, os.environ, store):
        (leaf,), _ = nest.flatten((value,))
        assert leaf is value
    assert store.looks == 2  # at one of its values, once for all of its class


def test_what_can_not_be_made_anew_is_refused_before_anything_is_done_with_it():
    class Named(dict):
        def __init__(self, name, items):
            super().__init__(items)

    with pytest.raises(TypeError, match=r"a nest with a .*Named can't be made anew.* TypeError"):
        nest.flatten([Named("n", {"a": 1})])


def test_two_threads_that_meet_a_class_at_once_open_it_once():
    class Many(dict):
        pass

    barrier = threading.Barrier(4)

    def look(_):
        barrier.wait()
        return nest.flatten(Many(a=1))[0]

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        assert list(pool.map(look, range(4))) == [[1]] * 4


# The quick ways through flat nests of arrays, of which some are known from earlier calls.


class Word(str):
    """A key that equals a str of the same letters, and yet is another one."""


Letter = enum.StrEnum("Letter", ["a", "b"])

KEYS = st.sampled_from(["a", "b", "c", "ab", 1, True, 1.0, 0, (1,), Word("a"), Letter.a])
PLAIN = st.sampled_from([None, 1, 2.5, True, "a", b"a", np.float32(1), np.ones(2), np.array(1)])
ODD = st.sampled_from([1j, {1}, object(), mr.PerReplica([1]), np.int8(1)])
DICTS = st.recursive(
    PLAIN,
    lambda inner: (
        st.dictionaries(KEYS, inner | ODD, max_size=3)
        | st.dictionaries(st.sampled_from("abc"), PLAIN, max_size=3)
        | st.lists(PLAIN, max_size=3)
        | st.lists(inner | ODD, max_size=3)
        | st.lists(inner, max_size=2).map(tuple)
    ),
    max_leaves=6,
)
IS_PLAIN = (type(None), int, float, bool, str, bytes, np.float32, np.ndarray)


@given(st.lists(DICTS, min_size=1, max_size=6))
def test_the_quick_way_gives_what_flatten_gives_whatever_came_before(values):
    orders = {}
    for value in values * 2:
        leaves, structure, is_plain = nest.flatten_plain(value)
        expected, other = nest.flatten(value)
        assert [id(leaf) for leaf in leaves] == [id(leaf) for leaf in expected]
        assert structure == other
        assert bool(is_plain) == all(type(leaf) in IS_PLAIN for leaf in leaves)
        assert (is_plain == nest.ARRAYS) == all(type(leaf) is np.ndarray for leaf in leaves)
        again = nest.unflatten(structure, leaves)
        assert type(again) is type(value)
        if isinstance(value, list | tuple | dict):
            assert list(again) == list(value)  # keys in the order in which they were put in
        # One object as the structure: one order of keys. It is kept, so that no other comes there.
        order = orders.setdefault(id(structure), (structure, key_order(value)))
        assert order == (structure, key_order(value))


@given(st.lists(DICTS | st.lists(PLAIN, max_size=3), min_size=1, max_size=6))
def test_where_a_list_is_a_leaf_all_else_is_as_elsewhere(values):
    for value in values * 2:
        leaves, structure = nest.flatten_tensors(value)
        expected, other = optree.tree_flatten(
            value, lambda node: isinstance(node, list), none_is_leaf=True, namespace=NAMESPACE
        )
        assert [id(leaf) for leaf in leaves] == [id(leaf) for leaf in expected]
        assert structure == other


class Unordered:
    def __lt__(self, other):
        raise ZeroDivisionError


@pytest.mark.parametrize(
    "kind",
    [dict, types.MappingProxyType, collections.Counter, lambda d: collections.defaultdict(int, d)],
)
@pytest.mark.parametrize("flatten", [nest.flatten, nest.flatten_plain, nest.flatten_tensors])
def test_keys_that_have_no_order_are_told_by_their_class(flatten, kind):
    nest.flatten(kind({"a": 1}))  # its class is known
    keys = ["a", Unordered(), 2, Unordered()]
    value = (os.stat_result(range(10)), {"c": (1, kind(dict.fromkeys(keys, 1)))})
    with pytest.raises(
        StructureMismatchError, match=r"type Unordered, .* raises ZeroDivision"
    ) as e:
        flatten(value)
    assert isinstance(e.value.__cause__, ZeroDivisionError)


def test_an_error_of_what_opens_a_class_of_the_program_stays_what_it_is():
    class Own:
        pass

    def opened(own):
        raise ZeroDivisionError

    optree.register_pytree_node(Own, opened, lambda _, items: Own(), namespace=GLOBAL)
    try:
        with pytest.raises(ZeroDivisionError):
            nest.flatten({"a": Own()})
    finally:
        optree.unregister_pytree_node(Own, namespace=GLOBAL)


@pytest.mark.parametrize("flatten", [nest.flatten, nest.flatten_plain, nest.flatten_tensors])
def test_a_container_that_contains_itself_is_a_value_error(flatten):
    endless = {"a": 1.0}
    endless["b"] = (endless,)
    with pytest.raises(ValueError, match="one of them contains itself"):
        flatten(endless)


@given(st.lists(st.tuples(st.lists(DICTS | PLAIN, max_size=3), DICTS), min_size=1, max_size=4))
def test_arguments_are_flattened_as_the_tuple_and_the_dict_that_they_are(calls):
    for args, keywords in calls * 2:
        kwargs = keywords if isinstance(keywords, dict) else {}
        leaves, structure, is_plain = nest.flatten_arguments(args, kwargs)
        expected, other = nest.flatten((tuple(args), dict(kwargs)))
        assert [id(leaf) for leaf in leaves] == [id(leaf) for leaf in expected]
        assert structure == other
        assert bool(is_plain) == all(type(leaf) in IS_PLAIN for leaf in leaves)


@pytest.mark.parametrize("flatten", [nest.flatten, nest.flatten_plain])
def test_the_leaves_of_a_list_are_another_list(flatten):
    value = [1.0, 2.0]
    for _ in range(2):
        leaves = flatten(value)[0]
        leaves.append(3.0)
        assert value == [1.0, 2.0]


def test_the_order_of_keys_comes_back_for_every_order_of_the_same_keys():
    keys = ["b", "a", "c"]
    for ordered in [*itertools.permutations(keys)] * 2:
        value = {key: np.array(ord(key)) for key in ordered}
        leaves, structure, is_plain = nest.flatten_plain(value)
        assert [chr(leaf) for leaf in leaves] == ["a", "b", "c"]
        assert list(nest.unflatten(structure, leaves)) == list(ordered)
        assert nest.leaf_paths(structure) == ("['a']", "['b']", "['c']")
        assert is_plain


@pytest.mark.parametrize("value", [{"a": {"b": 1}}, {"a": ()}, {"a": []}, {"a": {}}, {"a": [1]}])
def test_a_dict_that_was_flat_before_may_hold_containers_and_be_flat_again(value):
    for one in ({"a": 1}, value, {"a": 2}, value, {"a": None}):
        leaves, structure, _ = nest.flatten_plain(one)
        assert (leaves, structure) == nest.flatten(one)
        assert nest.unflatten(structure, leaves) == one


@pytest.mark.parametrize("namespace", ["mpi_replica", GLOBAL])
def test_leaves_keep_their_keys_where_optree_was_told_to_keep_the_order_of_these(namespace):
    value = {f"z of {namespace}": np.full(2, 1.0), f"a of {namespace}": np.full(2, 2.0)}
    with optree.dict_insertion_ordered(True, namespace=namespace):
        assert_comes_back(value)
        assert_comes_back(value)
    assert_comes_back(value)
    assert nest.flatten_plain(value)[1] == nest.flatten(value)[1]


def assert_comes_back(value):
    leaves, structure, _ = nest.flatten_plain(value)
    back = nest.unflatten(structure, leaves)
    assert all(back.pop(key) is leaf for key, leaf in value.items())
    assert not back


def test_keys_of_a_subclass_of_str_come_back_as_they_were_also_where_equal_ones_are_known():
    nest.flatten_plain({"a": 1, "b": 2})
    for a, b in ((Word("a"), Word("b")), (Letter.a, Letter.b), ("a", "b")):
        leaves, structure, _ = nest.flatten_plain({a: 1, b: 2})
        keys = list(nest.unflatten(structure, leaves))
        assert [type(key) for key in keys] == [type(a), type(b)]


@pytest.fixture
def few_are_kept(monkeypatch):
    monkeypatch.setattr(nest, "_CACHE_SIZE", 3)


@given(values=st.lists(DICTS, max_size=12))
def test_a_key_never_stands_for_two_structures(few_are_kept, values):
    """Nor where what is known is forgotten, and a structure comes to lie where another one was."""
    structures = {}
    for value in values * 2:
        for structure in (
            nest.flatten_plain(value)[1],
            nest.flatten_arguments([value], {})[1],
            nest.flatten_arguments([], {"x": value})[1],
        ):
            assert structures.setdefault(nest.key(structure), structure) == structure


def test_a_few_large_nests_are_known_side_by_side(monkeypatch):
    """They would drive each other out at each turn of a loop."""
    monkeypatch.setattr(nest, "_MOST_LEAVES", 10)
    for number in range(20):
        nest.flatten_plain([1] * (1000 + number))
    large = [[1] * 2000, dict.fromkeys(map(str, range(2000)), 1), (1,) * 2000]
    known = [nest.flatten_plain(value)[1] for value in large]
    for value, structure in zip(large, known, strict=True):
        assert nest.flatten_plain(value)[1] is structure


@pytest.mark.parametrize(
    "flatten",
    [
        lambda: nest.flatten_plain({"met by two threads": 1}),
        lambda: nest.flatten_plain([1] * 17),
        lambda: nest.flatten_plain((1,) * 17),
        lambda: nest.flatten_arguments([1] * 17, {}),
    ],
    ids=["dict", "list", "tuple", "arguments"],
)
def test_two_threads_that_learn_a_structure_at_once_leave_no_number_without_a_structure(
    flatten, monkeypatch
):
    """A number of one that dies would come to stand for another structure, at its address."""
    barrier = threading.Barrier(2)
    tree_flatten = optree.tree_flatten

    def meet(*args, **options):
        found = tree_flatten(*args, **options)
        barrier.wait()  # neither has learned it yet
        return found

    with monkeypatch.context() as patched:
        patched.setattr(optree, "tree_flatten", meet)
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            found = list(pool.map(lambda _: flatten()[1], range(2)))
    known = flatten()[1]
    assert any(structure is known for structure in found)
    for structure in found:
        assert isinstance(nest.key(structure), int) == (structure is known)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"a": 1, "b": {"a": [2]}}, {np.str_("a"): 1, "b": {Letter.a: [2]}}),
        ({1: {0: "x"}}, {True: {np.int64(0): "x"}}),
        ({1: 5, 0.5: [6, 7]}, {np.float32(1): 5, fractions.Fraction(1, 2): [6, 7]}),
        (collections.OrderedDict({1: 5}), collections.OrderedDict({1.0: 5})),
        (collections.Counter({"a": 1}), collections.Counter({np.str_("a"): 1})),
        ({("a", 1): [0]}, {(np.str_("a"), np.int8(1)): [0]}),
        ({b"a": [0]}, {np.bytes_(b"a"): [0]}),
        ({frozenset("a"): 1}, {frozenset([np.str_("a")]): 1}),
        ({(frozenset([0, 8]), 1): [0]}, {(frozenset([8, 0]), 1): [0]}),
    ],
)
@pytest.mark.parametrize("swapped", [False, True])
def test_structures_with_equal_keys_have_one_text_whichever_was_met_first(one, other, swapped):
    first, second = (nest.flatten(x)[1] for x in ((other, one) if swapped else (one, other)))
    assert first == second
    for describe in (nest.structure_text, nest.leaf_paths):
        texts = set()
        for structure in (first, second):
            describe.cache_clear()
            texts.add(describe(structure))
        assert len(texts) == 1
    assert not re.search(r"np\.|Letter|True|Fraction", nest.structure_text(first))


def test_keys_that_differ_have_texts_that_differ():
    keys = [1, 2, 0.5, "1", "True", None, b"1", (1,), "np.str_('a')", "a", 1j, 10**30]
    assert len({nest.structure_text(nest.flatten({key: 0})[1]) for key in keys}) == len(keys)
