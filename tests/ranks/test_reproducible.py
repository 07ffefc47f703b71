"""reproducible=True: what all_reduce gives has the bits of one sum in numpy, in every layout.

That is one tree over the replicas (see in_order.py), so that all layouts, both MPI libraries, all
sizes of pieces and all implementations give the same.
"""

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

import mpi_replica as mr
from contributions import arrays_in, at_once, build, native, nests
from everywhere import error_of, holds_everywhere
from hard_numbers import Empty, Hard, Scalar
from in_order import bits, reduced_in_order
from mpi_replica.collectives import ordered_ways, shared_window
from mpi_replica.collectives.agreement import agreement
from mpi_replica.core.tree import tree_of

IMPLEMENTATIONS = ["AUTO", "SHARED_MEMORY", "ALLTOALL"]
by_each_way = pytest.mark.parametrize("implementation", IMPLEMENTATIONS[1:])

REAL = ["float16", "bfloat16", "float32", "float64", "longdouble"]
COMPLEX = ["complex64", "complex128"]
INTEGERS = ["int8", "uint16", "int32", "int64"]
DTYPES_OF = {
    "SUM": [*REAL, *COMPLEX, *INTEGERS],
    "MEAN": [*REAL, *COMPLEX, *INTEGERS, "bool"],
    "PROD": [*REAL, *COMPLEX, *INTEGERS],
}


@pytest.fixture
def small_parts(monkeypatch):
    """Let what travels together be as small as it may be; before `reproducible`."""
    monkeypatch.setattr(shared_window, "_WINDOW_PART_BYTES", 1 << 16)
    monkeypatch.setattr(ordered_ways, "_MESSAGE_PART_BYTES", 1 << 16)
    monkeypatch.setattr(ordered_ways.Here, "part_bytes", 1 << 16)


@pytest.fixture
def wide(monkeypatch):
    """The way of many ranks, where nothing travels in headers; before `reproducible`."""
    monkeypatch.setattr(agreement, "_ALLGATHER_RANKS", 0)


# Ways to give `out`: from op, nest of Leaf and replica id to a value and its `out`.


def fresh(op, nest, replica):
    return build(nest, lambda leaf: leaf.of(replica)), None


def result_dtype(op, leaf):
    return reduced_in_order(op, [leaf.of(0)]).dtype


def into_arrays(op, nest, replica):
    value, _ = fresh(op, nest, replica)
    return value, build(nest, lambda leaf: np.ones_like(plain(leaf, op, replica)))


def in_place(op, nest, replica):
    value = build(nest, lambda leaf: plain(leaf, op, replica))
    return value, value


def plain(leaf, op, replica):
    """What a replica contributes in an array that can be reduced in place."""
    array = np.array(native(np.asarray(leaf.of(replica))), order="C")
    return array.astype(result_dtype(op, leaf))


def results_of(strategy, op, nest, way=fresh, options=None):
    """What each local replica gets; `out` where there is one, which must be what is given."""

    def step():
        ctx = mr.get_replica_context()
        value, out = way(op, nest, ctx.replica_id_in_sync_group)
        kept = arrays_in([out])
        result = ctx.all_reduce(op, value, options, out=out)
        if out is not None:
            assert result is out
            assert all(one is other for one, other in zip(arrays_in([out]), kept, strict=True))
        results.append(result)  # as it is: `run` makes nests of it

    results = []
    strategy.run(step)
    return results


def check_bits(strategy, op, nest, way=fresh, **options):
    """Check that every replica gets the bits of the reference."""
    replicas = range(strategy.num_replicas_in_sync)
    results = results_of(strategy, op, nest, way, mr.CommunicationOptions(**options))

    def check():
        expected = build(nest, lambda leaf: reduced_in_order(op, [leaf.of(i) for i in replicas]))
        if way is not fresh:
            expected = build(
                nest, lambda leaf: np.asarray(reduced_in_order(op, [leaf.of(i) for i in replicas]))
            )
        assert len(results) == len(strategy.local_replica_ids)
        for result in results:
            assert bits(result) == bits(expected), (result, expected)

    holds_everywhere(check)


SHAPES = st.lists(st.integers(0, 4), max_size=3).map(tuple) | st.tuples(st.integers(20, 90))


@st.composite
def calls(draw):
    """Draw an op and a nest of leaves that it has a meaning for."""
    op = draw(st.sampled_from(sorted(DTYPES_OF)))
    leaves = st.builds(
        lambda kind, *fields: kind(*fields),
        st.sampled_from([Hard] * 6 + [Scalar, Empty]),
        st.sampled_from(DTYPES_OF[op]),
        SHAPES,
        st.integers(0, 99),
        st.integers(0, 6),
    )
    return op, draw(nests(leaves) | st.tuples(leaves, nests(leaves), leaves))


OPTIONS = st.fixed_dictionaries(
    {
        "implementation": st.sampled_from(IMPLEMENTATIONS),
        "bytes_per_pack": st.sampled_from([0, 0, 0, 16, 200, 1 << 12]),
        "timeout_seconds": st.sampled_from([None, None, 60]),
    }
)
WAYS = st.sampled_from([fresh, into_arrays, in_place])


@at_once
@given(call=calls(), way=WAYS, options=OPTIONS)
def test_any_nest_has_the_bits_of_the_reference(reproducible, call, way, options):
    check_bits(reproducible, *call, way, **options)


@at_once
@given(call=calls(), way=WAYS, options=OPTIONS)
def test_any_nest_has_them_on_many_ranks_too(wide, reproducible, call, way, options):
    check_bits(reproducible, *call, way, **options)


# Bytes, in what they accumulate in, around those of a part.
AROUND_A_PART = [(1 << 16) * parts + more for parts in (1, 2) for more in (-16, 0, 16)]


@pytest.mark.parametrize(
    ("implementation", "way"), [("SHARED_MEMORY", in_place), ("ALLTOALL", fresh)]
)
def test_large_leaves_have_them_whatever_their_size(small_parts, reproducible, implementation, way):
    """Around the ends of parts, of the slices that the ranks have of them, and of rows."""
    nest = [
        Hard(dtype, (size // max(4, np.dtype(dtype).itemsize),), number, number)
        for number, (size, dtype) in enumerate(
            zip(AROUND_A_PART, [*REAL, "complex64"], strict=True)
        )
    ]
    nest += [Hard("float32", (129, 151), 7, 1), Hard("float16", (3, 20_011), 8, 2)]
    check_bits(reproducible, "MEAN", nest, way, implementation=implementation)


@by_each_way
def test_a_last_part_of_which_most_ranks_are_given_nothing_has_them(
    small_parts, reproducible, implementation
):
    """Its contributions are copied before they are sent: no rank may take that for in place."""
    options = {"implementation": implementation, "timeout_seconds": 60}
    for layout in range(4):
        leaf = Hard("float32", ((1 << 14) + 4,), 1, layout)
        check_bits(reproducible, "SUM", leaf, **options)


@by_each_way
def test_many_small_leaves_have_them(small_parts, reproducible, implementation):
    """Several packs, and several chunks of one."""
    nest = [Hard("float64", (n * 37,), n, n) for n in range(0, 40, 2)]
    nest += [Hard("bfloat16", (n * 91, 3), n, n) for n in range(0, 20, 2)]
    check_bits(reproducible, "MEAN", nest, into_arrays, implementation=implementation)


def partials_in(strategy):
    """How many partials all ranks have together, and how many one has at most."""
    counts = [len(partials) for partials in tree_of(strategy.engine.layout.counts).partials]
    return sum(counts), max(counts)


def test_leaves_around_what_travels_in_headers_and_in_one_message_have_them(reproducible):
    total, most = partials_in(reproducible)
    for size in (232 // most, (1 << 16) // total):
        for more in (-8, 0, 8):
            check_bits(reproducible, "SUM", Hard("float64", ((size + more) // 8,), more + 8))
            check_bits(reproducible, "MEAN", [Hard("float16", ((size + more) // 4,), more + 9)])


def test_results_of_several_parts_have_them_in_their_usual_size(reproducible):
    check_bits(reproducible, "SUM", Hard("float32", (140_007,)), in_place)


@by_each_way
def test_who_names_the_implementation_gets_the_same_bits(implementation):
    """Whether he asks for them or not: there is one order."""
    options = mr.CommunicationOptions(implementation=implementation)
    with mr.MPIStrategy(replicas_per_rank=3, communication_options=options) as strategy:
        for length in (3, 900, 20_011):
            check_bits(strategy, "SUM", Hard("float32", (length,)))


def test_the_contributions_stay_as_they_are(reproducible):
    for length in (5, 300, 20_011):

        def step(length=length):
            ctx = mr.get_replica_context()
            value = Hard("float32", (length,)).of(ctx.replica_id_in_sync_group)
            before = value.tobytes()
            result = ctx.all_reduce("SUM", value)
            assert value.tobytes() == before
            assert not np.shares_memory(result, value)

        assert error_of(lambda step=step: reproducible.run(step)) is None


def test_results_are_memory_of_their_own_that_later_calls_leave_alone(reproducible):
    """Not that of a window, of messages, or of other replicas."""
    nest = [Hard("float64", (n,), n) for n in (3, 300, 9000, 20_011)]
    first = results_of(reproducible, "SUM", nest)
    before = bits(first)
    results_of(reproducible, "MEAN", [Hard("float64", leaf.shape, 77) for leaf in nest])
    owned = arrays_in(first)
    assert bits(first) == before
    for index, array in enumerate(owned):
        assert not any(np.shares_memory(array, other) for other in owned[:index])
        array[...] = index
    assert all((array == index).all() for index, array in enumerate(owned))
