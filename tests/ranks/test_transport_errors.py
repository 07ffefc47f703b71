"""A header that could not be sent on one rank is that error on every rank.

At each agreement of each kind of call, on each rank in turn; and the next collective works. What
fails behind it ends the strategy (see tests/test_broken_calls.py).
"""

import functools

import numpy as np
import pytest

import mpi_replica as mr
from everywhere import check_works, error_of, needs_two_ranks, raises_everywhere

METHODS = ("exchange", "maximum")


class Exchanges:
    """Counts the exchanges of a strategy, and lets one fail on this rank in place of its message.

    Parameters
    ----------
    fails_at : int, optional
        The number of the exchange that fails.
    """

    def __init__(self, strategy, monkeypatch, fails_at=None):
        self.transport = strategy.engine.transport
        self.rank = strategy.rank
        self.monkeypatch = monkeypatch
        self.fails_at = fails_at
        self.methods = []

    def during(self, call):
        """Call `call`."""
        with self.monkeypatch.context() as patch:
            for name in METHODS:
                patch.setattr(self.transport, name, self.counted(name))
            call()

    def counted(self, name):
        method = getattr(self.transport, name)

        def counted(*args, **kwargs):
            number = len(self.methods)
            self.methods.append(name)
            if number == self.fails_at:
                raise OSError(f"{name} failed on rank {self.rank}, at {number}")
            return method(*args, **kwargs)

        return counted


def context():
    return mr.get_replica_context()


def mine():
    return context().replica_id_in_sync_group


def filled(shape, dtype="f8"):
    return np.full(shape, 1 + mine(), dtype)


def all_reduce(op, *leaves, **options):
    def step():
        given = mr.CommunicationOptions(**options)
        return context().all_reduce(op, [filled(*leaf) for leaf in leaves], given)

    return lambda strategy: strategy.run(step)


def all_gather(*shapes, axis=0, uneven=0):
    def step():
        more = uneven * mine()
        return context().all_gather([filled((n + more, *rest)) for n, *rest in shapes], axis)

    return lambda strategy: strategy.run(step)


def merge_call(*leaves, look=False):
    def merge_fn(strategy, *args):
        return [float(np.sum(x.values[0])) for x in args] if look else None

    return lambda strategy: strategy.run(
        lambda: context().merge_call(merge_fn, [filled(leaf) for leaf in leaves])
    )


def from_above(call):
    def do(strategy):
        rows = strategy.experimental_distribute_values_from_function(
            lambda context: np.full(9000, float(context.replica_id_in_sync_group))
        )
        return call(strategy, rows)

    return do


def variable(call, **settings):
    def do(strategy):
        with strategy.scope():
            made = mr.Variable(1.0, **settings)
        return call(strategy, made)

    return do


SUM, FIRST = mr.VariableAggregation.SUM, mr.VariableAggregation.ONLY_FIRST_REPLICA
CALLS = {
    "all_reduce in the header": all_reduce("SUM", (1,)),
    "all_reduce of a pack": all_reduce("MEAN", (3000, "f4"), (1, "i8")),
    "all_reduce in pieces": all_reduce(
        "SUM", (20_000,), (3, "i8"), (9000,), bytes_per_pack=1 << 16
    ),
    "all_reduce of the greatest": all_reduce("MAX", (20_000,)),
    "all_reduce of half floats": all_reduce("MEAN", (40_000, "f2")),
    "reproducible in the header": all_reduce("SUM", (1,), reproducible=True),
    "reproducible in a message": all_reduce("MEAN", (700,), (3, "i8"), reproducible=True),
    "reproducible by a window": all_reduce(
        "MEAN", (9000,), (3, "i8"), bytes_per_pack=1 << 16, reproducible=True
    ),
    "reproducible in pieces": all_reduce(
        "SUM", (9000,), (3, "i8"), bytes_per_pack=1 << 16, implementation="ALLTOALL"
    ),
    "all_gather in the header": all_gather((2,)),
    "all_gather of large leaves": all_gather((9000,), (9000, 2)),
    "all_gather of uneven leaves": all_gather((70_000,), (3, 2), (5,), uneven=7),
    "all_gather of many leaves": all_gather(*[(4,)] * 100),
    "all_gather along another axis": all_gather((4, 5000), axis=1),
    "merge_call": merge_call(3),
    "merge_call of more": merge_call(4000),
    "merge_call that looks": merge_call(9000, 3, 9000, look=True),
    "reduce": from_above(lambda strategy, x: strategy.reduce("SUM", x, axis=None)),
    "reduce along an axis": from_above(lambda strategy, x: strategy.reduce("MEAN", x, axis=0)),
    "gather": from_above(lambda strategy, x: strategy.gather(x, axis=0)),
    "broadcast_to": lambda strategy: strategy.extended.broadcast_to(1.0),
    "broadcast_to of more": lambda strategy: strategy.extended.broadcast_to(bytes(2 << 20)),
    "variable": variable(lambda strategy, v: v.assign(3.0)),
    "variable in a step": variable(lambda strategy, v: strategy.run(lambda: v.assign(3.0))),
    "variable that sums": variable(
        lambda strategy, v: strategy.run(lambda: v.assign_add(float(mine()))), aggregation=SUM
    ),
    "variable of the first": variable(
        lambda strategy, v: strategy.run(lambda: v.assign(float(mine()))), aggregation=FIRST
    ),
    "variable that is read": variable(
        lambda strategy, v: float(v),
        aggregation=SUM,
        synchronization=mr.VariableSynchronization.ON_READ,
    ),
    "verify": variable(lambda strategy, v: strategy.verify([v, np.ones(9000)])),
    "barrier": lambda strategy: strategy.barrier(),
    "gather_objects": lambda strategy: strategy.gather_objects(1.0),
    "gather_objects of more": lambda strategy: strategy.gather_objects(bytes(2 << 20)),
    "end of a run": lambda strategy: strategy.run(int),
}


def check_each_exchange(strategy, monkeypatch, call):
    """Let each agreement of `call` fail on each rank; return the methods of the exchanges."""
    call(strategy)  # the first one may open a window
    all_of_them = Exchanges(strategy, monkeypatch)
    all_of_them.during(lambda: call(strategy))
    for number, method in enumerate(all_of_them.methods):
        if "maximum" in all_of_them.methods and method == "exchange":
            continue  # of payloads, behind the agreement
        for rank in sorted({0, strategy.size // 2, strategy.size - 1}):
            one = Exchanges(strategy, monkeypatch, number if rank == strategy.rank else None)
            failing = functools.partial(one.during, lambda: call(strategy))
            error = raises_everywhere(OSError, failing)
            assert str(error) == f"{method} failed on rank {rank}, at {number}"
            check_works(strategy)
    return all_of_them.methods


@pytest.mark.parametrize("name", CALLS)
def test_at_each_agreement_of_a_call(strategy, monkeypatch, name):
    assert check_each_exchange(strategy, monkeypatch, CALLS[name]) or strategy.size == 1


WITH_DATA = [name for name in CALLS if "pieces" in name or "many" in name or "looks" in name]


@pytest.mark.parametrize("name", WITH_DATA)
def test_with_a_timeout(monkeypatch, name):
    options = mr.CommunicationOptions(timeout_seconds=60)
    with mr.MPIStrategy(replicas_per_rank=2, communication_options=options) as strategy:
        check_each_exchange(strategy, monkeypatch, CALLS[name])


@pytest.mark.parametrize(
    "name",
    [*WITH_DATA, "merge_call", "all_gather in the header", "verify", "barrier", "gather_objects"],
)
def test_with_more_ranks_than_see_all_headers(strategy, monkeypatch, name):
    """Section 6: there two messages take the place of a header."""
    monkeypatch.setattr(strategy.engine.agreement, "_wide", True)
    methods = check_each_exchange(strategy, monkeypatch, CALLS[name])
    assert methods[0] == "maximum"


def differ():
    context().all_reduce("SUM", np.ones(2 + mine()))


def fail():
    if mine() == 1:
        raise ValueError("from replica 1")
    context().all_reduce("SUM", 1.0)


def end_apart():
    return None if mine() else 1


def diverge():
    context().merge_call(lambda strategy: strategy.verify(np.full(9000, strategy.rank)))


@pytest.mark.parametrize("step", [differ, fail, end_apart, diverge])
def test_when_the_ranks_are_about_to_tell_each_other_what_is_wrong(strategy, monkeypatch, step):
    """All ranks raise one error: this one, or what they were about to raise."""
    needs_two_ranks(strategy)
    all_of_them = Exchanges(strategy, monkeypatch)
    wrong = error_of(lambda: all_of_them.during(lambda: strategy.run(step)))
    for rank in range(strategy.size):
        one = Exchanges(strategy, monkeypatch, 0 if rank == strategy.rank else None)
        failing = functools.partial(one.during, lambda: strategy.run(step))
        error = raises_everywhere(Exception, failing)
        assert type(error) in (OSError, type(wrong))
        check_works(strategy)
