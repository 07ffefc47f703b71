"""agreement: what it costs that all ranks are known to be at the same call.

Each collective is preceded by a header that all ranks exchange. The rows are this alone, against
the bare message; a raw Allreduce with it and without; the whole call of the package against the
raw one; the stall watcher; and what a rank uses that waits for a late one.
"""

import contextlib
import os
import resource
import time

import numpy as np

import mpi_replica as mr
from mpi_replica.collectives.agreement.call import Call
from mpi_replica.collectives.agreement.stand import CallDescription
from mpi_replica.ranks import HEADER_BYTES

from .launching import Launch
from .measuring import beside, row, spread
from .tables import Beside, Row, rows_of

_SIZES = {"1 value": 1, "1 kB": 250, "64 kB": 16_000, "1 MB": 250_000}  # float32
_LATE_SECONDS = 5

# Goals, for 2 ranks: seconds added on Open MPI, and the ratio at 1 MB.
_MOST_ADDED = 3e-6
_MOST_RATIO = 1.01
# Of a core, for a rank that waits.
_MOST_USED = 0.05


def launches(settings):
    """Return what to start for one library."""
    batches = settings.repeat or (3 if settings.quick else 300)
    counts = settings.ranks or ([2] if settings.quick else [2, 4])
    for ranks in counts:
        yield Launch("exchanges", ranks, {"batches": batches})
    # Whether there is a watcher is decided once for a process: runs with it and without in turn.
    for turn in range(1 if settings.quick else 4):
        late_seconds = (0.2 if settings.quick else _LATE_SECONDS) if turn == 0 else 0
        for watch in ("1", "0"):
            arguments = {"batches": batches, "watch": watch, "late_seconds": late_seconds}
            yield Launch("watched", counts[0], arguments, {"MPI_REPLICA_WATCH": watch})


def rows(outcomes):
    """Return the rows of all launches."""
    records = [record for outcome in outcomes for record in outcome.records]
    found = [*rows_of(outcomes), *_watchers([record for record in records if "watch" in record])]
    # The bare message, then what the header adds to it, then whole calls.
    return sorted(found, key=lambda row: (row.unit == "%", "ctx." in row.what))


def _watchers(records):
    """Return a row that holds runs with the watcher against runs without it."""
    runs = {"1": [], "0": []}
    for record in records:
        runs[record["watch"]].append(record["batches"])
    with_it, without = np.concatenate(runs["1"]), np.concatenate(runs["0"])
    of_pairs = [
        np.median(one) - np.median(other) for one, other in zip(runs["1"], runs["0"], strict=True)
    ]
    yield Row(
        "ctx.all_reduce of 1 value, watched",
        records[0]["ranks"],
        float(np.median(with_it)),
        spread(with_it),
        besides=(
            Beside(
                "not watched",
                float(np.median(without)),
                spread(without),
                "difference",
                float(np.median(of_pairs)),
            ),
        ),
    )


class _Nothing(Call):
    """A call that only agrees."""

    kind = "nothing"

    def words(self, position=0):
        """Return the call in words."""
        return CallDescription(self.kind, "", self.site, self.options.name)

    def perform(self, engine, calls):
        """Agree."""
        engine.agreement.agree(calls)
        return [None]


def agreement_of(strategy):
    """Return what makes the ranks agree, and nothing else, as each collective does first."""
    engine = strategy.engine
    call = engine.make("nothing", None, _Nothing)
    call.replica_ids = engine.layout.local_replica_ids
    calls, agree = [call], engine.agreement.agree
    return lambda: agree(calls)


def exchanges(world, batches):
    """Measure the header alone and before collectives, and whole calls."""
    on_open_mpi = "Open MPI" in world.mpi.Get_library_version()
    with mr.MPIStrategy() as strategy:
        agree = agreement_of(strategy)
        with _bare_exchange(world) as (bare, name):
            ours, others = world.in_turn([world.repeated(agree), world.repeated(bare)], batches)
            yield row("agreement alone", world.size, ours, beside(name, ours, others, "difference"))

            for size, count in _SIZES.items():
                raw = _allreduce(world, count)

                def agreed(raw=raw):
                    agree()
                    raw()

                def preceded(raw=raw):
                    bare()
                    raw()

                sides = [world.repeated(side) for side in (agreed, preceded, raw)]
                ours, least, others = world.in_turn(sides, batches)
                by_ratio = size == "1 MB"
                goal = None
                if world.size == 2 and (by_ratio or on_open_mpi):
                    goal = _MOST_RATIO if by_ratio else _MOST_ADDED
                comparison = "ratio" if by_ratio else "difference"
                against = beside("Allreduce", ours, others, comparison, goal)
                yield row(f"agreement + Allreduce of {size}", world.size, ours, against)
                against = beside("Allreduce", least, others, comparison)
                yield row(f"bare message + Allreduce of {size}", world.size, least, against)

        for size, count in _SIZES.items():
            whole = world.in_replica(strategy, _all_reduce_of(count))
            ours, others = world.in_turn([whole, world.repeated(_allreduce(world, count))], batches)
            against = beside("Allreduce", ours, others)
            yield row(f"ctx.all_reduce of {size}", world.size, ours, against)


def watched(world, batches, watch, late_seconds):
    """Measure the smallest call, and what ranks use while they wait for a late one."""
    with mr.MPIStrategy() as strategy:
        (taken,) = world.in_turn([world.in_replica(strategy, _all_reduce_of(1))], batches)
        yield {"watch": watch, "ranks": str(world.size), "batches": taken.tolist()}
        if not late_seconds:
            return
        is_late = world.rank == world.size - 1
        world.comm.Barrier()
        used = strategy.run(_share_of_a_core, args=(late_seconds, is_late))
        used = strategy.experimental_local_results(used)[0]
        waiting, late = world.greatest([0 if is_late else used, used if is_late else 0])
        watcher = "" if watch == "1" else ", not watched"
        for what, share in (
            (f"a core, of a rank that waits {late_seconds:g} s", waiting),
            ("a core, of the rank that it waits for, asleep", late),
        ):
            yield Row(f"{what}{watcher}", str(world.size), share, unit="%", goal=_MOST_USED)


def _share_of_a_core(late_seconds, is_late):
    """Return what part of the time this process runs, while a rank comes late to a call."""
    start, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF)
    if is_late:
        time.sleep(late_seconds)
    mr.get_replica_context().all_reduce("SUM", 1.0)
    after, seconds = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter() - start
    return (after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime) / seconds


@contextlib.contextmanager
def _bare_exchange(world):
    """Return what sends a message of the header's size between all ranks, and its name."""
    send, receive = bytearray(HEADER_BYTES), bytearray(HEADER_BYTES * world.size)
    try:
        request = world.comm.Allgather_init(send, receive)
    except NotImplementedError:  # before MPI-4
        yield lambda: world.comm.Allgather(send, receive), f"Allgather, {HEADER_BYTES} B"
        return
    start, test = request.Start, request.Test
    give_core_away = getattr(os, "sched_yield", lambda: None)  # macOS has none

    def bare():
        start()
        while not test():
            pass

    def bare_and_crowded():
        start()
        while not test():
            give_core_away()

    yield bare_and_crowded if world.is_crowded else bare, f"persistent Allgather, {HEADER_BYTES} B"
    request.Free()


def _allreduce(world, count):
    """Return what makes a raw Allreduce of so many values."""
    send, receive = np.ones(count, np.float32), np.empty(count, np.float32)
    call, op = world.comm.Allreduce, world.mpi.SUM
    return lambda: call(send, receive, op)


def _all_reduce_of(count):
    """Return what makes a ``ctx.all_reduce`` of so many values."""
    value = np.ones(count, np.float32)
    return lambda context: context.all_reduce("SUM", value)
