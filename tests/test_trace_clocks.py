"""All processes of a trace on one clock: true times of simulated jobs are found again."""

import itertools

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from mpi_replica.ranks.watch.event_log import EventKind
from mpi_replica.trace.clocks import clocks_of
from mpi_replica.trace.summary import summary
from mpi_replica.trace.timeline import UNDECIDED, Timeline
from simulated_jobs import (
    HOUR,
    MICROSECOND,
    MILLISECOND,
    ROUNDS,
    SECOND,
    LocalClock,
    SimulatedProcess,
    World,
    local_clocks,
)

# Clocks are read in whole nanoseconds.
TICKS = 2

latencies = st.sampled_from([MICROSECOND, 30 * MICROSECOND, MILLISECOND])


@st.composite
def worlds(draw, least=2, most=4):
    """Return some ranks, before their first call."""
    clocks = draw(st.lists(local_clocks, min_size=least, max_size=most))
    processes = [SimulatedProcess(clock, rank) for rank, clock in enumerate(clocks)]
    for process in processes:
        process.works(draw(st.integers(0, SECOND)))
        process.slow_to_send = draw(st.sampled_from([0, 100 * MICROSECOND]))
        process.slow_to_receive = draw(st.sampled_from([0, 100 * MICROSECOND]))
    return World(processes, draw(st.integers(0, 1 << 32)), draw(latencies))


def traced(processes, killed=()):
    return [process.traced(is_killed=process in killed) for process in processes]


def clocks_within_bounds(processes):
    """Return clocks. By them times of two processes differ by what they say at most, always."""
    clocks = clocks_of(traced(processes))
    moments = np.linspace(0, max(process.at for process in processes), 50)
    found = [
        (clock.start, clock.common(times), clock.bound(times))
        for process, clock in zip(processes, clocks, strict=True)
        for times in [process.clock.read(moments)]
    ]
    for (start, times, bounds), (other, others, their_bounds) in itertools.combinations(found, 2):
        if start == other:
            assert np.max(np.abs(times - others) - bounds - their_bounds) <= TICKS
    return clocks


def bounds_at_calls(processes):
    """Return the largest bound of each process at one of its calls."""
    traces = traced(processes)
    return [
        float(clock.bound(trace.rows[trace.rows[:, 0] == EventKind.CALL, 3]).max())
        for trace, clock in zip(traces, clocks_of(traces), strict=True)
    ]


@given(worlds())
def test_times_of_all_processes_come_to_one_clock_within_the_bounds_that_it_states(world):
    world.go_on()
    clocks = clocks_within_bounds(world.members)
    assert {clock.start for clock in clocks} == {0}


@given(worlds(least=4), st.permutations([(0, 3), (1, 2), (2, 3)]))
def test_clocks_are_found_by_way_of_others_in_whatever_order_they_were_compared(world, pairs):
    members = world.members
    for pair in pairs:
        World([members[n] for n in pair]).compare()
    clocks = clocks_within_bounds(members)
    assert {clock.start for clock in clocks} == {0}


@given(worlds())
def test_the_clock_of_the_first_process_is_right_by_definition(world):
    world.go_on()
    times = world.members[0].clock.read(np.linspace(0, world.members[0].at, 9))
    clock, *_ = clocks_of(traced(world.members))
    np.testing.assert_array_equal(np.diff(clock.common(times)), np.diff(times))
    np.testing.assert_array_equal(clock.bound(times), 0)


@given(worlds(), st.lists(st.integers(0, SECOND), min_size=1, max_size=3))
def test_a_rank_that_is_late_within_a_comparison_does_not_make_clocks_wrong(world, stalls):
    for stall in stalls:
        world.compare(stall=stall)
        world.works(SECOND)
    clocks_within_bounds(world.members)


@pytest.mark.parametrize("drift", [-1e-4, 1e-4])
@pytest.mark.parametrize("late", [0, 1])
def test_a_clock_runs_on_while_its_rank_waits_within_a_comparison(drift, late):
    processes = [SimulatedProcess(LocalClock(n * HOUR, 1 + n * drift), n) for n in range(2)]
    processes[late].works(SECOND)
    World(processes, latency=MICROSECOND).compare(rounds=1)
    clocks_within_bounds(processes)


@pytest.mark.parametrize("size", [2, 4])
def test_between_comparisons_bounds_are_no_larger_than_the_time_of_some_messages(size):
    clocks = [LocalClock(n * HOUR, 1 + n * 3e-5) for n in range(size)]
    world = World(map(SimulatedProcess, clocks, range(size)), latency=10 * MICROSECOND)
    for _ in range(10):
        world.call(compares=True)
        world.works(10 * SECOND)
        world.call()
    world.compare()
    assert max(bounds_at_calls(world.members)) < 30 * MICROSECOND


def test_a_clock_that_is_off_by_hours_is_not_off_afterwards():
    processes = [SimulatedProcess(LocalClock(n * 5 * HOUR, 1 - 1e-4 * n), n) for n in range(3)]
    world = World(processes)
    world.call(compares=True)
    world.works(HOUR)
    world.call(compares=True)
    clocks = clocks_of(traced(processes))
    for moment in (0, HOUR // 2, HOUR):
        times = [
            clock.common(process.clock.read([moment]))
            for process, clock in zip(processes, clocks, strict=True)
        ]
        assert np.ptp(times) < MILLISECOND


@given(worlds(least=3))
def test_clocks_are_within_their_bounds_where_the_first_rank_dies_halfway(world):
    world.go_on()
    survivors = World(world.members[1:], seed=1)
    survivors.go_on()
    assert {clock.start for clock in clocks_within_bounds(world.members)} == {0}


@given(worlds(least=3), st.integers(1, ROUNDS))
def test_clocks_are_within_their_bounds_where_a_rank_dies_before_a_second_comparison(world, rounds):
    world.compare(rounds)
    world.works(SECOND)
    world.call()
    survivors = World(world.members[:-1], seed=1)
    survivors.go_on()
    clocks_within_bounds(world.members)


@given(worlds(least=4, most=4), st.permutations(range(4)))
def test_clocks_are_within_their_bounds_where_ranks_are_lost_again_and_again(world, lost):
    world.go_on()
    left = [world.members[n] for n in lost]  # ranks get new numbers
    while len(left) > 2:
        left.pop()
        World(left).go_on()
    assert {clock.start for clock in clocks_within_bounds(world.members)} == {0}


@given(worlds(), worlds())
def test_each_start_of_a_job_has_a_clock_that_is_within_its_bounds(first, second):
    for world in (first, second):
        world.go_on()
    processes = [*first.members, *second.members]
    starts = [clock.start for clock in clocks_within_bounds(processes)]
    assert len(set(starts[: len(first.members)])) == len(set(starts[len(first.members) :])) == 1
    assert starts[0] != starts[-1]


def test_one_start_after_the_other_is_placed_by_the_clock_of_its_host():
    clocks = LocalClock(7 * HOUR, 1 + 1e-4), LocalClock(0, 1.0)
    first = World(map(SimulatedProcess, clocks, range(2)))
    first.call(compares=True)
    second = World(
        SimulatedProcess(clock, rank, restart=1, begins=HOUR)
        for rank, clock in enumerate(reversed(clocks))
    )
    second.call(compares=True)
    processes = [*first.members, *second.members]
    began = [
        float(clock.common(trace.rows[:, 3]).min())
        for trace, clock in zip(traced(processes), clocks_of(traced(processes)), strict=True)
    ]
    assert np.ptp(began[:2]) < MILLISECOND
    assert np.ptp(began[2:]) < MILLISECOND
    assert began[2] - began[0] == pytest.approx(HOUR, abs=MILLISECOND)


@given(worlds(most=2), st.integers(0, ROUNDS - 1), st.integers(0, ROUNDS - 1))
def test_clocks_are_within_their_bounds_where_first_exchanges_are_not_kept(world, mine, other):
    """As where the last seconds are kept, or a disk was slow: each rank has others."""
    world.compare()
    for process, num_lost in zip(world.members, (mine, other), strict=True):
        process.forget(num_lost)
    world.works(SECOND)
    clocks_within_bounds(world.members)


def true_arrivals(world, index):
    return np.array([world.arrivals[index][process] for process in world.members], float)


@given(worlds())
def test_the_rank_that_is_named_came_last_by_what_is_said(world):
    world.go_on()
    timeline = Timeline(traced(world.members))
    clocks = [
        clock.bound(trace.rows[trace.rows[:, 0] == EventKind.CALL, 3])
        for trace, clock in zip(timeline.processes, timeline.clocks, strict=True)
    ]
    for index in range(len(world.arrivals)):
        true, bounds = true_arrivals(world, index), np.array([one[index] for one in clocks])
        order = np.argsort(true)
        late_by = true[order[-1]] - true[order[-2]]
        doubt = np.sort(bounds)[-2:].sum() + TICKS
        for calls in timeline.calls:
            assert calls.is_whole[index]
            if calls.last[index] == UNDECIDED:
                assert late_by <= 2 * doubt
            else:
                assert calls.last[index] == order[-1]
                # Time itself runs at most 100 ppm apart from the clock of the first rank.
                assert abs(calls.late_by[index] - late_by) <= doubt + 1e-4 * late_by


def test_no_rank_is_named_where_some_came_within_the_bounds_of_each_other():
    world = World([SimulatedProcess(LocalClock(n * HOUR, 1.0), n) for n in range(3)])
    world.latency = MILLISECOND
    world.call(compares=True)
    world.latency = MICROSECOND
    world.call()
    world.call()
    world.call(late={world.members[2]: SECOND})
    world.latency = MILLISECOND
    world.compare()
    for calls in Timeline(traced(world.members)).calls:
        assert calls.last.tolist()[2:] == [UNDECIDED, 2]


def test_no_rank_is_named_where_one_whose_clock_is_unsure_may_have_come_later():
    processes = [SimulatedProcess(LocalClock(n * HOUR, 1.0), n) for n in range(3)]
    world = World(processes)
    world.call(compares=True)
    for process, late in zip(processes, (1, 2, 0), strict=True):
        process.works(20 * SECOND + late * MILLISECOND)
    # Nobody knows within 10 ms when rank 2 has come, whose clock was compared 20 s before.
    world.call()
    survivors = World(processes[:2])
    survivors.call(compares=True)
    timeline = Timeline(traced(processes, killed=processes[2:]))
    assert {int(calls.last[1]) for calls in timeline.calls} == {UNDECIDED}


@given(worlds())
def test_times_of_two_processes_differ_by_no_more_than_what_the_table_says(world):
    world.go_on()
    timeline = Timeline(traced(world.members))
    for index in range(len(world.arrivals)):
        came = np.array([calls.begin[index] for calls in timeline.calls])
        wrong = came - true_arrivals(world, index) * world.members[0].clock.speed
        assert np.ptp(wrong) <= timeline.bound + TICKS


@given(worlds())
def test_a_rank_waits_for_the_one_that_came_last(world):
    world.go_on()
    timeline = Timeline(traced(world.members))
    for n, calls in enumerate(timeline.calls):
        assert np.all(calls.wait >= 0)
        assert np.all(calls.wait <= calls.end - calls.begin)
        for index in range(len(world.arrivals)):
            true = true_arrivals(world, index)
            wait = true.max() - true[n]
            assert abs(calls.wait[index] - wait) <= timeline.bound + 1e-4 * wait + TICKS


@given(worlds(most=3), st.integers(0, 1))
def test_calls_of_which_a_part_is_missing_are_not_cut(world, missing):
    world.go_on()
    del world.members[missing]
    timeline = Timeline(traced(world.members))
    for calls in timeline.calls:
        assert not calls.is_whole.any()
        assert not calls.wait.any()
        assert set(calls.last) == {UNDECIDED}


def test_a_call_that_a_rank_did_not_live_to_end_is_not_cut_on_the_others():
    processes = [SimulatedProcess(LocalClock(n * HOUR, 1.0), n) for n in range(2)]
    world = World(processes)
    world.call(compares=True)
    world.call()
    traces = traced(processes, killed=processes[1:])
    traces[1].rows = traces[1].rows[:-1]
    some, others = Timeline(traces).calls
    assert some.is_whole.tolist() == [True, False]
    assert others.is_whole.tolist() == [True]


def test_zeros_in_what_one_rank_has_left_are_told_and_lose_nothing_of_the_others():
    """As a disk leaves them; wherever they begin, and whatever fields of events they cover."""
    processes = [SimulatedProcess(LocalClock(n * HOUR, 1.0), n) for n in range(3)]
    world = World(processes)
    for _ in range(2):
        world.call(compares=True)
    (size,) = {process.rows.size for process in traced(processes)}
    told = set()
    for begin in range(0, size, 3):  # an event has seven fields
        traces = traced(processes)
        traces[1].rows.flat[begin : begin + 20] = 0
        timeline = Timeline(traces)
        assert [len(timeline.calls[n]) for n in (0, 2)] == [2, 2]
        assert {timeline.clocks[n].start for n in (0, 2)} == {0}
        told.update(summary(timeline)["missing"])
    assert told == {f"the rest of {traces[1].label}, whose part is damaged"}
