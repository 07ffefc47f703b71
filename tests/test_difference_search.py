"""Where bytes of several ranks begin to differ, found without exchanging all of them."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpi_replica.collectives.contents import content_of, element_name, element_texts
from mpi_replica.collectives.difference_search import SMALL_BYTES, differing_units, search


def searched(rows, unit_bytes):
    """Let each row search as a rank of its own; return what all found, and the bytes of each."""
    searches = [search(np.frombuffer(row, np.uint8), unit_bytes) for row in rows]
    given = [next(one) for one in searches]
    sent = 0
    while True:
        sent += len(given[0])
        assert len({len(data) for data in given}) == 1
        results, given, old = [], [], given
        for one in searches:
            try:
                given.append(one.send(old))
            except StopIteration as end:
                results.append(end.value)
        if results:
            assert len(results) == len(rows)
            assert len(set(results)) == 1
            return results[0], sent


@given(
    st.integers(1, 40_000),
    st.sampled_from([1, 2, 8, 16, 24]),
    st.lists(st.tuples(st.integers(0), st.integers(0, 3)), min_size=1, max_size=6),
)
def test_the_first_unit_that_differs_is_found_by_all_ranks(units, unit_bytes, changes):
    row = np.random.default_rng(units).integers(0, 256, (units, unit_bytes), np.uint8)
    rows = [row.copy() for _ in range(4)]
    for at, rank in changes:
        rows[rank][at % units, at % unit_bytes] ^= 1 + rank
    differing = [i for i in range(units) if any((r[i] != rows[0][i]).any() for r in rows)]
    found, _ = searched([r.tobytes() for r in rows], unit_bytes)
    if not differing:
        assert found is None
        return
    assert found.position == differing[0]
    assert found.units == tuple(r[differing[0]].tobytes() for r in rows)
    assert found.number <= len(differing)
    if found.is_exact:
        assert found.number == len(differing)


def test_little_is_exchanged_whatever_the_size():
    row = np.zeros(1 << 24, np.uint8)
    other = row.copy()
    other[12_345_678] = 1
    found, sent = searched([row.tobytes(), other.tobytes()], 8)
    assert (found.position, found.number, found.is_exact) == (12_345_678 // 8, 1, True)
    assert sent < 2 * SMALL_BYTES


def test_units_that_are_alike_in_all_rows_do_not_differ():
    assert differing_units([b"", b""], 4) == []
    assert differing_units([b"abcd"], 2) == []
    assert differing_units([b"abcd", b"abcd", b"xbcd"], 2) == [0]


def kind_of(leaf):
    return content_of(leaf, "").kind


def test_the_kind_of_a_leaf_tells_dtype_and_shape_and_short_values_that_are_no_arrays():
    assert kind_of(np.ones((2, 3), "f4")) == "float32[2, 3]"
    assert kind_of(np.ones(2, ">f4")) == "float32[2]"
    assert kind_of(1.5) == kind_of(np.float64(2.5)) == "float64[]"
    assert kind_of("it's") == '"it\'s"'
    assert kind_of("\ud800") == "'\\ud800'"
    assert kind_of("x" * 100) == "a str of 100 characters"
    assert kind_of(b"x" * 100) == "bytes of 100 bytes"
    assert kind_of(None) == "None"
    assert kind_of(1 << 64) == "18446744073709551616"
    assert kind_of(1 << 5000) == "an int of 626 bytes"


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (1, 1.0),
        (1, True),
        ("1", 1),
        ("a", b"a"),
        ("None", None),
        (1 << 64, str(1 << 64)),
        (1 << 5000, (1 << 5000) + 1),
        ("x" * 100, "x" * 99 + "y"),
        (0.0, -0.0),
        (np.zeros((2, 3)), np.zeros((3, 2))),
        (np.zeros(2, "f4"), np.zeros(2, "i4")),
        (np.zeros(0, "f4"), np.zeros(0, "i4")),
    ],
)
def test_leaves_that_differ_have_other_digests(one, other):
    assert content_of(one, "").digest() != content_of(other, "").digest()


def test_leaves_that_are_the_same_have_the_same_digest():
    rows = np.arange(12.0).reshape(3, 4)
    for one, other in (
        (rows, np.asfortranarray(rows)),
        (rows, rows.astype(">f8")),
        (1, np.int64(1)),
    ):
        assert content_of(one, "").digest() == content_of(other, "").digest()


UNIT_FREE = np.array([5, 6]).view("M8")
NO_TEXTS = np.array([0x110000, 0x110001], np.uint32).view("U1")
IN_RECORDS = np.array([(1, 5), (1, 6)], "i8, i8").view([("f0", "i8"), ("f1", "M8")])


@pytest.mark.parametrize("array", [UNIT_FREE, NO_TEXTS, IN_RECORDS], ids=lambda x: str(x.dtype))
def test_elements_that_numpy_can_not_write_are_shown_by_their_bytes(array):
    """As times without a unit, and characters that are none."""
    units = [array[:1].tobytes(), array[1:].tobytes()]
    shown = [f"bytes {unit.hex(' ')}" for unit in units]
    assert element_texts(content_of(array, ""), units) == shown
    assert content_of(array[:1].reshape(()), "").text.endswith(f" {shown[0]}")


def test_elements_are_named_by_their_place_and_shown_with_their_bits_where_they_print_alike():
    content = content_of(np.zeros((3, 4), "f4"), "")
    assert element_name(content, 4, 6) == "element [1, 2]"
    nans = np.array([0x7FC00000, 0x7FC00001], "u4").view("f4")
    units = [nan.tobytes() for nan in nans]
    assert element_texts(content, units) == ["nan (0x7fc00000)", "nan (0x7fc00001)"]
    assert element_texts(content, [bytes(4), units[0]]) == ["0.0", "nan"]
    bools = content_of(np.zeros(2, bool), "")
    assert element_texts(bools, [b"\1", b"\2"]) == ["True (bytes 01)", "True (bytes 02)"]
