"""All ranks foresee alike how large the next headers are, from what they agreed on before."""

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

import every_call
from contributions import Leaf
from every_call import Plain
from mpi_replica.collectives.agreement.header import PAYLOAD_START
from mpi_replica.collectives.agreement.header_sizes import HeaderSizes
from mpi_replica.collectives.agreement.steps import Agree
from mpi_replica.ranks.transport import HEADER_BYTES, LARGER_HEADER_BYTES
from world import World

MEMORY = {size: np.zeros(2 * size, np.uint8) for size in (HEADER_BYTES, *LARGER_HEADER_BYTES)}
SMALL, LARGE = 8, 1000
OTHERS = [
    "all_reduce in the header, out",
    "all_reduce of a message",
    "all_reduce of a pack",
    "all_reduce of integers",
]


def sizes_after(history, sizes=None):
    """Agree on calls, each a fingerprint and what it would send; return sizes before each."""
    sizes = sizes or HeaderSizes(MEMORY)
    before = []
    for fingerprint, payload_bytes in history:
        before.append(sizes.next_bytes)
        sizes.agree(fingerprint)
        sizes.learn(sizes.size_of(payload_bytes))
    return [*before, sizes.next_bytes]


@pytest.mark.parametrize("loop", [[(1, LARGE)], [(1, LARGE), (2, SMALL)], [(1, SMALL), (2, LARGE)]])
def test_in_a_loop_each_header_is_as_large_as_its_call_needs_from_the_third_round_on(loop):
    """The first call follows the last one from the second round on."""
    found = sizes_after(loop * 4)
    for (_, payload_bytes), size in zip(loop * 2, found[2 * len(loop) :], strict=False):
        assert size - PAYLOAD_START >= payload_bytes
        assert (size == HEADER_BYTES) == (payload_bytes == SMALL)


@pytest.mark.parametrize("payload_bytes", [0, 232, 233, 552, 553, 4096, 32_768, 32_808])
def test_a_header_is_the_smallest_that_holds_the_payload(payload_bytes):
    size = sizes_after([(1, payload_bytes)] * 2)[-1]
    assert size >= payload_bytes + PAYLOAD_START
    smaller = [one for one in MEMORY if one < size]
    assert all(one < payload_bytes + PAYLOAD_START for one in smaller)


@pytest.mark.parametrize("payload_bytes", [32_809, 1 << 40, float("inf")])
def test_what_fits_into_no_header_leaves_it_small(payload_bytes):
    assert sizes_after([(1, payload_bytes)] * 3) == [HEADER_BYTES] * 4


def test_a_call_that_needs_less_than_before_has_a_small_header_again():
    assert sizes_after([(1, LARGE), (1, LARGE), (1, SMALL), (1, SMALL)])[-1] == HEADER_BYTES


def test_whatever_else_headers_tell_the_next_ones_are_small_and_nothing_is_foreseen():
    sizes = HeaderSizes(MEMORY)
    assert sizes_after([(1, LARGE), (2, LARGE)] * 2, sizes)[-1] > HEADER_BYTES
    sizes.begin_anew()
    assert sizes.next_bytes == HEADER_BYTES
    assert sizes_after([(1, SMALL), (2, SMALL)], sizes) == [HEADER_BYTES] * 3


def test_where_headers_carry_nothing_they_stay_small():
    sizes = HeaderSizes(MEMORY, carries_payload=False)
    assert set(sizes_after([(1, LARGE)] * 3, sizes)) == {HEADER_BYTES}


@given(st.lists(st.tuples(st.integers(1, 4), st.sampled_from([0, 300, 900, 5000, 1 << 20]))))
def test_sizes_are_those_that_the_memory_has(history):
    sizes = HeaderSizes({size: MEMORY[size] for size in (HEADER_BYTES, LARGER_HEADER_BYTES[0])})
    assert set(sizes_after(history, sizes)) <= {HEADER_BYTES, LARGER_HEADER_BYTES[0]}


def test_a_program_that_makes_new_calls_all_the_time_does_not_grow():
    sizes = HeaderSizes(MEMORY)
    sizes_after([(fingerprint, LARGE) for fingerprint in range(1, 20_000)], sizes)
    assert len(sizes._after) <= 4096


REPEATED = {
    "all_reduce": every_call.all_reduce("SUM", Leaf("f8", (128,)), Leaf("i4", (9,))),
    "all_reduce into memory": every_call.all_reduce("MEAN", Plain("f8", (500,)), out="apart"),
    "all_reduce, narrow": every_call.all_reduce("SUM", Leaf("bfloat16", (300,))),
    "all_reduce, reproducible": every_call.all_reduce("SUM", Leaf("f4", (700,)), reproducible=True),
    "all_gather": every_call.all_gather(0, Leaf("f8", (128,))),
    "all_gather along the last axis": every_call.all_gather(-1, Leaf("f4", (3, 50))),
    "gather_objects": every_call.gather_objects(lambda i: "text" * 100 * (i + 1)),
    "merge_call": every_call.merge_call(lambda i: np.full(200, i)),
    "broadcast": every_call.broadcast(lambda i: np.full(100, i)),
}


@pytest.mark.parametrize("counts", [(1, 1), (2, 1), (1, 2, 1)])
@pytest.mark.parametrize("name", REPEATED)
def test_a_call_of_some_kilobytes_that_repeats_sends_nothing_but_its_header(name, counts):
    world = World(counts)
    rounds = []
    for _ in range(4):
        world.done.clear()
        REPEATED[name](world)
        rounds.append(set(world.done) - {type(None), Agree})
    assert rounds[0] == rounds[1] != set()
    assert rounds[2] == rounds[3] == set()


@settings(max_examples=20)
@given(data=st.data(), counts=st.sampled_from([(1, 1), (2, 1), (1, 1, 1)]))
def test_calls_give_what_numpy_gives_whatever_size_their_headers_have(data, counts):
    world = World(counts)
    calls = REPEATED | {name: every_call.CALLS[name] for name in OTHERS}
    loop = data.draw(st.lists(st.sampled_from(sorted(calls)), min_size=1, max_size=4))
    for name in loop * 3:
        calls[name](world)
