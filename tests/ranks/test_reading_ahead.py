"""experimental_per_replica_buffer_size: the same steps, made in a thread before they are due."""

import gc
import threading

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

import mpi_replica as mr
from datasets import WatchedRows, generated, readers_since
from everywhere import check_works, gathered, needs_two_ranks, raises_everywhere, steps_of
from mpi_replica.data import Dataset

PER_REPLICA = mr.InputReplicationMode.PER_REPLICA


def ahead(count, mode=mr.InputReplicationMode.PER_WORKER):
    return mr.InputOptions(
        experimental_per_replica_buffer_size=count, experimental_replication_mode=mode
    )


@pytest.fixture
def readers():
    """A function that returns the threads that read ahead, of those begun in this test."""
    before = set(threading.enumerate())
    return lambda: readers_since(before)


def number(context):
    """That of a pipeline, up to 3: what depends on it stays short."""
    return context.input_pipeline_id % 4


# By name: a function of the strategy and of InputOptions, that returns a distributed dataset.
INPUTS = {
    "rows": lambda s, options: s.experimental_distribute_dataset(
        Dataset.range(11).shuffle(seed=3).batch(3), options
    ),
    "stream": lambda s, options: s.experimental_distribute_dataset(
        generated(*range(11)).shuffle(4, seed=3).batch(3), options
    ),
    "list": lambda s, options: s.experimental_distribute_dataset(
        [np.arange(3), np.arange(5), np.arange(0)], options
    ),
    "own": lambda s, options: s.distribute_datasets_from_function(
        lambda c: Dataset.range(7 + number(c)).shuffle(seed=3).batch(2), options
    ),
    "own list": lambda s, options: s.distribute_datasets_from_function(
        lambda c: [np.full(2, i) for i in range(number(c))], options
    ),
}


def plain(strategy, dataset):
    """Two epochs, as nested lists; all of them end at the same step."""
    return [
        [part.tolist() for part in step] for _ in range(2) for step in steps_of(strategy, dataset)
    ]


@pytest.mark.parametrize("mode", mr.InputReplicationMode)
@pytest.mark.parametrize("kind", INPUTS)
def test_the_batches_are_the_same_with_any_number_of_steps_ahead(strategy, kind, mode, readers):
    if "own" not in kind:
        mode = mr.InputReplicationMode.PER_WORKER
    expected = plain(strategy, INPUTS[kind](strategy, ahead(0, mode)))
    for count in (1, 2, 100):
        assert plain(strategy, INPUTS[kind](strategy, ahead(count, mode))) == expected
    assert readers() == []


@given(st.lists(st.integers(0, 4), min_size=4, max_size=4))
def test_ranks_may_read_ahead_by_different_numbers_of_steps(strategy, counts):
    options = ahead(counts[strategy.rank % 4])
    for kind in ("rows", "stream", "own"):
        expected = plain(strategy, INPUTS[kind](strategy, None))
        assert plain(strategy, INPUTS[kind](strategy, options)) == expected
    check_works(strategy)


@pytest.mark.parametrize("count", [1, 3])
def test_so_many_steps_are_read_ahead_and_no_more(strategy, count, readers):
    R, ids = strategy.num_replicas_in_sync, strategy.local_replica_ids
    rows = WatchedRows(20 * R)
    source = Dataset.from_source(rows).batch(R)
    iterator = iter(strategy.experimental_distribute_dataset(source, ahead(count)))
    assert (rows.read, readers()) == ([], [])
    for taken in range(1, 6):
        next(iterator)
        assert rows.events[(taken + count - 1) * R + ids[-1]].wait(timeout=60)
        assert len(rows.read) == (taken + count) * len(ids)
    assert threading.current_thread() not in rows.threads
    strategy.run(lambda: None)


def test_nothing_is_read_ahead_by_default(strategy, readers):
    R = strategy.num_replicas_in_sync
    rows = WatchedRows(4 * R)
    iterator = iter(strategy.experimental_distribute_dataset(Dataset.from_source(rows).batch(R)))
    next(iterator)
    assert len(rows.read) == len(strategy.local_replica_ids)
    assert rows.threads == {threading.current_thread()}
    assert readers() == []
    strategy.run(lambda: None)


@pytest.mark.parametrize("kind", INPUTS)
def test_the_thread_ends_with_the_iterator(strategy, kind, readers):
    dataset = INPUTS[kind](strategy, ahead(1))
    for _ in dataset:  # also where the loop is left
        break
    assert readers() == []
    iterator = iter(dataset)
    next(iterator, None)
    del iterator
    gc.collect()
    assert readers() == []
    list(dataset)
    assert readers() == []
    strategy.run(lambda: None)


@pytest.mark.parametrize("is_known", [True, False], ids=["rows", "stream"])
def test_input_without_end_is_read_ahead(strategy, is_known, readers):
    source = (Dataset.range(4) if is_known else generated(*range(4))).repeat().batch(3)
    iterator = iter(strategy.experimental_distribute_dataset(source, ahead(2)))
    found = [strategy.gather(next(iterator), axis=0).tolist() for _ in range(5)]
    assert found == (np.arange(15) % 4).reshape(5, 3).tolist()
    assert len(readers()) == 1
    del iterator
    assert readers() == []


@pytest.mark.parametrize("bad", [0, 2, 4])
@pytest.mark.parametrize("kind", ["map", "generator", "loader", "own"])
def test_an_error_comes_on_all_ranks_at_the_step_it_belongs_to(strategy, kind, bad):
    R, is_here = strategy.num_replicas_in_sync, strategy.rank == strategy.size - 1
    shared = len(strategy.local_replica_ids)
    was_read = threading.Event()

    def checked(row, first):
        if row == first and is_here:
            was_read.set()
            raise OSError(5, "bad sector")
        return row

    def batches(first):
        for number in range(5 * shared):
            yield np.full(R, checked(number, first))

    class Loader:
        def __iter__(self):
            return batches(bad)

    last = bad * R + R - 1
    distribute = strategy.experimental_distribute_dataset
    dataset = {
        "map": lambda: distribute(
            Dataset.range(5 * R).map(lambda row: checked(row, last)).batch(R), ahead(9)
        ),
        "generator": lambda: distribute(
            Dataset.from_generator(lambda: batches(bad)).unbatch().batch(R), ahead(9)
        ),
        "loader": lambda: distribute(Loader(), ahead(9)),
        "own": lambda: strategy.distribute_datasets_from_function(
            lambda context: Dataset.from_generator(lambda: batches(bad * shared)), ahead(9)
        ),
    }[kind]()
    iterator = iter(dataset)

    def take_a_step():
        strategy.gather(next(iterator), axis=0)

    for _ in range(bad):
        take_a_step()
        if is_here:  # the thread has come to it, and yet the steps before it go on
            assert was_read.wait(timeout=60)
        check_works(strategy)
    raises_everywhere(OSError, take_a_step)
    check_works(strategy)


@given(st.integers(0, 4), st.integers(0, 3), st.integers(0, 3), st.booleans())
def test_a_checkpoint_counts_the_steps_taken_not_those_read(
    strategy, taken, before, after, is_known
):
    """It goes on with the next one on another number of ranks, with other reading ahead."""
    from mpi4py import MPI

    def source():
        rows = Dataset.range(17).shuffle(seed=5) if is_known else generated(*range(17))
        return rows.batch(4)

    R = strategy.num_replicas_in_sync
    epochs = source()
    list(epochs), (expected := [batch.tolist() for batch in epochs])  # the second one
    with mr.MPIStrategy(MPI.COMM_SELF, num_replicas=R) as alone:
        for first, second in ((strategy, alone), (alone, strategy)):
            dataset = first.experimental_distribute_dataset(source(), ahead(before))
            iterator = iter(dataset)
            for _ in iterator:
                pass
            iterator = iter(dataset)
            found = [first.gather(next(iterator), axis=0).tolist() for _ in range(taken)]
            resumed = second.experimental_distribute_dataset(source(), ahead(after))
            resumed.load_state_dict(dataset.state_dict())
            found += [second.gather(batch, axis=0).tolist() for batch in resumed]
            assert found == expected
            again = iter(second.experimental_distribute_dataset(source(), ahead(after)))
            next(again)
            again.load_state_dict(iterator.state_dict())
            found[taken:] = [second.gather(batch, axis=0).tolist() for batch in again]
            assert found == expected
            strategy.run(lambda: None)


def test_the_thread_has_the_settings_and_the_strategy_of_the_one_who_iterates(strategy):
    seen = []

    def inverse(number):
        seen.append(mr.get_strategy())
        return np.float64(1) / np.float64(number)

    R = strategy.num_replicas_in_sync
    source = Dataset.range(R).map(inverse).batch(R)
    with strategy.scope():
        dataset = strategy.experimental_distribute_dataset(source, ahead(1))

        def epoch():
            for batch in dataset:
                strategy.gather(batch, axis=0)

        with np.errstate(all="raise"):
            raises_everywhere(FloatingPointError, epoch)
        with np.errstate(all="ignore"):
            epoch()
    assert set(map(id, seen)) == {id(strategy)}


@pytest.mark.parametrize("is_known", [True, False], ids=["known length", "unknown length"])
def test_input_that_makes_collective_calls_is_an_error_everywhere(strategy, is_known):
    """Also where the strategy was never used before: it belongs to the thread that iterates."""

    def shares(number):
        return strategy.reduce("SUM", mr.PerReplica((1.0,)), axis=None)

    rows = Dataset.range(8) if is_known else generated(*range(8))
    dataset = strategy.experimental_distribute_dataset(rows.map(shares).batch(4), ahead(2))
    error = raises_everywhere(mr.errors.ContextError, lambda: list(dataset))
    words = "was called where rows are made" if is_known else "belongs to another thread"
    assert words in str(error)
    check_works(strategy)


def test_an_iterator_can_not_be_read_ahead(strategy):
    """What was read and not taken would be missing in the next iteration."""
    iterator = iter([np.arange(4)])
    for distribute in (
        lambda options: strategy.experimental_distribute_dataset(iterator, options),
        lambda options: strategy.distribute_datasets_from_function(lambda c: iterator, options),
    ):
        error = raises_everywhere(ValueError, lambda d=distribute: d(ahead(1)))
        assert "experimental_per_replica_buffer_size=1" in str(error)
        assert "from_generator" in str(error)
        distribute(ahead(0))


def test_batches_that_a_generator_of_a_pipeline_yields_are_reshuffled_and_resumed(strategy):
    """A Dataset of whole batches: its epochs are those of the distributed dataset."""

    def batches(context):
        rows = np.arange(12).reshape(6, 2) + 100 * context.input_pipeline_id
        return Dataset.from_tensor_slices(rows).shuffle(seed=context.input_pipeline_id).repeat(3)

    R = strategy.num_replicas_in_sync
    needed = 18 // len(strategy.local_replica_ids)
    assert gathered(needed >= 3) == [True] * strategy.size
    for mode in mr.InputReplicationMode:
        dataset = strategy.distribute_datasets_from_function(batches, ahead(1, mode))
        first, second = (steps_of(strategy, list(dataset)) for _ in range(2))
        assert [p.tolist() for s in first for p in s] != [p.tolist() for s in second for p in s]
        resumed = strategy.distribute_datasets_from_function(batches, ahead(2, mode))
        pipelines = dataset.state_dict()["pipelines"]
        assert pipelines == (R if mode is PER_REPLICA else strategy.size)
        resumed.load_state_dict({"epoch": 1, "steps": 2, "pipelines": pipelines})
        rest = steps_of(strategy, list(resumed))
        assert [[part.tolist() for part in step] for step in rest] == [
            [part.tolist() for part in step] for step in second[2:]
        ]


def test_two_iterators_read_ahead_side_by_side(strategy, readers):
    dataset = INPUTS["rows"](strategy, ahead(2))
    expected = plain(strategy, INPUTS["rows"](strategy, None))
    pairs = list(zip(dataset, dataset, strict=True))
    found = [
        [part.tolist() for part in step]
        for side in (0, 1)
        for step in steps_of(strategy, [pair[side] for pair in pairs])
    ]
    assert found == expected
    assert readers() == []


def test_one_step_more_on_one_rank_is_an_error_and_comes_again(strategy):
    needs_two_ranks(strategy)
    R = strategy.num_replicas_in_sync
    dataset = strategy.experimental_distribute_dataset(Dataset.range(4 * R).batch(R), ahead(2))
    iterator = iter(dataset)
    next(iterator)
    strategy.run(lambda: None)

    def one_skips_a_step():
        if strategy.rank == 0:
            next(iterator)
        strategy.reduce("SUM", next(iterator), axis=0)

    raises_everywhere(mr.errors.CollectiveMismatchError, one_skips_a_step)
    rest = [strategy.gather(batch, axis=0).tolist() for batch in iterator]
    assert rest == np.arange(2 * R, 4 * R).reshape(2, R).tolist()


@pytest.mark.parametrize("size", [True, 1.0, "1", None])
def test_a_size_that_is_no_int_is_a_type_error_with_its_name(size):
    with pytest.raises(TypeError, match="experimental_per_replica_buffer_size must be an int"):
        ahead(size)


def test_a_negative_size_is_a_value_error_and_a_mode_of_another_type_a_type_error():
    with pytest.raises(ValueError, match="experimental_per_replica_buffer_size must be at least 0"):
        ahead(-1)
    with pytest.raises(TypeError, match=r"mr\.InputReplicationMode, got 'PER_R"):
        ahead(0, "PER_REPLICA")
