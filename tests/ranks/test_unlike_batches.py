"""Batches of one dataset that are not alike on all ranks: an error that says what differs."""

import types

import numpy as np
import pytest

import mpi_replica as mr
from everywhere import (
    check_works,
    cost_of,
    error_of,
    gathered,
    needs_two_ranks,
    raises_everywhere,
)
from mpi_replica.data import Dataset

STEPS = 4


def known(strategy, function):
    rows = Dataset.range(STEPS * strategy.num_replicas_in_sync)
    return rows.map(function).batch(strategy.num_replicas_in_sync)


def endless(strategy, function):
    return known(strategy, function).repeat()


def unknown(strategy, function):
    rows = Dataset.from_generator(lambda: range(STEPS * strategy.num_replicas_in_sync))
    return rows.map(function).batch(strategy.num_replicas_in_sync)


def iterable(strategy, function):
    return list(known(strategy, function))


LENGTHS = [known, endless, unknown, iterable]

# What the last rank makes of a row, what the others make of it; how the error names both.
UNLIKE = {
    "keys": (
        lambda x: {"b": x},
        lambda x: {"a": x},
        "{'b': *} of int64[any]",
        "{'a': *} of int64[any]",
    ),
    "structure": (lambda x: (x, x), lambda x: x, "(*, *) of int64[any], int64[any]", "int64[any]"),
    "axes": (lambda x: [x, x], lambda x: x, "int64[any, any]", "int64[any]"),
    "dtype": (lambda x: np.float32(x), lambda x: np.float64(x), "float32[any]", "float64[any]"),
    "text": (lambda x: str(x), lambda x: x, "str[any]", "int64[any]"),
}

# By name: a dataset whose second batch has fewer rows on the last rank. Its length is known.
ROWS = {
    "a stream without end": lambda is_last: (
        Dataset.from_generator(lambda: range(4 + is_last)).batch(4).repeat()
    ),
    "some of it": lambda is_last: (
        Dataset.from_generator(lambda: range(4 + is_last)).batch(4).repeat().take(3)
    ),
    "a map after batch": lambda is_last: (
        Dataset.range(12).batch(4).map(lambda rows: rows[rows != 5] if is_last else rows)
    ),
}


def take(strategy, iterator):
    """Take a step, and a collective call: where the length is known the ranks hear there."""
    next(iterator)
    strategy.run(lambda: None)


def is_last(strategy):
    return strategy.rank == strategy.size - 1


@pytest.mark.parametrize("source", LENGTHS)
@pytest.mark.parametrize("name", UNLIKE)
def test_batches_of_other_keys_dtypes_or_numbers_of_axes_are_told_with_both_sides(
    strategy, name, source
):
    needs_two_ranks(strategy)
    culprit, others, *words = UNLIKE[name]
    dataset = source(strategy, culprit if is_last(strategy) else others)
    iterator = iter(strategy.experimental_distribute_dataset(dataset))
    for _ in range(2):
        error = raises_everywhere(
            mr.errors.StructureMismatchError, lambda: take(strategy, iterator)
        )
        for word in words:
            assert word in str(error), error
        check_works(strategy)
        if not isinstance(dataset, Dataset):
            break


def test_what_is_concatenated_and_does_not_fit_is_one_error_on_every_layout(strategy):
    """A rank that reads a batch by itself finds out what others hear of one another."""
    rows = [*range(strategy.num_replicas_in_sync)]
    dataset = Dataset.from_source(rows).concatenate(Dataset.from_source([x + 0.5 for x in rows]))
    iterator = iter(strategy.experimental_distribute_dataset(dataset.batch(2 * len(rows))))
    error = raises_everywhere(mr.errors.StructureMismatchError, lambda: take(strategy, iterator))
    assert all(dtype in str(error) for dtype in ("int64", "float64"))
    check_works(strategy)


@pytest.mark.parametrize("source", LENGTHS)
def test_batches_that_come_to_differ_are_told_in_the_step_in_which_they_do(strategy, source):
    needs_two_ranks(strategy)
    first = 2 * strategy.num_replicas_in_sync

    def function(x):
        return x if x < first or not is_last(strategy) else float(x)

    dataset = source(strategy, function)
    iterator = iter(strategy.experimental_distribute_dataset(dataset))
    for _ in range(2):
        take(strategy, iterator)
    error = raises_everywhere(mr.errors.StructureMismatchError, lambda: take(strategy, iterator))
    assert "float64[any]" in str(error)
    check_works(strategy)


def told_of_rows(strategy, name, take_first):
    """Return the text of the error at the second step of `ROWS`, and the rows of the last rank."""
    needs_two_ranks(strategy)
    dataset = ROWS[name](is_last(strategy))
    iterator = iter(strategy.experimental_distribute_dataset(dataset))
    take_first(iterator)
    error = raises_everywhere(mr.errors.StructureMismatchError, lambda: take(strategy, iterator))
    check_works(strategy)
    return str(error), 3 if name == "a map after batch" else 1


@pytest.mark.parametrize("name", ROWS)
def test_batches_of_other_numbers_of_rows_are_told_where_no_step_is_agreed_on(strategy, name):
    text, last = told_of_rows(strategy, name, lambda iterator: take(strategy, iterator))
    assert "4 rows of int64[any] for " in text
    assert f"{last} rows of int64[any] for " in text


@pytest.mark.parametrize("name", ROWS)
def test_they_are_told_also_where_the_steps_before_were_alike(strategy, name):
    """Two steps are taken before the first collective call."""
    text, last = told_of_rows(strategy, name, next)
    assert f"4 rows of int64[any] and {last} rows of int64[any] for " in text


def test_batches_without_values_are_told_from_others(strategy):
    needs_two_ranks(strategy)
    batch = {} if is_last(strategy) else np.ones(4)
    iterator = iter(strategy.experimental_distribute_dataset([batch]))
    error = raises_everywhere(mr.errors.StructureMismatchError, lambda: next(iterator))
    assert "{}" in str(error)
    assert "{} of" not in str(error)
    check_works(strategy)


def test_a_difference_is_told_also_where_the_steps_after_it_were_alike(strategy):
    """Two steps are taken before the first collective call, say."""
    needs_two_ranks(strategy)

    def function(x):
        return float(x) if x < strategy.num_replicas_in_sync and is_last(strategy) else x

    iterator = iter(strategy.experimental_distribute_dataset(known(strategy, function)))
    next(iterator)
    error = raises_everywhere(mr.errors.StructureMismatchError, lambda: take(strategy, iterator))
    assert "float64[any]" in str(error)
    assert gathered(iterator.state_dict()["steps"]) == [0] * strategy.size
    check_works(strategy)


@pytest.mark.parametrize("source", LENGTHS)
def test_batches_may_change_on_all_ranks_alike(strategy, source):
    first = 2 * strategy.num_replicas_in_sync

    def function(x):
        return x if x < first else {"x": float(x)}

    iterator = iter(strategy.experimental_distribute_dataset(source(strategy, function)))
    kinds = []
    for _ in range(STEPS):
        batch = next(iterator)
        strategy.run(lambda: None)
        kinds.append(type(batch))
    assert kinds == [mr.PerReplica] * 2 + [dict] * 2


def test_ranks_may_have_other_numbers_of_rows_other_lengths_and_widths_of_texts(strategy):
    """Rows that are padded to the longest of their part, say."""
    replicas = strategy.num_replicas_in_sync
    rows = Dataset.range(replicas + 1).batch(replicas + 1)

    def padded(rows):
        longest = strategy.rank + 1
        return np.ones((len(rows), longest)), rows.astype(f"U{longest}")

    for batch in strategy.experimental_distribute_dataset(rows.map(padded)):
        strategy.run(lambda batch: None, (batch,))
    check_works(strategy)


def test_input_of_each_ranks_own_may_be_of_other_dtypes_and_shapes_and_not_of_other_keys(strategy):
    def dataset_fn(context):
        shape = 2, *(1,) * (strategy.rank % 8)
        return [{"x": np.ones(shape, "f4" if strategy.rank else "f8")}] * strategy.size

    for batch in strategy.distribute_datasets_from_function(dataset_fn):
        strategy.run(lambda batch: None, (batch,))
    check_works(strategy)
    if strategy.size > 1:
        own = strategy.distribute_datasets_from_function(
            lambda context: [{"b" if is_last(strategy) else "a": np.ones(2)}]
        )
        error = raises_everywhere(mr.errors.StructureMismatchError, lambda: next(iter(own)))
        assert "{'a': *}" in str(error)
        assert "{'b': *}" in str(error)
        check_works(strategy)


def test_a_rank_without_input_is_no_difference(strategy):
    own = strategy.distribute_datasets_from_function(
        lambda context: [{"a": np.ones(2)}] * (context.input_pipeline_id + 1)
    )
    for batch in own:
        strategy.run(lambda batch: None, (batch,))
    check_works(strategy)


def test_batches_that_a_rank_without_input_can_not_be_told_of_are_an_error_on_all(strategy):
    needs_two_ranks(strategy)
    own = strategy.distribute_datasets_from_function(
        lambda context: [] if is_last(strategy) else [types.MappingProxyType({"a": np.ones(2)})]
    )
    error = raises_everywhere(TypeError, lambda: next(iter(own)))
    assert "mappingproxy" in str(error)
    check_works(strategy)


def test_a_step_that_fails_on_one_rank_leaves_no_difference_behind(strategy):
    failures = [OSError("bad sector")] if is_last(strategy) else []

    def function(x):
        if failures:
            raise failures.pop()
        return x

    iterator = iter(strategy.experimental_distribute_dataset(known(strategy, function)))
    raises_everywhere(OSError, lambda: take(strategy, iterator))
    for _ in range(STEPS):
        take(strategy, iterator)
    assert gathered(type(error_of(lambda: next(iterator))).__name__) == (
        ["StopIteration"] * strategy.size
    )


def test_a_step_of_fewer_rows_that_fails_on_one_rank_is_told_by_its_error(strategy):
    replicas = strategy.num_replicas_in_sync
    failures = [OSError("bad sector")] if is_last(strategy) else []

    def function(x):
        if failures and x >= 2 * replicas:
            raise failures.pop()
        return x

    dataset = Dataset.range(3 * replicas).map(function).batch(2 * replicas)
    iterator = iter(strategy.experimental_distribute_dataset(dataset))
    take(strategy, iterator)
    raises_everywhere(OSError, lambda: take(strategy, iterator))
    take(strategy, iterator)
    check_works(strategy)


def test_comparing_costs_no_message(strategy):
    iterator = iter(strategy.experimental_distribute_dataset(known(strategy, lambda x: x)))
    assert cost_of(strategy, lambda: next(iterator)) == (0, 0)


@pytest.mark.parametrize("what", ["dtype", "axes"])
@pytest.mark.parametrize("read_ahead", [None, 2])
def test_no_row_is_lost_where_a_row_was_of_another_kind_once(strategy, what, read_ahead):
    """After the error the same step is read again, as where the row was on one rank with others."""
    needs_two_ranks(strategy)
    replicas = strategy.num_replicas_in_sync
    torn = [2 * replicas - 1]  # the last row of the second step, on the last rank

    def row(x):
        if int(x) in torn:
            torn.clear()
            return np.float64(x) if what == "dtype" else [np.float32(x)]
        return np.float32(x)

    rows = Dataset.range(STEPS * replicas).map(row).batch(replicas)
    options = (
        mr.InputOptions(experimental_per_replica_buffer_size=read_ahead) if read_ahead else None
    )
    batches = iter(strategy.experimental_distribute_dataset(rows, options))
    totals, errors, places = [], [], []
    while True:
        try:
            batch = next(batches)
            total = strategy.run(
                lambda rows: mr.get_replica_context().all_reduce("SUM", rows.sum()), args=(batch,)
            )
        except StopIteration:
            break
        except mr.errors.StructureMismatchError as error:
            errors.append(error)
            places.append(batches.state_dict()["steps"])
        else:
            totals.append(float(strategy.experimental_local_results(total)[0]))
    assert len(errors) == 1
    assert places == [1]
    expected = np.arange(STEPS * replicas, dtype="float32").reshape(STEPS, replicas).sum(axis=1)
    assert totals == expected.tolist()


# By name: what makes the same global batches of the same generator, and can only be iterated.
ONLY_ITERATED = {
    "iterable": lambda rng: [{"x": rng.normal(size=(8, 2)), "y": np.arange(8)} for _ in range(3)],
    "generator": lambda rng: Dataset.from_generator(lambda: map(rng.permutation, [5] * 9)).batch(4),
    "filter": lambda rng: Dataset.range(90).filter(lambda x: rng.random() < 0.5).batch(8),
    "texts": lambda rng: [rng.permutation(["a", "bc", "d\xfc", "", "e"])],
}


@pytest.mark.parametrize("made", ONLY_ITERATED)
@pytest.mark.parametrize("culprit", ["first", "last"])
def test_batches_that_a_rank_shuffles_or_draws_by_itself_are_an_error_on_all(
    strategy, made, culprit
):
    """Each rank would take its rows of another batch: some would come twice, and others never."""
    needs_two_ranks(strategy)
    is_culprit = is_last(strategy) if culprit == "last" else strategy.rank == 0

    def steps(seed):
        dataset = ONLY_ITERATED[made](np.random.default_rng(seed))
        return list(strategy.experimental_distribute_dataset(dataset))

    assert steps(3)
    error = raises_everywhere(mr.errors.DivergenceError, lambda: steps(3 + is_culprit))
    assert "in their first or last row" in str(error)
    assert "Seed what shuffles or draws" in str(error)
    check_works(strategy)


def test_datasets_of_other_verbs_are_shown_in_the_error(strategy):
    needs_two_ranks(strategy)
    dataset = Dataset.range(16).shuffle(seed=int(is_last(strategy))).batch(4)
    distributed = strategy.experimental_distribute_dataset(dataset)
    error = raises_everywhere(
        mr.errors.CollectiveMismatchError, lambda: take(strategy, iter(distributed))
    )
    for seed in (0, 1):
        assert f"<Dataset.range(0, 16, 1).shuffle(seed={seed}).batch(4)>" in str(error)
    check_works(strategy)


@pytest.mark.parametrize("made", ["by position", "stream"])
def test_a_replica_without_rows_gets_the_lengths_of_its_batch(strategy, made):
    """Not those of the first element of all."""
    count = strategy.num_replicas_in_sync
    long, short = np.zeros((count, 5)), np.ones((1, 3))
    rows = Dataset.from_tensor_slices(long).concatenate(Dataset.from_tensor_slices(short))
    if made == "stream":
        rows = rows.filter(lambda row: True)
    found = [
        np.asarray(strategy.reduce("MEAN", batch, axis=0)).tolist()
        for batch in strategy.experimental_distribute_dataset(rows.batch(count))
    ]
    assert found == [[0] * 5, [1] * 3]
