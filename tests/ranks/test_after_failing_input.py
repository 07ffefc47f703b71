"""After an error of the input: all ranks stand before the same step, and no row is lost or twice.

What can be read again is read again by the next call; anything else stays broken on all ranks.
"""

import contextlib
import copy
import itertools

import numpy as np
import pytest

import mpi_replica as mr
from datasets import order
from everywhere import (
    check_works,
    gathered,
    interrupt_instead,
    needs_two_ranks,
    raises_everywhere,
    steps_of,
)
from mpi_replica.data import Dataset

STEPS = 5


def ahead(count):
    return mr.InputOptions(experimental_per_replica_buffer_size=count)


class Disk:
    """Lets all rows pass, but one of them not the first times, and only on some ranks."""

    def __init__(self, bad, failures=1, is_here=True):
        self.bad = bad
        self.failures = failures if is_here else 0

    def check(self, row):
        if row == self.bad and self.failures:
            self.failures -= 1
            raise OSError(5, f"bad sector {row}")
        return row

    def rows(self, count):
        for row in range(count):
            yield self.check(row)


def by_position(strategy, disk, batch):
    """Known length: only the rank that reads the row fails."""
    return Dataset.range(STEPS * batch).map(disk.check).batch(batch)


def by_position_ahead(strategy, disk, batch):
    return by_position(strategy, disk, batch).prefetch(2)


def by_stream(strategy, disk, batch):
    """Infinite for the ranks, so that they do not agree on each step, and read as a stream."""
    stream = Dataset.from_generator(lambda: iter(range(STEPS * batch))).map(disk.check)
    return stream.repeat().batch(batch)


def by_generator(strategy, disk, batch):
    """Unknown length: each step is agreed on."""
    return Dataset.from_generator(lambda: disk.rows(STEPS * batch)).batch(batch)


def by_filter(strategy, disk, batch):
    rows = Dataset.range(STEPS * batch)
    return rows.filter(lambda row: disk.check(row) >= 0).batch(batch)


BY_POSITION = [by_position, by_position_ahead]
SOURCES = [*BY_POSITION, by_stream, by_generator, by_filter]


def make(strategy, source, step, failures, options=None):
    """A distributed dataset, whose input fails in that step on one rank; and its batch size."""
    batch = strategy.num_replicas_in_sync
    last = step * batch + batch - 1  # of the last replica, which the last rank hosts
    disk = Disk(last, failures, is_here=strategy.rank == strategy.size - 1)
    return strategy.experimental_distribute_dataset(source(strategy, disk, batch), options), batch


def batches_with_retries(strategy, iterator, steps):
    """Take steps of which each is used in a collective call; also count errors."""
    batches, errors = [], 0
    while len(batches) < steps:
        try:
            batch = next(iterator)
            batches.append(strategy.gather(batch, axis=0).tolist())
        except OSError:
            errors += 1
            assert errors < 10
    return batches, errors


def numbers(start, stop, batch):
    return np.arange(start * batch, stop * batch).reshape(-1, batch).tolist()


def test_a_dataset_that_a_generator_iterates_comes_again_in_the_same_order(strategy):
    """The rank that reads again calls the generator once more than the others."""
    batch = strategy.num_replicas_in_sync
    rows = Dataset.range(STEPS * batch)
    epochs = [order(STEPS * batch, 1, epoch) for epoch in range(2)]
    shuffled = rows.shuffle(seed=1)
    disk = Disk(epochs[0][3 * batch - 1], is_here=strategy.rank == strategy.size - 1)
    stream = Dataset.from_generator(lambda: iter(shuffled)).map(disk.check).batch(batch)
    dataset = strategy.experimental_distribute_dataset(stream)
    for epoch in epochs:
        found, errors = batches_with_retries(strategy, iter(dataset), STEPS)
        assert errors == (epoch is epochs[0])
        assert found == epoch.reshape(-1, batch).tolist()
    iterator = iter(dataset)
    iterator.load_state_dict({"epoch": 1, "steps": 2, "pipelines": None})
    found, _ = batches_with_retries(strategy, iterator, STEPS - 2)
    assert found == epochs[1].reshape(-1, batch)[2:].tolist()


@pytest.mark.parametrize("count", [0, 2], ids=["asked for", "ahead"])
@pytest.mark.parametrize("failures", [1, 3])
@pytest.mark.parametrize("source", SOURCES)
def test_a_step_that_could_not_be_read_comes_with_the_next_call(strategy, source, failures, count):
    for step in (0, 2, STEPS - 1):
        dataset, batch = make(strategy, source, step, failures, ahead(count))
        found, errors = batches_with_retries(strategy, iter(dataset), STEPS)
        assert errors == failures
        assert found == numbers(0, STEPS, batch)
        check_works(strategy)


@pytest.mark.parametrize("source", SOURCES)
def test_the_same_error_comes_again_on_all_ranks_as_long_as_its_cause_is_there(strategy, source):
    dataset, batch = make(strategy, source, 2, failures=-1)
    iterator = iter(dataset)

    def take_a_step():
        strategy.gather(next(iterator), axis=0)

    for _ in range(2):
        take_a_step()
    for _ in range(3):
        error = raises_everywhere(OSError, take_a_step)
        assert f"bad sector {3 * batch - 1}" in str(error)
        assert gathered(iterator.state_dict()["steps"]) == [2] * strategy.size
    check_works(strategy)


@pytest.mark.parametrize("source", BY_POSITION)
def test_a_step_can_be_left_out_by_counting_it_as_taken(strategy, source):
    """Not of a stream: it is read through from its beginning, and would fail again."""
    dataset, batch = make(strategy, source, 2, failures=-1)
    iterator = iter(dataset)
    batches_with_retries(strategy, iterator, 2)
    raises_everywhere(OSError, lambda: strategy.gather(next(iterator), axis=0))
    state = iterator.state_dict()
    state["steps"] += 1
    iterator.load_state_dict(state)
    found, errors = batches_with_retries(strategy, iterator, STEPS - 3)
    assert (found, errors) == (numbers(3, STEPS, batch), 0)


@pytest.mark.parametrize("source", SOURCES)
def test_another_iteration_after_an_error_has_all_rows(strategy, source):
    dataset, batch = make(strategy, source, 2, failures=1)

    def epoch():
        iterator = iter(dataset)
        return [strategy.gather(next(iterator), axis=0).tolist() for _ in range(STEPS)]

    raises_everywhere(OSError, epoch)
    assert epoch() == numbers(0, STEPS, batch)


def test_an_error_of_the_input_is_told_where_a_step_of_others_fails_too(strategy):
    """As on one rank, where that step does not begin."""
    dataset, _ = make(strategy, by_position, 0, 1)
    iterator = iter(dataset)

    def fails(rows):
        raise ArithmeticError("no step for a row that is missing")

    raises_everywhere(OSError, lambda: strategy.run(fails, args=(next(iterator),)))
    check_works(strategy)


def test_draws_of_others_before_they_heard_of_the_error_are_made_again(strategy):
    """As on one rank, where none is made behind the error."""
    dataset, _ = make(strategy, by_position, 2, 1)
    iterator, shared = iter(dataset), strategy.rng
    before = copy.deepcopy(shared)
    flat = [int(before.integers(1000)) for _ in range(2 * STEPS + 1)]
    del flat[4]  # drawn before the step that could not be read, by all
    expected = [flat[i : i + 2] for i in range(0, 2 * STEPS, 2)]
    drawn, errors = [], 0
    while len(drawn) < STEPS:
        first = shared.integers(1000)
        try:
            rows = next(iterator)
            draws = [int(first), int(shared.integers(1000))]
            strategy.gather(rows, axis=0)
            drawn.append(draws)
        except OSError:
            errors += 1
    assert gathered(errors) == [1] * strategy.size
    assert gathered(drawn) == [expected] * strategy.size


@pytest.mark.parametrize("count", [1, 100])
def test_ranks_draw_alike_behind_an_error_however_many_draws_others_have_made(strategy, count):
    dataset, _ = make(strategy, by_position, 1, 1)

    def reads_all():
        for _ in dataset:
            for _ in range(count):
                strategy.rng.random()
        strategy.barrier()

    raises_everywhere(OSError, reads_all)
    assert len(set(gathered(strategy.rng.random()))) == 1


@pytest.mark.parametrize("count", [0, 2], ids=["asked for", "ahead"])
def test_steps_that_others_took_before_they_heard_of_the_error_come_again(strategy, count):
    """Without a collective call between the steps they go on to the end of the epoch."""
    dataset, batch = make(strategy, by_position, 2, 1, ahead(count))
    iterator = iter(dataset)
    batches_with_retries(strategy, iterator, 1)

    def rest():
        steps = list(iterator)
        strategy.run(lambda: None)
        return steps

    raises_everywhere(OSError, rest)
    assert gathered(iterator.state_dict()["steps"]) == [2] * strategy.size
    steps = steps_of(strategy, rest())
    assert [np.concatenate(step).tolist() for step in steps] == numbers(2, STEPS, batch)
    with pytest.raises(StopIteration):
        next(iterator)


def test_an_iteration_that_others_ended_and_one_that_they_began_are_taken_back(strategy):
    dataset, batch = make(strategy, by_position, 3, 1)
    iterators = [iter(dataset)]

    def two_epochs():
        list(iterators[0])
        iterators.append(iter(dataset))
        list(iterators[1])
        strategy.run(lambda: None)

    raises_everywhere(OSError, two_epochs)
    steps = steps_of(strategy, list(iterators[0]))
    assert [np.concatenate(step).tolist() for step in steps] == numbers(3, STEPS, batch)
    strategy.run(lambda: None)
    assert gathered(dataset.state_dict()) == [{"epoch": 1, "steps": 0, "pipelines": None}] * (
        strategy.size
    )
    assert len(list(dataset)) == STEPS
    strategy.run(lambda: None)


def test_of_two_iterators_side_by_side_each_comes_back_to_its_own_step(strategy):
    """They take steps in turns, and only the second one fails."""
    (first, batch), (second, _) = (make(strategy, by_position, 2, n) for n in (0, 1))
    iterators = iter(first), iter(second)

    def take_four_steps_each():
        for iterator in iterators * 4:
            next(iterator)
        strategy.run(lambda: None)

    raises_everywhere(OSError, take_four_steps_each)
    assert gathered([each.state_dict()["steps"] for each in iterators]) == [[3, 2]] * strategy.size
    for iterator, start in zip(iterators, (3, 2), strict=True):
        steps = steps_of(strategy, list(iterator))
        assert [np.concatenate(step).tolist() for step in steps] == numbers(start, STEPS, batch)
    strategy.run(lambda: None)


def test_pipelines_of_each_ranks_own_are_read_again_too(strategy):
    batch, rank = 2, strategy.rank
    shared = len(strategy.local_replica_ids)
    disk = Disk(2 * batch * shared + 1, 2, is_here=rank == strategy.size - 1)

    def rows_of(context):
        return Dataset.range(STEPS * batch * shared).map(disk.check).batch(batch)

    iterator = iter(strategy.distribute_datasets_from_function(rows_of))
    mine, errors = [], 0
    while len(mine) < STEPS * shared:
        try:
            step = next(iterator)
        except OSError:
            errors += 1
            continue
        mine += [part.tolist() for part in strategy.experimental_local_results(step)]
    assert gathered(errors) == [2] * strategy.size
    assert mine == numbers(0, STEPS * shared, batch)
    for _ in range(2):
        with pytest.raises(StopIteration):
            next(iterator)


@pytest.mark.parametrize("source", SOURCES)
def test_a_step_whose_use_failed_was_taken_and_does_not_come_again(strategy, source):
    """An error of the step function is none of the input, on whatever rank it comes up."""
    dataset, batch = make(strategy, source, STEPS, 0)

    def fails(rows):
        if mr.get_replica_context().replica_id_in_sync_group == 0:
            raise ZeroDivisionError("of the step")

    iterator = iter(dataset)
    step = next(iterator)
    raises_everywhere(ZeroDivisionError, lambda: strategy.run(fails, args=(step,)))
    found, _ = batches_with_retries(strategy, iterator, STEPS - 1)
    assert found == numbers(1, STEPS, batch)


# What is no Dataset


class Loader:
    """Can be iterated anew, as a data loader of PyTorch."""

    def __init__(self, disk, steps, batch):
        self.disk, self.steps, self.batch = disk, steps, batch

    def __iter__(self):
        for step in range(self.steps):
            yield np.arange(step * self.batch, (step + 1) * self.batch)
            self.disk.check(step)


def distributed_by(strategy, how, source):
    if how == "global":
        return strategy.experimental_distribute_dataset(source)
    return strategy.distribute_datasets_from_function(lambda context: source)


def foreign(strategy, shared):
    disk = Disk(1, 1, is_here=strategy.rank == strategy.size - 1)
    return Loader(disk, STEPS * shared, strategy.num_replicas_in_sync)


def epoch_of(strategy, iterator):
    return [strategy.gather(batch, axis=0).tolist() for batch in iterator]


@pytest.mark.parametrize("how", ["global", "own"])
def test_what_is_no_dataset_stays_broken_on_all_ranks_until_it_is_iterated_anew(strategy, how):
    shared = 1 if how == "global" else len(strategy.local_replica_ids)
    dataset = distributed_by(strategy, how, foreign(strategy, shared))
    iterator = iter(dataset)
    raises_everywhere(OSError, lambda: epoch_of(strategy, iterator))
    for _ in range(2):
        error = raises_everywhere(RuntimeError, lambda: epoch_of(strategy, iterator))
        assert "raised OSError(5, 'bad sector 1')" in str(error)
        assert "Iterate anew" in str(error)
    assert len(epoch_of(strategy, dataset)) == STEPS
    check_works(strategy)


@pytest.mark.parametrize("how", ["global", "own"])
def test_an_iterator_stays_broken_on_all_ranks_for_good(strategy, how):
    """Another iteration would go on behind what was lost, with other rows on other ranks."""
    shared = 1 if how == "global" else len(strategy.local_replica_ids)
    dataset = distributed_by(strategy, how, iter(foreign(strategy, shared)))
    iterator = iter(dataset)
    raises_everywhere(OSError, lambda: epoch_of(strategy, iterator))
    for each in (iterator, dataset, dataset):
        error = raises_everywhere(RuntimeError, lambda each=each: epoch_of(strategy, each))
        assert "distribute anew what is an iterator" in str(error)
    check_works(strategy)


def test_an_iterator_of_which_one_rank_has_read_ahead_is_not_iterated_anew(strategy):
    needs_two_ranks(strategy)
    dataset = strategy.experimental_distribute_dataset(iter([np.arange(4)] * 4))

    def one_takes_a_step():
        iterator = iter(dataset)
        if strategy.rank == 0:
            next(iterator)
        strategy.run(lambda: None)

    raises_everywhere(mr.errors.CollectiveMismatchError, one_takes_a_step)
    error = raises_everywhere(RuntimeError, lambda: epoch_of(strategy, dataset))
    assert "step 0 was read on a rank, and not all ranks have taken it" in str(error)


def test_an_iterator_goes_on_from_a_state_before_its_first_step_and_not_later(strategy):
    def batches():
        return (np.full(2, step) for step in range(6))

    dataset = strategy.experimental_distribute_dataset(batches())
    dataset.load_state_dict({"epoch": 0, "steps": 3, "pipelines": None})
    iterator = iter(dataset)
    assert strategy.gather(next(iterator), axis=0).tolist() == [3, 3]
    iterator.load_state_dict(iterator.state_dict())
    error = raises_everywhere(RuntimeError, lambda: next(iterator))
    assert "can't go on with step 4 of a saved state" in str(error)
    check_works(strategy)


@pytest.mark.parametrize("taken", [1, 3], ids=["one", "all"])
def test_an_iterator_that_was_read_does_not_go_back_to_its_first_step(strategy, taken):
    """Its rows are gone: those that come next are no others than before, in another iteration."""
    dataset = strategy.experimental_distribute_dataset(np.full(2, step) for step in range(3))
    begin = dataset.state_dict()
    assert len([*itertools.islice(dataset, taken)]) == taken
    dataset.load_state_dict(begin)
    error = raises_everywhere(RuntimeError, lambda: epoch_of(strategy, dataset))
    assert "can't go on with step 0 of a saved state" in str(error)
    dataset.load_state_dict({"epoch": 1, "steps": 0, "pipelines": None})
    assert epoch_of(strategy, dataset) == [[step, step] for step in range(taken, 3)]
    place = dataset.state_dict()
    for _ in range(2):
        error = raises_everywhere(RuntimeError, lambda: epoch_of(strategy, dataset))
        assert "has read to its end" in str(error)
        dataset.load_state_dict(place)  # nor was anything read of an iteration that has no more
    check_works(strategy)


@pytest.mark.parametrize(
    ("wrong", "kind"),
    [({"steps": -1}, ValueError), ({"epoch": -1}, ValueError), ({"steps": 1.5}, TypeError)],
    ids=str,
)
def test_a_state_that_is_none_is_told(strategy, wrong, kind):
    dataset = strategy.experimental_distribute_dataset(Dataset.range(8).batch(4))
    (key,) = wrong
    for loaded in (dataset, iter(dataset)):
        with pytest.raises(kind, match=f"{key} must be"):
            loaded.load_state_dict(loaded.state_dict() | wrong)
    check_works(strategy)


# Ranks that are apart


def known(strategy):
    return strategy.experimental_distribute_dataset(Dataset.range(12).batch(2))


def unknown(strategy):
    rows = Dataset.from_generator(lambda: iter(range(12)))
    return strategy.experimental_distribute_dataset(rows.batch(2))


def own(strategy):
    return strategy.distribute_datasets_from_function(lambda context: Dataset.range(12).batch(2))


@pytest.mark.parametrize("epoch", [0, 1], ids=["another step", "another epoch"])
@pytest.mark.parametrize("dataset_of", [known, unknown, own])
def test_a_state_that_one_rank_alone_loads_is_an_error_everywhere(strategy, dataset_of, epoch):
    needs_two_ranks(strategy)
    iterator = iter(dataset_of(strategy))
    next(iterator)
    strategy.run(lambda: None)
    state = iterator.state_dict()
    if strategy.rank == 0:
        iterator.load_state_dict(state | {"epoch": epoch, "steps": 1 + (epoch == 0)})

    def take_a_step():
        next(iterator)
        strategy.run(lambda: None)

    raises_everywhere(mr.errors.CollectiveMismatchError, take_a_step)
    iterator.load_state_dict(state)
    take_a_step()
    assert gathered(iterator.state_dict()["steps"]) == [2] * strategy.size


@pytest.mark.parametrize("dataset_of", [known, unknown])
def test_a_restored_place_is_not_lost_where_one_rank_iterates_alone(strategy, dataset_of):
    needs_two_ranks(strategy)
    dataset = dataset_of(strategy)
    dataset.load_state_dict({"epoch": 0, "steps": 4, "pipelines": None})

    def one_iterates():
        if strategy.rank == 0:
            next(iter(dataset))
        strategy.run(lambda: None)

    raises_everywhere(mr.errors.CollectiveMismatchError, one_iterates)
    assert epoch_of(strategy, dataset) == [[8, 9], [10, 11]]


@pytest.mark.parametrize("dataset_of", [known, unknown])
def test_an_iteration_whose_begin_is_interrupted_on_one_rank_begins_again_on_all(
    strategy, monkeypatch, dataset_of
):
    needs_two_ranks(strategy)
    dataset = dataset_of(strategy)

    def begin():
        if strategy.rank == 0:
            interrupt_instead(monkeypatch, dataset, "_note_iteration")
        with contextlib.suppress(KeyboardInterrupt):
            iter(dataset)
        strategy.barrier()

    raises_everywhere(mr.errors.CollectiveMismatchError, begin)
    iterator = iter(dataset)
    strategy.barrier()
    assert gathered(iterator.state_dict()["epoch"]) == [0] * strategy.size


def test_global_batches_that_differ_are_the_same_error_again(strategy):
    needs_two_ranks(strategy)
    rows = range(2 + (strategy.rank == 0))
    source = Dataset.from_generator(lambda: iter(rows)).batch(4)
    iterator = iter(strategy.experimental_distribute_dataset(source))
    for _ in range(3):
        raises_everywhere(ValueError, lambda: next(iterator))
    assert gathered(iterator.state_dict()["steps"]) == [0] * strategy.size
    check_works(strategy)


@pytest.mark.parametrize("source", SOURCES)
def test_an_interrupted_read_loses_nothing(strategy, source):
    class Interrupted(Disk):
        def check(self, row):
            try:
                return super().check(row)
            except OSError:
                raise KeyboardInterrupt from None

    batch = strategy.num_replicas_in_sync
    disk = Interrupted(3 * batch - 1, 1, is_here=strategy.rank == strategy.size - 1)
    iterator = iter(strategy.experimental_distribute_dataset(source(strategy, disk, batch)))
    batches = []
    while len(batches) < STEPS:
        try:
            step = next(iterator)
        except KeyboardInterrupt:
            step = next(iterator)
        batches.append(strategy.gather(step, axis=0).tolist())
    assert batches == numbers(0, STEPS, batch)


@pytest.mark.parametrize("is_known", [True, False], ids=["by position", "stream"])
def test_calls_of_what_makes_rows_that_do_not_fit_are_one_error_of_all(strategy, is_known):
    """A function that makes rows by position is called on each rank for its own rows."""
    needs_two_ranks(strategy)
    replicas = strategy.num_replicas_in_sync

    def scale(x):
        if strategy.rank == 0:
            strategy.barrier()
        return x

    numbers = Dataset.from_generator(lambda: range(replicas))
    rows = (Dataset.range(replicas) if is_known else numbers).map(scale).batch(replicas)
    data = strategy.experimental_distribute_dataset(rows)
    raises_everywhere(
        mr.errors.ContextError if is_known else mr.errors.CollectiveMismatchError,
        lambda: [strategy.reduce("SUM", batch, axis=0) for batch in data],
    )
    for number in range(3):
        assert strategy.gather_objects(number) == (number,) * replicas


@pytest.mark.parametrize("call", ["values", "datasets"])
def test_ranks_stay_together_where_each_catches_what_one_functions_call_raised(strategy, call):
    last = strategy.num_replicas_in_sync - 1

    def load(context):
        if strategy.rank == strategy.size - 1:
            raise OSError("disk")
        return [1.0]

    def make():
        if call == "values":
            strategy.experimental_distribute_values_from_function(load)
        else:
            strategy.distribute_datasets_from_function(load)

    raises_everywhere(OSError, make)
    for number in range(3):
        assert strategy.gather_objects(number) == (number,) * (last + 1)
