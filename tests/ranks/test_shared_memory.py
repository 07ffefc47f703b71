"""The window of shared memory by which reproducible sums go: one for each strategy."""

import re
import sys
from pathlib import Path

import numpy as np
import pytest

import mpi_replica as mr
from everywhere import cost_of, gathered, holds_everywhere
from hard_numbers import Hard
from in_order import bits, reduced_in_order
from mpi_replica.collectives.shared_window import window_bytes

REPRODUCIBLE = mr.CommunicationOptions(reproducible=True)
LEAF = Hard("float32", (20_011,), 1)


def make(**about):
    return mr.MPIStrategy(communication_options=REPRODUCIBLE, **about)


def reduce(strategy, leaf=LEAF, implementation="SHARED_MEMORY"):
    """What each local replica gets."""
    results = []

    def step():
        ctx = mr.get_replica_context()
        given = mr.CommunicationOptions(implementation=implementation)
        value = leaf.of(ctx.replica_id_in_sync_group)
        results.append(ctx.all_reduce("SUM", value, given))

    strategy.run(step)
    return results


def check(strategy, leaf=LEAF, implementation="SHARED_MEMORY"):
    results = reduce(strategy, leaf, implementation)
    right = bits(reduced_in_order("SUM", leaf.of_all(strategy.num_replicas_in_sync)))

    def check_all():
        assert [bits(result) == right for result in results] == [True] * len(results)

    holds_everywhere(check_all)


def windows(*strategies):
    """How many mappings of the size of their windows, or a little more, this process has."""
    sizes = {window_bytes(strategy.engine.layout)[1] for strategy in strategies}
    lines = Path("/proc/self/maps").read_text().splitlines()
    found = [re.match(r"([0-9a-f]+)-([0-9a-f]+) rw-s", line) for line in lines]
    lengths = [int(m[2], 16) - int(m[1], 16) for m in found if m]
    return sum(any(size <= length < size + (1 << 16) for size in sizes) for length in lengths)


@pytest.mark.usefixtures("small_world")
def test_by_it_each_rank_sends_headers_only_and_waits_once_more_than_there_are_parts(reproducible):
    part_bytes, _ = window_bytes(reproducible.engine.layout)
    for parts in (1, 2, 5):
        leaf = Hard("float32", ((part_bytes * parts - 400) // 4,), 1)
        reduce(reproducible, leaf)
        steps, sent_bytes = cost_of(reproducible, lambda leaf=leaf: reduce(reproducible, leaf))
        has_others = reproducible.size > 1
        assert (steps, sent_bytes) == (2 + has_others * (parts + 1), 2 * 256)


@pytest.mark.usefixtures("small_world")
def test_the_other_way_two_messages_carry_a_part(reproducible):
    """A slice of all partials to each rank, and its result to all."""
    if reproducible.size == 1:
        pytest.skip("nothing is sent")
    reduce(reproducible, implementation="ALLTOALL")
    steps, _ = cost_of(reproducible, lambda: reduce(reproducible, implementation="ALLTOALL"))
    assert steps == 2 + 2


@pytest.mark.skipif(sys.platform != "linux", reason="it reads /proc")
def test_strategies_side_by_side_have_one_each_until_they_are_closed():
    size = len(gathered(None))
    if size == 1:
        pytest.skip("one rank has nobody to share it with")
    strategies = [make(replicas_per_rank=count) for count in (1, 2, 3)]
    others = windows(*strategies)  # of strategies that other tests still use

    def own():
        return gathered(windows(*strategies) - others)

    for number, strategy in enumerate(strategies):
        assert own() == [number] * size
        check(strategy)
    for strategy in strategies:
        check(strategy)
    for strategy in strategies:
        part_bytes, _ = window_bytes(strategy.engine.layout)
        check(strategy, Hard("float64", (part_bytes // 5,), 2))  # more than one part
    for number, strategy in enumerate(strategies, 1):
        strategy.close()
        assert own() == [len(strategies) - number] * size
        for other in strategies[number:]:
            check(other)


@pytest.mark.usefixtures("small_world")
@pytest.mark.skipif(sys.platform != "linux", reason="it reads /proc")
def test_a_strategy_that_needs_none_has_none():
    """Where all is small, or MPI does it as well; two ranks never do."""
    with make() as strategy, mr.MPIStrategy() as other:
        others = windows(strategy)  # of strategies that other tests still use
        before = cost_of(strategy, lambda: reduce(strategy, Hard("float32", (3,)), "AUTO"))
        assert before == (2, 2 * 256)
        reduce(other, implementation="AUTO")
        if strategy.size == 2:
            check(strategy, implementation="AUTO")
        assert windows(strategy) == others


def test_results_are_no_memory_of_the_window(reproducible):
    """The next call would write there."""
    first = reduce(reproducible)
    before = [bits(result) for result in first]
    reduce(reproducible, Hard("float32", (20_011,), 2))
    assert [bits(result) for result in first] == before
    for result in first:
        assert not any(np.shares_memory(result, other) for other in first if other is not result)
