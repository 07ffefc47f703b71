"""strategy.barrier: no rank returns before all have come."""

import pytest

import mpi_replica as mr
from everywhere import check_works, cost_of, needs_two_ranks, raises_everywhere


def test_what_a_rank_did_before_it_is_there_behind_it_on_all(strategy, shared_folder):
    for writer in range(strategy.size):
        file = shared_folder / f"of rank {writer}"
        if strategy.rank == writer:
            file.write_text(f"from {writer}", "utf-8")
        assert strategy.barrier() is None
        assert file.read_text("utf-8") == f"from {writer}"


@pytest.mark.usefixtures("small_world")
def test_it_costs_one_header(strategy):
    assert cost_of(strategy, strategy.barrier) == (1, 256)


def test_it_stands_in_a_merge_fn_and_in_the_scope(strategy):
    def merge(strategy, i):
        strategy.barrier()
        return strategy.reduce("SUM", i, axis=None)

    with strategy.scope():
        strategy.barrier()
        strategy.run(lambda: mr.get_replica_context().merge_call(merge, (1,)))
        strategy.barrier()
    check_works(strategy)


def test_ranks_at_different_barriers_are_told_both_lines(strategy):
    needs_two_ranks(strategy)

    def apart(**options):
        if strategy.rank == 0:
            strategy.barrier(**options)
        else:
            strategy.barrier(**options)

    error = raises_everywhere(mr.errors.CollectiveMismatchError, apart)
    assert str(error).count("barrier() at test_barrier.py:") == 2
    apart(options=mr.CommunicationOptions(name="saved"))
    check_works(strategy)


def test_a_rank_at_another_call_is_told_everywhere(strategy):
    needs_two_ranks(strategy)
    value = strategy.run(lambda: 1.0)

    def apart():
        strategy.reduce("SUM", value, axis=None) if strategy.rank == 0 else strategy.barrier()

    error = raises_everywhere(mr.errors.CollectiveMismatchError, apart)
    assert "barrier" in str(error)
    assert "reduce(SUM" in str(error)
    check_works(strategy)


@pytest.mark.parametrize("bad", [5, "x", {"timeout_seconds": 1.0}])
def test_options_that_are_none_are_an_error_everywhere(strategy, bad):
    given = bad if strategy.rank == strategy.size - 1 else None
    raises_everywhere(TypeError, lambda: strategy.barrier(options=given))
    check_works(strategy)


def test_in_a_replica_it_says_that_every_collective_waits(strategy):
    error = raises_everywhere(mr.errors.ContextError, lambda: strategy.run(strategy.barrier))
    assert "ctx.all_reduce" in str(error)
    check_works(strategy)


def test_one_process_alone_waits_for_nobody():
    assert mr.get_strategy().barrier() is None
