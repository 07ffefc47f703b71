"""Datasets of torch tensors, JAX arrays and others: batches are of the kind that the source is."""

import numpy as np
import pytest

import mpi_replica as mr
from array_kinds import LIBRARIES, Library

Dataset = mr.data.Dataset
ROWS = np.arange(24, dtype="f4").reshape(12, 2)


@pytest.fixture(params=LIBRARIES)
def library(request):
    return Library(request.param)


def holds_all(library, found, expected):
    """Check that elements are the library's, with the values of those of a numpy dataset."""
    found, expected = list(found), list(expected)
    assert len(found) == len(expected) > 0
    for one, other in zip(found, expected, strict=True):
        library.holds(one, other)


class Rows:
    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return self.rows.shape[0]

    def __getitem__(self, i):
        return self.rows[i, ...]


SOURCES = {
    "slices": Dataset.from_tensor_slices,
    "source": lambda rows: Dataset.from_source(Rows(rows)),
    "generator": lambda rows: Dataset.from_generator(
        lambda: (rows[i, ...] for i in range(rows.shape[0]))
    ),
}

VERBS = {
    "nothing": lambda dataset: dataset,
    "batch": lambda dataset: dataset.batch(5),
    "shuffle": lambda dataset: dataset.shuffle(8, seed=3).batch(5),
    "unbatch": lambda dataset: dataset.batch(5).unbatch().batch(3),
    "concatenate": lambda dataset: dataset.concatenate(dataset).batch(7),
    "repeat": lambda dataset: dataset.repeat(2).batch(7),
    "prefetch": lambda dataset: dataset.batch(5).prefetch(2),
    "skip": lambda dataset: dataset.skip(1).take(9).shard(2, 1).batch(2),
    "filter": lambda dataset: dataset.filter(lambda row: row[0] > 4).batch(2),
    "map": lambda dataset: dataset.map(lambda row: row + 1).batch(5),
    "parallel map": lambda dataset: dataset.map(lambda row: row * 2, 2).batch(5),
    "map of batches": lambda dataset: dataset.batch(5).map(lambda batch: batch + 1),
    "map to numbers": lambda dataset: dataset.map(lambda row: row[0]).batch(5),
}


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("source", SOURCES)
def test_elements_are_of_the_kind_of_the_source(library, source, verb):
    make = VERBS[verb]
    found = make(SOURCES[source](library.array(ROWS)))
    expected = make(SOURCES[source](ROWS))
    holds_all(library, found, expected)
    assert found.element_spec == expected.element_spec


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("cut", [lambda n: slice(1, 2), lambda n: slice(n, n)])
@pytest.mark.parametrize("verb", ["batch", "shuffle", "unbatch", "map", "map of batches", "repeat"])
def test_rows_of_a_batch_are_of_the_kind_of_the_source_and_so_are_none(library, source, verb, cut):
    make = VERBS[verb]
    found = make(SOURCES[source](library.array(ROWS))).batches(cut)
    expected = make(SOURCES[source](ROWS)).batches(cut)
    for (count, rows), (other_count, others) in zip(found, expected, strict=True):
        assert count == other_count
        library.holds(rows, others)


def test_the_function_of_a_map_sees_the_kind_of_the_source(library):
    seen = []

    def look(row, number):
        seen.append((type(row), type(number)))
        return row, number

    pairs = Dataset.zip(Dataset.from_tensor_slices(library.array(ROWS)), Dataset.range(12))
    for row, number in pairs.map(look).batch(4):
        library.holds(row, ROWS[number])
        assert type(number) is np.ndarray
    assert len(seen) >= 12
    for kind, kind_of_number in seen:
        assert issubclass(kind, library.type)
        assert kind_of_number is np.int64


def test_a_map_may_make_arrays_of_the_library_of_numpy_ones(library):
    made = Dataset.from_tensor_slices(ROWS).map(library.array).batch(5)
    holds_all(library, made, Dataset.from_tensor_slices(ROWS).batch(5))


def test_the_numpy_iterator_gives_numpy_values(library):
    source = {"x": library.array(ROWS), "y": ROWS[:, 0]}
    for row, element in enumerate(Dataset.from_tensor_slices(source).as_numpy_iterator()):
        assert type(element["x"]) is np.ndarray
        np.testing.assert_array_equal(element["x"], ROWS[row])
        assert type(element["y"]) is np.float32


def test_writing_into_what_a_dataset_gave_does_not_reach_the_source(library):
    library.needs_writable_arrays()
    rows = library.array(ROWS)
    kept = library.array(ROWS[:2])
    for dataset in (
        Dataset.from_tensor_slices(rows),
        Dataset.from_tensor_slices(rows).batch(12),
        Dataset.from_source(Rows(rows)),
        Dataset.from_generator(lambda: iter([kept])),
        Dataset.range(3).map(lambda i: kept),
    ):
        for element in dataset:
            element += 100
    library.holds(rows, ROWS)
    library.holds(kept, ROWS[:2])


def test_bfloat16_stays_bfloat16(library):
    rows = library.as_bfloat16(library.array(ROWS))
    for source in SOURCES.values():
        batches = list(source(rows).shuffle(1, seed=0).batch(5))
        assert {batch.dtype for batch in batches} == {rows.dtype}
    assert np.concatenate(list(map(library.as_float32, batches))).tolist() == ROWS.tolist()


def test_elements_of_a_mix_of_libraries_are_batched_as_the_first_one(library):
    first, second = library.array(ROWS[0]), ROWS[1]
    (batch,) = Dataset.from_generator(lambda: iter([first, second])).batch(2)
    library.holds(batch, ROWS[:2])
    (batch,) = Dataset.from_generator(lambda: iter([second, first])).batch(2)
    assert type(batch) is np.ndarray
    np.testing.assert_array_equal(batch, ROWS[[1, 0]])
    (batch,) = Dataset.from_generator(lambda: iter([np.arange(2), first])).batch(2)
    np.testing.assert_array_equal(batch, [[0, 1], ROWS[0]])


def test_shapes_that_do_not_stack_are_told_as_of_numpy(library):
    elements = [library.array(ROWS[:2]), library.array(ROWS[:3])]
    with pytest.raises(ValueError, match=r"shape \(2, 2\).*shape \(3, 2\)"):
        list(Dataset.from_generator(lambda: iter(elements)).batch(2))
    with pytest.raises(ValueError, match="which has no rows"):
        Dataset.from_tensor_slices(library.array(1.0))


def test_nothing_is_recorded_for_gradients_of_torch():
    torch = pytest.importorskip("torch", reason="torch is not installed")
    rows = torch.as_tensor(ROWS.copy()).requires_grad_()
    for source in SOURCES.values():
        dataset = source(rows)
        mapped = dataset.map(lambda row: row * rows[0])
        for elements in (dataset, dataset.batch(5), mapped, mapped.batch(5)):
            assert not any(element.requires_grad for element in elements)


def test_what_has_no_numpy_form_says_what_to_do():
    torch = pytest.importorskip("torch", reason="torch is not installed")
    with pytest.raises(TypeError, match="to_dense"):
        Dataset.from_tensor_slices(torch.eye(3).to_sparse())
