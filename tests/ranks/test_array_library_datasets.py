"""Distributed datasets of other libraries' arrays: replicas get rows of the kind of the source."""

import numpy as np
import pytest

import mpi_replica as mr
from array_kinds import LIBRARIES, Library
from everywhere import check_works

Dataset = mr.data.Dataset
ROWS = np.arange(24, dtype="f4").reshape(12, 2)


@pytest.fixture(params=LIBRARIES)
def library(request):
    return Library(request.param)


def generated(rows):
    return Dataset.from_generator(lambda: (rows[i, ...] for i in range(rows.shape[0])))


def in_lists(rows):
    return [rows[:5, ...], rows[5:6, ...], rows[6:, ...]]


INPUTS = {
    "slices": lambda rows: Dataset.from_tensor_slices(rows).batch(5),
    "shuffle": lambda rows: Dataset.from_tensor_slices(rows).shuffle(seed=1).batch(5),
    "map": lambda rows: Dataset.from_tensor_slices(rows).map(lambda row: row + 1).batch(5),
    "map of batches": lambda rows: Dataset.from_tensor_slices(rows).batch(5).map(lambda x: x + 1),
    "generator": lambda rows: generated(rows).batch(5),
    "filter": lambda rows: generated(rows).filter(lambda row: row[0] > 4).batch(5),
    "list": in_lists,
}


def same_steps(strategy, library, steps, expected):
    """Check that the steps have the rows of a numpy input, as arrays of the library."""
    steps, expected = list(steps), list(expected)
    assert len(steps) == len(expected) > 0
    for step, other in zip(steps, expected, strict=True):
        parts = strategy.experimental_local_results(step)
        others = strategy.experimental_local_results(other)
        for part, rows in zip(parts, others, strict=True):
            library.holds(part, rows)


@pytest.mark.parametrize("buffer_size", [0, 2])
@pytest.mark.parametrize("name", INPUTS)
def test_replicas_get_rows_of_the_library_and_those_without_rows_empty_ones(
    strategy, library, name, buffer_size
):
    options = mr.InputOptions(experimental_per_replica_buffer_size=buffer_size)
    of_library, of_numpy = (
        strategy.experimental_distribute_dataset(INPUTS[name](rows), options)
        for rows in (library.array(ROWS), ROWS)
    )
    same_steps(strategy, library, of_library, of_numpy)


@pytest.mark.parametrize("name", ["shuffle", "generator", "list"])
def test_an_iteration_goes_on_from_a_saved_place_with_the_same_kind(strategy, library, name):
    def distributed(rows):
        return strategy.experimental_distribute_dataset(INPUTS[name](rows))

    begun = distributed(library.array(ROWS))
    next(iter(begun))
    restored = distributed(library.array(ROWS))
    restored.load_state_dict(begun.state_dict())
    expected = list(distributed(ROWS))[1:]
    same_steps(strategy, library, restored, expected)


def test_a_rank_whose_own_input_has_ended_or_is_empty_gets_empty_arrays_of_the_library(
    strategy, library
):
    def of_pipeline(make):
        def dataset_fn(context):
            # batches: the last pipeline has none, unless it is the only one
            count = max(context.num_input_pipelines - 1, 1) - context.input_pipeline_id
            return [make(np.full((2, 3), i)) for i in range(count)]

        return strategy.distribute_datasets_from_function(dataset_fn)

    same_steps(strategy, library, of_pipeline(library.array), of_pipeline(np.float32))


def test_a_step_sees_the_kind_and_results_of_parts_are_gathered_as_such(strategy, library):
    batches = strategy.experimental_distribute_dataset(INPUTS["slices"](library.array(ROWS)))

    def step(rows):
        assert isinstance(rows, library.type)
        return rows * 2

    found = [strategy.gather(strategy.run(step, args=(batch,)), axis=0) for batch in batches]
    for batch, expected in zip(found, in_batches(ROWS * 2), strict=True):
        library.holds(batch, expected)


def in_batches(rows):
    return [rows[:5], rows[5:10], rows[10:]]


AHEAD = mr.InputOptions(experimental_per_replica_buffer_size=2)
READERS = {
    "prefetch": (lambda source, function: source.map(function).prefetch(2), None),
    "steps ahead": (lambda source, function: source.map(function), AHEAD),
    "calls at once": (lambda source, function: source.map(function, num_parallel_calls=2), None),
}


@pytest.mark.parametrize("name", READERS)
def test_what_is_read_in_another_thread_has_the_settings_of_torch_of_who_iterates(strategy, name):
    torch = pytest.importorskip("torch", reason="torch is not installed")
    read, options = READERS[name]
    weights = torch.eye(2, requires_grad=True)
    records = []

    def product(rows):
        result = rows @ weights
        records.append(result.requires_grad)
        return result

    def dtypes():
        source = Dataset.from_tensor_slices(torch.from_numpy(ROWS)).batch(6)
        steps = strategy.experimental_distribute_dataset(read(source, product), options)
        return {x.dtype for step in steps for x in strategy.experimental_local_results(step)}

    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert dtypes() == {torch.bfloat16}
    assert not any(records)
    assert dtypes() == {torch.float32}
    assert any(records)


@pytest.mark.parametrize("name", READERS)
def test_what_is_read_in_another_thread_has_the_settings_of_jax_of_who_iterates(strategy, name):
    jax = pytest.importorskip("jax", reason="jax is not installed")
    read, options = READERS[name]
    with jax.enable_x64(True):
        source = Dataset.from_tensor_slices(jax.numpy.arange(12) + 2**40).batch(6)
        source = read(source, lambda numbers: numbers * 1)
        steps = strategy.experimental_distribute_dataset(source, options)
        rows = [strategy.gather(step, axis=0) for step in steps]
        np.testing.assert_array_equal(np.concatenate(rows), np.arange(12) + 2**40)


def test_tensors_that_record_gradients_are_cut_by_value(strategy):
    torch = pytest.importorskip("torch", reason="torch is not installed")
    rows = torch.as_tensor(ROWS.copy()).requires_grad_()
    for batches in (in_batches(rows), INPUTS["slices"](rows)):
        for batch in strategy.experimental_distribute_dataset(batches):
            for part in strategy.experimental_local_results(batch):
                assert not part.requires_grad


@pytest.mark.parametrize("reads", ["prefetch", "parallel map"])
def test_what_is_read_ahead_in_inference_mode_can_be_trained_with_after_it(strategy, reads):
    """So a look at the first batch changes nothing for the others; nor does no_grad for good."""
    torch = pytest.importorskip("torch", reason="torch is not installed")
    weight = torch.ones(2, requires_grad=True)
    count = strategy.num_replicas_in_sync
    rows = mr.data.Dataset.from_tensor_slices(torch.ones(8 * count, 2))
    calls = 2 if reads == "parallel map" else None
    rows = rows.map(lambda row: row * weight, calls).batch(count)
    rows = rows.prefetch(2) if reads == "prefetch" else rows
    iterator = iter(strategy.experimental_distribute_dataset(rows))
    with torch.inference_mode():
        first = strategy.experimental_local_results(next(iterator))
    assert not any(part.requires_grad for part in first)
    *_, last = (strategy.experimental_local_results(batch) for batch in iterator)
    for part in last:
        (part * weight).sum().backward()
    assert weight.grad.abs().sum() > 0
    check_works(strategy)


class Parts:
    """An iterable of parts of what it keeps, as programs have their own."""

    def __init__(self, batches):
        self._batches = batches

    def __iter__(self):
        return (batch[:, ...] for batch in self._batches)


@pytest.mark.parametrize("source", [list, Parts])
def test_a_step_that_writes_into_its_rows_of_tensors_changes_none_of_the_program(strategy, source):
    torch = pytest.importorskip("torch", reason="torch is not installed")
    batches = in_lists(torch.from_numpy(ROWS.copy()))
    distributed = strategy.experimental_distribute_dataset(source(batches))

    def step(rows):
        rows.mul_(2)
        return rows

    for _ in range(2):
        for batch, rows in zip(distributed, in_lists(ROWS), strict=True):
            doubled = strategy.gather(strategy.run(step, args=(batch,)), axis=0)
            np.testing.assert_array_equal(doubled, 2 * rows)
    np.testing.assert_array_equal(torch.cat(batches), ROWS)


@pytest.mark.parametrize("source", [list, Parts])
def test_nor_does_one_that_writes_into_its_own_input_of_tensors(strategy, source):
    torch = pytest.importorskip("torch", reason="torch is not installed")
    per_replica = mr.InputReplicationMode.PER_REPLICA
    options = mr.InputOptions(experimental_replication_mode=per_replica)
    distributed = strategy.distribute_datasets_from_function(
        lambda context: source([torch.ones(2, 1), torch.ones(1, 1)]), options
    )

    def step(rows):
        rows.mul_(2)
        return rows.sum().item()

    for _ in range(2):
        found = [strategy.run(step, args=(batch,)) for batch in distributed]
        for sums, expected in zip(found, (4.0, 2.0), strict=True):
            assert set(strategy.experimental_local_results(sums)) == {expected}
