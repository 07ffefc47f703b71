"""What tests on several ranks say about all ranks."""

import re
import signal
import traceback

import numpy as np
import pytest

import mpi_replica as mr


def gathered(value):
    """Return `value` of each rank."""
    from mpi4py import MPI  # starts MPI, so not when this file is imported

    return MPI.COMM_WORLD.allgather(value)


def error_of(call):
    """Return what `call` raises on this rank, or None."""
    try:
        call()
    except BaseException as error:
        return error
    return None


def interrupt_instead(monkeypatch, place, name):
    """Have Ctrl-C come up on this rank in the place of the next call of a function."""

    def interrupted(*args):
        monkeypatch.undo()
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(place, name, interrupted)


def holds_everywhere(check):
    """Call `check`; where it fails on one rank it fails on all.

    Hypothesis repeats an example that fails: the ranks would be apart.
    """
    text = ""
    try:
        check()
    except AssertionError:
        text = traceback.format_exc()
    texts = gathered(text)
    assert texts == [""] * len(texts), "\n".join(texts)


def raises_everywhere(kind, call):
    """Call `call`; it must raise `kind`, with the same text, on every rank. Return the error."""
    error = error_of(call)
    seen = gathered((type(error).__name__, str(error)))
    if error is None or len(set(seen)) > 1:
        pytest.fail(f"not the same error on all ranks: {seen}")
    if not isinstance(error, kind):
        raise error
    return error


def steps_of(strategy, steps):
    """What each step gives to all replicas, in the order of their ids; all ranks see as many."""
    mine = [strategy.experimental_local_results(step) for step in steps]
    of_ranks = gathered(mine)
    assert len({len(of_rank) for of_rank in of_ranks}) == 1, [len(steps) for steps in of_ranks]
    return [[part for of_rank in step for part in of_rank] for step in zip(*of_ranks, strict=True)]


def ranks_of(strategy):
    """Return the rank of each replica."""
    return [rank for rank, ids in enumerate(gathered(strategy.local_replica_ids)) for _ in ids]


def named(replica_id, rank):
    """Return how an error names one replica."""
    return f"replica {replica_id} (rank {rank})"


def culprits(strategy):
    """Return the first, a middle and the last replica id."""
    count = strategy.num_replicas_in_sync
    return sorted({0, count // 2, count - 1})


def needs_two_replicas(strategy):
    if strategy.num_replicas_in_sync == 1:
        pytest.skip("a single replica has nobody to disagree with")


def needs_two_ranks(strategy):
    if strategy.size == 1:
        pytest.skip("a single rank has nobody to disagree with")


def shares_ranks(strategy):
    """Return whether some rank hosts several replicas."""
    return strategy.num_replicas_in_sync > strategy.size


def check_equal(found, expected):
    """Assert what a lambda can't: for `holds_everywhere`."""
    assert found == expected


def cost_of(strategy, call):
    """Return the steps that `call` takes, and the bytes that this rank sends in them."""
    transport = strategy.engine.transport
    steps, sent = transport.steps, transport.sent_bytes
    call()
    return transport.steps - steps, transport.sent_bytes - sent


def check_total(strategy):
    """Check that the next collective gives the right number."""
    count = strategy.num_replicas_in_sync

    def step():
        context = mr.get_replica_context()
        return context.all_reduce("SUM", context.replica_id_in_sync_group)

    totals = strategy.experimental_local_results(strategy.run(step))
    assert set(totals) == {count * (count - 1) // 2}


def check_works(strategy):
    """Check that the next collectives give the right numbers."""
    count = strategy.num_replicas_in_sync

    def step():
        context = mr.get_replica_context()
        mine = context.replica_id_in_sync_group
        total = context.all_reduce("SUM", np.array([mine, 1.0]))
        rows = context.all_gather(np.full(mine + 1, mine), axis=0)
        large = context.all_reduce("SUM", np.full(3000, mine))
        return total, rows, large

    expected = count * (count - 1) // 2
    for total, rows, large in strategy.experimental_local_results(strategy.run(step)):
        np.testing.assert_array_equal(total, [expected, count])
        np.testing.assert_array_equal(rows, np.repeat(np.arange(count), np.arange(count) + 1))
        np.testing.assert_array_equal(large, np.full(3000, expected))
    ids = strategy.run(lambda: mr.get_replica_context().replica_id_in_sync_group)
    assert strategy.reduce("SUM", ids, axis=None) == expected


def check_mistake(strategy, mistake, replicas=None):
    """Let replicas make a mistake (see mistakes.py): the first, a middle and the last one.

    Check that every rank gets the error, with the same text, and that the strategy works on.
    """
    layout = strategy.engine.layout
    for culprit in culprits(strategy) if replicas is None else replicas:
        origin = layout.rank_of(culprit)
        error = error_of(lambda culprit=culprit: mistake.make(strategy, culprit))
        kind = mistake.error
        if mistake.elsewhere is not None and strategy.rank != origin:
            kind = mistake.elsewhere
        ranks = gathered((isinstance(error, kind), type(error).__name__, str(error)))
        if not all(is_right for is_right, _, _ in ranks):
            raise AssertionError(f"replica {culprit}: {mistake.name}: {ranks}") from error
        if mistake.elsewhere is not None:  # the rank of origin raises the original
            del ranks[origin]
        assert len(set(ranks)) <= 1, ranks

        replica, replicas = (culprit,), layout.replica_ids(origin)
        wanted = [
            word.replace("{replica}", layout.describe(replica)).replace(
                "{replicas}", layout.describe(replicas)
            )
            for word in mistake.words
        ]
        if mistake.names_both_sides:
            wrong = replica if mistake.in_a_step else replicas
            right = set(layout.all_replica_ids).difference(wrong)
            wanted += [layout.describe(wrong), layout.describe(right)]
        holds_everywhere(
            lambda error=error, wanted=wanted: check_text(error, wanted, mistake.places)
        )
        check_total(strategy)
    check_works(strategy)


def check_text(error, words, places):
    """Check that an error, or a note of it, holds these words and names these lines."""
    text = "\n".join([str(error), *getattr(error, "__notes__", ())])
    missing = [word for word in words if word not in text]
    missing += [place for place in places if not re.search(rf"{re.escape(place)}\b", text)]
    assert missing == [], text
