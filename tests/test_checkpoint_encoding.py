"""State as plain data and back: what a checkpoint can hold, and what it refuses."""

import collections
import decimal
import enum
import json
import math
import os
import re
import time
import types

import hypothesis
import hypothesis.strategies as st
import ml_dtypes
import numpy as np
import pytest

import mpi_replica as mr
from mpi_replica.checkpoint.decoder import decoded
from mpi_replica.checkpoint.dtype_texts import dtype_from, dtype_text
from mpi_replica.checkpoint.encoder import Encoder
from mpi_replica.core.pad_bytes import without_padding

Point = collections.namedtuple("Point", "x y")

DTYPES = [
    *("?", "i1", "<i2", ">i2", "<u4", ">i8", "<u8", "<f2", ">f4", "<f8", ">f8", "<c8", ">c16"),
    *("S3", "S0", "<U5", ">U2", "U0", "V7", "V0", "<M8[ns]", ">M8[25s]", "<M8", "<m8[D]"),
    *(np.longdouble, np.clongdouble, np.intp, np.longlong),
]
NAMED = sorted(
    {
        np.dtype(found).name
        for found in vars(ml_dtypes).values()
        if isinstance(found, type) and issubclass(found, np.generic)
    }
)
STRUCTURED = [
    np.dtype("i1,i8", align=True),
    np.dtype([("a", ">f4"), ("b", "U3"), ("c", "f8", (2, 3))]),
    np.dtype({"names": ["late", "early"], "formats": ["i2", "f8"], "offsets": [12, 0]}),
    np.dtype({"names": ["a", "b"], "formats": ["u4", "u1"], "offsets": [0, 0], "itemsize": 32}),
    np.dtype([("outer", [("inner", "i4"), ("when", "M8[us]")], 2), ("", "f2")]),
    np.dtype([("weight", ml_dtypes.bfloat16), ("scale", ml_dtypes.float8_e5m2, (3,))]),
    np.dtype([(("a title", "x"), "i4"), ("y", "i4")]),
    np.dtype([("größe", "f4"), ("$array", "i4")]),
    np.dtype([]),
    np.dtype([("nothing", []), ("x", "i4")]),
]


def encoded(value):
    """What stands for a value, as it comes out of a file, and its arrays."""
    encoder = Encoder(lambda value: value)
    state = json.loads(json.dumps(encoder.encode(value, "checkpoint.x")))
    return state, encoder.arrays


def there_and_back(value):
    state, arrays = encoded(value)
    return decoded(state, arrays.__getitem__)


def bits(value):
    """Something that is equal for values that are the same to the bit, of the same types."""
    if isinstance(value, np.ndarray | np.generic):
        data = without_padding(np.asarray(value)).tobytes()
        return type(value), value.dtype, value.shape, data
    if isinstance(value, float):
        return float, value.hex()
    if isinstance(value, complex):
        return complex, bits(value.real), bits(value.imag)
    if isinstance(value, dict):
        return dict, [(bits(key), bits(item)) for key, item in value.items()]
    if isinstance(value, list | tuple):
        return type(value), [bits(item) for item in value]
    return type(value), value


dtypes = st.sampled_from([np.dtype(d) for d in DTYPES] + STRUCTURED) | st.sampled_from(NAMED).map(
    lambda name: np.dtype(getattr(ml_dtypes, name))
)


@st.composite
def arrays(draw):
    """Arrays of any bits: also NaN with a payload, and what no number has."""
    dtype, shape = draw(dtypes), tuple(draw(st.lists(st.integers(0, 3), max_size=3)))
    count = int(np.prod(shape, dtype=int))
    if dtype.kind == "U":  # not all bits are text
        return np.full(shape, draw(st.text(max_size=5)), dtype)
    data = draw(st.binary(min_size=count * dtype.itemsize, max_size=count * dtype.itemsize))
    if dtype.kind == "b":
        data = bytes(byte & 1 for byte in data)
    return np.ndarray(shape, dtype, buffer=bytearray(data) or None)


numbers = (
    st.integers()
    | st.integers(-(10**300), 10**300)
    | st.floats(allow_nan=True)
    | st.complex_numbers(allow_nan=True)
    | st.sampled_from([-0.0, float("inf"), float("nan"), complex(-0.0, float("-inf"))])
)
names = st.text(max_size=4) | st.sampled_from(["$array", "$dict", "$", "$state", "$tuple", "größe"])
keys = names | st.integers() | st.booleans() | st.none() | st.binary(max_size=3)
keys = keys | st.tuples(names, st.integers())
scalars = st.sampled_from(
    [np.float32(0.1), np.int64(-3), np.bool_(True), np.datetime64("NaT", "s"), np.longdouble(1) / 3]
)
leaves = numbers | names | st.none() | st.booleans() | st.binary(max_size=5) | arrays() | scalars
nests = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(names, inner, max_size=3)
        | st.dictionaries(keys, inner, max_size=3)
    ),
    max_leaves=8,
)


@hypothesis.settings(max_examples=150)
@hypothesis.given(nests)
def test_a_nest_comes_back_with_its_bits_and_types(value):
    assert bits(there_and_back(value)) == bits(value)


@pytest.mark.parametrize(
    "value",
    [
        *({}, [], (), {"": {}}, {"$array": "0"}, {"$dict": []}, {"$state": None}, {"$bytes": 1}),
        *({1: 2}, {True: 1}, {None: 0}, {(): 1}, {(1, "$tuple"): [()]}, {b"$": {"$": 1}}),
        *(10**4000, -(2**63), "\ud800 alone", "\0", b"", b"\xff\0", np.zeros((0, 3), ">f4")),
    ],
    ids=lambda value: f"{value!r:.20}".encode("ascii", "replace").decode(),
)
def test_what_is_rare_comes_back(value):
    assert bits(there_and_back(value)) == bits(value)


class Color(enum.IntEnum):
    RED = 3


class Phase(str, enum.Enum):  # noqa: UP042 (`str` of it is another text)
    WARM = "warm"


@pytest.mark.parametrize(
    ("value", "found"),
    [
        (Point(1, [2]), (1, [2])),
        (collections.OrderedDict(b=1, a=2), {"b": 1, "a": 2}),
        (types.MappingProxyType({"a": 1}), {"a": 1}),
        (bytearray(b"ab"), b"ab"),
        (np.str_("a"), "a"),
        (np.str_("a\0"), "a\0"),
        (np.bytes_(b"ab\0\0"), np.bytes_(b"ab\0\0")),
        ({"a": (np.bytes_(b"\0\0"),)}, {"a": (np.bytes_(b"\0\0"),)}),
        (np.bytes_(b""), np.bytes_(b"")),
        (np.bytes_(b"\0ab"), np.bytes_(b"\0ab")),
        ({np.bytes_(b"a\0"): 1}, {b"a\0": 1}),
        (Color.RED, 3),
        (Phase.WARM, "warm"),
        ({Phase.WARM: 1}, {"warm": 1}),
        ({np.int64(3): 1, np.str_("a"): 2}, {3: 1, "a": 2}),
        ({np.float32(0.1): 1}, {float(np.float32(0.1)): 1}),
        (np.rec.array([(1, 2.0)]), np.array([(1, 2.0)], "i8,f8")),
    ],
    ids=lambda value: type(value).__name__,
)
def test_subclasses_come_back_as_what_they_are_made_of(value, found):
    assert bits(there_and_back(value)) == bits(found)


def test_a_numpy_number_as_a_key_finds_what_was_saved_under_it():
    for key in (np.int8(-3), np.uint64(2**63), np.float32(0.1), np.float64(1e300), np.bool_(True)):
        assert there_and_back({key: "here"})[key] == "here"
        assert there_and_back({("a", (key,)): "here"})["a", (key,)] == "here"


class Stateful:
    def __init__(self, state):
        self.state = state

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


def test_an_object_is_saved_as_its_state():
    state, arrays = encoded({"model": Stateful({"w": np.arange(3.0), 2: (1,)})})
    assert list(state["model"]) == ["$state"]
    inner = decoded(state["model"]["$state"], arrays.__getitem__)
    assert bits(inner) == bits({"w": np.arange(3.0), 2: (1,)})


# What is refused


@pytest.mark.parametrize(
    "value",
    [
        *(object(), {1, 2}, decimal.Decimal(1), range(3), print, int, iter([])),
        *(np.array([1, None]), np.array([(1, {})], [("a", "i4"), ("b", "O")]), np.array(None)),
        *(np.array(["a"], np.dtypes.StringDType()), np.zeros(1, [((7, "x"), "i4")])),
    ],
    ids=lambda value: f"{value!r:.20}",
)
def test_what_has_no_plain_data_is_a_type_error_that_says_where(value):
    with pytest.raises(TypeError, match=r"\(checkpoint\.x\['a'\]\[1\]\).*state_dict"):
        encoded({"a": [0, value]})
    with pytest.raises(TypeError, match=r"state_dict\(\)\['a'\]"):
        encoded(Stateful({"a": value}))


@pytest.mark.parametrize("dtype", [np.dtype(object), np.dtypes.StringDType(), np.dtype("i4,O")])
def test_an_array_without_plain_data_is_named_with_its_dtype(dtype):
    words = f"ndarray of dtype {dtype} (checkpoint.x): it takes arrays of fixed item size"
    with pytest.raises(TypeError, match=re.escape(words)):
        encoded(np.zeros(1, dtype))


@pytest.mark.parametrize("value", [os.stat_result(range(10)), time.struct_time(range(9))])
def test_what_has_more_fields_than_items_is_a_type_error_that_says_where(value):
    with pytest.raises(TypeError, match=r"\(checkpoint\.x\['a'\]\[1\]\).*no items of it"):
        encoded({"a": [0, value]})


@pytest.mark.parametrize(
    "key",
    [
        *(frozenset(), np.longdouble(1), np.datetime64(1, "s"), object(), (1, (np.longdouble(1),))),
        *(mr.Mirrored(1.0), (mr.Mirrored(np.zeros(3)),)),
    ],
)
def test_what_can_be_no_key_is_a_type_error_that_says_where(key):
    with pytest.raises(TypeError, match=r"the keys of checkpoint\.x"):
        encoded({"a": 1, key: 2})


@pytest.mark.parametrize("nan", [float("nan"), np.float32("nan"), complex(0, math.nan)])
@pytest.mark.parametrize(
    "wrap", [lambda key: key, lambda key: ("a", (key,))], ids=["", "in tuples"]
)
def test_nan_is_no_key_but_in_the_state_of_an_object_that_takes_it_back(nan, wrap):
    encoder = Encoder(lambda value: value, lambda value: None)
    with pytest.raises(ValueError, match=r"nan.* \(the keys of checkpoint\.x\).* equals no key"):
        encoder.encode({1.0: 1, wrap(nan): 2}, "checkpoint.x")
    state = encoder.encode(Stateful({wrap(nan): 2}), "checkpoint.x")
    assert list(decoded(state["$state"], encoder.arrays.__getitem__).values()) == [2]


def test_a_key_that_is_nested_too_deep_is_an_error_that_says_where():
    key = ()
    for _ in range(99):
        key = (key,)
    assert there_and_back({key: 1}) == {key: 1}
    for _ in range(3):
        key = (key,)
    with pytest.raises(ValueError, match=r"100 levels deep \(the keys of checkpoint\.x"):
        encoded({key: 1})


def test_a_masked_array_is_a_type_error():
    with pytest.raises(TypeError, match="masked"):
        encoded([np.ma.masked_array([1, 2], [0, 1])])


# Dtypes


@pytest.mark.parametrize(
    "dtype",
    [*map(np.dtype, DTYPES), *(np.dtype(getattr(ml_dtypes, name)) for name in NAMED), *STRUCTURED],
    ids=str,
)
def test_a_dtype_comes_back(dtype):
    found = dtype_from(json.loads(json.dumps(dtype_text(dtype))))
    assert found == dtype
    assert found.fields == dtype.fields
    assert found.itemsize == dtype.itemsize
    assert found.str == dtype.str
    assert found.name == dtype.name


@pytest.mark.parametrize(
    "text",
    [
        *("O", "|O", "<O", "T", "i4,i4", "|i4,|i4", "<(2,)i4", "", "<", "float", "garbage", "("),
        *("finfo", "__name__", "np", "__loader__", "<f3", "|S-1", "<M8[year of the cat]"),
        *(None, 4, 1.5, True, {}, {"names": ["a"], "formats": ["O"]}, [], [[]], [4, 4], ["<f4"]),
        *([["a", "O", [], 0, None], 8], [["a", "<f4", [], -4, None], 4]),
        *([["a", "<f4", [], 0, None], 2], [["a", "<f4", [-1], 0, None], 4]),
        *([["a", "<f4", [], 0, None]] * 2 + [8], [[1, "<f4", [], 0, None], 4]),
        *([["a", "<f4", [], 0], 4], [["a", "<f4", [2**40, 2**40], 0, None], 4], [["a"], "b"]),
    ],
    ids=str,
)
def test_what_stands_for_no_dtype_is_refused(text):
    with pytest.raises((ValueError, TypeError, AttributeError, OverflowError)):
        dtype_from(text)
