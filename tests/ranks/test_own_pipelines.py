"""Datasets of the ranks' own, and values from a function: each pipeline makes what it likes."""

import numpy as np
import pytest

import mpi_replica as mr
from everywhere import check_works, gathered, raises_everywhere, steps_of
from mpi_replica.data import Dataset

PER_REPLICA = mr.InputOptions(
    experimental_replication_mode=mr.InputReplicationMode.PER_REPLICA,
)


# Datasets of the ranks' own


def own_batches(context):
    """Pipeline i has i batches of 2 rows: the first one has none at all."""
    i = context.input_pipeline_id
    return [np.full((2, 3), 10 * i + n, np.float32) for n in range(i)]


def expected_of_own(strategy, pipelines_of_replicas):
    """The batches of `own_batches`, one for each replica and step, as nested lists."""
    inputs = {i: iter(range(i)) for i in pipelines_of_replicas}
    steps = []
    while True:
        taken = [(i, next(inputs[i], None)) for i in pipelines_of_replicas]
        if all(number is None for _, number in taken):
            return steps
        steps.append([None if n is None else 10 * i + n for i, n in taken])


@pytest.mark.parametrize("options", [None, mr.InputOptions(), PER_REPLICA], ids=str)
def test_pipelines_of_different_lengths_end_at_the_same_step(strategy, options):
    local = gathered(strategy.local_replica_ids)
    if options is PER_REPLICA:
        pipelines = range(strategy.num_replicas_in_sync)
    else:
        pipelines = [rank for rank, ids in enumerate(local) for _ in ids]
    dataset = strategy.distribute_datasets_from_function(own_batches, options)
    for _ in range(2):
        steps = steps_of(strategy, dataset)
        expected = expected_of_own(strategy, list(pipelines))
        assert len(steps) == len(expected)
        for parts, numbers in zip(steps, expected, strict=True):
            for part, number in zip(parts, numbers, strict=True):
                assert part.dtype == np.float32
                assert part.shape == ((0, 3) if number is None else (2, 3))
                assert np.all(part == number)


def test_replicas_without_rows_can_write_into_what_they_get(strategy):
    """Also where a rank has several of them."""
    dataset = strategy.distribute_datasets_from_function(own_batches, PER_REPLICA)

    def step(rows):
        rows += 1.0
        return float(rows.sum())

    for rows in dataset:
        before = [float(part.sum() + part.size) for part in rows.values]
        assert list(strategy.run(step, args=(rows,)).values) == before
    check_works(strategy)


def test_dataset_and_iterator_tell_the_spec_of_what_a_replica_gets(strategy):
    """How many rows is known only where no step is incomplete."""
    rows = Dataset.from_tensor_slices({"x": np.ones((24, 3), np.float32), "y": np.arange(24)})
    full, cut = rows.batch(4, drop_remainder=True), rows.batch(4)
    made = strategy.distribute_datasets_from_function
    for dataset, number in (
        (strategy.experimental_distribute_dataset(full), None),
        (strategy.experimental_distribute_dataset(cut), None),
        (made(lambda context: cut), None),
        (made(lambda context: full), 4),
    ):
        iterator = iter(dataset)
        expected = {
            "x": mr.data.ArraySpec((number, 3), np.dtype("f4")),
            "y": mr.data.ArraySpec((number,), np.dtype("i8")),
        }
        assert dataset.element_spec == iterator.element_spec == expected
        batch = next(iterator)
        strategy.run(lambda: None)
        for own in strategy.experimental_local_results(batch["x"]):
            assert own.shape[1:] == (3,)
            assert number in (None, own.shape[0])
    with pytest.raises(TypeError, match="list does not tell its element_spec"):
        iter(made(lambda context: [np.ones(2)])).element_spec  # noqa: B018
    check_works(strategy)


CHANGES = {
    "batch": lambda batches: batches,
    "map": lambda batches: batches.map(lambda rows: rows),
    "take": lambda batches: batches.take(100).prefetch(1),
    "zip": lambda batches: Dataset.zip(batches, batches).map(lambda one, other: one),
    "concatenate": lambda batches: batches.take(1).concatenate(batches.skip(1)),
}


@pytest.mark.parametrize("options", [None, PER_REPLICA], ids=["rank", "replica"])
@pytest.mark.parametrize("change", CHANGES)
def test_who_asks_for_full_batches_gets_no_empty_one(strategy, change, options):
    """An incomplete step is left out on all ranks."""
    local = len(strategy.local_replica_ids) if options is None else 1

    def dataset_fn(context):
        batches = 2 * local + (context.input_pipeline_id + 1) % context.num_input_pipelines
        rows = Dataset.range(2 * batches + 1)
        return CHANGES[change](rows.batch(2, drop_remainder=True))

    dataset = strategy.distribute_datasets_from_function(dataset_fn, options)
    for _ in range(2):
        steps = steps_of(strategy, dataset)
        assert len(steps) >= 2
        assert {len(part) for parts in steps for part in parts} == {2}
    assert min(gathered(len(list(dataset)))) == max(gathered(len(list(dataset)))) == len(steps)
    check_works(strategy)


def test_the_epoch_ends_where_a_rank_that_asks_for_full_batches_has_no_more(strategy):
    def dataset_fn(context):
        i, last = context.input_pipeline_id, context.num_input_pipelines - 1
        local = len(strategy.local_replica_ids)
        steps = {0: 1, last: 2}.get(i, 5)  # the last one asks for full batches
        return Dataset.range(2 * steps * local).batch(2, drop_remainder=i == last)

    steps = steps_of(strategy, strategy.distribute_datasets_from_function(dataset_fn))
    assert len(steps) == 2
    sizes = [[len(part) for part in parts] for parts in steps]
    first = gathered(len(strategy.local_replica_ids))[0] if strategy.size > 1 else 0
    count = strategy.num_replicas_in_sync
    assert sizes == [[2] * count, [0] * first + [2] * (count - first)]
    check_works(strategy)


@pytest.mark.parametrize(
    ("rows", "of_last", "sizes"),
    [(9, 5, [(2, 2), (2, 2)]), (5, 9, [(2, 2), (2, 2), (1, 2), (0, 2)])],
)
def test_the_epoch_ends_where_the_replica_that_asks_for_full_batches_has_no_more(
    strategy, rows, of_last, sizes
):
    """On whichever rank it is; the others go on without rows."""

    def dataset_fn(context):
        is_last = context.input_pipeline_id == context.num_input_pipelines - 1
        return Dataset.range(of_last if is_last else rows).batch(2, drop_remainder=is_last)

    others = strategy.num_replicas_in_sync - 1
    steps = steps_of(strategy, strategy.distribute_datasets_from_function(dataset_fn, PER_REPLICA))
    found = [[len(part) for part in parts] for parts in steps]
    assert found == [[other] * others + [last] for other, last in sizes]
    check_works(strategy)


def test_the_function_is_called_once_for_each_pipeline(strategy):
    def contexts(options):
        seen = []
        strategy.distribute_datasets_from_function(lambda c: seen.append(c) or [], options)
        return seen

    R, size = strategy.num_replicas_in_sync, strategy.size
    assert contexts(None) == [mr.InputContext(size, strategy.rank, R)]
    ids = strategy.local_replica_ids
    assert contexts(PER_REPLICA) == [mr.InputContext(R, i, R) for i in ids]


def test_what_each_replica_has_of_its_own_is_made_from_one_order_of_the_rows(strategy):
    """A function that is called for each replica begins the same epoch in each call."""
    rows = Dataset.range(24).shuffle(seed=1)

    def part(context):
        shuffled = Dataset.from_tensor_slices(np.array(list(rows)))
        mine = shuffled.shard(context.num_input_pipelines, context.input_pipeline_id)
        return mine.batch(24)

    (parts,) = steps_of(strategy, strategy.distribute_datasets_from_function(part, PER_REPLICA))
    assert sorted(np.concatenate(parts)) == list(range(24))
    assert len(set(gathered(str(list(rows))))) == 1


def test_pipelines_of_replicas_whose_filter_iterates_a_dataset_keep_the_same_rows(strategy):
    """However many of them a rank reads."""
    others = Dataset.range(100).shuffle(seed=1)
    source = Dataset.range(24).filter(lambda row: next(iter(others)) % 3 != 0).batch(24)
    dataset = strategy.distribute_datasets_from_function(lambda _: source, PER_REPLICA)
    (parts,) = steps_of(strategy, dataset)
    assert 0 < len(parts[0]) < 24
    assert [part.tolist() for part in parts] == [parts[0].tolist()] * len(parts)


def test_a_function_that_is_called_for_each_replica_draws_nothing_above(strategy):
    def drawn(context):
        return [strategy.rng.integers(1 << 62, size=2)]

    error = raises_everywhere(
        mr.errors.ContextError,
        lambda: strategy.distribute_datasets_from_function(drawn, PER_REPLICA),
    )
    assert "the dataset_fn of distribute_datasets_from_function draws from" in str(error)
    assert len(set(gathered(strategy.rng.random()))) == 1
    strategy.distribute_datasets_from_function(drawn)  # once on each rank
    assert len(set(gathered(strategy.rng.random()))) == 1
    check_works(strategy)


ABOVE = {
    "broadcast_to": lambda strategy: strategy.extended.broadcast_to(3.0),
    "gather_objects": lambda strategy: strategy.gather_objects(strategy.rank),
    "run": lambda strategy: strategy.run(lambda: 1.0),
    "experimental_distribute_dataset": lambda strategy: strategy.experimental_distribute_dataset(
        Dataset.range(4).batch(2)
    ),
}


@pytest.mark.parametrize("call", ABOVE)
def test_a_function_that_is_called_for_each_replica_calls_nothing_above(strategy, call):
    def calling(context):
        ABOVE[call](strategy)
        return [np.ones(2)]

    error = raises_everywhere(
        mr.errors.ContextError,
        lambda: strategy.distribute_datasets_from_function(calling, PER_REPLICA),
    )
    words = f"{call} was called while the dataset_fn of distribute_datasets_from_function runs"
    assert words in str(error)
    strategy.distribute_datasets_from_function(calling)  # once on each rank
    check_works(strategy)


def test_pipelines_of_a_rank_may_fill_one_buffer(strategy):
    buffer = np.empty(2)

    class Filling:
        def __init__(self, pipeline):
            self.pipeline = pipeline

        def __iter__(self):
            for number in range(3):
                buffer[:] = 10 * self.pipeline + number
                yield buffer

    def filling(context):
        return Filling(context.input_pipeline_id)

    dataset = strategy.distribute_datasets_from_function(filling, PER_REPLICA)
    ids = range(strategy.num_replicas_in_sync)
    seen = []
    for step in dataset:  # not kept: each is the next one's memory
        seen += steps_of(strategy, [step])
    found = [[part.tolist() for part in parts] for parts in seen]
    assert found == [[[10.0 * i + number] * 2 for i in ids] for number in range(3)]


def test_pipelines_of_a_rank_that_get_one_iterator_are_an_error_everywhere(strategy):
    """Each would get what the others leave; where it has a rank to itself it gets all."""
    if max(gathered(len(strategy.local_replica_ids))) == 1:
        pytest.skip("each rank has a single pipeline")
    batches = iter([np.full(1, number) for number in range(4)])

    def distribute():
        strategy.distribute_datasets_from_function(lambda context: batches, PER_REPLICA)
        strategy.barrier()  # where ranks of one replica hear of it

    error = raises_everywhere(ValueError, distribute)
    assert "gives input pipelines " in str(error)
    assert "one and the same list_iterator" in str(error)
    check_works(strategy)


def test_nests_of_a_pipeline_without_batches_are_filled_like_those_of_the_others(strategy):
    def batches(context):
        is_last = context.input_pipeline_id == context.num_input_pipelines - 1
        return [{"x": np.ones((2, 5), np.int8), "y": (np.ones(2),)}] if is_last else []

    steps = list(strategy.distribute_datasets_from_function(batches, PER_REPLICA))
    R = strategy.num_replicas_in_sync
    (x,) = steps_of(strategy, [step["x"] for step in steps])
    (y,) = steps_of(strategy, [step["y"][0] for step in steps])
    assert [part.shape for part in x] == [(0, 5)] * (R - 1) + [(2, 5)]
    assert [part.shape for part in y] == [(0,)] * (R - 1) + [(2,)]
    assert {(a.dtype.name, b.dtype.name) for a, b in zip(x, y, strict=True)} == {
        ("int8", "float64")
    }


def test_a_replica_whose_pipeline_has_ended_gets_none_of_its_own_kind(strategy):
    dtypes = [np.dtype(name) for name in ("int8", "float32", "complex64", "<U3", "bool")]
    last = strategy.num_replicas_in_sync - 1

    def pipeline(context):
        i = context.input_pipeline_id
        rows = np.zeros((1 if i < last else 3, 2 + i), dtypes[i % len(dtypes)])
        return Dataset.from_tensor_slices(rows).batch(1)

    steps = steps_of(strategy, strategy.distribute_datasets_from_function(pipeline, PER_REPLICA))
    assert len(steps) == 3
    for number, parts in enumerate(steps):
        for i, part in enumerate(parts):
            assert part.shape == (1 if number == 0 or i == last else 0, 2 + i)
            assert part.dtype == dtypes[i % len(dtypes)]


def test_a_dataset_of_a_pipeline_reshuffles_at_each_iteration(strategy):
    def shuffled(context):
        return Dataset.range(50).shuffle(seed=context.input_pipeline_id).batch(50)

    dataset = strategy.distribute_datasets_from_function(shuffled, PER_REPLICA)
    ((*first,), (*second,)) = (steps_of(strategy, dataset)[0] for _ in range(2))
    for one, other in zip(first, second, strict=True):
        assert one.tolist() != other.tolist()
        assert sorted(one) == sorted(other) == list(range(50))


def test_a_place_in_mid_epoch_is_one_of_as_many_replicas_at_each_pipeline(strategy):
    """They take turns: with others rows would be lost, or come twice."""

    def rows(context):
        return Dataset.range(24 + context.input_pipeline_id).batch(1)

    dataset = strategy.distribute_datasets_from_function(rows)
    begun = iter(dataset)
    next(begun)
    state = dataset.state_dict()
    expected = steps_of(strategy, list(begun))
    without = {key: value for key, value in state.items() if key != "replicas"}
    for given in (state, without):  # states of older versions do not tell
        dataset.load_state_dict(given)
        assert str(steps_of(strategy, list(dataset))) == str(expected)
    counts = [count + (rank == strategy.size - 1) for rank, count in enumerate(state["replicas"])]
    with mr.MPIStrategy(replicas_per_rank=counts[strategy.rank]) as other:
        dataset = other.distribute_datasets_from_function(rows)
        for loading in (dataset, iter(dataset)):
            error = raises_everywhere(ValueError, lambda to=loading: to.load_state_dict(state))
            last, had = strategy.size - 1, state["replicas"][-1]
            text = f"replicas at input pipeline {last} was {had} then, and is {had + 1} now: rows"
            assert text in str(error)
            loading.load_state_dict({**state, "steps": 0})


def test_batches_of_other_structure_on_replicas_of_one_rank_are_an_error_everywhere(strategy):
    mine = strategy.local_replica_ids
    if gathered(len(mine))[-1] == 1:
        pytest.skip("the last rank has a single replica, which agrees with itself")
    is_last = strategy.rank == strategy.size - 1

    def batches(context):
        return [{"x": np.ones(2)}, {"x": np.ones(2)}, {"y" if is_last else "x": np.ones(2)}] * 3

    iterator = iter(strategy.distribute_datasets_from_function(batches))

    def epoch():
        for step in iterator:
            strategy.run(lambda batch: None, args=(step,))

    error = raises_everywhere(mr.errors.StructureMismatchError, epoch)
    assert "a distributed dataset got different structures: " in str(error)
    assert "{'y': *}" in str(error)
    check_works(strategy)


def test_per_replica_mode_is_for_functions_only(strategy):
    with pytest.raises(NotImplementedError, match="distribute_datasets_from_function"):
        strategy.experimental_distribute_dataset(Dataset.range(4).batch(2), PER_REPLICA)


def test_input_context(strategy):
    context = mr.InputContext(2, 1, 4)
    assert context.get_per_replica_batch_size(12) == 3
    with pytest.raises(ValueError, match=r"10.*4"):
        context.get_per_replica_batch_size(10)
    for wrong in ("12", 12.0):
        with pytest.raises(TypeError, match="global_batch_size must be an integer"):
            context.get_per_replica_batch_size(wrong)
    assert str(context) == "mr.InputContext(input pipeline id 1, total: 2)"
    assert mr.InputContext() == mr.InputContext(1, 0, 1)


# Values from a function


def test_values_from_a_function_are_those_of_each_replica(strategy):
    R = strategy.num_replicas_in_sync
    make = strategy.experimental_distribute_values_from_function
    shared = np.ones(3)
    cases = [
        (lambda c: 1.0, lambda i: 1.0),
        (lambda c: shared, lambda i: shared),
        (lambda c: np.arange(R)[c.replica_id_in_sync_group], lambda i: i),
        (lambda c: c.num_replicas_in_sync, lambda i: R),
    ]
    for value_fn, expected in cases:
        value = make(value_fn)
        assert isinstance(value, mr.PerReplica)
        assert value.replica_ids == strategy.local_replica_ids
        for i, component in zip(value.replica_ids, value.values, strict=True):
            np.testing.assert_array_equal(component, expected(i))
    nest = make(lambda c: (1.0, {"a": 2.0 * c.replica_id_in_sync_group}))
    assert isinstance(nest, tuple)
    assert nest[1]["a"].values == tuple(2.0 * i for i in strategy.local_replica_ids)
    doubled = strategy.run(lambda x: x[1]["a"] * 2, args=(nest,))
    assert strategy.reduce("SUM", doubled, axis=None) == 2.0 * R * (R - 1)


def test_value_context():
    assert mr.ValueContext() == mr.ValueContext(0, 1)
    text = "mr.ValueContext(replica id 1, total replicas in sync: 4)"
    assert str(mr.ValueContext(1, 4)) == text
    assert mr.experimental.ValueContext is mr.ValueContext
