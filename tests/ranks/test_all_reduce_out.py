"""ctx.all_reduce with ``out=``: results go where the caller wants them (see mistakes_in_out.py)."""

import ctypes
import tracemalloc

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given
from numpy._core import _multiarray_umath

import mistakes_in_out
import mpi_replica as mr
from contributions import Leaf, arrays_in, at_once, build, check, native, reduced
from everywhere import check_works, holds_everywhere, needs_two_replicas, raises_everywhere
from mistake import CALL, INLINE, LARGE, MEDIUM
from mpi_replica.core.nest import map_structure
from reducing import calls, contribution, reference

# Ways to give `out`: from op, nest of Leaf and replica id to a value and its `out`.


def plain(array):
    """The same values in an array that can be reduced in place."""
    return np.array(native(array), order="C")


def result_dtype(op, leaf):
    return reduced(op, [np.ones((), leaf.dtype)]).dtype


def ones_like_result(op, leaf):
    """Zeros would hide that nothing was written."""
    return np.ones(leaf.shape, result_dtype(op, leaf))


def of_result_dtype(op, leaf, replica):
    return plain(leaf.of(replica)).astype(result_dtype(op, leaf))


def in_one_buffer(nest, make):
    """The arrays that `make` gives for the leaves, one behind the other in one buffer."""
    arrays = iter(arrays_in(build(nest, make)))
    memory = np.empty(sum(array.nbytes + 32 for array in arrays_in(build(nest, make))), np.uint8)
    start = 0

    def cut(leaf):
        nonlocal start
        array = next(arrays)
        part = memory[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
        part[...] = array
        start += array.nbytes + -array.nbytes % 16
        return part

    return build(nest, cut)


def into_arrays(op, nest, replica):
    return contribution(nest, replica), build(nest, lambda leaf: ones_like_result(op, leaf))


def into_one_buffer(op, nest, replica):
    value = in_one_buffer(nest, lambda leaf: plain(leaf.of(replica)))
    return value, in_one_buffer(nest, lambda leaf: ones_like_result(op, leaf))


def in_place(op, nest, replica):
    value = build(nest, lambda leaf: of_result_dtype(op, leaf, replica))
    return value, value


def in_place_in_one_buffer(op, nest, replica):
    """By other array objects than those of the value."""
    value = in_one_buffer(nest, lambda leaf: of_result_dtype(op, leaf, replica))
    return value, map_structure(lambda array: array[...], value)


def in_place_by_views(op, nest, replica):
    """The value has views of the arrays that it is reduced into."""
    out, _ = in_place(op, nest, replica)
    return map_structure(lambda array: array[...], out), out


def some_in_place(op, nest, replica):
    value, _ = in_place(op, nest, replica)
    turns = iter(range(1000))
    return value, map_structure(lambda array: np.copy(array) if next(turns) % 2 else array, value)


WAYS = [into_arrays, into_one_buffer, in_place, in_place_in_one_buffer, some_in_place]


def check_out(strategy, op, nest, ways, **options):
    expected = map_structure(np.asarray, reference(strategy, op, nest))
    for way in ways:
        rows = []

        def step(way=way, rows=rows):
            ctx = mr.get_replica_context()
            value, out = way(op, nest, ctx.replica_id_in_sync_group)
            before = [array.tobytes() for array in arrays_in(value)]
            result = ctx.all_reduce(op, value, mr.CommunicationOptions(**options), out=out)
            rows.append((value, before, out, result))

        def check_rows(way=way, rows=rows):
            assert len(rows) == len(strategy.local_replica_ids)
            for value, before, out, result in rows:
                assert result is out
                check(out, expected)
                if way in (into_arrays, into_one_buffer):
                    assert [array.tobytes() for array in arrays_in(value)] == before

        strategy.run(step)
        holds_everywhere(check_rows)


@at_once
@given(
    call=calls(),
    bytes_per_pack=st.sampled_from([0, 0, 1, 24, 200]),
    timeout_seconds=st.sampled_from([None, 60]),
)
def test_the_results_of_any_nest_come_into_out(strategy, call, **options):
    check_out(strategy, *call, WAYS, **options)


# By how they travel: in the header, in packs, and as streams.
NESTS = {
    "header": lambda dtype: {"z": Leaf(dtype, ()), "a": [Leaf(dtype, (2, 2), 1)]},
    "packs": lambda dtype: [Leaf(dtype, (n, 110), n, layout=n) for n in range(1, 12)],
    "streams": lambda dtype: [Leaf(dtype, (130, 151), layout=1), Leaf(dtype, (17_001,), layout=3)],
}


@pytest.mark.parametrize(
    ("op", "dtype"), [("SUM", "float64"), ("MEAN", "int32"), ("MIN", "float32"), ("SUM", "float16")]
)
@pytest.mark.parametrize("size", NESTS)
def test_results_of_all_sizes_come_into_out(strategy, size, op, dtype):
    nest = NESTS[size](dtype)
    check_out(strategy, op, nest, WAYS)
    check_out(strategy, op, nest, WAYS, bytes_per_pack=1 << 14)


@pytest.mark.parametrize("size", NESTS)
def test_a_value_may_be_made_of_views_of_the_arrays_that_it_is_reduced_into(strategy, size):
    """They are exactly the memory of the value, though not in place by the same objects."""
    check_out(strategy, "SUM", NESTS[size]("float32"), [in_place_by_views])


def test_results_of_several_mebibytes_come_into_out(strategy):
    """From 4 MiB on those in place travel in larger pieces."""
    check_out(strategy, "SUM", Leaf("float64", (727, 730)), [into_arrays, in_place])


def test_arrays_that_are_kept_get_the_results_of_call_after_call_and_nothing_is_allocated(strategy):
    count = strategy.num_replicas_in_sync
    shapes = {"large": (601, 1009), "medium": (30, 40), "small": (3,), "scalar": ()}

    def step():
        ctx = mr.get_replica_context()
        i = ctx.replica_id_in_sync_group
        out = {name: np.ones(shape) for name, shape in shapes.items()}
        kept = dict(out)
        value = {name: np.ones(shape) for name, shape in shapes.items()}
        for turn in range(4):
            for array in value.values():
                array[...] = i + turn
            if turn == 1:  # scratch memory is kept, too
                tracemalloc.reset_peak()
                start, _ = tracemalloc.get_traced_memory()
            assert ctx.all_reduce("SUM", value, out=out) is out
        ctx.all_reduce("SUM", 1)  # all replicas are here, and have done nothing else
        _, peak = tracemalloc.get_traced_memory()
        ctx.all_reduce("SUM", 1)
        for name, array in kept.items():
            assert out[name] is array
            assert (array == sum(range(count)) + count * turn).all()
        return peak - start

    tracemalloc.start()
    try:
        taken = strategy.experimental_local_results(strategy.run(step))
    finally:
        tracemalloc.stop()
    assert max(taken) < 1 << 16


def test_out_may_have_its_keys_in_another_order(strategy):
    def step():
        ctx = mr.get_replica_context()
        i = ctx.replica_id_in_sync_group
        out = {"b": np.ones(2), "a": np.ones(3)}
        return ctx.all_reduce("SUM", {"a": np.full(3, 1.0 * i), "b": np.full(2, 1.0)}, out=out)

    count = strategy.num_replicas_in_sync
    for out in strategy.experimental_local_results(strategy.run(step)):
        assert list(out) == ["b", "a"]
        assert out["a"].tolist() == [sum(range(count))] * 3
        assert out["b"].tolist() == [count] * 2


def test_values_of_replicas_and_numpy_scalars_are_reduced_into_out(strategy):
    """Decision 7: a PerReplica stands for the replica's component."""
    count = strategy.num_replicas_in_sync
    rows = strategy.experimental_distribute_values_from_function(
        lambda ctx: np.full(3, ctx.replica_id_in_sync_group)
    )

    def step():
        out = {"rows": np.ones(3, np.int64), "one": np.ones((), np.int8)}
        return mr.get_replica_context().all_reduce(
            "SUM", {"rows": rows, "one": np.int8(1)}, out=out
        )

    for out in strategy.experimental_local_results(strategy.run(step)):
        assert out["rows"].tolist() == [sum(range(count))] * 3
        assert out["one"] == count


def turned(array):
    return array.reshape(-1)[::-1].reshape(array.shape)


@pytest.mark.parametrize("view", [np.transpose, np.flipud, np.fliplr, turned])
def test_a_value_that_is_out_in_another_order_is_reduced_right_or_is_an_error(strategy, view):
    """It must not be read where a part of the result lies already."""
    count = strategy.num_replicas_in_sync
    base = np.arange(709.0 * 709).reshape(709, 709)

    def step(length):
        ctx = mr.get_replica_context()
        part = base[:length, :length]
        out = part * (ctx.replica_id_in_sync_group + 1)
        try:
            ctx.all_reduce("SUM", view(out), out=out)
        except ValueError:
            return True
        return np.array_equal(out, view(part) * (count * (count + 1) // 2))

    for length in (3, 31, 709):
        results = strategy.experimental_local_results(strategy.run(step, (length,)))
        holds_everywhere(lambda results=results: np.testing.assert_array_equal(results, True))


@pytest.mark.filterwarnings("ignore:the matrix subclass:PendingDeprecationWarning")
@pytest.mark.parametrize("size", [3, 500])
def test_out_may_be_a_matrix_of_any_size(strategy, size):
    """It has two dimensions, whatever it is reshaped to."""
    total = np.full((size, size), 1.0 * sum(range(strategy.num_replicas_in_sync)))

    def step():
        ctx = mr.get_replica_context()
        mine = np.asmatrix(np.full((size, size), 1.0 * ctx.replica_id_in_sync_group))
        other = np.asmatrix(np.ones((size, size)))
        return (
            ctx.all_reduce("SUM", np.array(mine), out=other) is other,
            ctx.all_reduce("SUM", mine, out=mine) is mine,
            other,
            mine,
        )

    for *are_out, other, mine in strategy.experimental_local_results(strategy.run(step)):
        assert are_out == [True, True]
        np.testing.assert_array_equal(other, total)
        np.testing.assert_array_equal(mine, total)


# What is wrong with `out` on all replicas at once; test_misuse.py has it on one of them.
WRONG = [mistake for mistake in mistakes_in_out.TABLE if mistake.error is not CALL]


@pytest.mark.parametrize("mistake", WRONG, ids=lambda mistake: mistake.name)
def test_what_is_wrong_with_out_everywhere_is_an_error_everywhere(strategy, mistake):
    def step():
        return mistake.in_a_step(mr.get_replica_context(), True)

    raises_everywhere(mistake.error, lambda: strategy.run(step))
    check_works(strategy)


@pytest.mark.parametrize("size", [1, INLINE, MEDIUM, LARGE])
def test_out_that_holds_the_value_of_another_replica_of_the_rank_is_an_error_everywhere(size):
    """Also where it is so on one rank alone."""
    with mr.MPIStrategy(replicas_per_rank=2) as strategy:
        for culprit in range(2 * strategy.size):
            values = {i: np.full(size, 1.0 + i) for i in strategy.local_replica_ids}

            def step(values=values, culprit=culprit):
                ctx = mr.get_replica_context()
                i = ctx.replica_id_in_sync_group
                out = values[i ^ 1] if i == culprit else np.empty(size)
                return ctx.all_reduce("SUM", values[i], out=out)

            error = raises_everywhere(ValueError, lambda step=step: strategy.run(step))
            assert "another replica of the same rank" in str(error)
            for i, value in values.items():
                assert (value == 1.0 + i).all()
        check_works(strategy)


@pytest.mark.parametrize("items", [1, INLINE, MEDIUM, LARGE])
@pytest.mark.parametrize("outs", ["shifted", "swapped", "of two leaves"])
def test_outs_of_replicas_of_a_rank_that_overlap_are_an_error_everywhere(items, outs):
    """Also where it is so on one rank alone: what one replica got, the other one would lose."""
    with mr.MPIStrategy(replicas_per_rank=2) as strategy:
        for culprit in range(strategy.size):
            memory = np.zeros(4 * items)

            def step(culprit=culprit, memory=memory):
                ctx = mr.get_replica_context()
                i = ctx.replica_id_in_sync_group
                one, other = memory[: 2 * items], memory[2 * items :]
                if strategy.rank == culprit:
                    if outs == "shifted":
                        one, other = memory[i % 2 :][: 2 * items], other.copy()
                    elif outs == "swapped" and i % 2:
                        one, other = other, one
                    elif i % 2:
                        one, other = np.empty_like(one), one
                else:
                    one, other = one.copy(), other.copy()
                value = {"a": np.full(2 * items, 1.0 + i), "b": np.full(2 * items, 10.0 + i)}
                return ctx.all_reduce("SUM", value, out={"a": one, "b": other})

            error = raises_everywhere(ValueError, lambda step=step: strategy.run(step))
            assert "two replicas of the same rank" in str(error)
            assert not memory.any()
        check_works(strategy)


def memory_of_c(buffer):
    """Return a buffer's memory as an array that neither owns it nor is a view of another one.

    So extension modules give theirs: wrappers of SWIG and f2py.
    """
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    functions = ctypes.cast(
        pointer(_multiarray_umath._ARRAY_API, None), ctypes.POINTER(ctypes.c_void_p)
    )
    integer, address, sizes = ctypes.c_int, ctypes.c_void_p, ctypes.POINTER(ctypes.c_ssize_t)
    types = [ctypes.py_object, integer, sizes, integer, address, address, integer, integer, address]
    make = ctypes.PYFUNCTYPE(ctypes.py_object, *types)(functions[93])  # PyArray_New
    shape, start = (ctypes.c_ssize_t * 1)(len(buffer)), ctypes.addressof(buffer)
    double, flags = np.dtype("f8").num, 0x0001 | 0x0100 | 0x0400  # in C order, aligned, writable
    array = make(np.ndarray, 1, shape, double, None, start, 0, flags, None)
    assert array.base is None
    assert not array.flags.owndata
    return array


@pytest.mark.parametrize("items", [1, INLINE, MEDIUM, LARGE])
def test_memory_of_c_is_known_again_whatever_array_shows_it(items):
    with mr.MPIStrategy(replicas_per_rank=2) as strategy:
        count = strategy.num_replicas_in_sync
        buffers = {i: (ctypes.c_double * items)() for i in strategy.local_replica_ids}

        def step(is_wrong):
            ctx = mr.get_replica_context()
            i = ctx.replica_id_in_sync_group
            mine = memory_of_c(buffers[i])
            mine[...] = 1.0 + i
            value = {"a": np.full(items, 5.0), "b": mine}
            out = {"a": np.empty(items), "b": np.empty(items)}
            out["a" if is_wrong else "b"] = memory_of_c(buffers[i])
            return ctx.all_reduce("SUM", value, out=out)

        error = raises_everywhere(ValueError, lambda: strategy.run(step, (True,)))
        assert "shares memory with value['b']" in str(error)
        for out in strategy.experimental_local_results(strategy.run(step, (False,))):
            assert (out["a"] == 5.0 * count).all()
            assert (out["b"] == sum(range(1, count + 1))).all()


@pytest.mark.parametrize("items", [1, INLINE, MEDIUM, LARGE])
def test_one_out_of_all_replicas_of_a_rank_gets_the_result_and_parts_of_one_array_get_theirs(items):
    with mr.MPIStrategy(replicas_per_rank=2) as strategy:
        count = strategy.num_replicas_in_sync
        kept, views = np.empty(items), np.empty(2 * items)
        rows = np.empty((2, items))

        def step():
            ctx = mr.get_replica_context()
            i = ctx.replica_id_in_sync_group
            value = [np.full(items, i + k, "f8") for k in range(4)]
            return ctx.all_reduce(
                "SUM", value, out=[kept, views[:items], views[items:], rows[i % 2]]
            )

        for out in strategy.experimental_local_results(strategy.run(step)):
            for k, result in enumerate(out):
                np.testing.assert_array_equal(result, sum(range(count)) + count * k)


def test_indexed_slices_have_no_out(strategy):
    """They have as many rows as all replicas have together."""
    slices = mr.IndexedSlices(np.ones((1, 2)), [0], (3, 2))
    for value, out in (
        (slices, np.ones((1, 2))),
        (slices, slices),
        ({"a": slices, "b": np.ones(3)}, {"a": np.ones((3, 2)), "b": np.ones(3)}),
    ):

        def step(value=value, out=out):
            return mr.get_replica_context().all_reduce("SUM", value, out=out)

        error = raises_everywhere(TypeError, lambda step=step: strategy.run(step))
        assert "to_dense()" in str(error)
    check_works(strategy)


def test_a_sum_of_python_ints_and_floats_is_never_cut_off_in_an_out_of_ints(strategy):
    """Decision 5: together they count as float64, which the replicas with ints can't know."""
    needs_two_replicas(strategy)

    def step():
        ctx = mr.get_replica_context()
        mine = ctx.replica_id_in_sync_group
        value = 1.5 if mine == 0 else mine
        return ctx.all_reduce("SUM", value, out=np.asarray(np.ones_like(value)))

    raises_everywhere(TypeError, lambda: strategy.run(step))
    check_works(strategy)
