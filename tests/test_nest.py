"""Nested structures: flatten, rebuild, name the leaves."""

import collections
from typing import NamedTuple

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

import mpi_replica as mr
from mpi_replica import nest


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


def test_values_of_replicas_and_indexed_slices_are_leaves():
    for leaf in (mr.PerReplica([1, 2]), mr.Mirrored([1]), mr.IndexedSlices([1.0], [0])):
        leaves, _ = nest.flatten([leaf])
        assert leaves[0] is leaf


def test_keys_are_visited_in_sorted_order_and_come_back_in_their_own():
    leaves, structure = nest.flatten({"b": 2, "a": 1})
    assert leaves == [1, 2]
    assert nest.leaf_paths(structure) == ("['a']", "['b']")
    assert list(nest.unflatten(structure, [10, 20]).items()) == [("b", 20), ("a", 10)]


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
