"""mr.data.Dataset: epochs of a shuffle, values, lengths, what is read, bad input."""

import dataclasses
import datetime
import itertools
import pickle
from collections import namedtuple

import hypothesis.strategies as st
import numpy as np
import pandas
import pytest
from hypothesis import assume, given

from datasets import generated, lists, order
from mpi_replica.data import (
    INFINITE_CARDINALITY,
    UNKNOWN_CARDINALITY,
    ArraySpec,
    Dataset,
)
from mpi_replica.data.plans import sources

Pair = namedtuple("Pair", "x y")


@given(st.integers(0, 9), st.integers(1, 4), st.integers(1, 30))
def test_a_batch_over_an_endless_repeat_crosses_the_passes(rows, size, batches):
    assume(rows > 0)
    dataset = Dataset.range(rows).shuffle(seed=3).repeat().batch(size)
    orders = (order(rows, 3, epoch).tolist() for epoch in itertools.count())
    stream = itertools.chain.from_iterable(orders)
    assert lists(itertools.islice(dataset, batches)) == [
        list(itertools.islice(stream, size)) for _ in range(batches)
    ]


@given(st.integers(-20, 20), st.integers(-20, 20), st.integers(-5, 5).filter(bool))
def test_range_takes_the_arguments_of_pythons_range(start, stop, step):
    for args in [(stop,), (start, stop), (start, stop, step)]:
        dataset = Dataset.range(*args)
        assert lists(dataset) == list(range(*args))
        assert len(dataset) == len(range(*args))


# Epochs.


def test_each_pass_of_repeat_is_the_next_epoch_of_a_shuffle():
    shuffled = Dataset.range(20).shuffle(seed=5)
    passes = [lists(shuffled), lists(shuffled), lists(shuffled)]
    assert lists(Dataset.range(20).shuffle(seed=5).repeat(3)) == [
        *passes[0],
        *passes[1],
        *passes[2],
    ]
    assert passes[0] != passes[1] != passes[2]


@pytest.mark.parametrize("dataset", [Dataset.range(20), generated(*range(20))])
def test_a_second_iteration_of_a_repeat_goes_on_with_the_epochs(dataset):
    once = dataset.shuffle(20, seed=5)
    passes = [lists(once) for _ in range(4)]
    twice = dataset.shuffle(20, seed=5).repeat(2)
    assert [lists(twice), lists(twice)] == [passes[0] + passes[1], passes[2] + passes[3]]


def test_rows_of_several_passes_come_in_the_order_of_the_shuffle_above_them():
    passes = np.concatenate([order(5, 1, epoch) for epoch in range(3)])
    outer = order(15, 2, 0)
    dataset = Dataset.range(5).shuffle(seed=1).repeat(3).shuffle(seed=2)
    assert lists(dataset) == passes[outer].tolist()
    dataset = Dataset.range(5).shuffle(seed=1).repeat(3).shuffle(seed=2).batch(15)
    assert lists(dataset) == [passes[outer].tolist()]


def test_the_order_is_a_function_of_seed_and_epoch():
    def numbers(seed):
        return lists(Dataset.range(20).shuffle(seed=seed))

    assert numbers(1) == numbers(1) == order(20, 1, 0).tolist()
    assert numbers(1) != numbers(2)


def test_without_reshuffling_each_epoch_has_the_same_order():
    dataset = Dataset.range(20).shuffle(seed=1, reshuffle_each_iteration=False)
    assert lists(dataset) == lists(dataset) != list(range(20))
    assert lists(dataset.repeat(2)) == 2 * lists(dataset)


def test_buffer_size_is_ignored_where_the_whole_can_be_permuted():
    assert lists(Dataset.range(20).shuffle(2, seed=1)) == lists(Dataset.range(20).shuffle(seed=1))


def test_iterating_and_batches_share_the_count_of_epochs():
    dataset, other = (Dataset.range(20).shuffle(seed=1).batch(8) for _ in range(2))
    passes = [lists(dataset) for _ in range(3)]
    assert lists(other) == passes[0]
    assert lists(rows for _, rows in other.batches()) == passes[1]
    assert lists(other.as_numpy_iterator()) == passes[2]


def test_a_named_epoch_can_be_had_again_and_is_not_counted():
    dataset = Dataset.range(20).shuffle(seed=1).batch(8)
    later = lists(rows for _, rows in dataset.batches(epoch=2))
    assert [lists(dataset) for _ in range(3)][2] == later


def test_two_iterators_at_once_are_two_epochs():
    dataset = Dataset.range(20).shuffle(seed=1)
    first, second = iter(dataset), iter(dataset)
    pairs = [(a.item(), b.item()) for a, b in zip(first, second, strict=True)]
    again = Dataset.range(20).shuffle(seed=1)
    assert [a for a, _ in pairs] == lists(again)
    assert [b for _, b in pairs] == lists(again)


def test_two_iterations_of_an_endless_repeat_have_orders_of_their_own():
    dataset = Dataset.range(20).shuffle(seed=1).repeat()
    first, second = (lists(itertools.islice(dataset, 40)) for _ in range(2))
    assert len({tuple(order) for order in (first[:20], first[20:], second[:20])}) == 3


def test_asking_for_the_spec_is_no_epoch():
    dataset, other = (generated(*range(20)).shuffle(20, seed=1) for _ in range(2))
    assert dataset.element_spec == ArraySpec((), np.dtype(np.int64))
    assert lists(dataset) == lists(other)


def test_a_verb_leaves_the_dataset_it_is_called_on_as_it_was():
    dataset = Dataset.range(4)
    dataset.batch(2), dataset.repeat(2), dataset.shuffle(seed=1)
    assert lists(dataset) == [0, 1, 2, 3]


# Values.


def test_nests_are_sliced_batched_and_repeated_leaf_by_leaf():
    tensors = {"b": (np.arange(5), Pair([[1, 2]] * 5, np.arange(5.0))), "a": list("vwxyz")}
    dataset = Dataset.from_tensor_slices(tensors).repeat(2).batch(3)
    second = list(dataset)[1]
    assert list(second) == ["b", "a"]
    assert second["a"].tolist() == ["y", "z", "v"]
    numbers, pair = second["b"]
    assert numbers.tolist() == [3, 4, 0]
    assert isinstance(pair, Pair)
    assert pair.x.tolist() == [[1, 2]] * 3
    assert pair.y.tolist() == [3.0, 4.0, 0.0]
    assert dataset.element_spec["b"][1] == Pair(
        ArraySpec((None, 2), np.dtype(np.int64)), ArraySpec((None,), np.dtype(np.float64))
    )


def test_a_list_is_one_array_as_in_tf():
    assert lists(Dataset.from_tensor_slices([5.0, 6.0, 7.0, 8.0]).batch(2)) == [[5, 6], [7, 8]]
    assert lists(Dataset.from_tensor_slices([[1, 2], [3, 4]])) == [[1, 2], [3, 4]]
    assert lists(generated([1, 2], [3, 4]).batch(2)) == [[[1, 2], [3, 4]]]


@pytest.mark.parametrize("dataset", [Dataset.range(3), generated(0, 1, 2)])
def test_elements_without_axes_are_numpy_scalars(dataset):
    assert [type(value) for value in dataset] == [np.int64] * 3


@pytest.mark.parametrize(
    "verbs",
    [
        lambda rows: rows.batch(8),
        lambda rows: rows.batch(8).shuffle(3, seed=0),
        lambda rows: rows.batch(8).filter(lambda batch: True),
        lambda rows: rows.batch(8).map(lambda batch: batch),
    ],
    ids=["batch", "shuffle", "filter", "map"],
)
def test_a_part_of_a_batch_of_a_stream_does_not_hold_the_rest_of_it(verbs):
    for _, part in verbs(generated(*range(16))).batches(lambda n: slice(1, 3)):
        memory = part if part.base is None else part.base
        assert (part % 8).tolist() == [1, 2]
        assert memory.nbytes == part.nbytes


@pytest.mark.parametrize("dtype", ["f2", ">f4", "i1", "?", "c8", "U3", "S2", "M8[s]"])
def test_the_dtype_is_kept(dtype):
    array = np.array([0, 1, 0], "i8").astype(dtype)
    (batch,) = Dataset.from_tensor_slices(array).batch(3)
    assert batch.dtype == array.dtype
    np.testing.assert_array_equal(batch, array)


@pytest.mark.parametrize("rows", [Dataset.range(3), generated(0, 1, 2)], ids=["rows", "stream"])
def test_a_batch_or_buffer_of_any_size_holds_all_there_is(rows):
    (batch,) = rows.batch(2**63)
    assert batch.tolist() == [0, 1, 2]
    assert sorted(rows.shuffle(2**63, seed=0)) == [0, 1, 2]


def test_what_is_yielded_can_be_written_without_touching_the_source():
    array = np.zeros((4, 2))
    for dataset in (Dataset.from_tensor_slices(array), generated(*array)):
        for value in (*dataset, *dataset.batch(3)):
            value += 1
    assert not array.any()


def test_a_generator_may_fill_one_buffer_again_and_again():
    def rows():
        buffer = np.zeros(2)
        for number in range(3):
            buffer[:] = number
            yield buffer

    assert lists(Dataset.from_generator(rows).batch(3)) == [[[0, 0], [1, 1], [2, 2]]]


def test_a_generator_function_is_called_anew_for_each_pass():
    calls = []

    def rows():
        calls.append(1)
        yield from range(2)

    dataset = Dataset.from_generator(rows)
    assert calls == []
    assert lists(dataset.repeat(3)) == [0, 1] * 3
    assert len(calls) == 3


def test_what_a_generator_iterates_belongs_to_the_epoch_that_it_yields():
    """However often it is called: again after an error, for the spec, by another rank."""
    base = Dataset.range(8).shuffle(seed=1)
    inside = []

    def rows():
        fresh = Dataset.range(8).shuffle(seed=1)
        inside.append((lists(fresh), lists(fresh)))
        yield from base
        yield from base

    dataset = Dataset.from_generator(rows).batch(1)
    epochs = [[value.item() for _, value in dataset.batches(epoch=epoch)] for epoch in range(3)]
    again = [value.item() for _, value in dataset.batches(epoch=1, start=3)]
    assert again == epochs[1][3:]
    assert [lists(base) for _ in range(3)] == [epoch[:8] for epoch in epochs]
    assert len({tuple(epoch[i : i + 8]) for epoch in epochs for i in (0, 8)}) == 6
    assert inside == [inside[0]] * 4
    assert inside[0] == (epochs[0][:8], epochs[1][:8])


def test_what_a_filter_iterates_belongs_to_the_row_that_it_is_asked_for():
    base = Dataset.range(100).shuffle(seed=1)

    def has_luck(row):
        return next(iter(base)) % 3 != 0

    dataset = Dataset.range(24).filter(has_luck).batch(4)
    whole = [batch.tolist() for _, batch in dataset.batches(epoch=1)]
    assert [batch.tolist() for _, batch in dataset.batches(epoch=1)] == whole
    assert [batch.tolist() for _, batch in dataset.batches(epoch=1, start=2)] == whole[2:]
    assert [batch.tolist() for _, batch in dataset.batches(epoch=0)] != whole
    marked = Dataset.range(24).map(lambda row: (row, has_luck(row)))
    found = [row.item() for _, (row, is_kept) in marked.batch(1).batches(epoch=1) if is_kept]
    assert found == [row for batch in whole for row in batch]
    assert lists(base) == lists(Dataset.range(100).shuffle(seed=1))  # its first epoch


def test_generators_that_iterate_a_dataset_through_others_begin_other_epochs_each_time():
    base = Dataset.range(8).shuffle(seed=1)

    def inner():
        yield from base
        yield from base

    def outer():
        yield from within
        yield from within

    within = Dataset.from_generator(inner)
    found = lists(Dataset.from_generator(outer))
    assert len({tuple(found[i : i + 8]) for i in range(0, 32, 8)}) == 4


def test_what_is_made_in_a_generator_can_be_pickled():
    def rows():
        yield from pickle.loads(pickle.dumps(Dataset.range(5).shuffle(seed=1)))

    assert lists(Dataset.from_generator(rows)) == lists(Dataset.range(5).shuffle(seed=1))


def test_numbers_of_a_generator_promote_within_a_batch():
    (batch,) = generated(1, 2.5, True).batch(3)
    assert batch.tolist() == [1.0, 2.5, 1.0]


def test_an_exception_of_a_generator_comes_through_after_the_batches_before_it():
    def rows():
        yield from range(3)
        raise OSError("disk gone")

    iterator = iter(Dataset.from_generator(rows).batch(2))
    assert next(iterator).tolist() == [0, 1]
    with pytest.raises(OSError, match="disk gone"):
        next(iterator)


# Length.


@pytest.mark.parametrize(
    ("dataset", "cardinality"),
    [
        (Dataset.range(7).batch(3), 3),
        (Dataset.range(7).batch(3, drop_remainder=True), 2),
        (Dataset.range(7).repeat(3).batch(4), 6),
        (Dataset.range(7).repeat(), INFINITE_CARDINALITY),
        (Dataset.range(7).repeat().repeat(2).batch(2), INFINITE_CARDINALITY),
        (Dataset.range(7).repeat().shuffle(3, seed=1), INFINITE_CARDINALITY),
        (Dataset.range(7).repeat().repeat(0), 0),
        (Dataset.range(0).repeat(), 0),
        (generated(1).batch(2), UNKNOWN_CARDINALITY),
        (generated(1).repeat(2), UNKNOWN_CARDINALITY),
        (generated(1).repeat(), INFINITE_CARDINALITY),
        (generated(1).repeat(-1), INFINITE_CARDINALITY),
        (generated(1).repeat(0), 0),
    ],
)
def test_cardinality_is_tfs(dataset, cardinality):
    assert dataset.cardinality() == cardinality
    assert bool(dataset) is True
    if cardinality >= 0:
        assert len(dataset) == len(list(dataset)) == cardinality
    else:
        with pytest.raises(TypeError, match=r"(no end|unknown length).*cardinality\(\)"):
            len(dataset)


def test_the_constants_are_tfs():
    assert (Dataset.INFINITE, Dataset.UNKNOWN) == (-1, -2)


@pytest.mark.parametrize("make", [Dataset.range, lambda n: generated(*range(n))])
def test_verbs_over_nothing_and_over_an_endless_repeat_end_or_go_on(make):
    assert lists(make(0).batch(2)) == []
    assert lists(make(0).repeat(3)) == []
    assert lists(make(0).shuffle(4, seed=1)) == []
    endless = make(3).repeat().shuffle(2, seed=1).repeat(2).batch(4)
    assert np.shape(list(itertools.islice(endless, 5))) == (5, 4)


def test_an_endless_repeat_of_nothing_is_an_error_and_no_endless_loop():
    once = iter([1, 2])
    dataset = Dataset.from_generator(lambda: once).repeat()
    iterator = iter(dataset)
    assert [next(iterator).item(), next(iterator).item()] == [1, 2]
    with pytest.raises(ValueError, match=r"pass 1 of .* yielded nothing.*new iterator"):
        next(iterator)


@pytest.mark.parametrize(
    ("dataset", "is_batched"),
    [
        (Dataset.range(4), False),
        (Dataset.range(4).shuffle(seed=1).repeat(), False),
        (Dataset.range(4).batch(2), True),
        (Dataset.range(4).batch(2).shuffle(seed=1).repeat(2), True),
        (generated(1).batch(2).shuffle(3, seed=1).repeat(), True),
        (generated(np.zeros(3)), False),
    ],
)
def test_is_batched_says_whether_axis_0_is_a_batch(dataset, is_batched):
    assert dataset.is_batched is is_batched


def test_the_batch_axis_of_the_spec_is_fixed_by_drop_remainder():
    dataset = Dataset.from_tensor_slices(np.zeros((6, 3), np.float32))
    assert dataset.batch(2).element_spec.shape == (None, 3)
    assert dataset.batch(2, drop_remainder=True).repeat().element_spec.shape == (2, 3)
    assert generated(np.zeros(3)).batch(2).element_spec.shape == (None, 3)


@pytest.mark.parametrize(
    "verbs",
    [
        lambda rows: rows.batch(3),
        lambda rows: rows.map(lambda row: row).batch(3),
        lambda rows: generated(*rows).batch(3),
        lambda rows: Dataset.zip(rows, generated(*rows)).batch(3).map(lambda one, other: one),
        lambda rows: rows.batch(2, drop_remainder=True).batch(2),
        lambda rows: rows.repeat().shuffle(4, seed=0).batch(2).take(1),
    ],
    ids=["rows", "map", "stream", "zip", "batches", "drawn"],
)
def test_element_spec_tells_the_byte_order_of_batches(verbs):
    rows = Dataset.from_tensor_slices(np.arange(6, dtype=">i4").reshape(6, 1))
    dataset = verbs(rows)
    assert {dataset.element_spec.dtype.str} == {batch.dtype.str for batch in dataset}


# What is read.


class Recorder(sources.Range):
    """Numbers that write down where they were read."""

    def __init__(self, length):
        super().__init__(0, length, 1)
        self.positions = []

    def read(self, positions, epoch):
        self.positions += positions.tolist()
        return super().read(positions, epoch)


@pytest.mark.parametrize(
    "verbs",
    [
        lambda dataset: dataset.batch(8),
        lambda dataset: dataset.shuffle(seed=1).batch(8),
        lambda dataset: dataset.shuffle(seed=1).repeat(2).batch(8),
        lambda dataset: dataset.repeat(2).shuffle(seed=1).batch(8),
        lambda dataset: dataset.batch(8).shuffle(seed=1).repeat(2),
    ],
)
def test_only_the_wanted_rows_are_read(verbs):
    recorder = Recorder(20)
    read = []
    for n, rows in verbs(Dataset(recorder)).batches(lambda n: slice(n // 2, n // 2 + 2)):
        assert len(rows) == 2 <= n
        read += rows.tolist()
    assert recorder.positions != []
    assert sorted(recorder.positions) == sorted(read)


def test_a_replica_without_rows_reads_nothing():
    recorder = Recorder(20)
    batches = list(Dataset(recorder).repeat(2).batch(8).batches(lambda n: slice(n, n)))
    assert [(n, rows.shape) for n, rows in batches] == [(8, (0,))] * 5
    assert recorder.positions == []


def test_a_replica_without_rows_of_a_batch_of_batches_gets_their_shape():
    for dataset in (Dataset.range(8), generated(*range(8))):
        batches = dataset.batch(2).batch(3, drop_remainder=True).batches(lambda n: slice(n, n))
        assert [(n, rows.shape) for n, rows in batches] == [(3, (0, 2))]


def test_making_a_dataset_and_asking_about_it_reads_nothing():
    recorder = Recorder(20)
    dataset = Dataset(recorder).shuffle(seed=1).batch(4).repeat()
    assert "shuffle(seed=1).batch(4).repeat()" in repr(dataset)
    assert (dataset.cardinality(), dataset.element_spec.shape) == (-1, (None,))
    iter(dataset), dataset.batches()
    assert recorder.positions == []


def test_an_array_that_no_memory_could_hold_is_read_where_it_is_wanted():
    rows = 2**20
    array = np.broadcast_to(np.arange(rows)[:, None], (rows, 2**22))
    dataset = Dataset.from_tensor_slices(array).shuffle(seed=1).batch(rows)
    ((n, part),) = dataset.batches(lambda n: slice(n - 1, n))
    assert n == rows
    assert part.shape == (1, 2**22)
    assert (part == order(rows, 1, 0)[-1]).all()


def test_rows_of_a_memory_mapped_file_arrive_as_plain_arrays(tmp_path):
    np.save(tmp_path / "rows.npy", np.arange(12).reshape(6, 2))
    mapped = np.load(tmp_path / "rows.npy", mmap_mode="r")
    dataset = Dataset.from_tensor_slices(mapped).batch(4)
    parts = list(dataset.batches(lambda n: slice(1, 3)))
    assert [(n, part.tolist()) for n, part in parts] == [(4, [[2, 3], [4, 5]]), (2, [[10, 11]])]
    assert all(type(part) is np.ndarray and part.flags.writeable for _, part in parts)


@pytest.mark.parametrize(
    ("rows", "dtype"),
    [
        (["a", np.str_("bc")], "U2"),
        ([b"a", np.bytes_(b"bc")], "S2"),
        ([["a"], np.array(["bc"])], "U2"),
        ([2**63, 2**64 - 1], "u8"),
        ([2**63, 1.0], "f8"),
        ([1, True], "i8"),
        ([np.float16(1), 2], "f8"),
        ([[], []], "f8"),
        ([[2**53 + 1], [0.5]], "f8"),
    ],
)
def test_lists_of_one_kind_have_the_dtype_that_numpy_gives_them(rows, dtype):
    assert np.asarray(rows).dtype == dtype
    assert Dataset.from_tensor_slices(rows).element_spec.dtype == dtype


@pytest.mark.parametrize(
    "table",
    [
        pandas.DataFrame({"id": [2**53 - 1, -(2**53) + 1], "x": [1.5, np.nan]}),
        pandas.DataFrame({"x": [1e300, np.inf], "y": [2.0**60, 1.0]}),
        pandas.Series([2**53 - 1, None], dtype="Int64"),
    ],
)
def test_ints_of_pandas_may_stand_beside_floats_that_hold_them(table):
    (batch,) = Dataset.from_tensor_slices(table).batch(2)
    np.testing.assert_array_equal(batch, np.asarray(table, float))


# Bad input.

STARTED = (number for number in range(3))
next(STARTED)


@dataclasses.dataclass
class Point:
    """A row as some programs have it."""

    x: float


class Sparse:
    """As those of scipy.sparse: numpy takes it for one object."""

    shape = (5, 5)


class WithoutLength(Sparse):
    """As those of scipy.sparse, whose rows are such ones, too."""

    def __len__(self):
        raise TypeError("the length is ambiguous")

    def __getitem__(self, i):
        return Sparse()

    def toarray(self):
        return np.eye(5)


BAD_CALLS = [
    (lambda: Dataset([1, 2]), TypeError, r"of \[1, 2\] directly.*from_tensor_slices"),
    (lambda: Dataset.from_tensor_slices({}), ValueError, r"got \{\}.*no array"),
    (lambda: Dataset.from_tensor_slices(3.5), ValueError, r"scalar.*3\.5.*no rows.*np\.array"),
    (lambda: Dataset.from_tensor_slices({"x": [1], "y": 2}), ValueError, r"scalar.*2.* at \['y'\]"),
    (
        lambda: Dataset.from_tensor_slices({"x": [1, 2, 3], "y": (np.zeros((4, 2)), [1, 2, 3])}),
        ValueError,
        r"\['x'\] has 3, \['y'\]\[0\] has 4, \['y'\]\[1\] has 3.*same number",
    ),
    *(
        (lambda rows=rows: Dataset.from_tensor_slices({"x": rows}), TypeError, text)
        for rows, text in [
            ([1, "a"], r"at \['x'\]: \[1, 'a'\] has texts beside int.*tuple"),
            ([("a", 1.5), ("b", 2.5)], "has texts beside float.*tuple"),
            ([b"a", True], "has texts beside bool.*tuple"),
            ([np.array(["a"]), np.array([1])], "has texts beside ndarray.*tuple"),
            (
                [2**63, -1],
                r"at \['x'\]: \[9223372036854775808, -1\] has ints.*float64.*round",
            ),
            ([np.uint64(2**63), np.int64(1)], "has ints.*float64"),
            ([[2**63], [np.int8(-1)]], "has ints.*float64"),
        ]
    ),
    (
        lambda: Dataset.from_tensor_slices({"x": [[1, 2], [3]]}),
        ValueError,
        r"\[\[1, 2\], \[3\]\] at \['x'\] can't become an array.*one length",
    ),
    (lambda: Dataset.from_tensor_slices(None), TypeError, r"None has dtype object.*is missing"),
    (
        lambda: Dataset.from_source([datetime.date(2020, 1, 1)]).element_spec,
        TypeError,
        r"np\.datetime64\(date\)",
    ),
    (
        lambda: Dataset.from_source([Point(1.0)]).element_spec,
        TypeError,
        r"dataclasses\.asdict\(row\) makes a dict",
    ),
    *(
        (
            make,
            TypeError,
            rf"a Sparse{at} is one object to numpy.*range\(n\)\.batch\(n\).*value\[rows\] in",
        )
        for make, at in [
            (lambda: Dataset.from_tensor_slices(Sparse()), ""),
            (lambda: Dataset.from_tensor_slices({"a": Sparse()}), r" at \['a'\]"),
            (lambda: list(Dataset.range(2).map(lambda _: Sparse())), ""),
            (lambda: list(Dataset.from_source(WithoutLength())), ""),
        ]
    ),
    (
        lambda: Dataset.from_tensor_slices([WithoutLength()]),
        TypeError,
        r"has dtype object.*value\.toarray\(\) makes a dense one",
    ),
    (
        lambda: Dataset.from_tensor_slices(pandas.DataFrame({"id": [1], "name": ["x"]})),
        TypeError,
        r"has dtype object.*dict\(frame\)",
    ),
    *(
        (lambda make=make: Dataset.from_tensor_slices(make()), TypeError, text)
        for make, text in [
            (lambda: pandas.DataFrame({"x": [1.5], "id": [2**53 + 1]}), "DataFrame has ints"),
            (lambda: pandas.DataFrame({"id": [-(2**53) - 1], "x": [1.5]}), r"dict\(frame\)"),
            (lambda: pandas.Series([2**53 + 1, None], dtype="Int64"), "Series has .*fillna"),
        ]
    ),
    (
        lambda: Dataset.from_tensor_slices(np.ma.masked_array([1, 2], [True, False])),
        TypeError,
        r"masked array.*filled",
    ),
    (
        lambda: Dataset.from_tensor_slices({"x": [[np.ma.masked_array([1], [True])], [[2]]]}),
        TypeError,
        r"leaf at \['x'\]: masked array.*filled",
    ),
    (lambda: Dataset.range(), TypeError, r"1 to 3 integers, got 0"),
    (lambda: Dataset.range(1, 2, 3, 4), TypeError, r"got 4: \(1, 2, 3, 4\)"),
    (lambda: Dataset.range(2.0), TypeError, r"must be an integer, got 2\.0"),
    (lambda: Dataset.range(0, 5, 0), ValueError, r"\(0, 5, 0\) has step 0"),
    (lambda: Dataset.range(2**63), ValueError, r"must be from .* got 9223372036854775808"),
    (lambda: Dataset.from_generator(STARTED), TypeError, r"generator object.*\(rows\), not"),
    (lambda: Dataset.from_generator([1, 2]), TypeError, r"got \[1, 2\].*lambda: iter\(values\)"),
    (lambda: Dataset.range(3).batch(0), ValueError, r"batch_size must be at least 1, got 0"),
    (lambda: Dataset.range(3).batch(-2), ValueError, r"batch_size .* got -2"),
    (lambda: Dataset.range(3).batch(2.0), TypeError, r"batch_size .*integer, got 2\.0.*int\(\)"),
    (lambda: Dataset.range(3).batch(True), TypeError, r"batch_size .*integer, got True"),
    (lambda: Dataset.range(3).batch("2"), TypeError, r"batch_size .*integer, got '2'"),
    (lambda: Dataset.range(3).batch(2, 1), TypeError, r"drop_remainder .*True or False, got 1"),
    (lambda: Dataset.range(3).repeat(-2), ValueError, r"count .* at least -1, got -2"),
    (lambda: Dataset.range(3).repeat(1.5), TypeError, r"count .*integer, got 1\.5"),
    (lambda: Dataset.range(3).shuffle(), TypeError, r"needs a seed: every rank shuffles for"),
    (lambda: Dataset.range(3).shuffle(3, seed=-1), ValueError, r"seed must be at least 0, got -1"),
    (lambda: Dataset.range(3).shuffle(seed="a"), TypeError, r"seed .*integer, got 'a'"),
    (lambda: Dataset.range(3).shuffle(0, seed=1), ValueError, r"buffer_size .*least 1, got 0"),
    (
        lambda: Dataset.range(3).shuffle(seed=1, reshuffle_each_iteration="no"),
        TypeError,
        r"reshuffle_each_iteration .*got 'no'",
    ),
    (lambda: generated(1).shuffle(seed=4), ValueError, r"as a whole.*buffer_size=1000, seed=4"),
    (lambda: Dataset.range(3).repeat().shuffle(seed=4), ValueError, r"as a whole.*buffer_size"),
    (lambda: Dataset.range(3).repeat(2).batches(), ValueError, r"repeat\(2\)> is not batched"),
    (lambda: Dataset.range(3).batch(2).batches(epoch=-1), ValueError, r"epoch .*got -1"),
    (lambda: generated().element_spec, ValueError, r"yielded nothing"),
    (lambda: list(Dataset.from_generator(lambda: 5)), TypeError, r"returned 5.*yield"),
    (lambda: list(Dataset.from_generator(lambda: STARTED)), TypeError, r"started before.*new one"),
    (lambda: list(generated(1, object())), TypeError, r"element 1 of .* has dtype object"),
    (
        lambda: list(generated(*({"x": np.zeros(n)} for n in (2, 2, 3))).batch(3)),
        ValueError,
        r"element 0 has shape \(2,\).* element 2 has shape \(3,\).* at \['x'\]",
    ),
    (
        lambda: list(generated(0, 1, 2, np.zeros(3)).batch(2)),
        ValueError,
        r"element 2 has shape \(\) and dtype int64, element 3 has shape \(3,\)",
    ),
    (
        lambda: list(generated({"x": 1}, {"y": 1}).batch(2)),
        ValueError,
        r"element 0 is \{'x': \*\}, element 1 is \{'y': \*\}.*one structure",
    ),
    (lambda: list(generated(1, "a").batch(2)), ValueError, r"dtype int64, element 1 .*dtype <U1"),
    (lambda: list(Dataset.range(3).batch(2).batch(2)), ValueError, r"\(2,\).*element 1.*\(1,\)"),
]


@pytest.mark.parametrize(("call", "error", "text"), BAD_CALLS)
def test_bad_input_is_an_error_that_says_what_to_do(call, error, text):
    with pytest.raises(error, match=f"(?s){text}"):
        call()


def test_integers_and_flags_of_numpy_are_accepted():
    dataset = Dataset.range(np.int32(5)).shuffle(seed=np.int64(1)).repeat(np.uint8(2))
    assert len(list(dataset.batch(np.int64(4), np.bool_(True)))) == 2
