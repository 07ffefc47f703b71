"""A header that could not be sent on one rank is that error on every rank.

At each agreement of some calls, on each rank in turn; and the next collective works. All kinds of
call are done by one driver (see tests/test_driver.py). What fails behind a header ends the strategy
(see tests/test_broken_calls.py).
"""

import functools

import numpy as np
import pytest

import mpi_replica as mr
from everywhere import check_works, error_of, needs_two_ranks, raises_everywhere
from mpi_replica.collectives.agreement.group import Kept
from mpi_replica.collectives.agreement.header_sizes import HeaderSizes

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


def filled(shape):
    return np.full(shape, 1.0 + mine())


def all_reduce(op, shape):
    return lambda strategy: strategy.run(lambda: context().all_reduce(op, filled(shape)))


def all_gather(*shapes):
    return lambda strategy: strategy.run(
        lambda: context().all_gather([filled(shape) for shape in shapes], 0)
    )


def merge_call(*leaves, look=False):
    def merge_fn(strategy, *args):
        return [float(np.sum(x.values[0])) for x in args] if look else None

    return lambda strategy: strategy.run(
        lambda: context().merge_call(merge_fn, [filled(leaf) for leaf in leaves])
    )


CALLS = {
    "all_reduce": all_reduce("SUM", (1,)),
    "all_gather of large leaves": all_gather((90_000,), (9000, 2)),
    "merge_call that looks": merge_call(9000, 3, 9000, look=True),
    # On many ranks each has them all, several times over.
    "gather_objects": lambda strategy: strategy.gather_objects(bytes((4 << 20) // strategy.size)),
    "verify": lambda strategy: strategy.verify([1.0, np.ones(9000)]),
    "barrier": lambda strategy: strategy.barrier(),
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


@pytest.mark.parametrize("name", CALLS)
def test_with_more_ranks_than_see_all_headers(strategy, monkeypatch, name):
    """Section 6: there two messages take the place of a header."""
    engine = strategy.engine
    sizes = HeaderSizes(engine.transport.headers, carries_payload=False)
    for one, name_of_value, value in (
        (engine.agreement, "_wide", True),
        (engine.agreement, "sizes", sizes),
        (engine.group, "sizes", sizes),
        (engine.group, "kept", Kept(engine.group)),
    ):
        monkeypatch.setattr(one, name_of_value, value)
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
