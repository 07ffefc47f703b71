"""The texts of the watcher, and what they are made of: calls, stacks, a signal (issue 3)."""

import threading
import types

import pytest

from mpi_replica.core.layout import Layout
from mpi_replica.ranks.watch.recorder import MOST_CALLS, FlightRecorder, RecordedCall
from mpi_replica.ranks.watch.stacks import Whereabouts
from mpi_replica.ranks.watch.stall_report import (
    Answer,
    Processes,
    local_stall_report,
    rank_report,
    stall_report,
)
from mpi_replica.ranks.watch.strategy_watch import stall_seconds
from mpi_replica.strategy.start import _reported

CALL = "all_reduce(SUM, 12 leaves, 4.1 MB) at train.py:88"
BEFORE = RecordedCall("all_gather(axis=0) at train.py:80", 1000.0, 1000.5)
STACK = (
    '  File "train.py", line 90, in step\n    rows = load()\n  File "data.py", line 41, in load\n'
)
LOCK = STACK + "    with lock:\n"


def waiting(step=7, missing=()):
    return Answer(step, True, missing, 1061.7, (BEFORE,), Whereabouts(STACK, False))


def elsewhere(missing=(), recent=(BEFORE,), place=None):
    return Answer(6, False, missing, 1061.7, recent, place or Whereabouts(STACK, False))


def report(layout, answers, waited=60.0, *, can_be_lost=False, lost=()):
    hosts = [f"n{16 + rank}" for rank in range(layout.size)]
    processes = Processes(hosts, [4710, 4711, 4712, 4713], can_be_lost, lost)
    return stall_report(CALL, waited, 7, answers, layout, processes)


def missing_lines(text):
    """Return the lines that name those who are missing, without the stacks."""
    return [line for line in text.splitlines() if line.startswith("  missing: ")]


def test_a_report_says_who_waits_where_and_where_the_missing_rank_is():
    """As the issue has it."""
    answers = {0: waiting(), 1: elsewhere(), 2: waiting(), 3: waiting()}
    text = report(Layout((1, 1, 1, 1), 0), answers)
    recorded = str(BEFORE)
    assert text.splitlines() == [
        "all_reduce(SUM, 12 leaves, 4.1 MB) at train.py:88 has waited 60 s.",
        "  waiting: replicas 0, 2-3 (ranks 0, 2-3)",
        "  missing: replica 1 (rank 1, host n17, pid 4711), last call all_gather(axis=0) at"
        " train.py:80, 61.2 s ago; it is now at",
        '    File "train.py", line 90, in step',
        "      rows = load()",
        '    File "data.py", line 41, in load',
        "    its last calls:",
        f"      {recorded}",
    ]


def test_errors_that_the_others_do_not_know_of_yet_are_told_in_the_order_of_the_ranks():
    """Also of several lines."""
    first = waiting()._replace(errors=["ValueError: no rows\nin part 2, by replica 0"])
    last = waiting()._replace(errors=["OSError: no file, by replica 2"])
    text = report(Layout((1, 1, 1), 0), {2: last, 0: first, 1: elsewhere()})
    assert text.splitlines()[1:5] == [
        "  waiting: replicas 0, 2 (ranks 0, 2)",
        "  raised: ValueError: no rows",
        "    in part 2, by replica 0",
        "  raised: OSError: no file, by replica 2",
    ]


def test_a_rank_without_a_call_so_far_is_told_so():
    text = report(Layout((1, 1), 0), {0: waiting(), 1: elsewhere(recent=())})
    assert "(rank 1, host n17, pid 4711), no call so far; it is now at" in text
    assert "its last calls" not in text


def test_a_rank_that_does_not_answer_is_named():
    text = report(Layout((2, 1, 2), 0), {0: waiting(), 1: waiting()})
    assert text.splitlines()[1:] == [
        "  waiting: replicas 0-2 (ranks 0-1)",
        "  missing: replicas 3-4 (rank 2, host n18, pid 4712) does not answer: the process is"
        " stopped, its host can't be reached, or C code in it holds the GIL",
    ]


def test_where_ranks_can_be_lost_the_report_says_how_to_go_on_without_those_that_are_missing():
    answers = {0: waiting(), 1: elsewhere(), 2: waiting()}
    layout = Layout((1, 1, 1, 1), 0)
    text = report(layout, answers, can_be_lost=True)
    assert [line for line in text.splitlines() if "kill" in line] == [
        "    to go on without it: kill -9 4711 on n17",
        "    to go on without it: kill -9 4713 on n19",
    ]
    assert text.endswith("4713 on n19")
    # Without these lines it is what it is elsewhere, where to kill one would end the job.
    others = [line for line in text.splitlines() if "kill" not in line]
    assert report(layout, answers).splitlines() == others


def test_a_rank_that_has_died_is_told_to_be_lost_and_nobody_is_advised_to_kill_it():
    layout = Layout((1, 1, 1), 0)
    text = report(layout, {0: waiting(), 2: waiting()}, can_be_lost=True, lost=(1,))
    assert text.splitlines()[1:] == [
        "  waiting: replicas 0, 2 (ranks 0, 2)",
        "  lost: replica 1 (rank 1, host n17, pid 4711): its process has died",
        "  missing: no rank: all are in this call, and MPI does not go on",
    ]


def test_of_several_replicas_of_a_rank_only_those_are_missing_that_have_not_come():
    answers = {0: waiting(), 1: elsewhere(missing=(3, 4))}
    text = report(Layout((2, 3), 0), answers)
    assert "  waiting: replicas 0-2 (ranks 0-1)" in text.splitlines()
    (line,) = missing_lines(text)
    assert line.startswith("  missing: replicas 3-4 (rank 1, host n17, pid 4711), last call ")


def test_all_replicas_of_a_rank_are_missing_that_is_in_no_call():
    """It is between two runs, or on its way from the meeting of its replicas to the exchange."""
    (line,) = missing_lines(report(Layout((2, 3), 0), {0: waiting(), 1: elsewhere()}))
    assert line.startswith("  missing: replicas 2-4 (rank 1,")


def test_each_missing_rank_has_a_line():
    answers = {1: waiting(), 0: elsewhere(), 3: elsewhere()}
    lines = missing_lines(report(Layout((1, 1, 1, 1), 1), answers))
    assert [line.partition(" (")[2].partition(",")[0] for line in lines] == [
        "rank 0",
        "rank 2",
        "rank 3",
    ]


def test_a_rank_that_is_ahead_is_not_missing():
    text = report(Layout((1, 1, 1), 0), {0: waiting(), 1: waiting(step=9), 2: elsewhere()})
    assert "  waiting: replicas 0-1 (ranks 0-1)" in text.splitlines()


def test_where_nobody_is_missing_the_report_says_so():
    answers = {0: waiting(), 1: waiting()}
    (line,) = missing_lines(report(Layout((1, 2), 0), answers))
    assert line == "  missing: no rank: all are in this call, and MPI does not go on"


def test_a_wait_for_a_lock_is_told():
    answers = {0: waiting(), 1: elsewhere(place=Whereabouts(LOCK, True))}
    text = report(Layout((1, 1), 0), answers)
    assert text.splitlines()[-1] == "    It waits for a lock."


@pytest.mark.parametrize(
    ("missing", "those"), [((3,), "replicas 1-2 of the same rank wait in"), ((2, 3), "replica 1")]
)
def test_a_lock_that_another_replica_of_the_rank_holds_is_recognised(missing, those):
    answers = {0: waiting(), 1: elsewhere(missing=missing, place=Whereabouts(LOCK, True))}
    text = report(Layout((1, 3), 0), answers)
    last = text.splitlines()[-1]
    assert last.startswith(f"    It waits for a lock, while {those}")
    assert last.endswith("Hold no lock over a collective.")


def test_a_rank_whose_replicas_wait_for_one_of_them_is_reported_without_other_ranks():
    answer = elsewhere(missing=(1,), place=Whereabouts(LOCK, True))
    text = local_stall_report(CALL, 1.25, answer, Layout((3,), 0), Processes(["n16"], [4710]))
    assert text.splitlines()[:3] == [
        f"{CALL} has waited 1.2 s.",
        "  waiting: replicas 0, 2 (rank 0)",
        "  missing: replica 1 (rank 0, host n16, pid 4710), last call all_gather(axis=0) at"
        " train.py:80, 61.2 s ago; it is now at",
    ]
    assert "while replicas 0, 2 of the same rank wait in a collective" in text


def test_the_last_calls_of_a_missing_rank_are_shown():
    calls = tuple(RecordedCall(f"reduce at train.py:{n}", n, n + 0.25) for n in range(9))
    text = report(Layout((1, 1), 0), {0: waiting(), 1: elsewhere(recent=calls)})
    shown = text.partition("its last calls:\n")[2].splitlines()
    assert shown == [f"      {call}" for call in calls[-3:]]


def test_a_rank_tells_where_it_is():
    assert rank_report(elsewhere()).startswith("it is at\n")
    assert "in load" in rank_report(elsewhere())
    open_call = RecordedCall(CALL, 1001.0, None)
    text = rank_report(waiting()._replace(recent=(BEFORE, open_call)))
    assert text.splitlines() == [
        "it waits in the last of these calls",
        "    its last calls:",
        f"      {BEFORE}",
        f"      {open_call}",
    ]


def test_a_recorded_call_is_a_line_with_its_time_and_how_long_it_lasted():
    assert str(BEFORE).endswith(":40.000 all_gather(axis=0) at train.py:80, 500.0 ms")
    assert str(RecordedCall(CALL, 1000.125, None)).endswith(f":40.125 {CALL}, not ended")


def test_the_recorder_keeps_the_last_256_calls_in_their_order():
    recorder = FlightRecorder()
    assert recorder.last() == []
    for number in range(MOST_CALLS + 10):
        recorder.begin(f"call {number}", None)
        recorder.end()
    texts = [call.text for call in recorder.last()]
    assert MOST_CALLS == 256
    assert texts == [f"call {number}" for number in range(10, MOST_CALLS + 10)]
    assert [call.text for call in recorder.last(2)] == texts[-2:]


def test_a_call_that_goes_on_has_not_ended():
    recorder = FlightRecorder()
    recorder.begin("before", None)
    recorder.end()
    recorder.begin("now", None)
    before, now = recorder.last()
    assert before.begun <= before.ended <= now.begun
    assert now.ended is None
    recorder.end()
    assert recorder.last(1)[0].ended >= now.begun


def test_the_recorder_can_be_read_while_another_thread_writes():
    recorder = FlightRecorder()
    seen = threading.Event()

    def write():
        number = 0
        while not seen.is_set():
            recorder.begin(f"{number}", None)
            recorder.end()
            number += 1

    writer = threading.Thread(target=write)
    writer.start()
    try:
        while not recorder.last():
            pass
        for _ in range(200):
            numbers = [int(call.text) for call in recorder.last()]
            assert numbers == list(range(numbers[0], numbers[-1] + 1))
    finally:
        seen.set()
        writer.join()


@pytest.mark.parametrize("given", ["abc", "0", "-1", "nan", "1 s"])
def test_a_limit_that_is_no_positive_number_is_told_and_not_used(given, monkeypatch, caplog):
    monkeypatch.setenv("MPI_REPLICA_STALL_SECONDS", given)
    assert stall_seconds() == stall_seconds() == 60.0  # told once
    (record,) = caplog.records
    assert record.getMessage() == (
        f"MPI_REPLICA_STALL_SECONDS={given!r} is not a positive number of seconds: 60 is used."
    )


@pytest.mark.parametrize(("given", "seconds"), [("", 60.0), ("1.5", 1.5), ("inf", float("inf"))])
def test_the_limit_is_read_from_the_environment(given, seconds, monkeypatch, caplog):
    monkeypatch.setenv("MPI_REPLICA_STALL_SECONDS", given)
    assert stall_seconds() == seconds
    assert caplog.records == []
    monkeypatch.delenv("MPI_REPLICA_STALL_SECONDS")
    assert stall_seconds() == 60.0


@pytest.mark.parametrize("given", ["1e10", "inf"])
def test_a_limit_beyond_what_a_thread_can_wait_for_is_never_reached(given, monkeypatch):
    monkeypatch.setenv("MPI_REPLICA_STALL_SECONDS", given)
    with _reported(types.SimpleNamespace(rank=0, size=2), "train.py:1"):
        (timer,) = (one for one in threading.enumerate() if isinstance(one, threading.Timer))
        assert timer.interval == threading.TIMEOUT_MAX
