"""Everything that can fail happens before the header (DESIGN.md section 6).

A MemoryError on any one rank is that error on every rank, and the next collective works.
"""

import tracemalloc

import numpy as np
import pytest

import mpi_replica as mr
from everywhere import check_works, error_of, gathered, needs_two_ranks

MANY = 1 << 18  # items: 2 MiB as float64
MIB = 1 << 20


def mine():
    return mr.get_replica_context().replica_id_in_sync_group


def all_reduce(op, size, dtype, **options):
    given = mr.CommunicationOptions(**options)
    return lambda s: s.run(
        lambda: mr.get_replica_context().all_reduce(op, np.full(size, mine(), dtype), given)
    )


def all_reduce_in_place(size):
    def step():
        value = np.full(size, float(mine()))
        return mr.get_replica_context().all_reduce("SUM", value, out=value)

    return lambda s: s.run(step)


def all_gather(shape, axis, count=1):
    return lambda s: s.run(
        lambda: mr.get_replica_context().all_gather([np.full(shape, mine())] * count, axis)
    )


def merge_call(make, look=False):
    def merge_fn(strategy, x):
        return len(x.values) if look else 0

    return lambda s: s.run(lambda: mr.get_replica_context().merge_call(merge_fn, (make(mine()),)))


def from_above(call, size):
    def do(strategy):
        rows = strategy.experimental_distribute_values_from_function(
            lambda context: np.full(size, float(context.replica_id_in_sync_group))
        )
        return call(strategy, rows)

    return do


CALLS = {
    "all_reduce in the header": all_reduce("SUM", 3, "f8"),
    "all_reduce of a pack": all_reduce("SUM", 3000, "f4"),
    "all_reduce of a stream": all_reduce("SUM", MANY, "f4"),
    "all_reduce of a stream in large pages": all_reduce("SUM", 4 * MANY, "f4"),
    "all_reduce in place": all_reduce_in_place(MANY),
    "all_reduce of half floats": all_reduce("MEAN", MANY, "f2"),
    "all_reduce of integers": all_reduce("MEAN", MANY, "i8"),
    "all_reduce of the least": all_reduce("MIN", MANY, "f8"),
    "all_reduce, reproducible, in the header": all_reduce("SUM", 3, "f2", reproducible=True),
    "all_reduce, reproducible, in a message": all_reduce("SUM", 700, "f8", reproducible=True),
    "all_reduce, reproducible, of a pack": all_reduce("SUM", 16_000, "f4", reproducible=True),
    "all_reduce, reproducible, of a stream": all_reduce("MEAN", MANY, "f4", reproducible=True),
    "all_reduce, reproducible, of half floats": all_reduce(
        "MEAN", MANY, "f2", implementation="ALLTOALL"
    ),
    "all_gather of a large result": all_gather(MANY, 0),
    "all_gather along another axis": all_gather((4, MANY // 4), 1),
    "all_gather of many small leaves": all_gather(1000, 0, 200),
    "merge_call that looks": merge_call(lambda i: np.full(MANY, i), look=True),
    "merge_call of many bytes": merge_call(lambda i: bytes(3 * MIB)),
    "reduce along an axis": from_above(lambda s, x: s.reduce("SUM", x, axis=0), MANY),
    "reduce": from_above(lambda s, x: s.reduce("SUM", x, axis=None), MANY),
    "gather": from_above(lambda s, x: s.gather(x, axis=0), MANY),
    "broadcast_to": lambda s: s.extended.broadcast_to(bytes(3 * MIB)),
    "gather_objects": lambda s: s.gather_objects(bytes(3 * MIB)),
    "verify": lambda s: s.verify([np.ones((4, MANY)).T, 1]),
}


class Meter:
    """Stands for np.empty, which fails once: at its n-th call, if that comes before a header.

    After the first header only large ones fail: up to 1 MiB is taken without asking again.
    """

    def __init__(self, strategy, fails_at=None, last_header=None):
        self.transport = strategy.engine.transport
        self.empty = np.empty
        self.exchange = self.transport.exchange
        self.calls = self.headers = 0
        self.fails_at = fails_at
        self.last_header = 0 if last_header is None else last_header
        self.has_failed = False

    def make(self, *args, **kwargs):
        array = self.empty(*args, **kwargs)
        if self.headers < self.last_header if array.nbytes > MIB else not self.headers:
            self.calls += 1
        if self.calls == self.fails_at and not self.has_failed:
            self.has_failed = True
            raise MemoryError(f"no memory for {array.nbytes} bytes")
        return array

    def send(self, *args, **kwargs):
        self.headers += 1
        return self.exchange(*args, **kwargs)

    def run(self, monkeypatch, call):
        with monkeypatch.context() as patch:
            patch.setattr(np, "empty", self.make)
            patch.setattr(self.transport, "exchange", self.send)
            return call()


def made(name, replicas_per_rank):
    """Return a strategy that has its shared memory already, which costs a header of its own."""
    strategy = mr.MPIStrategy(replicas_per_rank=replicas_per_rank)
    if "reproducible" in name:
        all_reduce("SUM", 1 << 15, "f8", reproducible=True)(strategy)
    return strategy


@pytest.mark.parametrize("replicas_per_rank", [1, 2])
@pytest.mark.parametrize("name", CALLS)
def test_a_memory_error_on_one_rank_is_one_on_every_rank(name, replicas_per_rank, monkeypatch):
    call = CALLS[name]
    with made(name, replicas_per_rank) as strategy:
        meter = Meter(strategy)
        meter.run(monkeypatch, lambda: call(strategy))
        size, headers = strategy.size, meter.headers
    headers -= name.startswith(("all_", "merge_"))  # the last one ends the run
    for culprit in sorted({0, size - 1}):
        with made(name, replicas_per_rank) as strategy:
            for fails_at in range(1, 100):
                meter = Meter(strategy, fails_at if strategy.rank == culprit else None, headers)
                error = error_of(
                    lambda meter=meter, s=strategy: meter.run(monkeypatch, lambda: call(s))
                )
                found = gathered((type(error).__name__, str(error), meter.has_failed))
                if not any(has_failed for _, _, has_failed in found):
                    assert error is None
                    break
                assert {kind for kind, _, _ in found} == {"MemoryError"}
                assert len({text for _, text, _ in found}) == 1
                check_works(strategy)
            assert fails_at > 1 or size == 1


# What takes memory after the ranks have agreed: its size is known only then, and 1 MiB at most.
LATE_CALLS = {
    "all_gather": all_gather(3000, 0),
    "all_gather along another axis": all_gather((4, 3000), 1),
    "all_gather of many small leaves": all_gather(300, 0, 5),
    "merge_call": merge_call(lambda i: np.full(3000, i), look=True),
    "merge_call of bytes": merge_call(lambda i: bytes(3000)),
    "gather": from_above(lambda s, x: s.gather(x, axis=0), 3000),
    "broadcast_to": lambda s: s.extended.broadcast_to(bytes(3000)),
    "gather_objects": lambda s: s.gather_objects(bytes(3000)),
}


@pytest.mark.parametrize("name", LATE_CALLS)
def test_memory_that_was_laid_by_is_given_up_for_what_is_needed_after_the_header(
    strategy, monkeypatch, name
):
    """Too late for an error on every rank: there is none."""
    needs_two_ranks(strategy)
    call = LATE_CALLS[name]
    expected = str(call(strategy))
    for culprit in range(strategy.size):
        with monkeypatch.context() as patch:
            once = Once(strategy.rank == culprit, np.empty)
            exchange = strategy.engine.transport.exchange

            def send(*args, exchange=exchange, patch=patch, once=once, **kwargs):
                headers = exchange(*args, **kwargs)
                patch.setattr(np, "empty", once.make)
                return headers

            patch.setattr(strategy.engine.transport, "exchange", send)
            assert str(call(strategy)) == expected
        assert any(gathered(once.has_failed))
        check_works(strategy)


class Once:
    """Stands for np.empty, which fails at its first call."""

    def __init__(self, fails, empty):
        self.fails = fails
        self.empty = empty
        self.has_failed = False

    def make(self, *args, **kwargs):
        if self.fails and not self.has_failed:
            self.has_failed = True
            raise MemoryError
        return self.empty(*args, **kwargs)


MOVES_NOTHING = ("all_reduce in the header", "reduce along an axis", "verify")
MOVES_NOTHING += ("all_reduce, reproducible, in the header",)


@pytest.mark.parametrize("name", [name for name in CALLS if name not in MOVES_NOTHING])
def test_no_memory_is_taken_after_the_header(name, monkeypatch):
    """A rank that fails while others move data would leave them in it."""
    call = CALLS[name]
    peaks = []

    def measured(*args, **kwargs):
        headers = exchange(*args, **kwargs)
        tracemalloc.reset_peak()
        peaks.append(tracemalloc.get_traced_memory()[0])
        return headers

    with mr.MPIStrategy() as strategy:
        transport = strategy.engine.transport
        exchange = transport.exchange
        taken = []

        def watch(method):
            def watched(*args, **kwargs):
                result = method(*args, **kwargs)
                taken.append(tracemalloc.get_traced_memory()[1] - peaks[-1])
                return result

            return watched

        with monkeypatch.context() as patch:
            patch.setattr(transport, "exchange", measured)
            for method in ("all_reduce", "all_gather_blocks", "all_to_all", "barrier"):
                patch.setattr(transport, method, watch(getattr(transport, method)))
            tracemalloc.start()
            try:
                call(strategy)
            finally:
                tracemalloc.stop()
        check_works(strategy)
    assert taken or strategy.size == 1
    assert max(taken, default=0) < MIB // 2
