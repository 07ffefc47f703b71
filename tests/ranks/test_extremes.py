"""MIN and MAX of floats have the same bits in every layout: NaN is numpy's, -0.0 less than 0.0."""

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

import mpi_replica as mr
from contributions import arrays_in, at_once, native
from everywhere import holds_everywhere
from hard_numbers import Hard
from in_order import bits, extreme_in_order
from mpi_replica.core.nest import map_structure

DTYPES = ["float16", "bfloat16", "float32", "float64"]


class Zeros(Hard):
    """A leaf of zeros, of either sign, and a few NaN of any bits."""

    def values(self, *about):
        array = super().values(*about)
        return np.where(np.isnan(array), array, np.copysign(np.zeros_like(array), array))


class Ties(Hard):
    """A leaf of the same numbers on all replicas, of either sign."""

    def values(self, dtype, shape, number, replica):
        array = np.abs(super().values(dtype, shape, number, 0))
        signs = np.random.default_rng([number, replica]).choice([-1, 1], shape)
        return np.copysign(array, signs.astype(dtype)).astype(dtype)


KINDS = [Hard, Zeros, Ties]


def check(strategy, op, leaves, out=False, **options):
    """Check the bits of all results, where they go into the values, too."""
    found = []

    def step():
        ctx = mr.get_replica_context()
        value = [leaf.of(ctx.replica_id_in_sync_group) for leaf in leaves]
        place = None
        if out:
            value = place = [np.array(native(array), order="C") for array in value]
        given = mr.CommunicationOptions(**options)
        found.append(ctx.all_reduce(op, value, given, out=place))

    with np.errstate(all="ignore"):
        strategy.run(step)
        right = [
            extreme_in_order(op, leaf.of_all(strategy.num_replicas_in_sync)) for leaf in leaves
        ]
    if out:
        right = map_structure(np.asarray, right)

    def check_all():
        assert len(found) == len(strategy.local_replica_ids)
        for result in found:
            for leaf, one, other in zip(leaves, result, right, strict=True):
                assert bits(one) == bits(other), (leaf, one, other)

    holds_everywhere(check_all)


@st.composite
def leaves(draw):
    shapes = st.lists(st.integers(0, 5), max_size=3).map(tuple) | st.tuples(st.integers(20, 90))
    made = st.builds(
        lambda kind, *about: kind(*about),
        st.sampled_from(KINDS),
        st.sampled_from(DTYPES),
        shapes,
        st.integers(0, 99),
        st.integers(0, 6),
    )
    return draw(st.lists(made, min_size=1, max_size=4))


@at_once
@given(
    op=st.sampled_from(["MIN", "MAX"]),
    leaves=leaves(),
    out=st.booleans(),
    bytes_per_pack=st.sampled_from([0, 0, 1, 24, 200]),
    timeout_seconds=st.sampled_from([None, 60]),
)
def test_any_leaves_have_the_bits_of_the_reference(strategy, op, leaves, **settings):
    check(strategy, op, leaves, **settings)


# By how they travel: in headers, in packs, and as streams of one piece and of several.
SIZES = {"header": (4,), "packs": (700,), "streams": (20_011,), "pieces": (3, 10_003)}


@pytest.mark.parametrize("op", ["MIN", "MAX"])
@pytest.mark.parametrize("size", SIZES)
def test_every_dtype_has_them_in_every_size(strategy, op, size):
    most = 1 << 15 if size == "pieces" else 0
    for number, kind in enumerate(KINDS):
        nest = [kind(dtype, SIZES[size], number, number) for dtype in DTYPES[number % 2 :: 2]]
        check(strategy, op, nest, out=number == 1, bytes_per_pack=most)


@pytest.mark.parametrize("op", ["MIN", "MAX"])
@pytest.mark.parametrize("length", [5, 20_011])
def test_what_is_reduced_from_above_and_in_a_merge_fn_has_them(strategy, op, length):
    leaves = [kind(dtype, (length,), 1) for kind in KINDS for dtype in DTYPES]
    right = [extreme_in_order(op, leaf.of_all(strategy.num_replicas_in_sync)) for leaf in leaves]
    found = []

    def merge_fn(strategy, x):
        found.append(strategy.reduce(op, x, axis=None))

    def step():
        ctx = mr.get_replica_context()
        value = [leaf.of(ctx.replica_id_in_sync_group) for leaf in leaves]
        ctx.merge_call(merge_fn, (value,))
        return value

    found.append(strategy.reduce(op, strategy.run(step), axis=None))

    def check_all():
        assert len(found) == 2
        for result in found:
            assert bits(result) == bits(right)

    holds_everywhere(check_all)


def test_a_reproducible_strategy_has_the_same(reproducible):
    for size in SIZES.values():
        check(reproducible, "MIN", [Hard("float32", size, 1), Zeros("bfloat16", size, 2)])


def test_the_values_stay_as_they_are(strategy):
    for length in (3, 700, 20_011):
        value = Hard("float32", (length,)).of(strategy.rank)
        before = value.tobytes()
        (result, *_) = arrays_in(
            [*strategy.run(lambda v=value: mr.get_replica_context().all_reduce("MIN", v)).values]
        )
        assert not np.shares_memory(result, value)
        assert value.tobytes() == before
