"""merge_call (DESIGN.md sections 4 and 6, decisions 2 and 18; tf_semantics.md 2.4, 35 to 49)."""

import collections
import dataclasses
import fractions
import functools

import ml_dtypes
import numpy as np
import pytest

import mpi_replica as mr
from contributions import laid_out
from everywhere import (
    check_works,
    culprits,
    gathered,
    needs_two_ranks,
    needs_two_replicas,
    raises_everywhere,
)

LARGE = 1 << 14  # items of 8 bytes: such leaves are gathered when they are looked at


@dataclasses.dataclass
class Record:
    """An object of the program."""

    name: str
    rows: list


Pair = collections.namedtuple("Pair", ["left", "right"])


#: The dtypes of ml_dtypes. Some have the same text as another one: "<f1".
NARROW = [
    found
    for found in vars(ml_dtypes).values()
    if isinstance(found, type) and issubclass(found, np.generic)
]


def mine():
    return mr.get_replica_context().replica_id_in_sync_group


def merged(strategy, merge_fn, make_args=lambda i: (), make_kwargs=lambda i: {}):
    """Return what merge_call gives in each local replica."""

    def step():
        context = mr.get_replica_context()
        i = context.replica_id_in_sync_group
        return [context.merge_call(merge_fn, make_args(i), make_kwargs(i))]

    return [value for (value,) in strategy.experimental_local_results(strategy.run(step))]


def test_three_plus_id(strategy):
    """tf_semantics.md 35: the sum of all, and each adds its own."""

    def step():
        context = mr.get_replica_context()
        three = 3 + context.replica_id_in_sync_group
        total = context.merge_call(lambda s, x: s.reduce("SUM", x, axis=None), args=(three,))
        return total + context.replica_id_in_sync_group

    count = strategy.num_replicas_in_sync
    total = sum(3 + i for i in range(count))
    expected = tuple(total + i for i in strategy.local_replica_ids)
    assert strategy.experimental_local_results(strategy.run(step)) == expected


@pytest.mark.parametrize(
    "make",
    [
        lambda i: i,
        lambda i: float(i),
        lambda i: f"replica {i}",
        lambda i: bytes([i]),
        lambda i: {i, i + 1},
        lambda i: fractions.Fraction(1, i + 1),
        lambda i: Record(f"r{i}", [i] * i),
        lambda i: None if i % 2 else i,
        lambda i: np.float32(i),
        lambda i: np.datetime64("2020-01-01") + np.timedelta64(i, "D"),
        lambda i: slice(i),
        lambda i: "x" * (1000 * i),
        lambda i: b"x" * (1 << 17),
        lambda i: int,
    ],
)
def test_merge_fn_sees_the_objects_of_all_replicas(strategy, make):
    """Decision 2: a PerReplica with R components, in order; so is one that is equal everywhere."""
    count = strategy.num_replicas_in_sync

    def merge_fn(strategy, value):
        assert isinstance(value, mr.PerReplica)
        assert value.replica_ids == tuple(range(count))
        return list(value.values)

    for seen in merged(strategy, merge_fn, lambda i: (make(i),)):
        assert seen == [make(i) for i in range(count)]
        assert [type(one) for one in seen] == [type(make(i)) for i in range(count)]


@pytest.mark.parametrize("size", [0, 1, 20, 5000, LARGE])
@pytest.mark.parametrize(
    "make",
    [
        lambda i, size: np.arange(size) + i,
        lambda i, size: np.full(size, i, ">f4"),
        lambda i, size: np.full((size, 2), i, "c16")[:, ::-1],
        lambda i, size: np.asfortranarray(np.arange(3.0 * size).reshape(3, size) + i),
        lambda i, size: np.full(size + i, i, "u1"),
        lambda i, size: np.full(size, i % 2, bool),
        lambda i, size: np.array([f"text {i}"] * size, dtype="U12"),
        lambda i, size: np.full(size, i, "m8[s]"),
        lambda i, size: np.full(size, i).astype(object),
        lambda i, size: np.array([(i, 2.0)] * size, dtype=[("a", "i4"), ("b", "f8")]),
        lambda i, size: np.empty(size + i, "V0"),
    ],
    ids="int big-endian strided fortran uneven bool str m8 object rec no-bytes".split(),
)
def test_merge_fn_sees_the_arrays_of_all_replicas(strategy, make, size):
    """Shapes and dtypes may differ between replicas; above 64 KiB looking gathers them."""
    count = strategy.num_replicas_in_sync

    def merge_fn(strategy, value):
        for found, i in zip(value.values, range(count), strict=True):
            expected = make(i, size)
            assert found.dtype == expected.dtype
            np.testing.assert_array_equal(found, expected)
        return len(value.values)

    assert set(merged(strategy, merge_fn, lambda i: (make(i, size),))) == {count}


@pytest.mark.parametrize("size", [3, 200_000])
def test_merge_fn_sees_arrays_of_every_dtype_of_ml_dtypes(strategy, size):
    def make(i):
        return [((np.arange(size) + i) % 3 + 1).astype(dtype) for dtype in NARROW]

    expected = [make(i) for i in range(strategy.num_replicas_in_sync)]

    def merge_fn(strategy, given):
        for leaf, *of_replicas in zip(given, *expected, strict=True):
            for part, wanted in zip(leaf.values, of_replicas, strict=True):
                assert part.dtype == wanted.dtype
                assert part.tobytes() == wanted.tobytes()
        return given

    for i, found in zip(
        strategy.local_replica_ids, merged(strategy, merge_fn, lambda i: (make(i),)), strict=True
    ):
        for part, wanted in zip(found, expected[i], strict=True):
            assert part.dtype == wanted.dtype
            assert part.tobytes() == wanted.tobytes()


def test_nests_keep_their_containers(strategy):
    """tf_semantics.md 2.4 and 37."""

    def merge_fn(strategy, nest):
        assert type(nest) is dict
        assert type(nest["pair"]) is Pair
        assert type(nest["ordered"]) is collections.OrderedDict
        assert nest["none"] is None
        assert all(isinstance(leaf, mr.PerReplica) for leaf in nest["list"])
        return nest["pair"].left, nest["list"][1], nest["ordered"]["z"]

    def make(i):
        nest = {"list": [i, (10 * i)], "pair": Pair(i, "same"), "none": None}
        return ({**nest, "ordered": collections.OrderedDict(z=-i)},)

    expected = [(i, 10 * i, -i) for i in strategy.local_replica_ids]
    assert merged(strategy, merge_fn, make) == expected


def test_keywords_arrive_by_name(strategy):
    """tf_semantics.md 40."""

    def merge_fn(strategy, first, *, second, third=None):
        return first, second, third

    seen = merged(strategy, merge_fn, lambda i: (i,), lambda i: {"second": 2 * i})
    assert seen == [(i, 2 * i, None) for i in strategy.local_replica_ids]


def test_none_from_all_is_none_and_from_some_a_component(strategy):
    count = strategy.num_replicas_in_sync

    def merge_fn(strategy, nothing, something):
        assert nothing is None
        return [None] if something is None else list(something.values)

    seen = merged(strategy, merge_fn, lambda i: (None, None if i == 0 else i))
    assert seen == [[None, *range(1, count)]] * len(strategy.local_replica_ids)


def test_variables_stay_themselves(strategy):
    """Decision 2: mirrored ones and those that are synchronized on read."""
    with strategy.scope():
        mirrored = mr.Variable(1.0)
        on_read = mr.Variable(
            0.0,
            synchronization=mr.VariableSynchronization.ON_READ,
            aggregation=mr.VariableAggregation.SUM,
        )

    def merge_fn(strategy, one, nest):
        return one is mirrored, nest["on_read"] is on_read, one, nest

    def step():
        context = mr.get_replica_context()
        same, same_too, one, nest = context.merge_call(merge_fn, (mirrored, {"on_read": on_read}))
        return same and same_too and one is mirrored and nest["on_read"] is on_read

    assert strategy.run(step).values == (True,) * len(strategy.local_replica_ids)


def test_a_per_replica_argument_stands_for_the_replicas_component(strategy):
    """Decision 7."""
    values = strategy.experimental_distribute_values_from_function(
        lambda context: 10 * context.replica_id_in_sync_group
    )
    count = strategy.num_replicas_in_sync
    seen = merged(strategy, lambda s, x: list(x.values), lambda i: (values,))
    assert seen == [[10 * i for i in range(count)]] * len(strategy.local_replica_ids)


def test_results_are_unpacked_per_replica(strategy):
    """Decision 18, tf_semantics.md 37 and 2.5: containers are new, other objects shared."""
    shared = Record("shared", [])

    def merge_fn(strategy, x):
        return {"p": x, "q": [x, 3, None, "s"], "shared": shared}

    seen = merged(strategy, merge_fn, lambda i: (i,))
    for i, found in zip(strategy.local_replica_ids, seen, strict=True):
        assert found == {"p": i, "q": [i, 3, None, "s"], "shared": shared}
        assert found["shared"] is shared
    assert len({id(found["q"]) for found in seen}) == len(seen)


def test_merge_fn_runs_once_per_rank(strategy):
    """Decision 18: on identical inputs, the function of the lowest local replica."""
    log = []

    def make(i):
        def merge_fn(strategy, value):
            log.append((i, value.values))

        return merge_fn

    strategy.run(lambda: mr.get_replica_context().merge_call(make(mine()), (mine(),)))
    count = strategy.num_replicas_in_sync
    assert log == [(strategy.local_replica_ids[0], tuple(range(count)))]


@pytest.mark.parametrize("size", [3, LARGE])
def test_reductions_inside_merge_fn(strategy, size):
    """reduce, gather, reduce_to and batch_reduce_to, also of what was not looked at."""
    count = strategy.num_replicas_in_sync
    total = sum(range(count))

    def merge_fn(strategy, x, rows):
        first = strategy.reduce("SUM", x, axis=None)
        mean = strategy.reduce("MEAN", rows, axis=0)
        all_rows = strategy.gather(rows, axis=0)
        to_all = strategy.extended.reduce_to("SUM", x, x)
        to_last = strategy.extended.reduce_to("MAX", x, strategy.size - 1)
        one, two = strategy.extended.batch_reduce_to("SUM", [(x, None), (rows["a"], None)][:1] * 2)
        assert (to_last is None) == (strategy.rank != strategy.size - 1)
        return first, mean, all_rows, to_all, one, two

    def make(i):
        return np.full(size, i), {"a": np.full((size + i, 2), i)}

    weighted = sum(i * (size + i) for i in range(count)) / sum(size + i for i in range(count))
    for first, mean, all_rows, *same in merged(strategy, merge_fn, make):
        np.testing.assert_array_equal(first, np.full(size, total))
        np.testing.assert_allclose(mean["a"], [weighted] * 2)
        expected = np.concatenate([np.full((size + i, 2), i) for i in range(count)])
        np.testing.assert_array_equal(all_rows["a"], expected)
        for one in same:
            np.testing.assert_array_equal(one, np.full(size, total))


@pytest.mark.parametrize("size", [3, LARGE])
def test_local_results_inside_merge_fn_are_those_of_all_replicas(strategy, size):
    count = strategy.num_replicas_in_sync

    def merge_fn(strategy, x):
        return [one[0] for one in strategy.experimental_local_results(x)]

    seen = merged(strategy, merge_fn, lambda i: (np.full(size, i),))
    assert seen == [list(range(count))] * len(strategy.local_replica_ids)


@pytest.mark.parametrize("kind", ["alone", "beside an argument", "beside a plain value"])
@pytest.mark.parametrize("size", [3, LARGE])
def test_of_what_was_made_outside_local_results_are_of_all_replicas_too(strategy, size, kind):
    """A sum over them would depend on the layout."""
    count = strategy.num_replicas_in_sync
    outside = strategy.experimental_distribute_values_from_function(
        lambda context: np.full(size, context.replica_id_in_sync_group)
    )

    def merge_fn(strategy, x):
        beside = {"alone": (), "beside an argument": (x,), "beside a plain value": (7,)}[kind]
        found = strategy.experimental_local_results((outside, *beside))
        for i, (mine, *others) in enumerate(found):
            np.testing.assert_array_equal(mine, np.full(size, i), strict=True)
            assert (
                others
                == {"alone": [], "beside an argument": [i], "beside a plain value": [7]}[kind]
            )
        return len(found)

    assert merged(strategy, merge_fn, lambda i: (i,)) == [count] * len(strategy.local_replica_ids)
    assert len(strategy.experimental_local_results(outside)) == len(strategy.local_replica_ids)


def test_what_was_made_outside_and_can_not_travel_is_told_on_every_layout(strategy):
    needs_two_replicas(strategy)
    outside = strategy.experimental_distribute_values_from_function(
        lambda context: (lambda: None) if context.replica_id_in_sync_group == 0 else 1
    )

    def look():
        merged(
            strategy, lambda strategy: strategy.experimental_local_results([7, outside]) and None
        )

    text = str(raises_everywhere(TypeError, look))
    assert "experimental_local_results can't pickle the function of value[1] of replica 0" in text
    check_works(strategy)


@pytest.mark.parametrize("make", [lambda i: {i}, lambda i: np.full(3, i), lambda i: np.zeros(())])
def test_of_what_was_made_outside_a_rank_keeps_its_own(strategy, make):
    outside = strategy.experimental_distribute_values_from_function(
        lambda context: make(context.replica_id_in_sync_group)
    )
    before = strategy.experimental_local_results(outside)

    def look(strategy):
        found = strategy.experimental_local_results((outside, outside))
        for i, mine in zip(strategy.local_replica_ids, before, strict=True):
            assert found[i][0] is mine
            assert found[i][1] is mine

    merged(strategy, look)


@pytest.mark.parametrize(
    "of",
    [
        lambda table: table[:, ::3],
        lambda table: table.T,
        lambda table: table.T[::2],
        lambda table: laid_out(table, "unaligned"),
    ],
)
def test_sums_of_what_was_made_outside_have_the_same_bits_on_all_ranks(strategy, of):
    needs_two_replicas(strategy)
    table = np.random.default_rng(1).normal(size=(300, 400)).astype("f4")
    outside = strategy.run(lambda: of(table))

    def sums(strategy):
        return [float(one.sum()) for one in strategy.experimental_local_results(outside)]

    expected = float(np.array(of(table), order="C").sum())
    for found in merged(strategy, sums):
        assert found == [expected] * strategy.num_replicas_in_sync


def columns_of_a_file(path, i):
    """Of which each replica has another part, and a file of its own."""
    file = f"{path}.{i}"
    np.random.default_rng(i).normal(size=(1000, 100)).astype("f4").tofile(file)
    return np.memmap(file, "f4", "r", shape=(1000, 100))[:, i : i + 50]


def unaligned_numbers(path, i):
    numbers = np.random.default_rng(i).normal(size=100_000).astype("f4")
    return laid_out(numbers, "unaligned")


@pytest.mark.parametrize("make", [unaligned_numbers, columns_of_a_file])
def test_sums_in_merge_fn_have_the_bits_of_those_of_a_copy_that_is_aligned_and_in_c_order(
    strategy, make, path
):
    given = {i: make(path, i) for i in strategy.local_replica_ids}
    own = [float(np.array(one, order="C", subok=False).sum()) for one in given.values()]
    expected = [total for of_rank in gathered(own) for total in of_rank]

    def sums(strategy, x):
        return x, [float(part.sum()) for part in strategy.experimental_local_results(x)]

    found = merged(strategy, sums, lambda i: (given[i],))
    for i, (same, of_all) in zip(strategy.local_replica_ids, found, strict=True):
        assert of_all == expected
        assert same is given[i]


@pytest.mark.parametrize("is_locked", [False, True])
def test_what_was_made_outside_is_written_or_not_as_where_it_was_made(strategy, is_locked):
    def step():
        array = np.arange(4.0)
        array.flags.writeable = not is_locked
        record = np.zeros(2, [("x", "f8")])[0]
        return array, record

    outside = strategy.run(step)

    def write(strategy):
        found = []
        for array, record in strategy.experimental_local_results(outside):
            record["x"] = 5
            found.append((array.flags.writeable, float(record["x"])))
        return found

    for found in merged(strategy, write):
        assert found == [(not is_locked, 5.0)] * strategy.num_replicas_in_sync


def test_ranks_that_look_at_other_parts_of_what_was_made_outside_are_told(strategy):
    needs_two_ranks(strategy)
    outside = strategy.experimental_distribute_values_from_function(lambda context: 1)

    def look(strategy):
        nest = [outside, 1] if strategy.rank else [1, outside]
        strategy.experimental_local_results(nest)

    error = raises_everywhere(mr.errors.CollectiveMismatchError, lambda: merged(strategy, look))
    assert "value[0]" in str(error)
    assert "value[1]" in str(error)
    check_works(strategy)


def test_local_results_of_what_was_made_outside_on_one_rank_alone_are_an_error(strategy):
    needs_two_ranks(strategy)
    outside = strategy.experimental_distribute_values_from_function(lambda context: 1)

    def look(strategy):
        if strategy.rank:
            strategy.experimental_local_results(outside)

    raises_everywhere(mr.errors.CollectiveMismatchError, lambda: merged(strategy, look))
    check_works(strategy)


@pytest.mark.parametrize("size", [3, LARGE])
def test_update_inside_merge_fn(strategy, size):
    with strategy.scope():
        weights = mr.Variable(np.zeros(size))

    def merge_fn(strategy, gradient):
        total = strategy.extended.reduce_to("SUM", gradient, weights)
        strategy.extended.update(weights, lambda v, g: v.assign_sub(g), args=(total,))
        with pytest.raises(ValueError, match="PerReplica"):
            strategy.extended.update(weights, lambda v, g: v.assign(g), args=(gradient,))

    merged(strategy, merge_fn, lambda i: (np.full(size, float(i)),))
    count = strategy.num_replicas_in_sync
    np.testing.assert_array_equal(weights.numpy(), np.full(size, -sum(range(count))))


def test_an_argument_that_aliases_a_variable_keeps_its_value_in_update(strategy):
    """Section 6: storage that update is about to write is copied first."""
    with strategy.scope():
        weights = mr.Variable(np.ones(LARGE))

    def merge_fn(strategy, value):
        strategy.extended.update(weights, lambda v: v.assign(np.full(LARGE, 5.0)))
        return [one[0] for one in value.values]

    count = strategy.num_replicas_in_sync
    seen = merged(strategy, merge_fn, lambda i: (weights.numpy(),))
    assert seen == [[1.0] * count] * len(strategy.local_replica_ids)


def test_scope_and_run_inside_merge_fn(strategy):
    """tf_semantics.md 41: run with further all_reduces and merge_calls."""
    count = strategy.num_replicas_in_sync

    def innermost(strategy, x):
        return strategy.reduce("MAX", x, axis=None)

    def inner(x):
        context = mr.get_replica_context()
        total = context.all_reduce("SUM", x)
        return context.merge_call(innermost, (total + context.replica_id_in_sync_group,))

    def merge_fn(strategy, x):
        with strategy.scope():
            again = strategy.run(inner, args=(x,))
        return strategy.reduce("MEAN", again, axis=None)

    def step():
        context = mr.get_replica_context()
        found = context.merge_call(merge_fn, (context.replica_id_in_sync_group,))
        assert mr.get_replica_context() is context
        return context.all_reduce("SUM", found)

    expected = count * (sum(range(count)) + count - 1)
    assert set(strategy.experimental_local_results(strategy.run(step))) == {expected}


def test_a_run_inside_merge_fn_returns_values_of_this_rank_and_unpacks_them(strategy):
    def merge_fn(strategy, x):
        return strategy.run(lambda x: x + 100, args=(x,))

    seen = merged(strategy, merge_fn, lambda i: (i,))
    assert seen == [100 + i for i in strategy.local_replica_ids]


def test_partials_and_bound_methods_are_the_same_function(strategy):
    """Decision 18: objects differ even inside one rank."""

    class Model:
        def __init__(self, rate):
            self.rate = rate

        def merge(self, strategy, x, scale=1):
            return strategy.reduce("SUM", x, axis=None) * scale

    def step():
        context = mr.get_replica_context()
        bound = Model(0.5).merge
        partial = functools.partial(bound, scale=2)
        return context.merge_call(bound, (1,)) + context.merge_call(partial, (1,))

    expected = 3 * strategy.num_replicas_in_sync
    assert set(strategy.experimental_local_results(strategy.run(step))) == {expected}


@pytest.mark.parametrize("is_last_call", [True, False])
@pytest.mark.parametrize(
    "make",
    [
        lambda i: i,
        lambda i: {"a": [1, f"{i}"]},
        lambda i: np.full(8192, i),
        lambda i: mr.IndexedSlices([1.0], [0], (1 + i,)),
        lambda i: np.array(["a", f"{i}"], object),
        lambda i: {1, i},
        lambda i: memoryview(bytes([i]) * (1 << 20)),
    ],
)
def test_a_result_that_differs_says_to_pass_it_through_args(strategy, make, is_last_call):
    """Decision 18: what merge_fn captures can differ; the next header tells."""
    needs_two_ranks(strategy)

    def step():
        context = mr.get_replica_context()
        captured = make(context.replica_id_in_sync_group)
        found = context.merge_call(lambda strategy: captured)
        return 0 if is_last_call else context.all_reduce("SUM", 1.0), found

    error = raises_everywhere(mr.errors.CollectiveMismatchError, lambda: strategy.run(step))
    assert "through args" in str(error)
    assert "test_merge_call.py:" in str(error)
    check_works(strategy)


def test_results_that_are_equal_in_other_places_and_orders_are_no_mistake(strategy):
    order = 1 if strategy.rank == 0 else -1
    result = [
        {f"key {i}" for i in range(9)[::order]},
        {frozenset([0, 8][::order]): np.array([object()])},
        memoryview(np.zeros(1 << 17)[::order]),
        np.ma.array([1.0, strategy.rank], mask=[False, True]),
    ]
    for _ in range(2):
        strategy.run(lambda: mr.get_replica_context().merge_call(lambda strategy: result))
    check_works(strategy)


def test_results_that_differ_as_per_replica_are_no_mistake(strategy):
    """Decision 18: leaves that are a PerReplica are not compared."""
    seen = merged(strategy, lambda s, x: [x, {"y": x}], lambda i: (np.full(3, i),))
    for i, (x, nest) in zip(strategy.local_replica_ids, seen, strict=True):
        np.testing.assert_array_equal(x, np.full(3, i))
        np.testing.assert_array_equal(nest["y"], np.full(3, i))


def test_another_function_on_one_replica_is_told(strategy):
    """Decision 18, tf_semantics.md 44."""
    needs_two_replicas(strategy)
    for culprit in culprits(strategy):

        def step(culprit=culprit):
            i = mine()
            chosen = (lambda s, x: x) if i == culprit else (lambda s, x: 2)
            return mr.get_replica_context().merge_call(chosen, (i,))

        error = raises_everywhere(
            mr.errors.CollectiveMismatchError, lambda step=step: strategy.run(step)
        )
        assert "<lambda> at test_merge_call.py:" in str(error)
        check_works(strategy)


def test_a_merge_call_that_one_replica_skips_or_repeats(strategy):
    """tf_semantics.md 43 and 46."""
    needs_two_replicas(strategy)

    def step(number_of_calls):
        context = mr.get_replica_context()
        for _ in range(number_of_calls(context.replica_id_in_sync_group)):
            context.merge_call(lambda strategy: 1)

    for number_of_calls in (lambda i: i % 2, lambda i: i + 1):
        raises_everywhere(
            mr.errors.CollectiveMismatchError,
            lambda number_of_calls=number_of_calls: strategy.run(step, (number_of_calls,)),
        )
        check_works(strategy)
    strategy.run(step, (lambda i: 2,))


def test_repr_never_communicates(strategy):
    """Section 6, on one rank only; before and after looking."""
    local = strategy.local_replica_ids
    count = strategy.num_replicas_in_sync
    texts = []

    def merge_fn(strategy, x):
        if strategy.rank == strategy.size - 1:
            texts.append(repr(x))
            texts.append(str([x]))
        assert len(x.values) == count
        texts.append(repr(x))

    merged(strategy, merge_fn, lambda i: (np.full(LARGE, i),))
    assert "not gathered" not in texts[-1]
    if strategy.rank == strategy.size - 1:
        assert texts[1] == f"[{texts[0]}]"
        for i in range(count):
            assert (f"<replica {i}: not gathered>" in texts[0]) == (i not in local)
    check_works(strategy)


def test_looking_after_merge_fn_returned_is_a_context_error(strategy):
    """Section 6."""
    needs_two_ranks(strategy)
    kept = []

    def merge_fn(strategy, x, y):
        assert len(y.values) == strategy.num_replicas_in_sync
        kept[:] = [x, y]

    merged(strategy, merge_fn, lambda i: (np.full(LARGE, i), np.full(LARGE, i)))
    with pytest.raises(mr.errors.ContextError, match="after merge_fn had returned"):
        _ = kept[0].values
    assert len(kept[1].values) == strategy.num_replicas_in_sync
    assert "not gathered" in repr(kept[0])
    check_works(strategy)


@pytest.mark.parametrize("then", ["return", "reduce", "all_reduce"])
def test_looking_on_one_rank_only_is_an_error_everywhere(strategy, then):
    """Section 6: it says to look on all ranks before branching on the rank."""
    needs_two_ranks(strategy)
    for culprit in sorted({0, strategy.size // 2, strategy.size - 1}):

        def merge_fn(strategy, x, culprit=culprit):
            if strategy.rank == culprit:
                _ = x.values
            if then == "reduce":
                strategy.reduce("SUM", x, axis=None)

        def step(merge_fn=merge_fn):
            context = mr.get_replica_context()
            context.merge_call(merge_fn, (np.full(LARGE, context.replica_id_in_sync_group),))
            if then == "all_reduce":
                context.all_reduce("SUM", 1.0)

        error = raises_everywhere(
            mr.errors.CollectiveMismatchError, lambda step=step: strategy.run(step)
        )
        assert "look at it on all ranks before branching on the rank" in str(error)
        assert f"(rank {culprit})" in str(error)
        check_works(strategy)


@pytest.mark.parametrize("look", ["values", "local results", "reduce first"])
def test_large_arrays_next_to_small_ones_and_objects(strategy, look):
    """Looking is a call of all ranks, also of one that holds all large components itself."""
    count = strategy.num_replicas_in_sync

    def make(i):
        return (np.full(LARGE if i % 2 else 3, i), "text" if i == 0 else np.full(LARGE, i))

    def looked_at(value):
        if look == "local results":
            return strategy.experimental_local_results(value)
        return value.values

    def merge_fn(strategy, uneven, mixed):
        if look == "reduce first":
            assert strategy.reduce("MAX", uneven, axis=0) == count - 1
        return (
            [one.size for one in looked_at(uneven)],
            [one if isinstance(one, str) else int(one[0]) for one in looked_at(mixed)],
        )

    expected = (
        [LARGE if i % 2 else 3 for i in range(count)],
        ["text", *range(1, count)],
    )
    for seen in merged(strategy, merge_fn, make):
        assert seen == expected


def test_what_can_not_be_pickled_is_told_on_every_rank(strategy):
    """Section 6: pickling happens before the header. On one rank nothing travels."""
    needs_two_ranks(strategy)
    for culprit in culprits(strategy):

        def step(culprit=culprit):
            i = mine()
            value = (lambda: i) if i == culprit else i
            return mr.get_replica_context().merge_call(lambda strategy, x: 1, (value,))

        error = raises_everywhere(Exception, lambda step=step: strategy.run(step))
        assert "pickle" in str(error)
        check_works(strategy)


def test_arrays_of_other_replicas_are_as_writable_as_ones_own(strategy):
    def merge_fn(strategy, small, large):
        for array in (*small.values, *large.values):
            array += 1
        return [int(array[0]) for array in small.values]

    seen = merged(strategy, merge_fn, lambda i: (np.full(3, i), np.full(LARGE, i)))
    expected = [i + 1 for i in range(strategy.num_replicas_in_sync)]
    assert seen == [expected] * len(strategy.local_replica_ids)


@pytest.mark.parametrize("length", [3, LARGE])
def test_what_a_merge_fn_writes_into_one_component_is_not_in_another(strategy, length):
    """Also where the replicas of a rank give one array, a constant of the module, say."""
    table = np.ones(length)

    def double(strategy, x):
        for part in strategy.experimental_local_results(x):
            part *= 2
        return strategy.reduce("SUM", x, axis=None)

    total = 2.0 * strategy.num_replicas_in_sync
    for found in merged(strategy, double, lambda i: (table,)):
        np.testing.assert_array_equal(found, np.full(length, total))


#: What replicas may give of which a merge_fn can change the items, and how it gets at these.
CHANGEABLE = {
    "array": (lambda length: np.ones(length), lambda value: value),
    "slices": (lambda n: mr.IndexedSlices(np.ones(n), np.arange(n)), lambda value: value.values),
    "record": (lambda n: np.ones(1, [("x", float, n)])[0], lambda value: value["x"]),
    "bytes": (lambda n: bytearray([1] * n), lambda value: np.frombuffer(value, np.uint8)),
    "object": (lambda n: Record("one", np.ones(n)), lambda value: value.rows),
    "list in an array": (lambda n: np.array([[1.0] * n, None], object)[:1], lambda value: value[0]),
}


@pytest.mark.parametrize("length", [3, LARGE])
@pytest.mark.parametrize("kind", CHANGEABLE)
def test_what_all_give_as_one_object_is_one_of_each_in_merge_fn(strategy, kind, length):
    make, items_of = CHANGEABLE[kind]
    given = make(length)

    def weighed(strategy, value):
        parts = strategy.experimental_local_results(value)
        for i, part in enumerate(parts):
            items_of(part)[0] = i + 10
        return [float(items_of(part)[0]) for part in parts]

    expected = [i + 10.0 for i in range(strategy.num_replicas_in_sync)]
    assert merged(strategy, weighed, lambda i: (given,)) == [expected] * len(
        strategy.local_replica_ids
    )


def test_a_merge_fn_without_the_strategy_is_told_that_it_gets_that_first(strategy):
    def forgetful(x):
        return x

    def step():
        return mr.get_replica_context().merge_call(forgetful, args=(1.0,))

    error = raises_everywhere(TypeError, lambda: strategy.run(step))
    (note, *_) = error.__notes__
    assert "forgetful at test_merge_call.py:" in note
    assert "gets the strategy first, and then what merge_call at test_merge_call.py:" in note
    check_works(strategy)


@pytest.mark.parametrize("kind", [set, bytearray, lambda: Record("one", [])])
def test_an_object_of_a_rank_is_on_all_ranks_as_it_was_when_a_replica_gave_it(strategy, kind):
    """Those that come behind change it. On one rank alone all get what has become of it."""
    needs_two_ranks(strategy)
    of_rank = kind()
    items = of_rank if isinstance(of_rank, (set, bytearray)) else of_rank.rows
    add = items.add if isinstance(items, set) else items.append

    def argument(i):
        add(i)
        return (of_rank,)

    def sizes(strategy, given):
        parts = strategy.experimental_local_results(given)
        return [len(part.rows if isinstance(part, Record) else part) for part in parts]

    expected = [
        1 + position for ids in gathered(strategy.local_replica_ids) for position in range(len(ids))
    ]
    found = merged(strategy, sizes, argument)
    assert found == [expected] * len(strategy.local_replica_ids)


@pytest.mark.parametrize("length", [3, LARGE])
@pytest.mark.parametrize("kind", ["array", "slices", "record"])
@pytest.mark.parametrize("is_shared", [False, True])
def test_what_is_read_only_is_so_in_merge_fn_whichever_replica_has_given_it(
    strategy, kind, length, is_shared
):
    make, _ = CHANGEABLE[kind]

    def argument(i):
        value = make(length)
        if i % 2:
            value = np.array([value]) if kind == "record" else value
            for array in (value.values, value.indices) if kind == "slices" else (value,):
                array.flags.writeable = False
        return value[0] if i % 2 and kind == "record" else value

    shared = argument(1), argument(0)

    def flags(strategy, *values):
        parts = [part for value in values for part in strategy.experimental_local_results(value)]
        if kind == "slices":
            return [(part.values.flags.writeable, part.indices.flags.writeable) for part in parts]
        return [part.flags.writeable for part in parts]

    number = strategy.num_replicas_in_sync
    expected = [not i % 2 for i in range(number)]
    if is_shared:
        expected = [False] * number + [True] * number
    if kind == "slices":
        expected = [(flag, flag) for flag in expected]
    found = merged(strategy, flags, lambda i: shared if is_shared else (argument(i),))
    assert found == [expected] * len(strategy.local_replica_ids)


@pytest.mark.parametrize("length", [7, 70003])
def test_every_component_is_aligned_whatever_lies_before_it(strategy, length):
    """Of another dtype and length on each replica."""
    dtypes = [np.int8, np.float64, np.int16, np.complex128]

    def argument(i, shift):
        return np.full(length + i, i, dtypes[(i + shift) % 4])

    seen = []

    def look(strategy, given):
        for shift, leaf in enumerate(given):
            for i, part in enumerate(strategy.experimental_local_results(leaf)):
                np.testing.assert_array_equal(part, argument(i, shift), strict=True)
                seen.append(part.flags.aligned and part.flags.writeable)

    merged(strategy, look, lambda i: ([argument(i, shift) for shift in range(4)],))
    assert seen == [True] * 4 * strategy.num_replicas_in_sync


def test_an_object_that_is_too_large_to_travel_says_what_to_do(strategy):
    """Memory that is never touched takes none."""
    needs_two_ranks(strategy)
    for culprit in culprits(strategy):

        def call(culprit=culprit):
            size = {culprit: 1 << 31}
            merged(strategy, lambda s, x: None, lambda i: ({"x": bytes(size.get(i, 3))},))

        text = str(raises_everywhere(ValueError, call))
        assert "merge_call got bytes of 2.1 GB for value[0][0]['x']" in text
        assert "Pass arrays" in text
    check_works(strategy)
