"""strategy.trace: on all ranks, or an error on all of them, whatever one of them does."""

import gzip
import json

import numpy as np
import pytest

import mpi_replica as mr
from everywhere import (
    check_works,
    cost_of,
    needs_two_ranks,
    needs_two_replicas,
    raises_everywhere,
)
from mpi_replica.collectives.agreement import agreement
from mpi_replica.ranks.watch import traced_calls
from mpi_replica.ranks.watch.traced_calls import TracedCalls
from mpi_replica.trace.trace_file import merge


def add_up(strategy):
    return strategy.run(lambda: mr.get_replica_context().all_reduce("SUM", 1.0))


def test_it_writes_one_file_for_all_ranks(strategy, path):
    with strategy.trace(path):
        add_up(strategy)
    found = json.loads(path.read_text("utf-8"))["otherData"]["mpi_replica"]
    assert [rank["rank"] for rank in found["ranks"]] == list(range(strategy.size))
    assert found["missing"] == []
    assert found["step"]["runs"] == 1
    check_works(strategy)


def test_files_of_the_program_beside_a_trace_stay(strategy, path):
    mine = path.with_name(f"{path.name}.parts") / "precious.csv"
    if strategy.rank == 0:
        mine.parent.mkdir()
        mine.write_text("1,2")
    strategy.barrier()
    for _ in range(2):
        with strategy.trace(path):
            add_up(strategy)
        assert [file.name for file in mine.parent.iterdir()] == ["precious.csv"]
    assert mine.read_text() == "1,2"
    check_works(strategy)


def test_a_part_in_a_context_that_has_no_id_is_one_of_the_rank(strategy, path):
    with strategy.trace(path), mr.ReplicaContext(strategy, None), mr.span("by hand"):
        pass
    assert "by hand" in path.read_text("utf-8")
    check_works(strategy)


def test_a_strategy_that_was_made_in_a_trace_is_traced_as_long_as_it(strategy, path):
    with strategy.trace(path):
        other = mr.MPIStrategy(strategy.communicator)
        assert isinstance(other.engine.watch.recorder, TracedCalls)
    assert not isinstance(other.engine.watch.recorder, TracedCalls)
    check_works(other)
    other.close()
    check_works(strategy)


def test_what_can_not_be_written_at_its_end_is_a_warning_and_the_program_goes_on(
    strategy, path, caplog
):
    with strategy.trace(path):
        add_up(strategy)
        if strategy.rank == 0:
            path.mkdir()  # as a disk that is full
        strategy.barrier()
    told = [record.getMessage() for record in caplog.records]
    if strategy.rank == 0:
        assert any(f"python -m mpi_replica trace {path}" in text for text in told), told
    assert not path.with_name(f"{path.name}.new").exists()
    check_works(strategy)
    if strategy.rank == 0:
        path.rmdir()
        found = merge(str(path))
        assert len(found["ranks"]) == strategy.size
    strategy.barrier()


@pytest.mark.parametrize(
    ("wrong", "kind"),
    [
        ({"last_seconds": "a"}, TypeError),
        ({"last_seconds": 0}, ValueError),
        ({"samples": 1}, TypeError),
        ({"path": None}, TypeError),
    ],
    ids=str,
)
def test_an_argument_that_is_wrong_is_told_by_its_name(strategy, path, wrong, kind):
    def begin():
        with strategy.trace(**{"path": path, **wrong}):
            add_up(strategy)

    (name,) = wrong
    assert name in str(raises_everywhere(kind, begin))
    check_works(strategy)


def test_what_ends_in_gz_is_compressed(strategy, path):
    path = path.with_name("trace.json.gz")
    with strategy.trace(str(path)):
        pass
    assert json.loads(gzip.decompress(path.read_bytes()))["otherData"]


def test_ranks_that_all_leave_it_by_an_error_go_on(strategy, path):
    def fail():
        with strategy.trace(path):
            add_up(strategy)
            raise KeyError("a")

    with pytest.raises(KeyError):
        fail()
    check_works(strategy)


def test_a_rank_that_leaves_it_by_an_error_while_others_stay_is_a_mistake_on_all(strategy, path):
    """By then clocks would be compared on some of them."""
    needs_two_ranks(strategy)

    def apart():
        try:
            with strategy.trace(path):
                if strategy.rank == 0:
                    raise KeyError("a")
                for _ in range(100):
                    add_up(strategy)
        except KeyError:
            for _ in range(100):
                add_up(strategy)

    raises_everywhere(mr.errors.CollectiveMismatchError, apart)
    check_works(strategy)


@pytest.mark.parametrize("most_headers", [32, 0], ids=["headers", "as in large worlds"])
def test_ranks_of_which_only_some_are_still_traced_work_on(
    monkeypatch, strategy, path, most_headers, passed_everywhere
):
    """Which are is each rank's own knowledge: they compare clocks where all of them are."""
    needs_two_ranks(strategy)
    monkeypatch.setattr(agreement, "_ALLGATHER_RANKS", most_headers)
    one = mr.MPIStrategy(strategy.communicator, num_replicas=strategy.num_replicas_in_sync)
    compared = []
    compare_clocks = TracedCalls.compare_clocks

    def compare(self):
        compared.append(len(compared))
        compare_clocks(self)

    monkeypatch.setattr(TracedCalls, "compare_clocks", compare)
    monkeypatch.setattr(traced_calls, "_MOST_GROWTH", 1)  # not more and more seldom

    def fail():
        raise KeyError("on all")

    def go_on():
        before = len(compared)
        for _ in range(100):
            one.barrier()
        return len(compared) - before

    trace = one.trace(path)
    trace.__enter__()
    assert go_on() > 0
    error = raises_everywhere(KeyError, lambda: one.run(fail))
    if one.rank == 0:
        trace.__exit__(KeyError, error, None)
    assert go_on() == 0
    error = raises_everywhere(KeyError, lambda: one.run(fail))
    if one.rank > 0:
        trace.__exit__(KeyError, error, None)
    check_works(one)
    with one.trace(path):
        assert go_on() > 0
    if passed_everywhere():
        one.close()


def test_a_failing_close_of_one_rank_leaves_the_others_in_step(strategy, path):
    """Those that close want to compare clocks at that call, and not at the next one."""
    needs_two_ranks(strategy)

    def apart():
        strategy.close() if strategy.rank == 0 else strategy.barrier()

    with strategy.trace(path):
        for _ in range(3):
            add_up(strategy)
            raises_everywhere(mr.errors.CollectiveMismatchError, apart)
        check_works(strategy)


@pytest.mark.parametrize("bad", [0, -1, float("nan"), "x"])
def test_seconds_that_are_none_are_an_error_everywhere(strategy, path, bad):
    given = bad if strategy.rank == strategy.size - 1 else None

    def traced():
        with strategy.trace(path, last_seconds=given):
            pass

    raises_everywhere((ValueError, TypeError), traced)
    check_works(strategy)


@pytest.mark.parametrize("kind", [np.int64, np.float32, int])
def test_seconds_may_be_a_number_of_any_kind(strategy, path, kind):
    with strategy.trace(path, last_seconds=kind(60)):
        add_up(strategy)
    assert "all_reduce" in path.read_text("utf-8")


def test_a_trace_that_is_entered_in_itself_is_refused_and_goes_on(strategy, path):
    trace = strategy.trace(path)

    def again():
        with trace:
            pass

    with trace:
        raises_everywhere(mr.errors.ContextError, again)
        add_up(strategy)
    assert "all_reduce" in path.read_text("utf-8")
    check_works(strategy)


def test_in_a_replica_it_is_an_error_everywhere(strategy, path):
    def traced():
        with strategy.trace(path):
            pass

    raises_everywhere(mr.errors.ContextError, lambda: strategy.run(traced))
    check_works(strategy)


def add_up_unlike(ctx):
    return ctx.all_reduce("SUM", 1.5 if ctx.replica_id_in_sync_group else 1)


def test_a_call_that_is_made_again_with_floats_is_two_calls_of_which_both_have_ended(strategy):
    needs_two_replicas(strategy)
    strategy.run(lambda: add_up_unlike(mr.get_replica_context()))
    *_, first, second, of_run = strategy.engine.watch.recorder.last()
    # What this rank had: on all others than the first it was floats at once.
    assert {first.text.partition(",")[0], second.text.partition(",")[0]} == {"all_reduce(SUM"}
    assert "float64[]" in second.text
    assert first.begun <= first.ended <= second.begun <= second.ended <= of_run.begun


def test_a_call_that_fails_has_ended_for_the_record(strategy):
    def fail():
        ctx = mr.get_replica_context()
        ctx.all_reduce("SUM", "no number" if ctx.replica_id_in_sync_group == 0 else 1.0)

    raises_everywhere(TypeError, lambda: strategy.run(fail))
    assert all(call.ended for call in strategy.engine.watch.recorder.last())


def test_the_bytes_and_calls_of_a_trace_are_those_that_were_made(strategy, path):
    needs_two_ranks(strategy)

    def reduce():
        mr.get_replica_context().all_reduce("SUM", 1.0)

    strategy.run(reduce)  # before it
    with strategy.trace(path):
        for _ in range(3):
            strategy.run(reduce)
    sites = json.loads(path.read_text("utf-8"))["otherData"]["mpi_replica"]["sites"]
    (site,) = [site for site in sites if site["call"].startswith("all_reduce")]
    _, both_bytes = cost_of(strategy, lambda: strategy.run(reduce))
    _, run_bytes = cost_of(strategy, lambda: strategy.run(lambda: None))
    assert (site["calls"], site["bytes"]) == (3, 3 * (both_bytes - run_bytes))
