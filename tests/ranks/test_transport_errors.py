"""An error of the transport on one rank, before it sent anything, is that error on every rank."""

import numpy as np
import pytest

import mpi_replica as mr
from everywhere import check_works, raises_everywhere


@pytest.fixture
def fails_once(strategy, monkeypatch):
    """Let a method of the transport fail on one rank, the next time that it is called there."""

    def break_it(method, rank):
        if strategy.rank != rank:
            return
        transport = strategy.engine.transport

        def broken(*args, **kwargs):
            monkeypatch.undo()
            raise OSError(f"{method} failed on rank {rank}")

        monkeypatch.setattr(transport, method, broken)

    return break_it


def reduce_small():
    ctx = mr.get_replica_context()
    return ctx.all_reduce("SUM", float(ctx.replica_id_in_sync_group))


def gather_rows():
    ctx = mr.get_replica_context()
    return ctx.all_gather(np.arange(ctx.replica_id_in_sync_group), axis=0)


def merge():
    ctx = mr.get_replica_context()
    return ctx.merge_call(lambda strategy, x: None, (ctx.replica_id_in_sync_group,))


@pytest.mark.parametrize("step", [reduce_small, gather_rows, merge, lambda: None])
def test_in_a_step(strategy, fails_once, step):
    for rank in range(strategy.size):
        fails_once("exchange", rank)
        error = raises_everywhere(OSError, lambda: strategy.run(step))
        assert str(error) == f"exchange failed on rank {rank}"
        check_works(strategy)


def test_in_cross_replica_context(strategy, fails_once):
    ids = strategy.run(lambda: mr.get_replica_context().replica_id_in_sync_group)
    with strategy.scope():
        v = mr.Variable(1.0)
    calls = [lambda: strategy.extended.broadcast_to(strategy.rank), lambda: v.assign(2.0)]
    if strategy.size > 1:  # on one rank all values are at hand, and nothing is exchanged
        calls.append(lambda: strategy.reduce("SUM", ids, axis=None))
    for call in calls:
        for rank in range(strategy.size):
            fails_once("exchange", rank)
            error = raises_everywhere(OSError, call)
            assert str(error) == f"exchange failed on rank {rank}"
            check_works(strategy)
    assert float(v) == 1.0
