"""Input that fails while it is read: an error on every rank, which names the row, and no hang."""

import itertools
import threading

import numpy as np
import pytest

import mpi_replica as mr
from everywhere import check_works, gathered, raises_everywhere
from mpi_replica.data import AUTOTUNE, Dataset


class Rows:
    """Like a map-style dataset of PyTorch; one of its rows can't be read."""

    def __init__(self, count, bad=None):
        self.count = count
        self.bad = bad

    def __len__(self):
        return self.count

    def __getitem__(self, row):
        if row == self.bad:
            raise OSError(5, f"bad sector {row}")
        return {"x": np.full(2, row), "y": row}


def fails_at(bad):
    def double(number):
        if number == bad:
            raise OSError(5, f"bad sector {bad}")
        return 2 * number

    return double


def keeps_until(bad):
    def is_kept(number):
        if number == bad:
            raise OSError(5, f"bad sector {bad}")
        return True

    return is_kept


def rows_until(count, bad):
    for number in range(count):
        if number == bad:
            raise OSError(5, f"bad sector {bad}")
        yield number


def ends_at(bad):
    def double(number):
        if number == bad:
            raise SystemExit("bad file")
        return 2 * number

    return double


SOURCES = {
    "source": lambda n, bad: Dataset.from_source(Rows(n, bad)).map(lambda row: row["y"]),
    "shuffled source": lambda n, bad: (
        Dataset.from_source(Rows(n, bad)).map(lambda row: row["y"]).shuffle(seed=3)
    ),
    "map": lambda n, bad: Dataset.range(n).map(fails_at(bad)),
    "parallel map": lambda n, bad: Dataset.range(n).map(fails_at(bad), AUTOTUNE),
    "filter": lambda n, bad: Dataset.range(n).filter(keeps_until(bad)),
    "generator": lambda n, bad: Dataset.from_generator(lambda: rows_until(n, bad)),
}


@pytest.mark.parametrize("is_prefetched", [False, True], ids=["", "prefetched"])
@pytest.mark.parametrize("kind", SOURCES)
def test_an_error_in_one_row_is_raised_on_all_ranks_with_the_row(strategy, kind, is_prefetched):
    """Where a batch is cut one rank reads that row; the others are at their next call then."""
    count = 6 * strategy.num_replicas_in_sync
    bad = count // 2 + 1
    source = SOURCES[kind](count, bad).batch(count // 3)
    if is_prefetched:
        source = source.prefetch(2)
    dataset = strategy.experimental_distribute_dataset(source)

    def epoch():
        for batch in dataset:
            strategy.reduce("SUM", batch, axis=0)

    error = raises_everywhere(OSError, epoch)
    assert "bad sector" in str(error)
    rows = gathered(error.__notes__[0])
    assert f"{bad} of " in rows[0]
    assert rows == [rows[0]] * strategy.size
    check_works(strategy)


def test_after_an_error_in_a_row_another_dataset_can_be_distributed(strategy):
    count = 2 * strategy.num_replicas_in_sync

    def total(bad):
        source = Dataset.range(count).map(fails_at(bad)).batch(count)
        dataset = strategy.experimental_distribute_dataset(source)
        return sum(strategy.reduce("SUM", batch, axis=0) for batch in dataset)

    raises_everywhere(OSError, lambda: total(count - 1))
    assert total(None) == count * (count - 1)


def test_an_error_in_the_last_step_is_raised_on_all_ranks_at_the_end_of_the_job(strategy):
    """Even where nothing is done with the steps: the next call is the first that can tell."""
    count = 2 * strategy.num_replicas_in_sync
    source = Dataset.range(count).map(fails_at(count - 1)).batch(count)

    def epoch():
        list(strategy.experimental_distribute_dataset(source))
        strategy.run(lambda: None)

    raises_everywhere(OSError, epoch)
    check_works(strategy)


def test_a_pipeline_of_a_rank_that_fails_in_a_row_is_an_error_everywhere(strategy):
    def rows_of(context):
        bad = 3 if context.input_pipeline_id == context.num_input_pipelines - 1 else None
        return Dataset.from_source(Rows(6, bad)).batch(2).prefetch(1)

    dataset = strategy.distribute_datasets_from_function(rows_of)
    error = raises_everywhere(OSError, lambda: list(dataset))
    assert "row 3 of from_source(Rows, 6 rows)" in " ".join(error.__notes__)
    check_works(strategy)


def test_a_prefetched_dataset_gives_replicas_what_it_gives_without(strategy):
    count = strategy.num_replicas_in_sync

    def steps(*verbs):
        source = Dataset.range(9 * count).shuffle(seed=1).map(lambda x: x * 2, 2).batch(4 * count)
        for verb in verbs:
            source = verb(source)
        dataset = strategy.experimental_distribute_dataset(source)
        return [
            [part.tolist() for part in strategy.experimental_local_results(step)]
            for _ in range(2)
            for step in dataset
        ]

    before = set(threading.enumerate())
    assert steps(lambda source: source.prefetch(2)) == steps()
    assert steps(lambda source: source.prefetch(AUTOTUNE).repeat(2)) == steps(
        lambda source: source.repeat(2)
    )
    new = set(threading.enumerate()) - before
    assert not [thread for thread in new if "prefetch" in thread.name]


def test_a_rank_reads_the_rows_of_its_own_replicas_only(strategy):
    """Also in the thread of a prefetch, and through all verbs that keep positions."""
    R = strategy.num_replicas_in_sync
    seen = []

    class Source(Rows):
        def __getitem__(self, row):
            seen.append(row)
            return row

    pairs = Dataset.zip(Dataset.from_source(Source(7 * R)), Dataset.range(7 * R))
    source = pairs.skip(R).take(6 * R).shuffle(seed=2).map(lambda x, y: x + y).batch(2 * R)
    mine = []
    for batch in strategy.experimental_distribute_dataset(source.prefetch(2)):
        for part in strategy.experimental_local_results(batch):
            mine += part.tolist()
    assert [2 * row for row in seen] == mine
    of_ranks = itertools.chain.from_iterable(gathered(mine))
    assert sorted(of_ranks) == [2 * row for row in range(R, 7 * R)]


def test_a_map_over_batches_gives_replicas_their_rows_of_the_result(strategy):
    R = strategy.num_replicas_in_sync
    data = np.arange(4.0 * R)
    source = Dataset.from_tensor_slices(data).batch(2 * R).map(lambda batch: batch - batch.mean())
    batches = strategy.experimental_distribute_dataset(source)
    found = [strategy.gather(batch, axis=0) for batch in batches]
    wanted = [half - half.mean() for half in np.split(data, 2)]
    np.testing.assert_array_equal(found, wanted)


def test_a_map_that_leaves_no_rows_to_cut_is_a_value_error_everywhere(strategy):
    source = Dataset.range(4).batch(4).map(lambda batch: batch.sum())
    dataset = strategy.experimental_distribute_dataset(source)
    error = raises_everywhere(ValueError, lambda: list(dataset))
    assert "is no batch: its leaves" in str(error)
    check_works(strategy)


@pytest.mark.parametrize("calls", [None, 2], ids=["", "parallel"])
def test_where_a_map_gives_no_array_the_error_names_the_line_that_asked_for_it(strategy, calls):
    R = strategy.num_replicas_in_sync
    source = Dataset.range(R).map(lambda row: None if row == R - 1 else row, calls).batch(R)
    dataset = strategy.experimental_distribute_dataset(source)

    def epoch():
        for batch in dataset:
            strategy.reduce("SUM", batch, axis=0)

    error = raises_everywhere(TypeError, epoch)
    if strategy.size > 1:
        assert " at test_failing_input.py:" in error.__notes__[-1]
    check_works(strategy)


def test_batches_that_are_zipped_with_other_numbers_of_rows_are_a_value_error(strategy):
    R = strategy.num_replicas_in_sync
    source = Dataset.zip(Dataset.range(6 * R).batch(2 * R), Dataset.range(9 * R).batch(3 * R))
    dataset = strategy.experimental_distribute_dataset(source)
    error = raises_everywhere(ValueError, lambda: list(dataset))
    assert "Zip first" in str(error)
    check_works(strategy)


def test_reading_in_a_thread_may_not_communicate(strategy):
    """A call from the thread of a prefetch is an error on all ranks, and no hang."""

    def shares(number):
        return strategy.reduce("SUM", mr.PerReplica((1.0,)), axis=None)

    check_works(strategy)  # it belongs to this thread now
    source = Dataset.range(4).map(shares).batch(4).prefetch(1)
    dataset = strategy.experimental_distribute_dataset(source)
    raises_everywhere(mr.errors.ContextError, lambda: list(dataset))
    check_works(strategy)


@pytest.mark.parametrize("kind", ["known length", "unknown length", "a pipeline of the last rank"])
def test_input_that_ends_the_program_ends_it_on_all_ranks(strategy, kind):
    rows = Dataset.range(4 * strategy.num_replicas_in_sync).map(ends_at(1))
    if kind == "known length":
        dataset = strategy.experimental_distribute_dataset(rows.batch(2))
    elif kind == "unknown length":
        rows = rows.filter(lambda number: True)
        dataset = strategy.experimental_distribute_dataset(rows.batch(2))
    else:
        last = strategy.size - 1
        dataset = strategy.distribute_datasets_from_function(
            lambda c: (rows if c.input_pipeline_id == last else Dataset.range(9)).batch(2)
        )

    def epoch():
        for batch in dataset:
            strategy.reduce("SUM", batch, axis=0)

    raises_everywhere(SystemExit, epoch)
    check_works(strategy)
