"""What is compared instead of values: digests differ where the values do."""

import datetime
import os
import time

import numpy as np
import pytest

import mpi_replica as mr
from mpi_replica.core.digests import BLAKE_BYTES, DIGEST_BYTES, digest_of, digest_of_bytes

SIZES = (0, 1, 100, BLAKE_BYTES, BLAKE_BYTES + 1, 300_001, (1 << 20) + 24)


def drawn(size, dtype="u1", seed=0):
    return np.random.default_rng(seed).integers(0, 256, size, np.uint8).view(dtype)


def digest(array):
    return digest_of_bytes(np.ascontiguousarray(array).reshape(-1).view(np.uint8))


@pytest.mark.parametrize("size", SIZES)
def test_a_digest_is_the_same_for_the_same_bytes_wherever_they_lie(size):
    array = drawn(size)
    elsewhere = np.empty(size + 3, np.uint8)[3:]
    elsewhere[:] = array
    assert len(digest(array)) == DIGEST_BYTES
    assert digest(array) == digest(elsewhere)


@pytest.mark.parametrize("size", SIZES[1:])
def test_one_bit_that_differs_changes_it(size):
    array = drawn(size)
    before = digest(array)
    for at in {0, size // 3, size // 2, size - 1}:
        for bit in (0, 7):
            array[at] ^= 1 << bit
            assert digest(array) != before
            array[at] ^= 1 << bit
    assert digest(array) == before


@pytest.mark.parametrize("of", [digest, digest_of])
@pytest.mark.parametrize("dtype", ["f8", "f4", "f2", "c16"])
def test_the_signs_of_all_numbers_change_it(of, dtype):
    array = np.random.default_rng(0).normal(size=(100, 1024)).astype(dtype)
    assert of(array) != of(-array)


@pytest.mark.parametrize("of", [digest, digest_of])
def test_the_order_of_rows_changes_it(of):
    rows = np.repeat(np.eye(64), 4, axis=0)
    orders = [np.random.default_rng(seed).permutation(rows) for seed in range(20)]
    assert len({of(order) for order in orders}) == 20


@pytest.mark.parametrize("of", [digest, digest_of])
def test_two_numbers_that_change_places_change_it(of):
    array = np.arange(20_000.0)
    seen = {of(array)}
    for one, other in ((0, 1), (0, 64), (5, 16_389), (0, 8192), (100, 19_999)):
        changed = array.copy()
        changed[[one, other]] = array[[other, one]]
        seen.add(of(changed))
    assert len(seen) == 6


def test_changes_that_cancel_in_sums_of_rows_and_of_columns_change_it():
    array = np.zeros((400, 64))
    seen = set()
    for sign in (1.0, -1.0):
        array[np.ix_([3, 200], [5, 60])] = [[sign, -sign], [-sign, sign]]
        seen.add(digest(array))
    assert len(seen) == 2


PADDED = [
    *(np.dtype(np.longdouble), np.dtype(np.clongdouble), np.dtype("i1, f8", align=True)),
    np.dtype([(("a title", "a"), "f4"), ("b", "f8")], align=True),
    np.dtype({"names": ["a", "b"], "formats": ["f4", "f4"], "offsets": [0, 0], "itemsize": 8}),
    np.dtype({"names": ["a", "b"], "formats": ["f4", "f2"], "offsets": [0, 2], "itemsize": 6}),
    np.dtype([(("a title", "a"), "g"), ("b", "i1")]),
]


@pytest.mark.parametrize("dtype", PADDED, ids=str)
@pytest.mark.parametrize("items", [1, 10_000])
def test_bytes_that_mean_nothing_do_not_count(dtype, items):
    """As behind a number of 80 bits, which is kept in 16 bytes."""
    digests = []
    for fill in (0x55, 0xAA):
        array = np.full(items * dtype.itemsize, fill, np.uint8).view(dtype)
        for place in [array[name] for name in dtype.names or ()] or [array]:
            np.divide(np.ones(items, place.dtype), 4, out=place, casting="unsafe")
        digests += [digest_of(array), digest_of({"last": array[-1]})]
    assert digests[:2] == digests[2:]


def masked(dtype, fill=0):
    """Return an array of three of which the second is masked, where `fill` is."""
    array = np.array([1, fill, 3]).astype(dtype)
    return np.ma.array(array, mask=np.array([False, True, False], np.ma.make_mask_descr(dtype)))


TEXTS = np.dtypes.StringDType()
AT_NOON = datetime.datetime(2026, 1, 1, 12)
# What makes a value of a number, and of another number another one.
MAKES = [
    lambda i: mr.IndexedSlices([1.0], [0], (2 + i,)),
    lambda i: mr.IndexedSlices([1.0], [0], (2,) if i else None),
    lambda i: np.array(["a", "b" * (i + 1)], TEXTS),
    lambda i: np.array([["a", "b"]] * (i + 1), TEXTS),
    lambda i: np.array(["a", i, None, object()], object),
    lambda i: np.array([[None]] * (i + 1), object),
    lambda i: bytearray([i]),
    lambda i: memoryview(bytes([i, 0])),
    lambda i: memoryview(np.arange(5.0)[:: i + 1]),
    lambda i: {f"{n}" for n in range(9 + i)},
    lambda i: frozenset([i, (1, 2)]),
    lambda i: range(3 + i),
    lambda i: AT_NOON.date().replace(day=1 + i),
    lambda i: AT_NOON.replace(tzinfo=datetime.timezone(datetime.timedelta(hours=i))),
    lambda i: datetime.timedelta(i),
    lambda i: np.ma.array([1.0, 2.0], mask=[i, 0]),
    lambda i: os.stat_result(range(i, i + 10)),
    lambda i: time.struct_time(range(9), {"tm_zone": "XY"[i]}),
]


@pytest.mark.parametrize("make", MAKES)
def test_values_that_are_no_plain_numbers_or_texts_count_too(make):
    assert digest_of(make(0)) == digest_of(make(0)) != digest_of(make(1))
    assert digest_of(make(1)) == digest_of(make(1))


@pytest.mark.parametrize("dtype", [*"? i1 f2 c16 U3 S3 M8[s] O i1,f8".split(), TEXTS])
def test_what_a_mask_hides_does_not_count(dtype):
    assert digest_of(masked(dtype)) == digest_of(masked(dtype, 2)) != digest_of(masked(dtype).data)


def test_of_an_object_without_a_value_the_class_counts_alone():
    class Zone(datetime.tzinfo):
        utcoffset = dst = lambda self, time: datetime.timedelta(hours=1)

    made = [{object()}, [np.array([{"a": id(object())}])], AT_NOON.replace(tzinfo=Zone())]
    again = [{object()}, [np.array([{"a": 1}])], AT_NOON.replace(tzinfo=Zone())]
    assert digest_of(made) == digest_of(again)


def test_a_digest_is_the_same_in_every_process():
    assert digest(drawn(100_000)).hex() == "204e17b5c9828549451adffa203e4836"
