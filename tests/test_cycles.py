"""Who finds a cycle of waits, and when: by a clock that the test sets (issue 3).

On ranks of MPI, and by their own clock: see test_watch.py.
"""

import gc
import random
import sys
import threading
import weakref
from contextlib import ExitStack

import pytest

from mpi_replica.ranks.watch import cycles
from mpi_replica.ranks.watch.cycles import CycleSearch
from mpi_replica.ranks.watch.new_strategies import NewStrategies
from watches import Clock, Post, World


class Ranks:
    """Some ranks with several strategies each, and their watchers."""

    def __init__(self, monkeypatch):
        self.clock = Clock(monkeypatch)
        self.new = [NewStrategies() for _ in range(4)]
        self.searches = [CycleSearch("n", 100 + rank, self.new[rank]) for rank in range(4)]
        self.watches = [[] for _ in self.searches]

    def strategy(self, *ranks):
        """Return a strategy over some of the ranks, which they have made."""
        with ExitStack() as made:
            self.make(made, *ranks, of=ranks)
        world = World(len(ranks), self.clock)
        for rank, watch in zip(ranks, world.watches, strict=True):
            self.watches[rank].append(watch)
            watch.on_cycle = lambda watch, message, rank=rank: self.searches[rank].receive(
                self.watches[rank], watch, message
            )
        return world

    def make(self, stack, *ranks, of=(0, 1, 2)):
        """Let ranks begin to make a strategy of some; they have when `stack` is left."""
        for rank in ranks:
            stack.enter_context(self.new[rank].noted(of, rank, f"line of rank {rank}"))

    def pass_time(self, seconds, *ranks):
        """Let the watchers of some ranks look ten times a second."""
        for _ in range(round(10 * seconds)):
            self.clock.now += 0.1
            for rank in ranks or range(4):
                for watch in self.watches[rank]:
                    watch.tick(self.clock.now)
                self.searches[rank].tick(self.watches[rank], self.clock.now)


@pytest.fixture
def ranks(monkeypatch):
    return Ranks(monkeypatch)


def one_text(*worlds):
    """Return the text of the errors of all ranks of some strategies, which is one."""
    errors = [error for world in worlds for error in world.errors.values()]
    assert [sorted(world.errors) for world in worlds] == [
        list(range(len(world.watches))) for world in worlds
    ]
    assert {type(error).__name__ for error in errors} == {"CollectiveMismatchError"}
    (text,) = {str(error) for error in errors}
    return text


def test_a_cycle_is_found_after_a_second(ranks):
    one, two = ranks.strategy(0, 1, 2), ranks.strategy(0, 1, 2)
    one.begin(0, 1)
    two.begin(2)
    ranks.pass_time(1)
    assert one.errors == two.errors == {}
    ranks.pass_time(1)
    text = one_text(one, two)
    assert "replica 0 (rank 0) of a strategy of 3 replicas: call of rank 0; replica 2" in text


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2)])
@pytest.mark.parametrize("slow_seconds", [0, 0.3])
def test_two_ranks_that_could_find_cycles_tell_of_one(ranks, monkeypatch, order, slow_seconds):
    """In whatever order their watchers look; where they search before they hear of the other."""
    two, one = ranks.strategy(0, 1, 2), ranks.strategy(0, 1, 2)
    one.begin(0, 1)
    two.begin(2)
    ranks.pass_time(1, *order)
    with monkeypatch.context() as patch:
        patch.setattr(Post, "is_slow", True)
        ranks.pass_time(slow_seconds, *order)
    ranks.pass_time(3, *order)
    one_text(one, two)


@pytest.mark.parametrize("late", range(4))
@pytest.mark.parametrize("late_seconds", [0.5, 1.5, 5])
def test_ranks_that_wait_for_one_that_comes_late_tell_of_one_cycle(ranks, late, late_seconds):
    """Each of them is in one, searches as the others do, and hears of them sooner or later."""
    for seed in range(25):
        draw = random.Random(seed)
        one, two = ranks.strategy(0, 1, 2, 3), ranks.strategy(0, 1, 2, 3)
        one.begin(*{0, 1, 2, 3} - {late}, call="first")
        ranks.pass_time(late_seconds)
        two.begin(late, call="second")
        for _ in range(90):
            for transport in (*one.transports, *two.transports):
                transport.mailbox.is_slow = draw.random() < 0.3
            ranks.pass_time(0.1, *draw.sample(range(4), 4))
        text = one_text(one, two)
        assert "first" in text
        assert "second" in text
        for watches in ranks.watches:
            watches.clear()


def test_who_finds_a_cycle_can_not_complete_a_call_of_it_any_more(ranks):
    """When its wait ends it may come there before the others have heard of it."""
    one, two = ranks.strategy(0, 1, 2), ranks.strategy(0, 1, 2)
    one.begin(1, 2)
    two.begin(0)
    while not two.errors:
        ranks.pass_time(0.1, 1, 2)
        ranks.pass_time(0.1, 0)
    assert list(one.errors) == list(two.errors) == [0]
    ranks.pass_time(1)
    one_text(one, two)


def test_a_cycle_that_the_lowest_waiting_rank_is_not_in_is_found_as_well(ranks):
    """Rank 0 searches first, in vain."""
    ranks.strategy(0)
    one, two = ranks.strategy(0, 1, 2), ranks.strategy(1, 2)
    one.begin(0, 1)
    two.begin(1)
    ranks.pass_time(3)
    assert "replica 1 (rank 1) of a strategy of 3 replicas" in one_text(one, two)


def test_a_ring_of_strategies_is_found(ranks):
    pairs = [ranks.strategy(0, 1), ranks.strategy(1, 2), ranks.strategy(2, 0)]
    for pair in pairs:
        pair.begin(0)
    ranks.pass_time(2)
    assert one_text(*pairs).count("of a strategy of 2 replicas") == 1  # their texts are alike


def test_a_rank_that_is_only_late_is_no_cycle(ranks):
    one, two = ranks.strategy(0, 1, 2), ranks.strategy(0, 1, 2)
    one.begin(0, 1)
    ranks.pass_time(9)
    two.begin(2)  # its partners will come when it has come to them
    two.end(2)
    one.begin(2)
    one.end(0, 1, 2)
    two.begin(0, 1)
    ranks.pass_time(9)
    assert one.errors == two.errors == {}


def test_ranks_that_wait_in_one_strategy_after_the_other_are_no_cycle(ranks):
    one, two = ranks.strategy(0, 1, 2), ranks.strategy(0, 1, 2)
    one.begin(0, 1)
    ranks.pass_time(1.1)  # rank 0 has begun to search
    one.begin(2)
    one.end(0, 1, 2)
    two.begin(0, 2)
    ranks.pass_time(9)
    two.begin(1)
    two.end(0, 1, 2)
    assert one.errors == two.errors == {}


def test_what_is_kept_of_waits_does_not_grow_with_them(ranks):
    one, _ = ranks.strategy(0, 1, 2), ranks.strategy(0, 1, 2)
    kept = []
    for _ in range(3):
        one.begin(0, 1)
        ranks.pass_time(9)
        kept.append([sum(map(len, search._seen.values())) for search in ranks.searches])
        one.begin(2)
        one.end(0, 1, 2)
    assert kept[0] == kept[-1] != [0, 0, 0, 0]


def test_watches_that_are_gone_are_not_kept(ranks):
    one, two = ranks.strategy(0, 1, 2), ranks.strategy(0, 1, 2)
    one.begin(0, 1)
    ranks.pass_time(3)
    watches = [weakref.ref(watch) for world in (one, two) for watch in world.watches]
    del one, two
    ranks.watches = [[] for _ in ranks.watches]
    gc.collect()
    assert [watch() for watch in watches] == [None] * 6
    assert [len(search._searches) for search in ranks.searches] == [0, 0, 0, 0]


@pytest.fixture
def making(monkeypatch):
    """Give what ends with the test, whose process has only those threads that it starts."""
    before = {*sys._current_frames()} - {threading.get_ident()}
    monkeypatch.setattr(cycles, "current_frames", lambda: {*sys._current_frames()} - before)
    with ExitStack() as stack:
        yield stack


@pytest.mark.parametrize("waiting", [(0,), (2,), (0, 1)])
def test_ranks_that_make_a_strategy_while_others_wait_for_them_in_another_one_are_a_cycle(
    ranks, making, waiting
):
    one = ranks.strategy(0, 1, 2)
    one.begin(*waiting)
    ranks.make(making, *{0, 1, 2} - {*waiting})
    ranks.pass_time(0.9)
    assert one.errors == {}
    ranks.pass_time(0.4)
    text = one_text(one)
    assert f"of a strategy of 3 replicas: call of rank {waiting[0]}" in text
    assert "of a strategy of 3 replicas: MPIStrategy() at line of rank" in text


def test_a_rank_that_has_made_the_strategy_may_wait_for_those_that_still_make_it(ranks, making):
    one = ranks.strategy(0, 1, 2)
    with ExitStack() as made:
        ranks.make(made, 0)
    one.begin(0)
    ranks.make(making, 1, 2)
    ranks.pass_time(9)
    assert one.errors == {}


def test_who_waits_need_not_be_of_the_strategy_that_is_made(ranks, making):
    one = ranks.strategy(0, 1, 2)
    one.begin(0)
    ranks.make(making, 1, of=(1, 2))
    ranks.pass_time(9)
    assert one.errors == {}


def test_who_makes_a_strategy_may_have_come_to_the_call_before(ranks, making):
    """As another thread of it does."""
    one = ranks.strategy(0, 1, 2)
    one.begin(0, 1)
    ranks.make(making, 1)
    ranks.pass_time(9)
    assert one.errors == {}


@pytest.mark.parametrize("name", ["Thread-1", "replica server"])
def test_another_thread_of_the_program_may_make_the_strategy(ranks, making, name):
    may_end = threading.Event()
    other = threading.Thread(target=may_end.wait, name=name)
    other.start()
    one = ranks.strategy(0, 1, 2)
    one.begin(0)
    ranks.make(making, 1, 2)
    ranks.pass_time(9)
    assert one.errors == {}
    may_end.set()
    other.join()
    ranks.pass_time(9)
    one_text(one)


def test_ranks_that_make_a_strategy_for_one_whose_program_has_ended_end_with_the_job(
    ranks, making, caplog
):
    one = ranks.strategy(0, 1, 2)
    one.watches[0].is_leaving = True
    ranks.make(making, 1)
    ranks.pass_time(1.2)
    assert one.aborts == [0]
    assert "the end of the program; replica 1 (rank 1) of a strategy of 3" in caplog.text
    assert one.errors == {}
