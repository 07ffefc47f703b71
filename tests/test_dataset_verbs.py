"""Verbs of mr.data.Dataset that read objects, call functions and put datasets together."""

import itertools
import threading
from collections import namedtuple

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from datasets import generated, lists, order
from mpi_replica.data import (
    AUTOTUNE,
    INFINITE_CARDINALITY,
    UNKNOWN_CARDINALITY,
    ArraySpec,
    Dataset,
)
from mpi_replica.errors import StructureMismatchError

Pair = namedtuple("Pair", "x y")


class Rows:
    """Like a map-style dataset of PyTorch; it writes down which rows were read."""

    def __init__(self, count, bad=None):
        self.count = count
        self.bad = bad
        self.read = []

    def __len__(self):
        return self.count

    def __getitem__(self, row):
        self.read.append(row)
        if row == self.bad:
            raise OSError(5, f"bad sector {row}")
        return {"x": np.full(2, row, np.float32), "y": row}


def notes_of(kind, call):
    with pytest.raises(kind) as caught:
        call()
    return " ".join(caught.value.__notes__)


# from_source


def test_the_elements_of_a_source_are_its_rows():
    dataset = Dataset.from_source(Rows(5))
    assert len(dataset) == 5
    batches = list(dataset.batch(2))
    assert [batch["y"].tolist() for batch in batches] == [[0, 1], [2, 3], [4]]
    assert batches[1]["x"].tolist() == [[2, 2], [3, 3]]
    assert batches[1]["x"].dtype == np.float32
    assert [row["y"] for row in dataset.shuffle(seed=1)] != list(range(5))


@pytest.mark.parametrize(
    "source",
    [[3, 1, 2], (3, 1, 2), np.array([3, 1, 2]), "312", bytes([3, 1, 2]), range(3, 0, -1)],
    ids=lambda source: type(source).__name__,
)
def test_a_source_is_anything_with_a_length_and_rows(source):
    assert lists(Dataset.from_source(source)) == [np.asarray(row).tolist() for row in source]


class Chunks:
    """Like an array of zarr 3: it has a shape and rows, and no length."""

    def __init__(self, rows):
        self._rows = rows

    @property
    def shape(self):
        return self._rows.shape

    def __getitem__(self, row):
        return self._rows[row]


def test_the_shape_of_a_source_without_a_length_tells_how_many_rows_it_has():
    rows = np.arange(10).reshape(5, 2)
    assert lists(Dataset.from_source(Chunks(rows)).shuffle(seed=1).batch(5)) == [
        rows[[*Dataset.range(5).shuffle(seed=1)]].tolist()
    ]
    with pytest.raises(TypeError, match="needs an object with __len__"):
        Dataset.from_source(Chunks(np.array(3)))


def test_a_row_of_a_source_may_be_a_list_which_is_one_array():
    (batch,) = Dataset.from_source([[1, 2], [3, 4]]).batch(2)
    assert batch.tolist() == [[1, 2], [3, 4]]


def test_a_source_is_asked_for_int_rows_one_by_one_and_for_the_wanted_ones_only():
    source = Rows(20)
    dataset = Dataset.from_source(source).shuffle(seed=1).batch(8)
    found = []
    for _, rows in dataset.batches(lambda n: slice(1, 3)):
        found += rows["y"].tolist()
    assert source.read == found
    assert {type(row) for row in source.read} == {int}


def test_the_length_of_a_source_is_asked_for_once():
    asked = []

    class Counted(Rows):
        def __len__(self):
            asked.append(1)
            return 3

    dataset = Dataset.from_source(Counted(3))
    assert len(dataset) == len(list(dataset)) == len(list(dataset.batch(2))) + 1
    assert asked == [1]


def test_a_source_may_fill_one_buffer_again_and_again():
    class Buffered(Rows):
        buffer = np.zeros(2)

        def __getitem__(self, row):
            self.buffer[:] = row
            return self.buffer

    assert lists(Dataset.from_source(Buffered(3)).batch(3)) == [[[0, 0], [1, 1], [2, 2]]]
    assert lists(list(Dataset.from_source(Buffered(3)))) == [[0, 0], [1, 1], [2, 2]]


def test_rows_lie_in_memory_alike_however_they_are_read():
    """Sums of them would have other bits: numpy adds in the order of the memory."""
    rows = np.random.default_rng(0).standard_normal((8, 50, 70)).astype(np.float32)
    for array in (rows, np.asfortranarray(rows), rows.transpose(0, 2, 1), rows[:, ::-1, ::2]):
        sums = Dataset.from_tensor_slices(array).map(lambda row: row.sum())
        expected = [float(each) for each in next(iter(sums.batch(8)))]
        assert [float(each) for each in sums] == expected
        kept = Dataset.from_tensor_slices(array).filter(lambda row: True)
        assert [float(row.sum()) for row in kept] == expected


@pytest.mark.parametrize(
    "dtype",
    [
        np.dtype({"names": ["x", "y"], "formats": ["u1", "<f8"], "offsets": [0, 12]}),
        np.dtype([("a", ">i4", (2,))]),
        np.dtype(">f8"),
    ],
    ids=["gaps", "big-endian parts", "big-endian"],
)
def test_one_row_and_several_stack_to_one_dtype(dtype):
    batches = Dataset.range(3).map(lambda i: np.zeros(2, dtype)).batch(2)
    several, one = (batch.dtype for batch in batches)
    assert several == one


def test_rows_of_many_sizes_can_be_mapped_to_one_before_they_are_stacked():
    images = [np.ones((n, n)) for n in (2, 5, 3)]
    dataset = Dataset.from_source(images).map(lambda image: image[:2, :2]).batch(3)
    assert np.shape(list(dataset)) == (1, 3, 2, 2)


def test_a_row_of_another_size_is_an_error_that_names_the_rows():
    images = [np.ones((n, n)) for n in (2, 2, 3)]
    with pytest.raises(ValueError, match=r"element 0 has shape \(2, 2\).*element 2 has shape"):
        list(Dataset.from_source(images).batch(3))


def test_a_replica_without_rows_of_a_source_gets_arrays_of_their_shape():
    source = Rows(4)
    ((n, rows),) = Dataset.from_source(source).batch(4).batches(lambda n: slice(n, n))
    assert (n, rows["x"].shape, rows["x"].dtype, rows["y"].shape) == (4, (0, 2), np.float32, (0,))
    assert source.read == [0]


def test_the_spec_of_a_source_is_that_of_its_first_row_read_once():
    source = Rows(4)
    dataset = Dataset.from_source(source).batch(2)
    for _ in range(2):
        assert dataset.element_spec == {
            "x": ArraySpec((None, 2), np.dtype(np.float32)),
            "y": ArraySpec((None,), np.dtype(np.int64)),
        }
    assert source.read == [0]


@pytest.mark.parametrize(
    "verbs",
    [
        lambda dataset: dataset,
        lambda dataset: dataset.shuffle(seed=4).batch(3),
        lambda dataset: dataset.repeat(2).skip(1).shard(2, 1),
        lambda dataset: dataset.map(lambda row: row["y"]).batch(2).map(np.sum),
        lambda dataset: dataset.filter(lambda row: True).take(9).prefetch(1),
        lambda dataset: Dataset.zip(Dataset.range(10), dataset).batch(4),
        lambda dataset: dataset.skip(8).concatenate(dataset),
    ],
)
def test_an_error_of_a_source_names_the_row_through_all_verbs(verbs):
    dataset = verbs(Dataset.from_source(Rows(10, bad=6)))
    notes = notes_of(OSError, lambda: list(dataset))
    assert notes == "Raised for row 6 of from_source(Rows, 10 rows)."


# map


def test_the_items_of_a_tuple_are_arguments_and_nothing_else_is_spread():
    x, y = np.arange(3), np.arange(3.0)
    assert lists(Dataset.from_tensor_slices((x, y)).map(lambda x, y: x + y)) == [0, 2, 4]
    pairs = Dataset.from_tensor_slices(Pair(x, y))
    assert lists(pairs.map(lambda pair: pair.x + pair.y)) == [0, 2, 4]
    dicts = Dataset.from_tensor_slices({"x": x, "y": y})
    assert lists(dicts.map(lambda row: row["x"] + row["y"])) == [0, 2, 4]
    assert lists(Dataset.from_tensor_slices((x,)).map(lambda x: x + 1)) == [1, 2, 3]


def test_a_map_returns_any_nest_and_a_list_is_one_array():
    dataset = Dataset.range(3).map(lambda i: {"a": (i, [i, 2 * i]), "b": str(i)})
    (batch,) = dataset.batch(3)
    assert batch["a"][1].tolist() == [[0, 0], [1, 2], [2, 4]]
    assert batch["b"].tolist() == ["0", "1", "2"]
    assert dataset.element_spec["a"][1] == ArraySpec((2,), np.dtype(np.int64))


def test_what_a_map_returns_is_the_datasets_own():
    table, buffer = np.zeros((4, 2)), np.zeros(2)

    def fill(number):
        buffer[:] = number
        return buffer

    for row in Dataset.range(4).map(lambda i: table[i]):
        row += 1
    assert not table.any()
    assert lists(list(Dataset.range(3).map(fill))) == [[0, 0], [1, 1], [2, 2]]
    assert lists(Dataset.range(3).map(fill).batch(3)) == [[[0, 0], [1, 1], [2, 2]]]


def test_a_map_before_batch_sees_the_wanted_rows_and_after_it_whole_batches():
    seen = []

    def look(value):
        seen.append(value.tolist())
        return value

    list(Dataset.range(8).map(look).batch(4).batches(lambda n: slice(1, 2)))
    assert seen == [1, 5]
    seen.clear()
    after = list(Dataset.range(8).batch(4).map(look).batches(lambda n: slice(1, 2)))
    assert seen == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert [(n, rows.tolist()) for n, rows in after] == [(4, [1]), (4, [5])]


def test_a_map_may_change_the_number_of_rows_of_a_batch():
    dataset = (
        Dataset.range(6)
        .batch(3)
        .map(lambda batch: np.repeat(batch, 2))
        .batches(lambda n: slice(n // 2, n))
    )
    assert [(n, rows.tolist()) for n, rows in dataset] == [(6, [1, 2, 2]), (6, [4, 5, 5])]


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (lambda batch: batch.sum(), r"what map\(.*\) returned is no batch:.* \(\)"),
        (lambda batch: {"a": batch, "b": batch[1:]}, r"\(3,\) at \['a'\], \(2,\) at \['b'\]"),
        (lambda batch: {}, r"of none"),
    ],
)
def test_a_map_that_leaves_no_batch_is_an_error_only_where_rows_are_taken(function, text):
    dataset = Dataset.range(3).batch(3).map(function)
    assert len(list(dataset)) == 1
    with pytest.raises(ValueError, match=text):
        list(dataset.batches())


@pytest.mark.parametrize("calls", [None, 2])
@pytest.mark.parametrize(
    ("make", "row"),
    [
        (lambda: Dataset.range(10, 20), "element 6 of range(10, 20, 1)"),
        (lambda: Dataset.from_tensor_slices(np.arange(10, 20)), "row 6 of from_tensor_slices"),
        (lambda: Dataset.from_source(range(10, 20)), "row 6 of from_source(range, 10 rows)"),
        (lambda: Dataset.from_source(range(10, 20)).shuffle(seed=8).repeat(2), "row 6 of"),
        (lambda: generated(*range(10, 20)), "element 6 of from_generator"),
        (lambda: Dataset.range(10, 20).filter(lambda x: x > 13), "element 2 of range(10, 20, 1)."),
    ],
)
def test_an_error_of_a_map_names_the_row_that_its_element_comes_from(make, row, calls):
    def fail_at_16(number):
        if number == 16:
            raise ZeroDivisionError("sixteen")
        return number

    def all_of(dataset):
        return lambda: list(dataset)

    dataset = make().map(fail_at_16, calls)
    for chain in (dataset, dataset.batch(4), dataset.batch(4).prefetch(2)):
        notes = notes_of(ZeroDivisionError, all_of(chain))
        assert notes.startswith("Raised in map(test_an_error")
        assert f"for {row}" in notes
        assert len(notes.splitlines()) == 1


def test_elements_before_the_one_that_fails_come_first():
    for dataset in (
        Dataset.range(6).map(lambda x: 1 // (3 - int(x)), 3),
        Dataset.from_source(Rows(6, bad=3)).map(lambda row: row["y"], 3),
    ):
        iterator = iter(dataset)
        assert len(list(itertools.islice(iterator, 3))) == 3
        with pytest.raises((ZeroDivisionError, OSError)):
            next(iterator)


@pytest.mark.parametrize("calls", [None, 2])
def test_a_function_that_runs_out_of_something_does_not_end_the_dataset(calls):
    class Rows(list):
        def __getitem__(self, row):
            return fail(row)

    def fail(row):
        return next(iter(())) if row == 1 else True

    for dataset, place in (
        (Dataset.range(3).map(fail, calls), "element 1 of range(0, 3, 1)"),
        (Dataset.range(3).filter(fail), "element 1 of range(0, 3, 1)"),
        (Dataset.from_source(Rows([0, 1, 2])), "row 1 of from_source"),
    ):
        for chain in (dataset, dataset.batch(2), dataset.batch(2).prefetch(1)):
            with pytest.raises(RuntimeError, match=r"StopIteration.*Raise another") as caught:
                list(chain)
            (note,) = caught.value.__notes__
            assert place in note


def test_parallel_calls_run_at_once_and_keep_the_order():
    barrier = threading.Barrier(3, timeout=60)

    def meet(number):
        barrier.wait()
        return number

    assert lists(Dataset.range(9).map(meet, num_parallel_calls=3)) == list(range(9))
    assert lists(Dataset.range(9).map(meet, num_parallel_calls=3).batch(9)) == [list(range(9))]
    names = set()
    list(Dataset.range(9).map(lambda i: names.add(threading.current_thread().name) or i, 2))
    assert threading.current_thread().name not in names


def test_parallel_calls_look_ahead_no_further_than_they_are_many():
    source = Rows(20)
    iterator = iter(Dataset.from_source(source).map(lambda row: row["y"], 3))
    for taken in range(1, 5):
        next(iterator)
        assert len(source.read) <= taken + 2
    iterator.close()


def test_parallel_calls_see_the_settings_of_the_one_who_iterates():
    dataset = Dataset.range(4).map(lambda x: np.float64(1) / np.float64(x), 2)
    with np.errstate(all="raise"), pytest.raises(FloatingPointError):
        list(dataset)
    with np.errstate(all="ignore"):
        assert lists(dataset)[0] == np.inf


@given(st.integers(0, 30), st.sampled_from([1, 2, 5, AUTOTUNE]), st.integers(1, 5))
def test_parallel_calls_change_no_value(rows, calls, size):
    dataset = Dataset.range(rows).shuffle(seed=1).map(lambda x: x * x, calls)
    plain = Dataset.range(rows).shuffle(seed=1).map(lambda x: x * x)
    assert lists(dataset) == lists(plain)
    assert lists(dataset.batch(size)) == lists(plain.batch(size))


def test_a_map_of_nothing_has_no_spec():
    with pytest.raises(ValueError, match="yielded nothing"):
        _ = Dataset.range(0).map(lambda x: x).element_spec
    assert list(Dataset.range(0).map(lambda x: x).batch(3)) == []


def test_the_batch_axis_of_a_map_is_not_fixed():
    batches = Dataset.range(5).batch(2)
    assert batches.map(lambda x: (x, x[:, None])).element_spec == (
        ArraySpec((None,), np.dtype(np.int64)),
        ArraySpec((None, 1), np.dtype(np.int64)),
    )
    assert batches.map(np.sum).element_spec == ArraySpec((), np.dtype(np.int64))


# filter


def test_a_filter_keeps_what_its_predicate_is_true_for():
    dataset = Dataset.range(10).filter(lambda x: x % 3 == 0)
    assert dataset.cardinality() == UNKNOWN_CARDINALITY
    assert lists(dataset.batch(3)) == [[0, 3, 6], [9]]
    pairs = Dataset.zip(Dataset.range(4), Dataset.range(4, 8))
    assert [(int(x), int(y)) for x, y in pairs.filter(lambda x, y: np.array(x * y > 5))] == [
        (2, 6),
        (3, 7),
    ]


def test_a_filter_of_batches_sees_them_whole_and_is_cut_afterwards():
    dataset = Dataset.range(9).batch(3).filter(lambda batch: batch.sum() > 5)
    assert dataset.is_batched
    found = dataset.batches(lambda n: slice(2, n))
    assert [(n, rows.tolist()) for n, rows in found] == [(3, [5]), (3, [8])]


def test_an_error_of_a_predicate_names_the_row():
    dataset = Dataset.from_source(range(5)).filter(lambda x: 1 // (2 - int(x)) != 7)
    notes = notes_of(ZeroDivisionError, lambda: list(dataset))
    assert "Raised in filter(test_an_error" in notes
    assert "for row 2 of from_source(range, 5 rows)." in notes


# zip, concatenate, enumerate


def test_zip_gives_the_nest_that_it_was_given():
    a, b = Dataset.range(3), Dataset.from_tensor_slices(np.array([5.0, 6, 7]))
    for dataset in (Dataset.zip(a, b), Dataset.zip((a, b))):
        assert list(dataset) == [(0, 5), (1, 6), (2, 7)]
    assert list(Dataset.zip({"x": a, "p": Pair(b, (a,))}))[2] == {"x": 2, "p": Pair(7, (2,))}
    assert list(Dataset.zip(a)) == [0, 1, 2]
    spec = Dataset.zip({"x": a, "y": (b,)}).batch(2).element_spec
    assert spec == {
        "x": ArraySpec((None,), np.dtype(np.int64)),
        "y": (ArraySpec((None,), np.dtype(np.float64)),),
    }


@pytest.mark.parametrize(
    ("lengths", "cardinality"),
    [
        ((3, 5), 3),
        ((4, None), 4),
        ((None, None), INFINITE_CARDINALITY),
        (("unknown", 3), UNKNOWN_CARDINALITY),
        ((0, 4), 0),
    ],
)
def test_the_shortest_of_what_is_zipped_ends_it(lengths, cardinality):
    def of(length):
        if length == "unknown":
            return generated(*range(4))
        return Dataset.range(9).repeat() if length is None else Dataset.range(length)

    dataset = Dataset.zip(*map(of, lengths))
    assert dataset.cardinality() == cardinality
    if cardinality >= 0:
        assert len(list(dataset)) == cardinality


def test_nothing_is_read_of_the_longer_ones_of_what_is_zipped():
    source = Rows(9)
    list(Dataset.zip(Dataset.from_source(source), Dataset.range(3)))
    assert source.read == [0, 1, 2]


def test_what_is_zipped_is_shuffled_by_the_same_epoch_and_read_by_position():
    source = Rows(8)
    rows = Dataset.from_source(source)
    dataset = Dataset.zip(rows.shuffle(seed=3), Dataset.range(8).shuffle(seed=3)).batch(4)
    for _ in range(2):
        for _, (row, number) in dataset.batches(lambda n: slice(1, 3)):
            assert row["y"].tolist() == number.tolist()
    assert len(source.read) == 8


def test_what_is_zipped_is_batched_where_all_parts_are():
    a, b = Dataset.range(8), Dataset.range(8)
    assert Dataset.zip(a.batch(2), b.batch(2)).is_batched
    assert not Dataset.zip(a.batch(2), b).is_batched
    found = Dataset.zip(a.batch(5), b.map(lambda x: -x).batch(5)).batches(lambda n: slice(1, 3))
    assert [(n, x.tolist(), y.tolist()) for n, (x, y) in found] == [
        (5, [1, 2], [-1, -2]),
        (3, [6, 7], [-6, -7]),
    ]
    different = Dataset.zip(a.batch(3), b.batch(2))
    assert len(list(different)) == 3
    with pytest.raises(ValueError, match=r"batches of element 0 .* have \[3, 2\] rows.*Zip first"):
        list(different.batches())


@pytest.mark.parametrize(
    ("first", "second", "cardinality"),
    [
        (Dataset.range(2), Dataset.range(3), 5),
        (Dataset.range(2), Dataset.range(3).repeat(), INFINITE_CARDINALITY),
        (Dataset.range(2).repeat(), Dataset.range(3), INFINITE_CARDINALITY),
        (Dataset.range(2), generated(1), UNKNOWN_CARDINALITY),
        (generated(1).repeat(), generated(1), INFINITE_CARDINALITY),
    ],
)
def test_the_length_of_what_is_concatenated_is_tfs(first, second, cardinality):
    dataset = first.concatenate(second)
    assert dataset.cardinality() == cardinality
    taken = lists(itertools.islice(dataset, 9))
    assert taken == lists(itertools.islice(itertools.chain(first, second), 9))


def test_a_batch_over_what_is_concatenated_crosses_from_one_to_the_other():
    dataset = Dataset.range(3).concatenate(Dataset.range(10, 13)).batch(4)
    assert lists(dataset) == [[0, 1, 2, 10], [11, 12]]
    assert lists(Dataset.range(0).concatenate(Dataset.range(2)).batch(2)) == [[0, 1]]
    rows = [rows.tolist() for _, rows in dataset.batches(lambda n: slice(n, n))]
    assert rows == [[], []]
    shuffled = Dataset.range(5).concatenate(Dataset.range(5, 9)).shuffle(seed=2).batch(9)
    assert sorted(*lists(shuffled)) == list(range(9))


@pytest.mark.parametrize("is_stream", [False, True], ids=["rows", "stream"])
def test_a_thousand_datasets_one_after_the_other_are_no_deeper_than_two(is_stream):
    whole = generated(0) if is_stream else Dataset.range(1)
    for number in range(1, 1200):  # some have no rows, and others more than one
        whole = whole.concatenate(Dataset.range(number, number + number % 3))
    expected = [0, *(n + i for n in range(1, 1200) for i in range(n % 3))]
    assert lists(whole) == expected
    assert [n for batch in lists(whole.batch(50)) for n in batch] == expected
    assert [n for _, rows in whole.batch(7).batches(start=20) for n in rows] == expected[140:]
    if not is_stream:
        (rows,) = whole.shuffle(seed=1).batch(len(expected))
        assert rows.tolist() == [expected[i] for i in order(len(expected), 1, 0)]
    assert whole.element_spec == ArraySpec((), np.dtype(np.int64))


def test_the_spec_of_what_is_concatenated_leaves_open_what_differs():
    a = Dataset.from_tensor_slices(np.zeros((2, 3, 4)))
    b = Dataset.from_tensor_slices(np.zeros((2, 3, 5)))
    assert a.concatenate(b).element_spec == ArraySpec((3, None), np.dtype(np.float64))
    texts = Dataset.from_tensor_slices(["a"]).concatenate(Dataset.from_tensor_slices(["long"]))
    assert texts.element_spec.dtype == np.dtype("U4")
    assert lists(texts.batch(2)) == [["a", "long"]]


def test_what_does_not_fit_and_must_be_read_to_know_is_an_error_when_it_is_read():
    dataset = Dataset.range(2).concatenate(Dataset.from_source([0.5, 1.5]))
    with pytest.raises(TypeError, match=r"dtype int64 first and then shape \(\) and dtype float64"):
        _ = dataset.element_spec
    with pytest.raises(StructureMismatchError, match="dtype int64 first and then"):
        list(dataset.batch(3))


def test_numbers_of_a_source_stack_alike_within_a_pass_and_across_two():
    batches = Dataset.from_source([1, 2.5, 3]).repeat(2).batch(4)
    assert [(batch.dtype, batch.tolist()) for batch in batches] == [
        (float, [1, 2.5, 3, 1]),
        (float, [2.5, 3]),
    ]


@pytest.mark.parametrize("make", [Dataset.from_source, lambda rows: generated(*rows)])
@pytest.mark.parametrize("other", [3, np.int8(3)], ids=["int64", "int8"])
def test_integers_are_never_stacked_to_floats_that_round_them(make, other):
    dataset = make([{"x": 2**63 + 1}, {"x": other}]).batch(2)
    with pytest.raises(ValueError, match=r"0 has dtype uint64, .* 1 has dtype int.*'x'\].*astype"):
        list(dataset)
    (batch,) = make([2**63 + 1, np.uint8(3), True]).batch(3)
    assert batch.tolist() == [2**63 + 1, 3, 1]
    (batch,) = make([1.5, 2**63, -1]).batch(3)  # floats are wanted here
    assert batch.tolist() == [1.5, 2.0**63, -1.0]


def test_enumerate_puts_numbers_before_the_elements():
    dataset = Dataset.from_tensor_slices(np.array(list("abc"))).enumerate(start=5)
    assert [(number.item(), str(text)) for number, text in dataset] == [
        (5, "a"),
        (6, "b"),
        (7, "c"),
    ]
    assert len(dataset) == 3


def test_numbers_before_the_elements_may_be_negative():
    for rows in (Dataset.range(3), generated(0, 1, 2)):
        for start in (-1, -(2**63)):
            numbers = [int(number) for number, _ in rows.enumerate(start)]
            assert numbers == [start, start + 1, start + 2]


@pytest.mark.parametrize("source", [generated(0, 1, 2), Dataset.range(3).repeat()])
def test_numbers_before_the_elements_that_do_not_fit_are_an_error_and_no_early_end(source):
    most = 2**63 - 1
    numbered = iter(source.enumerate(most - 1))
    assert [int(next(numbered)[0]), int(next(numbered)[0])] == [most - 1, most]
    with pytest.raises(ValueError, match=r"number 9223372036854775808 .*int64.*smaller"):
        next(numbered)
    assert len(list(generated(0, 1, 2).enumerate(most - 3))) == 3


@pytest.mark.parametrize("rows", [Dataset.range(3), generated(0, 1, 2)], ids=["rows", "stream"])
@pytest.mark.parametrize("wanted", [None, 2, [0, 2]])
def test_what_is_wanted_of_a_batch_is_a_slice_or_an_error(rows, wanted):
    with pytest.raises(TypeError, match="slice_rows must return a slice, got"):
        list(rows.batch(3).batches(lambda count: wanted))


@pytest.mark.skipif(not hasattr(np.dtypes, "StringDType"), reason="numpy has none")
def test_texts_of_any_width_of_numpy_go_through_all_verbs():
    texts = np.array(["a", "bbb", "cc"], np.dtypes.StringDType())
    for rows in (Dataset.from_tensor_slices(texts), Dataset.from_source(texts)):
        for same in (rows, rows.filter(lambda text: True), rows.concatenate(rows).take(3)):
            (batch,) = same.batch(3)
            assert (batch.dtype.kind, batch.tolist()) == ("U", ["a", "bbb", "cc"])
    with pytest.raises(ValueError, match="ends with a NUL"):
        Dataset.from_tensor_slices(np.array(["a\0"], np.dtypes.StringDType()))
    missing = np.array(["a", None], np.dtypes.StringDType(na_object=None))
    with pytest.raises(TypeError, match="has dtype StringDType"):
        Dataset.from_tensor_slices(missing)


@pytest.mark.parametrize("source", [Dataset.range(3), generated(0, 1, 2)], ids=["rows", "stream"])
def test_an_endless_dataset_stays_one_with_numbers_and_is_shuffled_by_a_buffer(source):
    dataset = source.repeat().enumerate(5)
    assert dataset.cardinality() == INFINITE_CARDINALITY
    numbers, rows = zip(*itertools.islice(dataset, 7), strict=True)
    assert (numbers, rows) == (tuple(range(5, 12)), (0, 1, 2, 0, 1, 2, 0))
    with pytest.raises(ValueError, match="never end"):
        dataset.shuffle(seed=0)
    drawn = [number for number, _ in itertools.islice(dataset.shuffle(4, seed=0), 50)]
    assert all(number < 5 + 4 + place for place, number in enumerate(drawn))
    assert len(set(drawn)) == 50


# unbatch


def test_unbatch_makes_elements_of_rows():
    dataset = Dataset.from_tensor_slices({"x": np.arange(10.0).reshape(5, 2), "y": np.arange(5)})
    rows = dataset.batch(2).unbatch()
    assert (rows.cardinality(), rows.is_batched) == (UNKNOWN_CARDINALITY, False)
    assert rows.element_spec == dataset.element_spec
    assert [row["x"].tolist() for row in rows] == [row["x"].tolist() for row in dataset]
    assert [type(row["y"]) for row in rows] == [np.int64] * 5
    again = dataset.map(lambda row: row["y"]).batch(2).unbatch().batch(3)
    assert [part.tolist() for _, part in again.batches(start=1)] == [[3, 4]]
    doubled = Dataset.range(3).batch(2).map(lambda batch: np.repeat(batch, 2)).unbatch()
    assert lists(doubled) == [0, 0, 1, 1, 2, 2]
    assert Dataset.range(3).batch(2).repeat().unbatch().cardinality() == INFINITE_CARDINALITY


# take, skip, shard


@pytest.mark.parametrize(
    ("dataset", "cardinality"),
    [
        (Dataset.range(5).take(9), 5),
        (Dataset.range(5).take(-1), 5),
        (Dataset.range(5).skip(9), 0),
        (Dataset.range(5).skip(-1), 0),
        (Dataset.range(5).shard(3, 2), 1),
        (Dataset.range(2).shard(3, 2), 0),
        (Dataset.range(5).repeat().take(7), 7),
        (Dataset.range(5).repeat().skip(7), INFINITE_CARDINALITY),
        (Dataset.range(5).repeat().shard(2, 1), INFINITE_CARDINALITY),
        (generated(1, 2).take(1), UNKNOWN_CARDINALITY),
        (generated(1, 2).take(0), 0),
        (generated(1, 2).skip(1), UNKNOWN_CARDINALITY),
        (generated(1, 2).skip(-1), 0),
        (generated(1, 2).shard(2, 0), UNKNOWN_CARDINALITY),
        (generated(1, 2).repeat().take(5), 5),
        (generated(1, 2).map(lambda x: x), UNKNOWN_CARDINALITY),
        (Dataset.range(5).map(lambda x: x).prefetch(1), 5),
    ],
)
def test_cardinality_is_tfs(dataset, cardinality):
    assert dataset.cardinality() == cardinality
    if cardinality >= 0:
        assert len(list(dataset)) == cardinality


@pytest.mark.parametrize(
    "verbs",
    [
        lambda dataset: dataset.skip(6).take(4),
        lambda dataset: dataset.shard(5, 1),
        lambda dataset: dataset.repeat(3).skip(30).take(3),
        lambda dataset: dataset.concatenate(dataset).skip(19).take(2),
    ],
)
def test_what_is_left_out_is_not_read(verbs):
    source = Rows(20)
    found = [row["y"].item() for row in verbs(Dataset.from_source(source))]
    assert source.read == found


@pytest.mark.parametrize(
    "verbs",
    [
        lambda dataset: dataset.batch(3),
        lambda dataset: dataset.shuffle(seed=1).repeat(2).batch(3),
        lambda dataset: dataset.map(lambda row: row["y"]).batch(3).map(lambda x: x),
        lambda dataset: dataset.batch(3).prefetch(2).repeat(2),
        lambda dataset: Dataset.zip(dataset, dataset).skip(3).batch(3).take(4),
        lambda dataset: dataset.batch(3).concatenate(dataset.batch(3)).shard(2, 1),
        lambda dataset: dataset.repeat().batch(3).shuffle(2, seed=3).take(6),
    ],
)
def test_starting_at_a_step_reads_nothing_of_the_steps_before(verbs):
    source = Rows(12)
    dataset = verbs(Dataset.from_source(source))
    whole = [repr(rows) for _, rows in dataset.batches(epoch=0)]
    read = len(source.read)
    source.read.clear()
    assert [repr(rows) for _, rows in dataset.batches(epoch=0, start=2)] == whole[2:]
    per_step = read // len(whole)
    assert len(source.read) == read - 2 * per_step
    assert list(dataset.batches(epoch=0, start=99)) == []


def test_a_stream_is_read_from_its_beginning_to_start_at_a_step():
    calls = []
    dataset = generated(*range(9)).map(lambda x: calls.append(int(x)) or x).batch(2)
    assert [rows.tolist() for _, rows in dataset.batches(start=3)] == [[6, 7], [8]]
    assert calls == [6, 7, 8]


# Bad input.


class NoRows:
    def __len__(self):
        return 3


BAD_CALLS = [
    (lambda: Dataset.from_source(iter([1])), TypeError, r"__len__ and __getitem__.*from_generator"),
    (lambda: Dataset.from_source(NoRows()), TypeError, r"needs an object with __len__"),
    (lambda: Dataset.from_source({"x": [1]}), TypeError, r"got a dict.*from_tensor_slices"),
    (lambda: list(Dataset.from_source([object()])), TypeError, r"has dtype object"),
    (lambda: Dataset.range(3).map(3), TypeError, r"map_func must be callable, got 3"),
    (lambda: Dataset.range(3).map(abs, 0), ValueError, r"num_parallel_calls must be.*AUTOTUNE"),
    (lambda: Dataset.range(3).map(abs, -2), ValueError, r"num_parallel_calls.*got -2"),
    (lambda: Dataset.range(3).map(abs, 1.5), TypeError, r"num_parallel_calls.*got 1\.5"),
    (lambda: list(Dataset.range(3).map(lambda x: None)), TypeError, r"returned: None has dtype"),
    (lambda: Dataset.range(3).filter(None), TypeError, r"predicate must be callable"),
    (
        lambda: list(Dataset.range(3).batch(3).filter(lambda x: x > 1)),
        TypeError,
        r"must return True or False, got array.*mask\.all\(\)",
    ),
    (lambda: list(Dataset.range(3).filter(lambda x: x)), TypeError, r"True or False, got .*0"),
    (
        lambda: list(Dataset.range(3).unbatch()),
        ValueError,
        r"element 0 of range\(0, 3, 1\) is no batch: its leaves have the shapes \(\)",
    ),
    (lambda: Dataset.range(3).take(-2), ValueError, r"count of take.* at least -1, got -2"),
    (lambda: Dataset.range(3).take("1"), TypeError, r"count of take.*got '1'"),
    (lambda: Dataset.range(3).skip(-2), ValueError, r"count of skip.* at least -1, got -2"),
    (lambda: Dataset.range(3).shard(0, 0), ValueError, r"num_shards must be at least 1"),
    (lambda: Dataset.range(3).shard(2, 2), ValueError, r"index of shard must be from 0 to 1"),
    (lambda: Dataset.zip(), TypeError, r"got no dataset"),
    (lambda: Dataset.zip([Dataset.range(3)]), TypeError, r"is no Dataset.*tuple or a dict"),
    (lambda: Dataset.zip({"x": [1, 2]}), TypeError, r"\[1, 2\] at \['x'\], which is no Dataset"),
    (lambda: Dataset.range(3).concatenate([1]), TypeError, r"needs a Dataset, got \[1\]"),
    (
        lambda: Dataset.range(3).concatenate(Dataset.from_tensor_slices([1.0])),
        TypeError,
        r"dtype int64 first and then shape \(\) and dtype float64.*astype",
    ),
    (
        lambda: Dataset.range(3).concatenate(Dataset.zip(Dataset.range(3), Dataset.range(3))),
        TypeError,
        r"elements are \* first and then \(\*, \*\)",
    ),
    (lambda: Dataset.range(3).prefetch(0), ValueError, r"buffer_size must be at least 1.*got 0"),
    (lambda: Dataset.range(3).prefetch(None), TypeError, r"buffer_size must be an integer"),
    (lambda: Dataset.range(3).enumerate("a"), TypeError, r"start must be an integer, got 'a'"),
    (
        lambda: Dataset.range(5).enumerate(2**63 - 3),
        ValueError,
        r"start must be from .* to 9223372036854775802, got 9223372036854775805",
    ),
    (lambda: Dataset.range(3).batch(2).batches(start=-1), ValueError, r"start must be at least 0"),
]


@pytest.mark.parametrize(("call", "error", "text"), BAD_CALLS)
def test_bad_input_is_an_error_that_says_what_to_do(call, error, text):
    with pytest.raises(error, match=f"(?s){text}"):
        call()


def test_the_chain_of_verbs_is_told_without_addresses():
    rows = Dataset.from_source([1, 2]).map(abs, 2).filter(bool).take(1).skip(0).shard(2, 1)
    assert repr(rows) == (
        "<Dataset.from_source(list, 2 rows).map(abs).filter(bool).take(1).skip(0).shard(2, 1)>"
    )
    both = Dataset.zip(Dataset.range(3), Dataset.range(4)).concatenate(
        Dataset.zip(Dataset.range(3), Dataset.range(4))
    )
    assert repr(both.prefetch(2)) == (
        "<Dataset.zip(range(0, 3, 1), range(0, 4, 1)).concatenate(zip(range(0, 3, 1), "
        "range(0, 4, 1))).prefetch(2)>"
    )


@pytest.mark.parametrize("count", [2**62, 2**63, 2**80])
def test_more_than_all_elements_may_be_taken_or_left_out(count):
    for rows in (Dataset.range(3), Dataset.range(3).filter(lambda row: True)):
        assert list(rows.take(count)) == [0, 1, 2]
        assert list(rows.skip(1).take(count)) == [1, 2]
        assert list(rows.skip(count)) == list(rows.skip(1).skip(count)) == []


@pytest.mark.parametrize(
    "text", [b"ab\0", "ab\0", [b"a", b"b\0"], [(b"a\0", b"b")], [[("a", "b\0")]]], ids=repr
)
def test_texts_that_end_with_nul_are_an_error(text):
    """numpy would give them back without it."""
    with pytest.raises(ValueError, match=r"ends with a NUL.*frombuffer"):
        list(Dataset.from_source([text]))
    assert list(Dataset.from_source([b"a\0b"])) == [b"a\0b"]


@pytest.mark.parametrize(
    "make",
    [
        lambda: Dataset.range(10).repeat(2**63),
        lambda: Dataset.range(2**62).repeat(3).batch(2**63),
        lambda: Dataset.range(2**62).concatenate(Dataset.range(2**62)),
    ],
)
def test_more_elements_than_numpy_can_count_are_refused_at_once(make):
    with pytest.raises(ValueError, match=str(2**63 - 1)):
        make()


def test_numbers_beyond_those_of_numpy_say_all_where_they_are_no_count_of_elements():
    numbers, most = Dataset.range(3), 2**70
    for dataset in (numbers.take(most), numbers.prefetch(most), numbers.batch(most).unbatch()):
        assert [int(number) for number in dataset] == [0, 1, 2]
    assert [int(number) for number in numbers.shard(most, 1)] == [1]
    assert list(numbers.skip(most)) == list(numbers.batch(most, drop_remainder=True)) == []
    assert len(Dataset.range(3).repeat(2**63 // 3)) == 2**63 // 3 * 3
