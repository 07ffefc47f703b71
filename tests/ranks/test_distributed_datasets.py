"""What distributed datasets give to replicas, and how all ranks end an epoch together."""

import copy
import functools
import itertools
import logging
import pickle
import re
from collections import namedtuple

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given
from mpi4py import MPI

import mpi_replica as mr
from datasets import lists
from everywhere import check_works, gathered, needs_two_ranks, raises_everywhere, steps_of
from mpi_replica.data import Dataset
from mpi_replica.data.epochs import epochs_begun, put_epochs_back
from mpi_replica.errors import StructureMismatchError

Pair = namedtuple("Pair", "x y")


def assert_fails(strategy, kind, pattern, call):
    """`call` raises the same on all ranks, and the next collectives give the right numbers."""
    error = raises_everywhere(kind, call)
    assert re.search(pattern, str(error)), error
    check_works(strategy)


def chunks(batch, replicas):
    """A global batch, cut as the design says."""
    size = -(-len(batch) // replicas)
    return [batch[i * size : (i + 1) * size] for i in range(replicas)]


def check_steps(strategy, steps, batches):
    """Each step has the chunks of the global batch that belongs to it."""
    found = steps_of(strategy, steps)
    assert len(found) == len(batches)
    for parts, batch in zip(found, batches, strict=True):
        for part, expected in zip(parts, chunks(batch, len(parts)), strict=True):
            np.testing.assert_array_equal(part, expected, strict=True)
            assert isinstance(part, np.ndarray)


def distributed(strategy, source):
    return strategy.experimental_distribute_dataset(source)


def generated(rows):
    """A dataset whose length nobody knows."""
    return Dataset.from_generator(lambda: iter(rows))


def reshuffled(dataset, is_reshuffled):
    return dataset.shuffle(8, seed=1, reshuffle_each_iteration=is_reshuffled).batch(8)


class Tensor:
    """What other libraries have: it becomes an array when numpy asks."""

    def __init__(self, array):
        self.array = array

    def __array__(self, dtype=None, copy=None):
        return np.array(self.array, dtype=dtype)


class Loader:
    """Like a data loader of PyTorch: iterable again and again, no `mr.data.Dataset`."""

    def __init__(self, batches):
        self.batches = batches

    def __iter__(self):
        for batch in self.batches:
            yield [Tensor(batch), Tensor(-batch)]


# Cutting global batches


@pytest.mark.parametrize("is_known", [True, False], ids=["known length", "unknown length"])
def test_global_batches_are_cut_into_chunks(strategy, is_known):
    for rows, batch in [(8, 4), (7, 4), (5, 4), (3, 1), (9, 3), (10, 10), (12, 8)]:
        source = Dataset.range(rows) if is_known else generated(np.arange(rows))
        expected = [np.arange(i, min(i + batch, rows)) for i in range(0, rows, batch)]
        check_steps(strategy, distributed(strategy, source.batch(batch)), expected)


@pytest.mark.usefixtures("few_ranks")
def test_10_rows_over_4_replicas_are_3_3_3_1_and_6_are_2_2_2_0():
    with mr.MPIStrategy(num_replicas=4) as strategy:
        first, second = steps_of(strategy, distributed(strategy, Dataset.range(16).batch(10)))
        assert [part.tolist() for part in first] == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9]]
        assert [part.tolist() for part in second] == [[10, 11], [12, 13], [14, 15], []]


@pytest.mark.parametrize("is_known", [True, False], ids=["known length", "unknown length"])
def test_replicas_without_rows_get_arrays_of_the_right_dtype_and_shape(strategy, is_known):
    rows = np.zeros((1, 3, 2), np.float32)
    source = Dataset.from_tensor_slices(rows) if is_known else generated(rows)
    (parts,) = steps_of(strategy, distributed(strategy, source.batch(4)))
    R = strategy.num_replicas_in_sync
    assert [part.shape for part in parts] == [(1, 3, 2)] + [(0, 3, 2)] * (R - 1)
    assert {part.dtype for part in parts} == {np.dtype(np.float32)}


def test_texts_are_as_wide_as_those_of_their_replica(strategy):
    """So that the same text fits into them, whoever hosts the others."""
    words = ["no" + "o" * (i // 2) for i in range(2 * strategy.num_replicas_in_sync)]
    sources = [Dataset.from_source(words), Dataset.range(len(words)).map(words.__getitem__)]
    sources.append(
        functools.reduce(Dataset.concatenate, (Dataset.from_tensor_slices([w]) for w in words))
    )
    for source in sources:
        (parts,) = steps_of(strategy, distributed(strategy, source.batch(len(words))))
        expected = [np.array(words[i : i + 2]) for i in range(0, len(words), 2)]
        for part, texts in zip(parts, expected, strict=True):
            np.testing.assert_array_equal(part, texts, strict=True)


def test_rows_of_one_replica_alone_need_one_length(strategy):
    replicas = strategy.num_replicas_in_sync
    source = Dataset.range(2 * replicas).map(lambda i: np.full(i // 2, i))
    (parts,) = steps_of(strategy, distributed(strategy, source.batch(2 * replicas)))
    assert [part.shape for part in parts] == [(2, i) for i in range(replicas)]
    for i, part in enumerate(parts):
        np.testing.assert_array_equal(part, [[2 * i] * i, [2 * i + 1] * i])


def test_replicas_with_rows_of_other_dtypes_are_an_error_everywhere(strategy):
    replicas = strategy.num_replicas_in_sync
    if replicas == 1:
        pytest.skip("one replica has rows of one dtype: numpy's promotion of them")
    numbers = [1] * (2 * replicas - 1) + [2.5]

    def epoch():
        for _ in distributed(strategy, Dataset.from_source(numbers).batch(2 * replicas)):
            strategy.run(lambda: None)  # where an epoch needs no message the next call finds out

    assert_fails(strategy, mr.errors.StructureMismatchError, "float64", epoch)


@pytest.mark.parametrize("is_known", [True, False], ids=["known length", "unknown length"])
def test_drop_remainder_leaves_out_the_last_partial_batch(strategy, is_known):
    source = Dataset.range(7) if is_known else generated(np.arange(7))
    dataset = distributed(strategy, source.batch(3, drop_remainder=True))
    check_steps(strategy, dataset, [np.arange(3), np.arange(3, 6)])
    dataset = distributed(strategy, source.batch(1, drop_remainder=True))
    check_steps(strategy, dataset, [np.array([i]) for i in range(7)])


def test_nests_keep_their_structure_and_each_leaf_is_a_per_replica(strategy):
    x, y = np.arange(10.0).reshape(5, 2), np.arange(5)
    nest = {"pair": Pair(x, y), "names": (np.array(list("abcde")),)}
    dataset = distributed(strategy, Dataset.from_tensor_slices(nest).batch(3))
    batches = list(dataset)
    for batch in batches:
        assert isinstance(batch["pair"], Pair)
        assert isinstance(batch["names"], tuple)
        for leaf in (batch["pair"].x, batch["pair"].y, batch["names"][0]):
            assert isinstance(leaf, mr.PerReplica)
            assert leaf.replica_ids == strategy.local_replica_ids
    check_steps(strategy, [batch["pair"].x for batch in batches], [x[:3], x[3:]])
    check_steps(strategy, [batch["pair"].y for batch in batches], [y[:3], y[3:]])
    names = nest["names"][0]
    check_steps(strategy, [batch["names"][0] for batch in batches], [names[:3], names[3:]])


def test_a_batch_goes_into_run_reduce_and_gather(strategy):
    data = np.arange(1.0, 11.0)
    dataset = distributed(strategy, Dataset.from_tensor_slices(data).batch(10))
    for batch in dataset:
        squares = strategy.run(lambda part: part**2, args=(batch,))
        assert strategy.reduce("SUM", squares, axis=0) == np.sum(data**2)
        assert strategy.reduce("MEAN", batch, axis=0) == data.mean()
        np.testing.assert_array_equal(strategy.gather(batch, axis=0), data)


rows_and_verbs = st.fixed_dictionaries(
    {
        "rows": st.integers(0, 20),
        "batch": st.integers(1, 9),
        "drop": st.booleans(),
        "seed": st.none() | st.integers(0, 5),
        "repeat": st.integers(1, 3),
        "is_known": st.booleans(),
    }
)


@given(rows_and_verbs)
def test_the_rows_that_replicas_get_are_in_order_those_of_the_global_batches(strategy, given):
    def source():
        values = 10 * np.arange(given["rows"])
        made = Dataset.from_tensor_slices(values) if given["is_known"] else generated(values)
        if given["seed"] is not None:
            made = made.shuffle(4, seed=given["seed"])
        return made.repeat(given["repeat"]).batch(given["batch"], given["drop"])

    alone, dataset = source(), distributed(strategy, source())
    for _ in range(2):
        check_steps(strategy, dataset, list(alone))


# Iterating


def test_it_can_be_iterated_again_and_reshuffles_alike_on_all_ranks(strategy):
    data = np.arange(20)
    dataset = distributed(strategy, Dataset.from_tensor_slices(data).shuffle(seed=3).batch(8))
    epochs = []
    for _ in range(3):
        steps = steps_of(strategy, dataset)
        epochs.append(np.concatenate([part for parts in steps for part in parts]).tolist())
    assert all(sorted(epoch) == data.tolist() for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    again = distributed(strategy, Dataset.from_tensor_slices(data).shuffle(seed=3).batch(8))
    steps = steps_of(strategy, again)
    assert np.concatenate([part for parts in steps for part in parts]).tolist() == epochs[0]


def test_a_dataset_iterated_in_a_step_begins_the_same_epochs_on_each_replica(strategy):
    """Wherever a replica is: what it sees does not depend on others of its rank."""

    def made():
        return Dataset.range(8).shuffle(seed=3).batch(8)

    def rows_of(batches):
        return lists(rows for _, rows in batches)

    expected = [rows_of(made().batches(epoch=epoch)) for epoch in range(4)]
    dataset = made()

    def step():
        return [lists(dataset), rows_of(dataset.batches())]

    for epoch in (0, 2):
        seen = strategy.gather_objects(strategy.run(step))
        assert list(seen) == [expected[epoch : epoch + 2]] * strategy.num_replicas_in_sync
    assert lists(dataset) == expected[0]  # above the replicas it counts for itself


@pytest.mark.parametrize("is_known", [True, False], ids=["infinite", "unknown length"])
def test_input_without_end_goes_on(strategy, is_known):
    source = Dataset.range(4) if is_known else generated(np.arange(4))
    iterator = iter(distributed(strategy, source.repeat().batch(3)))
    numbers = np.arange(15) % 4
    check_steps(strategy, itertools.islice(iterator, 5), np.split(numbers, 5))
    assert next(iterator) is not None


@pytest.mark.parametrize("is_known", [True, False], ids=["known length", "unknown length"])
def test_the_iterator_after_its_end(strategy, is_known):
    source = Dataset.range(4) if is_known else generated(np.arange(4))
    iterator = iter(distributed(strategy, source.batch(2)))
    assert iter(iterator) is iterator
    taken = [next(iterator), iterator.get_next()]
    check_steps(strategy, taken, [np.array([0, 1]), np.array([2, 3])])
    for _ in range(2):
        with pytest.raises(StopIteration):
            next(iterator)
        with pytest.raises(IndexError, match="ended"):
            iterator.get_next()
        found = iterator.get_next_as_optional()
        assert found.has_value() is False
        with pytest.raises(ValueError, match="no value"):
            found.get_value()


@pytest.mark.parametrize("is_known", [True, False], ids=["known length", "unknown length"])
def test_get_next_as_optional_gives_all_steps(strategy, is_known):
    source = Dataset.range(7) if is_known else generated(np.arange(7))
    iterator = iter(distributed(strategy, source.batch(4)))
    steps = []
    while (found := iterator.get_next_as_optional()).has_value():
        steps.append(found.get_value())
    check_steps(strategy, steps, [np.arange(4), np.arange(4, 7)])


@pytest.mark.parametrize("again", [copy.copy, copy.deepcopy, pickle.dumps])
def test_neither_a_distributed_dataset_nor_its_iterator_can_be_copied(strategy, again):
    """The other ranks would not know of the copy."""
    dataset = distributed(strategy, Dataset.range(6).batch(2))
    for one in (dataset, iter(dataset)):
        with pytest.raises(TypeError, match="can't be copied or pickled"):
            again(one)


def test_two_iterators_side_by_side(strategy):
    dataset = distributed(strategy, generated(np.arange(6)).batch(3))
    steps = list(zip(dataset, dataset, strict=True))
    for side in (0, 1):
        batches = [np.arange(3), np.arange(3, 6)]
        check_steps(strategy, [step[side] for step in steps], batches)


def for_each_replica_of_a_rank(strategy, function):
    """Calls that call `function` once for each replica of this rank, with its id."""
    with strategy.scope():
        on_read = mr.VariableSynchronization.ON_READ
        own = mr.Variable(0, synchronization=on_read, aggregation=mr.VariableAggregation.SUM)
    strategy.run(lambda: own.assign(mr.get_replica_context().replica_id_in_sync_group))
    return (
        lambda: strategy.experimental_distribute_values_from_function(
            lambda context: function(context.replica_id_in_sync_group)
        ),
        lambda: strategy.extended.update(
            own, lambda x: function(strategy.experimental_local_results(x.value())[0])
        ),
    )


@pytest.mark.parametrize("source", [Dataset.range(64), generated(range(64))])
def test_no_step_is_taken_where_a_rank_would_take_one_for_each_of_its_replicas(strategy, source):
    dataset = distributed(strategy, source.batch(8))
    iterator = iter(dataset)
    first = steps_of(strategy, [next(iterator)])
    for take, words in (
        (lambda i: int(strategy.experimental_local_results(next(iterator))[0].sum()), "next"),
        (lambda i: len([*itertools.islice(iterator, 1)]), "next"),
        (lambda i: iterator.get_next_as_optional().has_value(), "next"),
        (lambda i: bool(iter(dataset)), "iter"),
    ):
        for call in for_each_replica_of_a_rank(strategy, take):
            words_of_error = rf"{words}\(\) of a distributed .*called for each replica of a rank"
            assert_fails(strategy, mr.errors.ContextError, words_of_error, call)
    check_steps(strategy, [next(iterator)], [np.arange(8, 16)])
    check_steps(strategy, [next(iter(dataset))], [np.arange(8)])
    np.testing.assert_array_equal(first[0][0], chunks(np.arange(8), len(first[0]))[0])


def test_a_dataset_iterated_for_each_replica_of_a_rank_begins_the_same_epochs_for_each(strategy):
    outside = Dataset.range(64).shuffle(seed=3).batch(64)

    def orders(replica_id):
        inside = Dataset.range(64).shuffle(seed=3).batch(64)
        return [next(iter(data)).tolist() for data in (outside, inside, outside, inside)]

    before = next(iter(outside)).tolist()
    alone = Dataset.range(64).shuffle(seed=3).batch(64)
    epochs = [next(iter(alone)).tolist() for _ in range(4)]
    for first, call in zip((0, 2), for_each_replica_of_a_rank(strategy, orders), strict=True):
        begun = [epochs[first], epochs[0], epochs[first + 1], epochs[1]]
        assert all(of_one == begun for of_one in strategy.experimental_local_results(call()))
    assert [before, next(iter(outside)).tolist()] == epochs[:2]


def test_a_run_in_a_generator_begins_the_same_epochs_on_each_replica(strategy):
    shuffled = Dataset.range(8).shuffle(seed=3)

    def rows():
        for _ in range(2):
            yield np.array(strategy.gather_objects(strategy.run(lambda: lists(shuffled))))

    first, second = lists(Dataset.from_generator(rows))
    count = strategy.num_replicas_in_sync
    assert first == [lists(Dataset.range(8).shuffle(seed=3))] * count
    assert second == [second[0]] * count != first


@pytest.mark.parametrize("first", [True, False])
def test_a_run_that_fails_begins_no_epoch_whoever_shares_a_rank(strategy, first):
    """Some replicas of a rank have not begun when another one of it fails."""
    shuffled = Dataset.range(8).shuffle(seed=3)
    fails = 0 if first else strategy.num_replicas_in_sync - 1

    def step(is_wrong):
        inside = Dataset.range(8).shuffle(seed=3)
        orders = [lists(data) for data in (shuffled, shuffled, inside)]
        if is_wrong and mr.get_replica_context().replica_id_in_sync_group == fails:
            raise KeyError("of one replica")
        mr.get_replica_context().all_reduce("SUM", 1.0)
        return orders

    def orders_of_all():
        found = strategy.experimental_local_results(strategy.run(step, args=(False,)))
        return [orders for of_rank in gathered(found) for orders in of_rank]

    above = lists(shuffled)
    alone = Dataset.range(8).shuffle(seed=3)
    epochs = [lists(alone) for _ in range(4)]
    assert orders_of_all() == [[*epochs[:2], epochs[0]]] * strategy.num_replicas_in_sync
    raises_everywhere(KeyError, lambda: strategy.run(step, args=(True,)))
    assert orders_of_all() == [[*epochs[2:], epochs[0]]] * strategy.num_replicas_in_sync
    assert [above, lists(shuffled)] == epochs[:2]
    check_works(strategy)


def test_the_epochs_of_what_was_made_for_a_replica_go_with_it(strategy):
    made = {}

    def value_fn(context):
        i = context.replica_id_in_sync_group
        made[i] = Dataset.range(8).shuffle(seed=i)

    def seen():
        rows = strategy.run(lambda: lists(made[mr.get_replica_context().replica_id_in_sync_group]))
        return list(strategy.gather_objects(rows))

    strategy.experimental_distribute_values_from_function(value_fn)
    first = seen()
    begun = {i: epochs_begun(i) for i in strategy.local_replica_ids}
    keys = [key for keys in strategy.gather_objects(list(begun.items())) for _, key in keys]
    second = seen()
    put_epochs_back(begun)
    assert seen() == second != first
    assert len({tuple(sorted(key)) for key in keys}) == strategy.num_replicas_in_sync


def test_iterators_that_stand_in_the_same_epoch_are_told_apart(strategy):
    """One more step of one of them is an error, and comes again, also beside the other one."""
    dataset = distributed(strategy, Dataset.range(16).batch(2))
    one, other = iter(dataset), iter(dataset)
    other.load_state_dict(one.state_dict())

    def steps(iterators):
        for iterator in iterators:
            next(iterator)
        strategy.run(lambda: None)

    steps([one, other])
    if strategy.size > 1:
        mine = [one, one, other] if strategy.rank == 0 else [one, other]
        assert_fails(strategy, mr.errors.CollectiveMismatchError, "", lambda: steps(mine))
        assert [one.state_dict()["steps"], other.state_dict()["steps"]] == [2, 2]
    steps([one, other, other])
    check_steps(strategy, list(one)[-1:], [np.array([14, 15])])
    check_steps(strategy, list(other)[-1:], [np.array([14, 15])])


def test_empty_input_has_no_step(strategy):
    for source in (Dataset.range(0).batch(2), generated([]).batch(2), [], iter([])):
        assert steps_of(strategy, distributed(strategy, source)) == []


def test_element_spec_and_length(strategy):
    dataset = distributed(strategy, Dataset.range(7).batch(4))
    assert len(dataset) == 2
    assert dataset.element_spec.shape == (None,)
    with pytest.raises(TypeError, match="length"):
        len(distributed(strategy, generated(np.arange(3)).batch(2)))
    with pytest.raises(TypeError, match="length"):
        len(distributed(strategy, Dataset.range(3).repeat().batch(2)))


@pytest.mark.parametrize("is_known", [True, False], ids=["known length", "unknown length"])
def test_next_in_a_replica_is_a_value_error_everywhere(strategy, is_known):
    source = Dataset.range(4) if is_known else generated(np.arange(4))
    iterator = iter(distributed(strategy, source.batch(2)))
    for take in (iterator.__next__, iterator.get_next, iterator.get_next_as_optional):
        run = functools.partial(strategy.run, lambda take=take: take())
        assert_fails(strategy, ValueError, "in a replica", run)
    check_steps(strategy, iterator, [np.array([0, 1]), np.array([2, 3])])


@pytest.mark.parametrize("call", ["iter", "load_state_dict", "load_state_dict of an iterator"])
def test_an_epoch_that_replicas_begin_or_place_is_a_value_error_everywhere(strategy, call):
    """It would be begun as often as a rank has replicas."""
    source = Dataset.range(16).shuffle(seed=1).batch(8)
    dataset, expected = distributed(strategy, source), distributed(strategy, source)
    iterator = iter(dataset)
    state = {"epoch": 3, "steps": 0, "pipelines": None}
    calls = {
        "iter": lambda: len(iter(dataset)),
        "load_state_dict": lambda: dataset.load_state_dict(state),
        "load_state_dict of an iterator": lambda: iterator.load_state_dict(state),
    }
    error = raises_everywhere(ValueError, lambda: strategy.run(calls[call]))
    assert "was called in a replica" in str(error)
    for one in (iterator, dataset):
        found, whole = ([strategy.gather(step, axis=0) for step in it] for it in (one, expected))
        np.testing.assert_array_equal(found, whole)
    check_works(strategy)


def test_batches_that_a_filter_has_seen_have_the_strides_of_their_parts_on_any_layout(strategy):
    """numpy sums in the order of the memory."""
    number = strategy.num_replicas_in_sync
    rows = np.arange(12.0 * number).reshape(4 * number, 3)
    source = Dataset.from_tensor_slices(rows).batch(4 * number).map(np.asfortranarray)
    (batch,) = distributed(strategy, source.filter(lambda batch: True))
    (parts,) = steps_of(strategy, [batch])
    for i, part in enumerate(parts):
        assert part.strides == (8, 32)
        assert part.tolist() == rows[4 * i : 4 * i + 4].tolist()


# Foreign sources


class EachEpochOf:
    """An iterable of the batches of a dataset."""

    def __init__(self, dataset):
        self.dataset = dataset

    def __iter__(self):
        return iter(self.dataset)


def test_an_iterable_around_a_dataset_goes_on_in_the_epoch_in_which_it_was_left(strategy):
    def made():
        return distributed(strategy, EachEpochOf(Dataset.range(16).shuffle(seed=1).batch(4)))

    dataset, again = made(), made()
    for _ in range(2):
        whole = [strategy.gather(step, axis=0).tolist() for step in dataset]
    again.load_state_dict({"epoch": 1, "steps": 2, "pipelines": None})
    assert [strategy.gather(step, axis=0).tolist() for step in again] == whole[2:]


def test_other_iterables_of_batches_can_be_distributed(strategy):
    batches = [np.arange(4), np.arange(10, 13)]
    dataset = distributed(strategy, batches)
    for _ in range(2):
        check_steps(strategy, dataset, batches)
    check_steps(strategy, distributed(strategy, (b for b in batches)), batches)
    of_dicts = distributed(strategy, [{"x": batch} for batch in batches])
    check_steps(strategy, [step["x"] for step in of_dicts], batches)
    check_steps(
        strategy,
        distributed(strategy, np.arange(6.0).reshape(3, 2)),
        [*np.arange(6.0).reshape(3, 2)],
    )


def test_a_foreign_loader_with_tensors_can_be_distributed(strategy):
    batches = [np.arange(8.0).reshape(4, 2), np.ones((1, 2))]
    dataset = distributed(strategy, Loader(batches))
    for _ in range(2):
        steps = list(dataset)
        assert all(isinstance(step, list) for step in steps)
        check_steps(strategy, [step[0] for step in steps], batches)
        check_steps(strategy, [step[1] for step in steps], [-batch for batch in batches])


def test_a_source_that_is_none_is_refused(strategy):
    for source in (None, 3, lambda: [np.arange(3)]):
        with pytest.raises(TypeError, match="iterable of batches"):
            distributed(strategy, source)
        with pytest.raises(TypeError, match="iterable of batches"):
            strategy.distribute_datasets_from_function(lambda context, s=source: s)
    with pytest.raises(TypeError, match="callable"):
        strategy.distribute_datasets_from_function(Dataset.range(3).batch(1))
    with pytest.raises(TypeError, match="InputOptions"):
        strategy.experimental_distribute_dataset([], options="PER_WORKER")


def test_input_that_is_not_batched_is_a_value_error_everywhere(strategy):
    for unbatched in (Dataset.range(4), generated(np.arange(4))):
        assert_fails(strategy, ValueError, "batch", lambda u=unbatched: distributed(strategy, u))
    for unbatched in ([1.0, 2.0], [{"x": np.arange(2), "y": 3}], [np.float32(2)]):
        iterator = iter(distributed(strategy, unbatched))
        assert_fails(strategy, ValueError, "rows", lambda i=iterator: next(i))
        own = strategy.distribute_datasets_from_function(lambda context, u=unbatched: u)
        iterator = iter(own)
        assert_fails(strategy, ValueError, "rows", lambda i=iterator: next(i))


def test_leaves_with_different_numbers_of_rows_are_a_value_error_everywhere(strategy):
    iterator = iter(distributed(strategy, [{"x": np.arange(4), "y": np.arange(3)}]))
    assert_fails(strategy, ValueError, "4 rows and 3.*'y'", lambda: next(iterator))


# Ranks that differ


def test_a_generator_that_raises_on_one_rank_raises_everywhere(strategy):
    def rows():
        yield from np.arange(4)
        if strategy.rank == strategy.size - 1:
            raise OSError(5, f"disk of rank {strategy.rank}")
        yield from np.arange(4)

    iterator = iter(distributed(strategy, Dataset.from_generator(rows).batch(4)))
    check_steps(strategy, [next(iterator)], [np.arange(4)])
    assert_fails(strategy, OSError, f"disk of rank {strategy.size - 1}", lambda: next(iterator))


def test_a_pipeline_that_raises_on_one_rank_raises_everywhere(strategy):
    def batches(context):
        yield np.full(1, context.input_pipeline_id)
        if context.input_pipeline_id == 0:
            raise OSError("no such file")
        yield np.full(1, context.input_pipeline_id)

    dataset = strategy.distribute_datasets_from_function(batches)

    def epoch():
        return list(dataset)

    assert_fails(strategy, OSError, "no such file", epoch)


@pytest.mark.parametrize(
    "make",
    [
        lambda rank: Dataset.range(8 + 8 * rank).batch(4),
        lambda rank: Dataset.range(8 - rank).batch(4),
        lambda rank: Dataset.range(rank, 8 + rank).batch(4),
        lambda rank: Dataset.range(8).batch(4 + rank),
        lambda rank: Dataset.range(8).shuffle(seed=rank).batch(4),
        lambda rank: reshuffled(Dataset.range(8), rank > 0),
        lambda rank: reshuffled(generated(range(8)), rank > 0),
        lambda rank: Dataset.range(8).repeat(None if rank else 9).batch(4),
        lambda rank: generated(np.arange(8 - rank)).batch(8),
        lambda rank: generated(np.arange(8 + rank)).batch(4),
        lambda rank: [np.arange(2 + rank)],
        lambda rank: [np.arange(2)] * (2 + rank),
        lambda rank: [np.arange(2)] * rank,
        lambda rank: Dataset.range(4).batch(2) if rank else generated(np.arange(4)).batch(2),
    ],
    ids=[
        *("steps", "last batch", "start", "batch size", "seed"),
        *("reshuffling", "reshuffling of a stream", "end"),
        *("rows of a stream", "length of a stream", "rows of a list", "length of a list"),
        *("empty list", "kind of source"),
    ],
)
def test_global_datasets_that_differ_between_ranks_are_an_error_everywhere(strategy, make):
    needs_two_ranks(strategy)

    def epoch():
        for batch in distributed(strategy, make(strategy.rank)):
            strategy.reduce("SUM", batch, axis=0)
        strategy.run(lambda: None)  # where an epoch needs no message the next call finds out

    assert_fails(strategy, (ValueError, mr.errors.CollectiveMismatchError), "", epoch)


@pytest.mark.parametrize("is_known", [True, False], ids=["known length", "unknown length"])
def test_iterating_on_one_rank_only_is_an_error_at_the_next_collective(strategy, is_known):
    """And nothing is left behind: the next iteration is the first one of all ranks."""
    needs_two_ranks(strategy)
    source = Dataset.range(8) if is_known else generated(np.arange(8))
    dataset = distributed(strategy, source.batch(4))

    def one_iterates():
        if strategy.rank == 0:
            next(iter(dataset))
        strategy.run(lambda: None)

    assert_fails(strategy, mr.errors.CollectiveMismatchError, "", one_iterates)
    check_steps(strategy, list(dataset), [np.arange(4), np.arange(4, 8)])
    strategy.run(lambda: None)


def test_datasets_that_one_rank_alone_makes_leave_nothing_behind(strategy):
    """Neither those that it only makes, nor one that it iterates: an error at the next call."""
    needs_two_ranks(strategy)

    def epoch():
        return list(distributed(strategy, generated(np.arange(4)).batch(4)))

    if strategy.rank == 0:
        distributed(strategy, generated(np.arange(4)).batch(4))
    strategy.run(lambda: None)
    check_steps(strategy, epoch(), [np.arange(4)])

    def one_iterates():
        if strategy.rank == 0:
            epoch()
        strategy.run(lambda: None)

    assert_fails(strategy, mr.errors.CollectiveMismatchError, "", one_iterates)
    check_steps(strategy, epoch(), [np.arange(4)])


@pytest.mark.parametrize("is_known", [True, False], ids=["known length", "unknown length"])
def test_one_step_more_on_one_rank_is_an_error_at_the_next_collective(strategy, is_known):
    needs_two_ranks(strategy)
    source = Dataset.range(8) if is_known else generated(np.arange(8))
    iterator = iter(distributed(strategy, source.batch(2)))
    next(iterator)

    def one_skips_a_batch():
        if strategy.rank == 0:
            next(iterator)
        strategy.reduce("SUM", next(iterator), axis=0)

    assert_fails(strategy, mr.errors.CollectiveMismatchError, "", one_skips_a_batch)


def test_a_step_that_not_all_ranks_took_comes_again(strategy):
    """Of an input whose length is not known, where each step is agreed on."""
    needs_two_ranks(strategy)
    iterator = iter(distributed(strategy, generated(np.arange(12)).batch(4)))
    steps = [next(iterator)]

    def one_takes_a_step():
        if strategy.rank == strategy.size - 1:
            next(iterator)
        strategy.run(lambda: None)

    for _ in range(2):
        assert_fails(strategy, mr.errors.CollectiveMismatchError, "", one_takes_a_step)
    check_steps(strategy, steps + list(iterator), np.arange(12).reshape(3, 4))


def test_another_epoch_on_one_rank_is_an_error_at_the_next_collective(strategy):
    needs_two_ranks(strategy)
    dataset = distributed(strategy, Dataset.range(8).shuffle(seed=1).batch(4))
    if strategy.rank == 0:
        iter(dataset)

    def epoch():
        return [strategy.reduce("SUM", batch, axis=0) for batch in dataset]

    assert_fails(strategy, mr.errors.CollectiveMismatchError, "", epoch)
    assert sum(epoch()) == 28


def reusing_one_buffer(start, steps=3):
    buffer = np.empty(4)
    for number in range(steps):
        buffer[:] = start + 10 * number + np.arange(4)
        yield buffer


class ReusingOneBuffer:
    def __iter__(self):
        return reusing_one_buffer(0)


@pytest.mark.parametrize("ahead", [0, 1, 3])
def test_batches_of_any_iterable_may_reuse_a_buffer(strategy, ahead):
    options = mr.InputOptions(experimental_per_replica_buffer_size=ahead)
    dataset = strategy.experimental_distribute_dataset(ReusingOneBuffer(), options)

    def total(rows):
        return mr.get_replica_context().all_gather(rows, axis=0)

    for number, batch in enumerate(dataset):
        for rows in strategy.experimental_local_results(strategy.run(total, args=(batch,))):
            assert rows.tolist() == [10 * number + i for i in range(4)]


def test_replicas_that_share_a_pipeline_get_its_batches_though_it_reuses_a_buffer(strategy):
    dataset = strategy.distribute_datasets_from_function(
        lambda context: reusing_one_buffer(100 * context.input_pipeline_id, steps=12)
    )
    steps = []
    for batch in dataset:
        steps.append(strategy.run(lambda rows: rows.copy(), args=(batch,)))
    found = [
        float(rows[0])
        for step in steps
        for rows in strategy.experimental_local_results(step)
        if len(rows)
    ]
    first = 100 * strategy.rank
    assert found == [first + 10.0 * number for number in range(12)]


def test_what_is_skipped_is_read_for_no_replica_however_few_rows_there_are(strategy):
    """A replica without rows needs the form of a row, and not of one that is skipped."""

    def parsed(line):
        return np.array([int(cell) for cell in str(line).split(",")])

    lines = Dataset.from_source(["a,b", "1,2", "3,4"]).map(parsed)
    for dataset in (lines.skip(1), lines.shard(3, 1).concatenate(lines.skip(2))):
        total = np.zeros(2, int)
        for batch in strategy.experimental_distribute_dataset(dataset.batch(2)):
            summed = strategy.run(
                lambda rows: mr.get_replica_context().all_reduce("SUM", rows.sum(axis=0)),
                args=(batch,),
            )
            total += strategy.experimental_local_results(summed)[0]
        assert total.tolist() == [4, 6]


def test_a_state_of_smaller_batches_stands_at_the_end(strategy):
    dataset = strategy.experimental_distribute_dataset(Dataset.range(80).batch(4))
    iterator = iter(dataset)
    for _ in range(10):
        next(iterator)
    larger = strategy.experimental_distribute_dataset(Dataset.range(80).batch(20))
    larger.load_state_dict(dataset.state_dict())
    iterator = iter(larger)
    assert len(iterator) == 0
    assert list(iterator) == []


def test_rows_of_another_byte_order_are_like_no_rows_on_any_layout(strategy):
    rows = [np.array([i, i + 1], ">f8") for i in range(2 * strategy.num_replicas_in_sync)]
    dataset = Dataset.from_source(rows).batch(1)
    steps = steps_of(strategy, strategy.experimental_distribute_dataset(dataset))
    assert len(steps) == len(rows)
    for number, (first, *others) in enumerate(steps):
        assert first.tolist() == [[number, number + 1]]
        assert [part.shape for part in others] == [(0, 2)] * len(others)
        assert {part.dtype.str for part in (first, *others)} == {"<f8"}


@pytest.mark.parametrize(
    "verbs",
    [
        lambda rows: rows,
        lambda rows: rows.repeat(2),
        lambda rows: rows.concatenate(rows).concatenate(rows),
    ],
    ids=["once", "repeat", "concatenate"],
)
def test_arrays_of_another_byte_order_keep_it_on_any_layout(strategy, verbs):
    """Also where the rows of a replica come from two passes, and those of another one do not."""
    columns = (np.arange(6, dtype=">f8"), np.zeros(6, [("x", ">i2")]), np.full(6, "a", ">U1"))
    dataset = distributed(strategy, verbs(Dataset.from_tensor_slices(columns)).batch(4))
    dtypes = [column.dtype for column in columns]
    assert [spec.dtype for spec in dataset.element_spec] == dtypes
    for batch in dataset:
        for part in zip(*map(strategy.experimental_local_results, batch), strict=True):
            assert [leaf.dtype for leaf in part] == dtypes


def test_what_is_no_state_is_an_error_that_says_so(strategy):
    dataset = distributed(strategy, Dataset.range(4).batch(2))
    for loads in (dataset, iter(dataset)):
        with pytest.raises(TypeError, match=r"needs what state_dict\(\) gave, got 5\."):
            loads.load_state_dict(5)
    assert len(list(dataset)) == 2


@pytest.mark.parametrize("kind", ["assign", "run", "barrier", "broadcast_to", "next", "Variable"])
@pytest.mark.parametrize("ahead", [0, 2])
def test_a_call_for_all_where_rows_are_made_is_an_error(strategy, kind, ahead):
    """Each rank makes those of its own replicas: it would call as often as it has rows."""
    with strategy.scope():
        seen = mr.Variable(0)
    others = iter(strategy.experimental_distribute_dataset(Dataset.range(99).batch(1)))
    calls = {
        "assign": lambda: seen.assign_add(1),
        "run": lambda: strategy.run(int),
        "barrier": strategy.barrier,
        "broadcast_to": lambda: strategy.extended.broadcast_to(1),
        "next": lambda: next(others),
        "Variable": lambda: mr.Variable(1.0),
    }

    def row(x):
        calls[kind]()
        return x

    count = strategy.num_replicas_in_sync
    dataset = Dataset.range(2 * count).map(row).batch(2 * count)
    if ahead:
        dataset = dataset.prefetch(ahead)

    def take():
        with strategy.scope():
            next(iter(strategy.experimental_distribute_dataset(dataset)))
        strategy.barrier()

    raises_everywhere(mr.errors.ContextError, take)
    assert int(seen.numpy()) == 0
    check_works(strategy)


@pytest.mark.parametrize("given", [{"x": np.arange(4)}, "rows", b"rows"], ids=type)
def test_what_iterates_keys_or_characters_is_an_error_that_names_it(strategy, given):
    error = raises_everywhere(
        TypeError, lambda: strategy.experimental_distribute_dataset(given) and strategy.barrier()
    )
    assert f"got {type(given).__name__} " in str(error)
    assert "from_tensor_slices" in str(error)


@pytest.mark.parametrize("call", ["value_fn", "dataset_fn"])
def test_what_a_function_raises_that_is_called_for_a_replica_names_it(strategy, call):
    last = strategy.num_replicas_in_sync - 1

    def fails(context):
        which = "replica_id_in_sync_group" if call == "value_fn" else "input_pipeline_id"
        if getattr(context, which) == last:
            raise KeyError("no such shard")
        return [np.zeros(1)]

    per_replica = mr.InputOptions(experimental_replication_mode=mr.InputReplicationMode.PER_REPLICA)
    error = raises_everywhere(
        KeyError,
        lambda: (
            strategy.experimental_distribute_values_from_function(fails)
            if call == "value_fn"
            else strategy.distribute_datasets_from_function(fails, per_replica)
        ),
    )
    notes = " ".join(error.__notes__)
    assert f"Raised in the {call} of " in notes
    assert f"called for replica {last}." in notes


def test_what_is_distributed_already_is_not_distributed_again(strategy):
    distributed = strategy.experimental_distribute_dataset(mr.data.Dataset.range(8).batch(4))
    for one in (distributed, iter(distributed)):
        error = raises_everywhere(
            TypeError,
            lambda one=one: (strategy.experimental_distribute_dataset(one), strategy.barrier()),
        )
        assert "distributed already: iterate it" in str(error)


class Views:
    """Gives views of an array that it keeps, as a loader over an array in memory does."""

    def __init__(self, rows):
        self._rows = rows

    def __iter__(self):
        return (self._rows[start : start + 8] for start in range(0, len(self._rows), 8))


@pytest.mark.parametrize(
    "make", [lambda rows: [rows[:8], rows[8:]], Views, lambda rows: itertools.repeat(rows[:8], 2)]
)
def test_a_step_that_writes_into_rows_of_the_program_is_an_error_everywhere(strategy, make):
    """They would be others in the next epoch, on the rank that hosts the replica alone."""
    rows = np.arange(16.0)
    dataset = distributed(strategy, make(rows))

    def write(batch):
        batch += 1.0

    error = raises_everywhere(ValueError, lambda: strategy.run(write, args=(next(iter(dataset)),)))
    assert "read-only" in str(error)
    assert any("Write into a copy" in note for note in error.__notes__)
    assert rows.tolist() == np.arange(16.0).tolist()
    check_works(strategy)


def test_a_step_may_write_into_rows_that_nobody_keeps(strategy):
    class Fresh:
        def __iter__(self):
            return (np.arange(8.0) + number for number in range(2))

    def doubled(batch):
        batch *= 2.0
        return batch.sum()

    dataset, sums = distributed(strategy, Fresh()), []
    for _ in range(2):
        for batch in dataset:
            total = strategy.reduce("SUM", strategy.run(doubled, args=(batch,)), axis=None)
            sums.append(float(total))
    assert sums == [56.0, 72.0] * 2


@pytest.mark.parametrize("batches", [[np.ones(2)] * 64, itertools.repeat(np.ones(2), 64)])
def test_what_a_step_writes_into_a_batch_of_its_rank_is_gone_with_it(strategy, batches):
    dataset = strategy.distribute_datasets_from_function(lambda context: batches)

    def doubled(batch):
        batch *= 2.0
        return batch.sum()

    for batch in itertools.islice(dataset, 3):
        found = strategy.experimental_local_results(strategy.run(doubled, args=(batch,)))
        assert set(map(float, found)) == {4.0}


class KeepsItsArray:
    """It tells nobody that it gives the same array in each epoch."""

    def __init__(self, array):
        self.array = array

    def __iter__(self):
        yield self.array


def test_what_a_step_writes_is_not_in_an_array_that_its_source_gives_again(strategy):
    number = strategy.num_replicas_in_sync
    array = np.arange(2.0 * number)
    mode = mr.InputOptions(experimental_replication_mode=mr.InputReplicationMode.PER_REPLICA)

    def dataset_fn(context):
        return KeepsItsArray(np.arange(2.0) + 2 * context.input_pipeline_id)

    def written(rows):
        rows += 1.0
        return rows.copy()

    for dataset in (
        distributed(strategy, KeepsItsArray(array)),
        strategy.distribute_datasets_from_function(dataset_fn, mode),
    ):
        for _ in range(2):
            (step,) = dataset
            rows = strategy.gather(strategy.run(written, args=(step,)), axis=0)
            assert rows.tolist() == (np.arange(2.0 * number) + 1.0).tolist()
    assert array.tolist() == np.arange(2.0 * number).tolist()


@pytest.mark.parametrize("per_replica", [False, True])
def test_a_batch_stays_what_it_is_when_its_source_fills_its_buffer_anew(strategy, per_replica):
    mode = mr.InputOptions(experimental_replication_mode=mr.InputReplicationMode.PER_REPLICA)
    if per_replica:
        dataset = strategy.distribute_datasets_from_function(lambda _: ReusingOneBuffer(), mode)
    else:
        dataset = distributed(strategy, ReusingOneBuffer())
    batches = list(dataset)
    for number, batch in enumerate(batches):
        rows = strategy.gather(batch, axis=0)
        assert (rows // 10 == number).all()


def test_an_epoch_of_an_iterator_that_has_ended_is_an_error_everywhere(strategy):
    dataset = distributed(strategy, (np.arange(4.0) + number for number in range(3)))
    assert len(steps_of(strategy, dataset)) == 3
    error = raises_everywhere(RuntimeError, lambda: next(iter(dataset)))
    assert "Distribute what can be iterated anew" in str(error)
    check_works(strategy)


def test_an_iterator_that_was_left_goes_on_in_the_next_epoch(strategy):
    dataset = distributed(strategy, (np.arange(4.0) + number for number in range(3)))
    next(iter(dataset))
    assert len(steps_of(strategy, dataset)) == 2


@pytest.mark.parametrize(
    "change",
    [
        lambda rows: Dataset.range(40).shuffle(seed=2).batch(4),
        lambda rows: Dataset.range(20).shuffle(seed=1).batch(4),
        lambda rows: Dataset.range(40).shuffle(seed=1).batch(8),
        lambda rows: [np.arange(4)] * 10,
    ],
)
def test_a_state_of_other_input_is_told_of_by_rank_0(strategy, change, caplog):
    dataset = distributed(strategy, Dataset.range(40).shuffle(seed=1).batch(4))
    next(iter(dataset))
    state = dataset.state_dict()
    with caplog.at_level(logging.WARNING, "mpi_replica"):
        distributed(strategy, Dataset.range(40).shuffle(seed=1).batch(4)).load_state_dict(state)
        assert caplog.messages == []
        distributed(strategy, change(40)).load_state_dict(state)
    assert len(caplog.messages) == (strategy.rank == 0)
    assert all("shuffle(seed=1).batch(4)>, and is" in text for text in caplog.messages)


SHORTER = {
    "known": lambda steps: Dataset.range(4 * steps).batch(4),
    "a list": lambda steps: [np.arange(4)] * steps,
    "an iterator": lambda steps: iter([np.arange(4)] * steps),
}


@pytest.mark.parametrize("source", SHORTER)
@pytest.mark.parametrize(("has", "is_told"), [(0, True), (2, True), (3, False), (4, False)])
def test_input_that_ends_before_its_state_is_told_of_by_rank_0(
    strategy, source, has, is_told, caplog
):
    dataset = distributed(strategy, SHORTER[source](has))
    dataset.load_state_dict({"epoch": 0, "steps": 3, "pipelines": None})
    with caplog.at_level(logging.WARNING, "mpi_replica"):
        assert len(list(dataset)) == max(0, has - 3)
    assert len(caplog.messages) == (is_told and strategy.rank == 0)
    for text in caplog.messages:
        assert text.startswith("the input stood at step 3, and has fewer steps now (")
        assert "this epoch is at its end" in text


def test_input_that_ends_before_its_state_and_is_read_ahead_is_told_of_once(strategy, caplog):
    options = mr.InputOptions(experimental_per_replica_buffer_size=2)
    batches = Dataset.range(8).batch(4)
    dataset = strategy.experimental_distribute_dataset(batches, options)
    dataset.load_state_dict({"epoch": 0, "steps": 3, "pipelines": None})
    with caplog.at_level(logging.WARNING, "mpi_replica"):
        assert [len(list(dataset)) for _ in range(2)] == [0, 2]
    assert len(caplog.messages) == (strategy.rank == 0)


@pytest.mark.parametrize("had", [0, 2])
@pytest.mark.parametrize("has", [0, 3])
def test_what_is_read_ahead_makes_no_other_input(strategy, had, has, caplog):
    def rows(ahead):
        numbers = Dataset.range(40).shuffle(seed=1)
        numbers = numbers.prefetch(ahead) if ahead else numbers
        numbers = Dataset.zip((numbers, Dataset.range(40))).batch(4)
        return distributed(strategy, numbers.prefetch(ahead) if ahead else numbers)

    dataset, other = rows(had), rows(has)
    next(iter(dataset))
    with caplog.at_level(logging.WARNING, "mpi_replica"):
        other.load_state_dict(dataset.state_dict())
    assert caplog.messages == []
    again, whole = (
        [strategy.gather(numbers, axis=0).tolist() for numbers, _ in one]
        for one in (other, rows(0))
    )
    assert again == whole[1:]


def test_values_of_other_structure_on_another_rank_are_an_error_everywhere(strategy):
    last = strategy.num_replicas_in_sync - 1
    if not last:
        pytest.skip("one replica has nobody to differ from")

    def value(context):
        is_last = context.replica_id_in_sync_group == last
        return {"b": 2.0} if is_last else {"w": 1.0}

    distribute = strategy.experimental_distribute_values_from_function
    error = raises_everywhere(StructureMismatchError, lambda: distribute(value))
    assert "got different structures" in str(error)
    check_works(strategy)


def in_order(keys):
    return {key: np.full(1, {"x": 1.0, "y": 100.0}[key]) for key in keys}


def check_loops_over_keys(strategy, dataset):
    """Loops of collectives over the keys of each batch add values of one key together."""
    number = 0
    for batch in dataset:
        assert len(set(map(tuple, gathered([*batch])))) == 1
        sums = {key: strategy.reduce("SUM", column, axis=0) for key, column in batch.items()}
        assert sums["y"] == 100.0 * sums["x"]
        assert sums["x"] == strategy.reduce("SUM", batch["x"], axis=0) > 0.0
        number += 1
    return number


@pytest.mark.parametrize("per_replica", [False, True])
def test_keys_of_each_ranks_own_batches_come_in_one_order_on_all(strategy, per_replica):
    def dataset_fn(context):
        i = context.input_pipeline_id
        keys = ["xy", "yx"][i % 2]
        return generated([in_order(keys)] * (3 + 2 * i))  # some have no more when others have

    mode = mr.InputReplicationMode.PER_REPLICA if per_replica else None
    options = mode and mr.InputOptions(experimental_replication_mode=mode)
    dataset = strategy.distribute_datasets_from_function(dataset_fn, options)
    assert check_loops_over_keys(strategy, dataset) > 0


def test_keys_of_rows_that_all_ranks_read_are_sorted_where_they_have_several_orders(strategy):
    rows = [in_order("yx"), in_order("xy")] * strategy.num_replicas_in_sync
    batches = generated(rows).batch(len(rows))
    assert [[*batch] for batch in batches] == [["x", "y"]]
    assert check_loops_over_keys(strategy, distributed(strategy, batches)) == 1
    each_alone = generated(rows).batch(1)
    assert [[*batch] for batch in each_alone][:2] == [["y", "x"], ["x", "y"]]
    assert check_loops_over_keys(strategy, distributed(strategy, each_alone)) == len(rows)


@pytest.mark.parametrize("is_alternating", [True, False])
def test_rows_that_ranks_read_by_themselves_have_one_order_of_keys(strategy, is_alternating):
    """Else it is an error on any layout, whoever reads which."""
    number = strategy.num_replicas_in_sync

    def row(i):
        return in_order("yx" if (i % 2 if is_alternating else i < number) else "xy")

    dataset = distributed(strategy, Dataset.range(2 * number).map(row).batch(2 * number))
    assert_fails(
        strategy,
        StructureMismatchError,
        "order of keys",
        lambda: [strategy.reduce("SUM", batch["x"], axis=0) for batch in dataset],
    )


def row_with_others(i, others):
    return np.array([i, *[int(other) for other in others], *[int(other) for other in others]])


class RowsWithOthers:
    """An object that gives a row at a time."""

    def __init__(self, others):
        self.others = others

    def __len__(self):
        return 8

    def __getitem__(self, i):
        return row_with_others(i, self.others)


class BatchesWithOthers:
    def __init__(self, i, others):
        self.i, self.others = i, others

    def __iter__(self):
        return (row_with_others(8 * self.i + j, self.others)[None] for j in range(2))


def in_own_pipelines(strategy, dataset_fn):
    mode = mr.InputReplicationMode.PER_REPLICA
    options = mr.InputOptions(experimental_replication_mode=mode)
    return strategy.distribute_datasets_from_function(dataset_fn, options)


def mapped(others):
    return Dataset.range(8).map(lambda i: row_with_others(i, others))


WAYS_TO_MAKE_ROWS = {
    "map": lambda strategy, others: distributed(strategy, mapped(others).batch(4)),
    "from_source": lambda strategy, others: distributed(
        strategy, Dataset.from_source(RowsWithOthers(others)).batch(4)
    ),
    "map in own pipelines": lambda strategy, others: in_own_pipelines(
        strategy,
        lambda c: mapped(others).shard(c.num_input_pipelines, c.input_pipeline_id).batch(1),
    ),
    "own iterables": lambda strategy, others: in_own_pipelines(
        strategy, lambda context: BatchesWithOthers(context.input_pipeline_id, others)
    ),
}


@pytest.mark.parametrize("way", WAYS_TO_MAKE_ROWS)
def test_a_dataset_that_rows_are_made_of_gives_each_the_same_on_any_layout(strategy, way):
    """Other ranks don't make the row, and must not count its epochs."""
    others = Dataset.range(100).shuffle(seed=1).take(2)

    def rows_of_two_epochs(strategy):
        dataset = WAYS_TO_MAKE_ROWS[way](strategy, others)
        steps = [step for _ in range(2) for step in dataset]
        return np.concatenate([strategy.gather(step, axis=0) for step in steps])

    found = rows_of_two_epochs(strategy)
    with mr.MPIStrategy(MPI.COMM_SELF, num_replicas=strategy.num_replicas_in_sync) as alone:
        assert found.tolist() == rows_of_two_epochs(alone).tolist()
    if way != "own iterables":  # others for each row, and each of its iterations
        drawn = [tuple(pair) for row in found for pair in (row[1:3], row[3:])]
        assert len(set(drawn)) > 0.9 * len(drawn)
    assert list(others) == list(Dataset.range(100).shuffle(seed=1).take(2))  # its first epoch
