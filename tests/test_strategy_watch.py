"""When a watcher asks, answers, reports and keeps still: by a clock that the test sets (issue 3).

On ranks of MPI, and by their own clock: see test_watch.py.
"""

import logging

import pytest

from mpi_replica.errors import RankLostError
from mpi_replica.ranks.watch import strategy_watch as watch_module
from watches import Clock, Post, World


class Reports(logging.Handler):
    def __init__(self, world):
        super().__init__()
        self.world = world

    def emit(self, record):
        self.world.reports.append((self.world.clock.now - 1000, record.getMessage()))


@pytest.fixture
def world(monkeypatch):
    monkeypatch.setenv("MPI_REPLICA_STALL_SECONDS", "10")
    world = World(3, Clock(monkeypatch))
    world.reports = []
    logger, handler = logging.getLogger("mpi_replica"), Reports(world)
    logger.addHandler(handler)
    yield world
    logger.removeHandler(handler)


def test_the_lowest_rank_that_waits_reports_at_the_limit_and_at_its_multiples(world):
    world.begin(1, 2)
    world.pass_time(90)
    times = [seconds for seconds, _ in world.reports]
    assert [round(seconds / 10) for seconds in times] == [1, 2, 4, 8]
    assert all(text.startswith("call of rank 1 has waited ") for _, text in world.reports)
    assert all("missing: replica 0 (rank 0," in text for _, text in world.reports)


def test_a_new_wait_has_the_limit_again(world):
    world.begin(1, 2)
    world.pass_time(25)
    world.begin(0)
    world.end(0, 1, 2)
    world.pass_time(3)
    world.begin(0, 1)
    world.pass_time(11)
    assert [round(seconds) for seconds, _ in world.reports] == [10, 20, 38]


def test_waits_below_the_limit_are_not_reported(world):
    for _ in range(5):
        world.begin(0, 1)
        world.pass_time(9)
        world.begin(2)
        world.end(0, 1, 2)
    assert world.reports == []


def test_who_was_asked_leaves_it_to_the_rank_that_asked(world):
    """Also a lower one, whose watcher looked later."""
    world.begin(0, 1)
    world.pass_time(9)
    world.pass_time(2, 1, 2)  # rank 0's watcher gets no time
    world.pass_time(6)
    assert len(world.reports) == 1
    assert world.reports[0][1].startswith("call of rank 1 has waited ")


def test_of_two_that_ask_at_once_the_lower_one_reports(world, monkeypatch):
    world.begin(0, 1)
    world.look()
    with monkeypatch.context() as patch:
        patch.setattr(Post, "is_slow", True)
        world.look(1, 0, after=12)  # both ask before they hear of the other
    world.pass_time(3, 1, 0, 2)
    assert len(world.reports) == 1
    assert world.reports[0][1].startswith("call of rank 0 has waited ")


def test_a_rank_that_gives_no_answer_in_time_is_told_so(world):
    world.begin(0, 1)
    world.pass_time(12, 0, 1)
    ((_, text),) = world.reports
    assert "missing: replica 2 (rank 2, host n, pid 2) does not answer" in text


def test_a_late_answer_is_of_no_use_to_the_next_question(world):
    world.begin(0, 1)
    world.pass_time(12, 0, 1)
    world.look(2)  # it answers now, and stops again
    world.pass_time(10, 0, 1)
    assert len(world.reports) == 2
    assert "does not answer" in world.reports[1][1]


def test_a_rank_that_comes_while_it_is_asked_is_not_reported(world):
    world.begin(0, 1)
    world.pass_time(10, 0, 1)
    world.look(0, after=0.1)  # it has asked
    world.begin(2)
    world.end(0, 1, 2)
    world.pass_time(5)
    assert world.reports == []


def test_a_rank_with_replicas_that_wait_for_one_of_them_leaves_the_report_to_the_others(world):
    world.local[2] = (2,), "a call of its other replicas"
    world.begin(0, 1)
    world.pass_time(90)
    assert {text.partition(" has")[0] for _, text in world.reports} == {"call of rank 0"}


def test_it_reports_itself_where_no_other_rank_waits(world):
    world.local[2] = (2,), "a call of its other replicas"
    world.pass_time(45)
    assert [round(seconds / 10) for seconds, _ in world.reports] == [1, 2, 4]
    assert {text.partition(" has")[0] for _, text in world.reports} == {
        "a call of its other replicas"
    }


def test_a_timeout_is_told_to_all_ranks_with_the_report(world):
    world.begin(1, 2, timeout_seconds=3)
    world.pass_time(5)
    assert sorted(world.errors) == [0, 1, 2]
    ((kind, text),) = {(type(error).__name__, str(error)) for error in world.errors.values()}
    assert kind == "CollectiveTimeoutError"
    assert text.startswith("call of rank 1 has waited 3.0 s.")
    assert "missing: replica 0 (rank 0," in text
    assert world.reports == []
    world.end(1, 2)
    world.pass_time(30)
    assert world.aborts == []


def test_a_rank_that_can_not_come_out_of_a_call_that_was_given_up_ends_the_job(world):
    world.begin(0, 1, timeout_seconds=3)
    world.pass_time(4)
    world.end(1)
    world.pass_time(1)
    assert world.aborts == []
    world.pass_time(3)
    assert set(world.aborts) == {0}


def test_so_it_does_where_nothing_can_be_logged(world, monkeypatch):
    """As where the program has closed its stderr."""

    def fail(*_):
        raise ValueError("I/O operation on closed file")

    monkeypatch.setattr(Reports, "emit", fail)
    world.begin(0, 1, timeout_seconds=3)
    world.pass_time(4)
    world.end(1)
    with pytest.raises(ValueError, match="closed file"):
        world.pass_time(4)
    assert world.aborts == [0]


@pytest.mark.parametrize(
    ("error", "words"), [(OSError("no network"), "OSError: no network"), (KeyError(), "KeyError")]
)
def test_an_error_between_two_exchanges_is_told_to_the_others_with_its_text_if_any(
    world, error, words
):
    world.begin(1)
    world.watches[1].tell_of_break(error)
    world.look()
    assert sorted(world.errors) == [0, 2]
    for told in world.errors.values():
        assert f"left call of rank 1 halfway, by {words}. The strategy" in str(told)


@pytest.mark.parametrize("what", ["failure", "final"])
def test_a_rank_that_makes_steps_is_not_taken_for_one_that_can_not_come_out(world, what):
    """It moves large data, piece by piece."""
    told = {"failure": ("failure", 1, b""), "final": ("final", "break", "it is broken")}
    world.watches[2].tell(told[what])
    for _ in range(60):
        world.begin(0, 1)
        world.look(after=0.1)
        world.end(0, 1)
    assert world.aborts == []
    assert len(world.errors) == 2 * (what == "final")


def test_a_watch_that_is_closed_uses_its_mailbox_no_more(world):
    """The strategy has given it back; a watcher that goes through all watches may still come."""
    closed, other = world.watches[:2]
    closed.tell(("final", "break", "it is broken"))
    other.close()
    other.tell(("final", "break", "it is broken, too"))
    other.read()
    assert list(other.ask(10)) == [1]
    world.look(0, 2)
    assert sorted(world.errors) == [2]


def lose(world, rank, *knowing):
    for one in knowing:
        world.transports[one].loss = RankLostError("a rank has died.")
        world.transports[one].failed_ranks = lambda: [rank]


def test_behind_a_loss_the_launcher_is_not_told_that_a_rank_is_waited_for_that_is_known_to_be_dead(
    world, monkeypatch
):
    """It would end a job that goes on without that one."""
    told = []
    monkeypatch.setattr(watch_module, "tell", lambda **facts: told.append(facts))
    world.begin(0)
    lose(world, 2, 0)
    world.pass_time(12, 0)
    assert told == [{"waits_for": [1]}]
    ((_, text),) = world.reports
    assert "lost: replica 2 (rank 2," in text
    assert "missing: replica 1 (rank 1," in text


def test_ranks_that_have_met_a_loss_wait_for_those_that_have_not_whatever_each_has_counted(world):
    """In the exchange that a dead rank has cut short some come to its end, and some do not."""
    world.begin(0)
    world.begin(1, 1)
    world.begin(2, 2, 2)
    world.end(2)
    lose(world, 3, 0, 1)
    world.pass_time(12)
    ((_, text),) = world.reports
    assert text.splitlines()[:2] == [
        "the recovery from a loss has waited 10 s.",
        "  waiting: replicas 0-1 (ranks 0-1)",
    ]
    assert "missing: replica 2 (rank 2," in text


def test_no_limit_of_the_call_that_met_a_loss_ends_the_recovery(world):
    world.begin(0, timeout_seconds=3)
    lose(world, 2, 0)
    world.pass_time(9)
    assert world.errors == {}
