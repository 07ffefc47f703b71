"""Small nests travel in the header, and give there what they give in pieces."""

import dataclasses
import warnings

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

import mpi_replica as mr
from contributions import OF_OP, Leaf, arrays_in, at_once, check_everywhere
from everywhere import gathered, holds_everywhere
from mpi_replica.collectives.agreement.header_sizes import HeaderSizes
from mpi_replica.collectives.inline import InlineReductions
from reducing import calls, contribution, reduce_everywhere, reference


class Repeated(Leaf):
    """A leaf whose rows are one and the same in memory."""

    def of(self, replica):
        row = dataclasses.replace(self, shape=self.shape[1:])
        return np.broadcast_to(super(Repeated, row).of(replica), self.shape)


KINDS = (Leaf, Leaf, Repeated)
SHAPES = st.sampled_from([(), (1,), (3,), (2, 2), (1, 3, 2), (5,), (0,), (2, 0, 3)])


@pytest.fixture
def in_pieces(strategy, monkeypatch):
    """Do a call as if nothing fitted into the header."""

    def do(call):
        group = strategy.engine.group
        with monkeypatch.context() as patch:
            sizes = HeaderSizes(group.sizes.memory, carries_payload=False)
            patch.setattr(group, "sizes", sizes)
            patch.setitem(group.kept, InlineReductions, InlineReductions(group))
            return call()

    return do


def check_ways(strategy, in_pieces, op, nest):
    """Check the results in the header, in packs, and as streams of a few items at a time."""
    expected = reference(strategy, op, nest)

    def reduce(**options):
        options = mr.CommunicationOptions(**options)
        return reduce_everywhere(strategy, op, lambda i: contribution(nest, i), options)

    check_everywhere(reduce(), expected)
    check_everywhere(in_pieces(reduce), expected)
    check_everywhere(in_pieces(lambda: reduce(bytes_per_pack=8)), expected)


@at_once
@given(call=calls(KINDS, SHAPES))
def test_any_small_nest_is_the_same_in_the_header_in_packs_and_in_pieces(strategy, in_pieces, call):
    check_ways(strategy, in_pieces, *call)


@pytest.mark.parametrize("op", OF_OP)
def test_every_dtype_is_the_same_beside_a_scalar_and_an_empty_leaf(strategy, in_pieces, op):
    for number, dtype in enumerate(OF_OP[op]):
        kind = KINDS[number % len(KINDS)]
        nest = {
            "z": kind(dtype, (2, 1), number, layout=number),
            "a": (Leaf(dtype, (), number + 1), Leaf(dtype, (0, 3))),
        }
        check_ways(strategy, in_pieces, op, nest)


def test_leaves_of_all_dtypes_at_once_are_the_same(strategy, in_pieces):
    """Each dtype has a pack of its own, which lie one behind the other."""
    for op, dtypes in OF_OP.items():
        nest = [Leaf(dtype, (), number, layout=number) for number, dtype in enumerate(dtypes)]
        check_ways(strategy, in_pieces, op, nest)
        check_ways(strategy, in_pieces, op, nest[::-1])


@pytest.mark.parametrize("op", OF_OP)
def test_reals_differ_by_their_rounding_at_most(strategy, in_pieces, op):
    """Their sums depend on the order."""

    def make(i):
        random = np.random.default_rng(i)
        return {"z": random.standard_normal(7), "a": random.standard_normal((3, 2), "f4")}

    found = reduce_everywhere(strategy, op, make)
    others = in_pieces(lambda: reduce_everywhere(strategy, op, make))
    for one, other in zip(found, others, strict=True):
        np.testing.assert_allclose(one["z"], other["z"], rtol=1e-13, atol=1e-14)
        np.testing.assert_allclose(one["a"], other["a"], rtol=1e-5, atol=1e-6)
        if op in ("MIN", "MAX"):
            assert (one["z"] == other["z"]).all()
            assert (one["a"] == other["a"]).all()
    bits = [arrays_in(result) for result in found]
    everywhere = [array for of_rank in gathered(bits) for array in of_rank]
    assert len({b"".join(array.tobytes() for array in arrays) for arrays in everywhere}) == 1


@at_once
@given(call=calls(KINDS, SHAPES))
def test_a_result_is_memory_of_its_own_that_nothing_else_writes(strategy, in_pieces, call):
    """Not of the values, of other results, of those of other replicas, or of later calls."""
    op, nest = call
    rows = []

    def step():
        ctx = mr.get_replica_context()
        i = ctx.replica_id_in_sync_group
        mine = contribution(nest, i)
        before = [array.tobytes() for array in arrays_in(mine)]
        first = ctx.all_reduce(op, mine)
        second = ctx.all_reduce(op, contribution(nest, i + 1))
        rows.append((mine, before, first, second))

    def check_rows():
        assert len(rows) == len(strategy.local_replica_ids)
        owned = []
        for mine, before, first, second in rows:
            results = [array for array in arrays_in([first, second]) if array.size]
            assert not any(np.shares_memory(a, b) for a in results for b in arrays_in(mine))
            assert [array.tobytes() for array in arrays_in(mine)] == before
            owned += results
        for turn, array in enumerate(owned):
            array[...] = np.full((), turn).astype(array.dtype)
        for turn, array in enumerate(owned):
            assert (array == np.full((), turn).astype(array.dtype)).all()

    for way in (lambda call: call(), in_pieces):
        rows.clear()
        way(lambda: strategy.run(step))
        check_everywhere([first for _, _, first, _ in rows], reference(strategy, op, nest))
        holds_everywhere(check_rows)


# What goes beyond the numbers of a dtype, and what is none.
BEYOND = [
    ("SUM", "float16", (60000, 60000)),
    ("PROD", "float32", (1e30, 1e30)),
    ("SUM", "int8", (100, 100)),
    ("MEAN", "float64", (np.inf, -np.inf)),
    ("MEAN", "float64", (5e-324, 1e-323)),
    ("MAX", "float64", (np.nan, 1.0)),
]


@pytest.mark.parametrize("way", ["in the header", "in one piece", "in pieces"])
@pytest.mark.parametrize(("op", "dtype", "numbers"), BEYOND)
def test_numpy_neither_warns_nor_raises_of_what_a_reduction_gives(
    strategy, in_pieces, way, op, dtype, numbers
):
    """Whatever one rank has set: it would be alone with an error after all have agreed."""
    is_strict = strategy.rank == strategy.size - 1
    length = 40_000 if way == "in one piece" else 3

    def reduce():
        with np.errstate(all="raise" if is_strict else "ignore"), warnings.catch_warnings():
            warnings.simplefilter("error")
            return reduce_everywhere(strategy, op, lambda i: np.full(length, numbers[i % 2], dtype))

    results = in_pieces(reduce) if way == "in pieces" else reduce()
    assert all(result.dtype == dtype for result in results)


# Of float64: one that fits into any header, some for which larger ones must be foreseen.
LENGTHS = [3, 40, 300, 2000]


@pytest.mark.parametrize("op", ["SUM", "MEAN", "PROD"])
@pytest.mark.parametrize("dtype", ["float32", "float64", "complex64", "complex128"])
def test_the_same_numbers_have_the_same_bits_each_time(strategy, op, dtype):
    """Also before larger headers are foreseen, beside another leaf, and in memory of `out`."""

    def step():
        ctx = mr.get_replica_context()
        rng = np.random.default_rng(ctx.replica_id_in_sync_group)
        found = []
        for length in LENGTHS:
            value = rng.standard_normal((length, 2)).view("complex128")[:, 0].astype(dtype)
            results = [ctx.all_reduce(op, value) for _ in range(5)]
            results.append(ctx.all_reduce(op, {"a": value[:2], "b": value})["b"])
            results.append(ctx.all_reduce(op, value, out=np.empty_like(value)))
            in_place = value.copy()
            ctx.all_reduce(op, in_place, out=in_place)
            found.append([result.tobytes() for result in (*results, in_place)])
        return found

    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the imaginary part
        each = strategy.experimental_local_results(strategy.run(step))

    def check_all():
        for found in each:
            for length, results in zip(LENGTHS, found, strict=True):
                assert len(set(results)) == 1, (length, [results.index(one) for one in results])

    holds_everywhere(check_all)
