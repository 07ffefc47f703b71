"""Any chain of verbs of mr.data.Dataset does what the verbs do to lists."""

import itertools

import hypothesis.strategies as st
import numpy as np
from hypothesis import assume, given, settings

from datasets import generated, lists, order
from mpi_replica.data import AUTOTUNE, UNKNOWN_CARDINALITY, Dataset

# A reference of a dataset is a function from the epoch to the list of its elements.


class Ragged(Exception):
    pass


def random(seed, epoch):
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, epoch])))


def batched_by(elements_of, size, drop):
    def batches_of(epoch):
        rows = elements_of(epoch)
        batches = [rows[i : i + size] for i in range(0, len(rows), size)]
        if drop and batches and len(batches[-1]) < size:
            batches.pop()
        for batch in batches:
            try:
                np.array(batch)
            except ValueError:
                raise Ragged from None
        return batches

    return batches_of


def permuted(elements_of, seed, reshuffle):
    def permutation_of(epoch):
        rows = elements_of(epoch)
        numbers = order(len(rows), seed, epoch if reshuffle else 0)
        return [rows[i] for i in numbers]

    return permutation_of


def drawn_from_buffer(elements_of, size, seed, reshuffle):
    def draws_of(epoch):
        rng = random(seed, epoch if reshuffle else 0)
        buffer, out = [], []
        for row in elements_of(epoch):
            if len(buffer) == size:
                out.append(buffer.pop(i := int(rng.integers(size))))
                buffer.insert(i, row)
            else:
                buffer.append(row)
        return out + [buffer[i] for i in rng.permutation(len(buffer))]

    return draws_of


def repeated(elements_of, count):
    return lambda epoch: [
        row for number in range(count) for row in elements_of(epoch * count + number)
    ]


def part_of(elements_of, part):
    return lambda epoch: elements_of(epoch)[part]


def joined(elements_of, others_of):
    return lambda epoch: elements_of(epoch) + others_of(epoch)


def unbatched(elements_of):
    return lambda epoch: [row for batch in elements_of(epoch) for row in batch]


def kept(elements_of):
    return lambda epoch: [row for row in elements_of(epoch) if is_kept(row)]


def changed(elements_of, function):
    def rows_of(epoch):
        return [each(function, row) for row in elements_of(epoch)]

    return rows_of


def each(function, row):
    return [each(function, item) for item in row] if isinstance(row, list) else function(row)


def is_kept(row):
    return np.sum(row) % 3 != 0


VERBS = st.one_of(
    st.tuples(st.just("batch"), st.integers(1, 4), st.booleans()),
    st.tuples(st.just("shuffle"), st.integers(0, 3), st.booleans(), st.integers(1, 5)),
    st.tuples(st.just("repeat"), st.integers(0, 3)),
    st.tuples(st.just("take"), st.integers(-1, 8)),
    st.tuples(st.just("skip"), st.integers(-1, 5)),
    st.integers(1, 3).flatmap(
        lambda n: st.tuples(st.just("shard"), st.just(n), st.integers(0, n - 1))
    ),
    st.tuples(st.just("map"), st.sampled_from([None, 1, 3, AUTOTUNE])),
    st.tuples(st.just("filter")),
    st.tuples(st.just("zip")),
    st.tuples(st.just("concatenate"), st.integers(0, 3)),
    st.tuples(st.just("unbatch")),
    st.tuples(st.just("prefetch"), st.sampled_from([1, 2, AUTOTUNE])),
)


@st.composite
def chains(draw, indexable=None, batched=None):
    """Return a dataset, its reference, and whether it is indexable."""
    numbers = list(range(100, 100 + draw(st.integers(0, 12))))
    may_stream = not indexable
    kind = draw(st.sampled_from(["range", "source", "slices", *["generator"] * may_stream]))
    match kind:
        case "range":
            dataset = Dataset.range(100, 100 + len(numbers))
        case "source":
            dataset = Dataset.from_source(numbers)
        case "slices":
            dataset = Dataset.from_tensor_slices(np.array(numbers, int))
        case "generator":
            dataset = generated(*numbers)
    indexable = kind != "generator"

    def reference(epoch):
        return numbers

    verbs = draw(st.lists(VERBS, max_size=5))
    if batched:
        verbs.insert(draw(st.integers(0, len(verbs))), ("batch", draw(st.integers(1, 4)), False))
    for verb, *args in verbs:
        match verb, args:
            case "batch", (size, drop):
                dataset = dataset.batch(size, drop_remainder=drop)
                reference = batched_by(reference, size, drop)
            case "repeat", (count,):
                dataset = dataset.repeat(count)
                reference = repeated(reference, count)
            case "shuffle", (seed, reshuffle, size):
                dataset = dataset.shuffle(size, seed=seed, reshuffle_each_iteration=reshuffle)
                reference = (
                    permuted(reference, seed, reshuffle)
                    if indexable
                    else drawn_from_buffer(reference, size, seed, reshuffle)
                )
            case "take", (count,):
                dataset = dataset.take(count)
                reference = part_of(reference, slice(None if count < 0 else count))
            case "skip", (count,):
                dataset = dataset.skip(count)
                reference = part_of(reference, slice(count, None) if count >= 0 else slice(0))
            case "shard", (number, index):
                dataset = dataset.shard(number, index)
                reference = part_of(reference, slice(index, None, number))
            case "map", (calls,):
                dataset = dataset.map(lambda x: 2 * x + 1, num_parallel_calls=calls)
                reference = changed(reference, lambda x: 2 * x + 1)
            case "filter", ():
                if not may_stream:
                    continue
                dataset = dataset.filter(is_kept)
                reference = kept(reference)
                indexable = False
            case "zip", ():
                dataset = Dataset.zip(dataset, dataset.map(lambda x: x * 3))
                dataset = dataset.map(lambda one, other: other - one)
                reference = changed(reference, lambda x: 2 * x)
            case "concatenate", (skipped,):
                dataset = dataset.concatenate(dataset.skip(skipped))
                reference = joined(reference, part_of(reference, slice(skipped, None)))
            case "unbatch", ():
                if not may_stream:
                    continue
                dataset = dataset.batch(2).unbatch()
                reference = unbatched(batched_by(reference, 2, False))
                indexable = False
            case "prefetch", (size,):
                dataset = dataset.prefetch(size)
    return dataset, reference, indexable


def expected(reference, epoch):
    try:
        return reference(epoch)
    except Ragged:
        assume(False)


MANY = settings(max_examples=300)


@MANY
@given(chains())
def test_chains_of_verbs_do_what_they_do_to_lists_epoch_after_epoch(chain):
    dataset, reference, indexable = chain
    for epoch in range(3):
        wanted = expected(reference, epoch)
        assert lists(dataset) == wanted
        if indexable or dataset.cardinality() >= 0:
            assert len(dataset) == dataset.cardinality() == len(wanted)
        else:
            assert dataset.cardinality() == UNKNOWN_CARDINALITY


@MANY
@given(chains(indexable=True))
def test_element_spec_is_what_the_elements_are(chain):
    dataset, reference, _ = chain
    assume(expected(reference, 0))
    spec = dataset.element_spec
    for value in dataset:
        assert value.dtype == spec.dtype
        assert len(value.shape) == len(spec.shape)
        if "map" not in repr(dataset):  # of a map the first element tells, and others may differ
            assert all(
                want in (None, got) for want, got in zip(spec.shape, value.shape, strict=True)
            )


@MANY
@given(chains(batched=True), st.integers(1, 4), st.integers(0, 2), st.integers(0, 6))
def test_the_rows_that_replicas_take_of_a_batch_make_up_the_batch_from_any_step_on(
    chain, replicas, epoch, start
):
    dataset, reference, _ = chain
    assume(dataset.is_batched)
    wanted = expected(reference, epoch)[start:]

    def rows_of(replica):
        def slice_rows(n):
            chunk = -(-n // replicas)
            return slice(min(n, replica * chunk), min(n, (replica + 1) * chunk))

        return slice_rows

    parts = [list(dataset.batches(rows_of(r), epoch=epoch, start=start)) for r in range(replicas)]
    for batch, *of_replicas in zip(wanted, *parts, strict=True):
        assert {n for n, _ in of_replicas} == {len(batch)}
        assert list(itertools.chain(*(part.tolist() for _, part in of_replicas))) == batch
    whole = dataset.batches(epoch=epoch, start=start)
    assert [(n, rows.tolist()) for n, rows in whole] == [(len(batch), batch) for batch in wanted]
