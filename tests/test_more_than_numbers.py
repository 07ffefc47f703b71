"""Values of more than numbers are refused where the rest would be lost without a word."""

import importlib.util

import numpy as np
import pandas
import pytest

import mpi_replica as mr
from mpi_replica.core.digests import digest_of
from mpi_replica.core.more_than_numbers import is_only_numbers, require_only_numbers


def of(library, make):
    """Return a test's parameter: what makes a value of a module of a library."""
    return pytest.param(lambda: make(importlib.import_module(library)), id=library)


def quantity(units):
    return np.array([1.0, 2.0]) * units.km


UNITS = [
    of("pint", lambda pint: quantity(pint.get_application_registry())),
    of("astropy.units", quantity),
    of("unyt", lambda unyt: unyt.unyt_array([1.0, 2.0], "km")),
    of("quantities", quantity),
    of("astropy.table", lambda table: table.Column([1.0, 2.0], unit="km")),
]
LABELS = [
    of("pandas", lambda pandas: pandas.Series([1.0, 2.0], index=["b", "a"])),
    of("pandas", lambda pandas: pandas.DataFrame({"b": [1.0, 2.0], "a": [3.0, 4.0]})),
    of("xarray", lambda xarray: xarray.DataArray([1.0, 2.0], {"x": [1, 0]})),
    of("polars", lambda polars: polars.DataFrame({"b": [1.0], "a": [2.0]})),
    of("pyarrow", lambda pyarrow: pyarrow.table({"b": [1.0], "a": [2.0]})),
    of("pyarrow", lambda pyarrow: pyarrow.record_batch({"b": [1.0], "a": [2.0]})),
]
MASKS = [
    of("numpy", lambda numpy: numpy.ma.masked_array([1.0, 2.0], [True, False])),
    of("astropy.utils.masked", lambda masked: masked.Masked([1.0, 2.0], [True, False])),
]
FIELDS = [
    of("os", lambda os: os.stat_result(range(10), {"st_mtime_ns": 5})),
    of("time", lambda time: time.struct_time(range(9), {"tm_zone": "X"})),
]
# With the word for what would be lost. numpy, pandas and pint are there, where all is installed
# that the tests ask for; of the others those that are.
WORDS = {"unit": UNITS, "labels": LABELS, "mask": MASKS, "fields": FIELDS}
REFUSED = [
    pytest.param(*parameter.values, word, id=f"{word} of {parameter.id}")
    for word, parameters in WORDS.items()
    for parameter in parameters
    if importlib.util.find_spec(parameter.id.partition(".")[0])
]


@pytest.fixture
def strategy():
    with mr.MPIStrategy(num_replicas=2) as strategy:
        yield strategy


def reduced(strategy, value):
    strategy.run(lambda: mr.get_replica_context().all_reduce("SUM", {"x": value}))


def gathered(strategy, value):
    strategy.run(lambda: mr.get_replica_context().all_gather({"x": value}, axis=0))


def reduced_along_an_axis(strategy, value):
    strategy.reduce("SUM", {"x": strategy.run(lambda: value)}, axis=0)


def verified(strategy, value):
    strategy.verify({"x": value})


def assigned(strategy, value):
    with strategy.scope():
        mr.Variable(np.zeros(np.shape(value))).assign(value)


def made_a_variable(strategy, value):
    with strategy.scope():
        mr.Variable(value)


def made_slices(strategy, value):
    mr.IndexedSlices(value, [0, 1], (2,))


PLACES = [
    *(reduced, gathered, reduced_along_an_axis, verified),
    *(assigned, made_a_variable, made_slices),
]


@pytest.mark.parametrize("place", PLACES, ids=lambda place: place.__name__)
@pytest.mark.parametrize(("make", "word"), REFUSED)
def test_what_an_array_would_lose_is_an_error_that_says_it(strategy, place, make, word):
    value = make()
    words = f"the {word}|its {word}"
    if word == "fields" and place is verified:
        words = "no bits that could be compared"
    with pytest.raises(TypeError, match=words) as caught:
        place(strategy, value)
    if place in (reduced, gathered, reduced_along_an_axis, verified):
        assert "value['x']" in str(caught.value)
    total = strategy.run(lambda: mr.get_replica_context().all_reduce("SUM", 1))
    assert strategy.experimental_local_results(total) == (2, 2)


def summed_over_a_batch(strategy, value):
    strategy.run(lambda: mr.mean_over_global_batch({"x": value}, 2))


def gathered_above(strategy, value):
    strategy.gather({"x": strategy.run(lambda: value)}, axis=0)


@pytest.mark.parametrize(
    "place",
    [one for one in (*PLACES, summed_over_a_batch, gathered_above) if one is not verified],
    ids=lambda place: place.__name__,
)
@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: (x for x in [1.0, 2.0]), "generator"),
        (lambda: map(float, [1, 2]), "map"),
        (lambda: filter(None, [1.0, 2.0]), "filter"),
        (lambda: zip([1.0], [2.0], strict=True), "zip"),
        (lambda: iter([1.0, 2.0]), "list_iterator"),
        (lambda: {"a": 1.0, "b": 2.0}.values(), "dict_values"),
        (lambda: {1.0: 1, 2.0: 2}.keys(), "dict_keys"),
    ],
)
def test_an_iterator_is_an_error_that_says_to_make_a_list(strategy, place, make, name):
    with pytest.raises(TypeError, match=rf"a {name} .* Pass list\(value\)"):
        place(strategy, make())
    total = strategy.run(lambda: mr.get_replica_context().all_reduce("SUM", 1))
    assert strategy.experimental_local_results(total) == (2, 2)


def test_an_iterator_over_an_array_is_that_array_to_numpy(strategy):
    reduced(strategy, np.ones(2).flat)


def in_a_dataset(strategy, value):
    mr.data.Dataset.from_tensor_slices(value)


def in_a_batch(strategy, value):
    next(iter(strategy.experimental_distribute_dataset([value])))


@pytest.mark.parametrize("place", [in_a_dataset, in_a_batch], ids=lambda place: place.__name__)
@pytest.mark.parametrize(("make", "word"), REFUSED)
def test_rows_of_a_dataset_may_have_labels_but_neither_mask_nor_unit(strategy, place, make, word):
    value = make()
    if word == "labels":
        place(strategy, value)
        return
    with pytest.raises(TypeError, match=f"the {word}"):
        place(strategy, value)


def test_a_frame_is_taken_as_a_dict_of_columns():
    """So tf's guides do it."""
    frame = pandas.DataFrame({"a": [1, 2], "b": [3.0, 4.0]}, index=[5, 4])
    elements = list(mr.data.Dataset.from_tensor_slices(dict(frame)))
    assert [{key: float(x) for key, x in row.items()} for row in elements] == [
        {"a": 1.0, "b": 3.0},
        {"a": 2.0, "b": 4.0},
    ]


def test_a_column_of_texts_is_taken_as_texts():
    frame = pandas.DataFrame({"a": ["x", "später"], "b": [1, 2]})
    (batch,) = mr.data.Dataset.from_tensor_slices(dict(frame)).batch(2)
    np.testing.assert_array_equal(batch["a"], np.array(["x", "später"]), strict=True)
    for mixed in (["x", None], ["x", 1.5]):
        with pytest.raises(TypeError, match="dtype object"):
            mr.data.Dataset.from_tensor_slices({"a": np.array(mixed, object)})


@pytest.mark.parametrize(
    "make",
    [
        lambda: pandas.Series([1.0, 2.0], index=[1, 0]),
        lambda: pandas.DataFrame({0: [1.0, 2.0], 1: [3.0, 4.0]}),
    ],
    ids=["series", "frame"],
)
def test_what_goes_by_label_is_no_source_of_rows(make):
    with pytest.raises(TypeError, match=r"goes by label or column.*from_tensor_slices"):
        mr.data.Dataset.from_source(make())


def same(one, other):
    assert type(one) is type(other)
    assert str(one) == str(other)
    for name in ("st_mtime_ns", "tm_zone"):
        assert getattr(one, name, None) == getattr(other, name, None)


# astropy's own pickle loses the mask.
@pytest.mark.parametrize(
    ("make", "word"), [refused for refused in REFUSED if "utils.masked" not in refused.id]
)
def test_what_pickles_takes_it_as_it_is(strategy, make, word):
    value = make()

    def step():
        merged = mr.get_replica_context().merge_call(lambda _, x: x.values[1], args=(value,))
        same(merged, value)

    strategy.run(step)
    for found in strategy.gather_objects(strategy.run(lambda: value)):
        same(found, value)
    same(strategy.extended.broadcast_to([value])[0].value, value)


class Plain(np.ndarray):
    """A class of the program, of which nothing is known."""


@pytest.mark.parametrize(
    "value",
    [
        1.0,
        "one",
        None,
        np.zeros(3),
        np.zeros(3).view(Plain),
        np.rec.array([(1, 2.0)], dtype=[("a", int), ("b", float)]),
        np.array([1, 2], "M8[s]"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_all_else_is_its_numbers(value):
    require_only_numbers(value)
    assert is_only_numbers(value)


def test_an_index_and_a_timestamp_have_no_labels():
    for value in (pandas.Index([1, 2]), pandas.date_range("2026", periods=2), pandas.Timestamp(1)):
        require_only_numbers(value)


@pytest.mark.parametrize(("make", "word"), REFUSED)
def test_of_values_that_ranks_compare_the_class_counts(make, word):
    assert digest_of(make()) == digest_of(make()) != digest_of(np.array([1.0, 2.0]))
