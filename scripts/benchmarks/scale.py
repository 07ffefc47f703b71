"""scale: what a call takes on many ranks, counted and timed, and what follows on real networks.

The MPI calls that a call of the runtime makes, and the bytes that a rank gives to them, are counted
on up to 64 ranks, and on one rank that takes the place of up to 16,384 (mirror.py): where both are
counted they must be alike. Each rank is on a host of its own. Up to 32 ranks all see the headers of
all ("by headers"); above that they compare fingerprints ("by words"). On the mirrored ranks the
time is measured that the runtime itself takes, without that of the transport. A strategy's memory
and the time to make one are those of real ranks, beside a duplicate of the world's communicator.

The last rows are a model: the MPI calls that were counted take what network_model.py says, and the
rest what was measured. Beside it stand the MPI calls that do the same by hand, without a check.
"""

import contextlib
import time
from collections import Counter
from unittest import mock

import numpy as np

import mpi_replica as mr

from .launching import Launch
from .measuring import beside, row
from .memory import growth_bytes
from .mirror import LENGTH_BYTES, Mirror, mirrored
from .network_model import NETWORKS, seconds
from .tables import Beside, Row

_RANKS = (2, 4, 8, 16, 32, 48, 64)
_MIRRORED_RANKS = (64, 256, 1024, 4096, 16384)
#: What stands beside a row of the model.
ALONE = "MPI alone"

# Behind so many calls nothing is new any more: headers have their size.
_WARM_UPS = 6
_BATCHES = 9
_BATCH_SECONDS = 4e-3

_NUMBER_BYTES, _KILOBYTE, _MEGABYTE = 8, 1 << 10, 1 << 20

# Which MPI calls a method of the transport makes, each with its part of the bytes.
_METHODS = {
    "exchange": lambda sent: [("Allgather", sent)],
    "maximum": lambda sent: [("Allreduce", sent)],
    "all_gather_bytes": lambda sent: [
        ("Allgather", LENGTH_BYTES),
        ("Allgatherv", sent - LENGTH_BYTES),
    ],
    "all_gather_blocks": lambda sent: [("Allgatherv", sent)],
    "all_reduce": lambda sent: [("Allreduce", sent)],
    "all_to_all": lambda sent: [("Alltoallv", sent)],
}


def _reduce(sent_bytes, **options):
    value = np.ones(sent_bytes // 8)
    options = mr.CommunicationOptions(**options)
    return lambda context: context.all_reduce("SUM", value, options)


def _gather(sent_bytes):
    value = np.ones(sent_bytes // 8)
    return lambda context: context.all_gather(value, axis=0)


def _merge(context):
    return context.merge_call(_nothing, args=(1.5,))


def _nothing(*_):
    """Return None."""


_LENGTHS = ("Allgather", LENGTH_BYTES)
#: What is called, and the same by hand: MPI calls, each with what a rank gives to it.
CALLS = {
    "run": (None, [("Barrier", 0)]),
    "all_reduce of a number": (
        lambda context: context.all_reduce("SUM", 1.5),
        [("Allreduce", _NUMBER_BYTES)],
    ),
    "all_reduce of 1 kB": (_reduce(_KILOBYTE), [("Allreduce", _KILOBYTE)]),
    "all_reduce of 1 MB": (_reduce(_MEGABYTE), [("Allreduce", _MEGABYTE)]),
    "reproducible, 1 kB": (_reduce(_KILOBYTE, reproducible=True), [("Allreduce", _KILOBYTE)]),
    "reproducible, 1 MB": (_reduce(_MEGABYTE, reproducible=True), [("Allreduce", _MEGABYTE)]),
    "all_gather of 1 kB": (_gather(_KILOBYTE), [_LENGTHS, ("Allgatherv", _KILOBYTE)]),
    "all_gather of 64 kB": (_gather(64 << 10), [_LENGTHS, ("Allgatherv", 64 << 10)]),
    "merge_call of a number": (_merge, [("Allgather", _NUMBER_BYTES)]),
}


def launches(settings):
    """Return what to start for one library."""
    for ranks in settings.ranks or ([2, 4] if settings.quick else _RANKS):
        yield Launch("real", ranks, limit_seconds=600)
        yield Launch("strategies", ranks, {"times": 3 if settings.quick else 9})
    sizes = _MIRRORED_RANKS[:2] if settings.quick else _MIRRORED_RANKS
    yield Launch("mirrors", 1, {"sizes": sizes}, limit_seconds=600)


def rows(outcomes):
    """Return the rows of what was counted, those of strategies, and those of the model."""
    records = [record for outcome in outcomes for record in outcome.records]
    counted = [record for record in records if "call" in record]
    made = [record for record in records if "made" in record]
    return [
        *_counts(counted),
        *(found for record in made for found in _of_strategies(record)),
        *_times(counted),
        *_modelled(counted),
    ]


def _counts(counted):
    """Return rows of counts: those on the most ranks, beside the least."""
    for call, by in dict.fromkeys((record["call"], record["by"]) for record in counted):
        mine = [record for record in counted if (record["call"], record["by"]) == (call, by)]
        ranks = [record["ranks"] for record in mine]
        layout = f"{min(ranks)}-{max(ranks)}"
        for place, (what, unit) in enumerate((("MPI calls", ""), ("bytes", "B")), start=1):
            sums = [sum(each[place] for each in record["sent"]) for record in mine]
            most, least = max(sums), min(sums)
            against = Beside("the least", least, None, "difference", most - least)
            name = f"{what} of {call}, by {by}"
            yield Row(name, layout, most, unit=unit, besides=(against,))


def _of_strategies(record):
    ours, alone = (np.array(record[name]) for name in ("made", "duplicated"))
    ranks = str(record["ranks"])
    yield row("MPIStrategy()", ranks, ours, beside("COMM_WORLD.Dup()", ours, alone))
    taken, duplicate = record["taken"], record["duplicate"]
    against = Beside("COMM_WORLD.Dup()", duplicate, None, "difference", taken - duplicate)
    yield Row("memory of a strategy", ranks, taken, unit="B", besides=(against,))


def _times(counted):
    """Return rows of the time that the runtime takes, beside that on the fewest ranks."""
    timed = [record for record in counted if "seconds" in record]
    for call in CALLS:
        fewest, *more = [record for record in timed if record["call"] == call]
        for record in more:
            name, taken, least = f"{fewest['ranks']} ranks", record["seconds"], fewest["seconds"]
            against = Beside(name, least, None, "difference", taken - least)
            yield Row(f"Python of {call}", str(record["ranks"]), taken, besides=(against,))


def _modelled(counted):
    """Return rows of the model."""
    for network in NETWORKS:
        for record in counted:
            if "seconds" in record:
                ours, alone = modelled(record, network)
                against = Beside(ALONE, alone, None, "difference", ours - alone)
                what = f"{record['call']}, {network.name}"
                yield Row(what, str(record["ranks"]), ours, besides=(against,))


def modelled(record, network):
    """Return the seconds that a call of `mirrors` takes on a network, and the same by hand."""
    ranks = record["ranks"]
    ours = record["seconds"] + sum(
        number * seconds(network, operation, sent / number, ranks)
        for operation, number, sent in record["sent"]
    )
    return ours, sum(seconds(network, *each, ranks) for each in CALLS[record["call"]][1])


def real(world):
    """Count what calls take on these ranks, and require that they are alike where mirrored."""
    from mpi_replica.ranks.mpi import MPITransport  # starts MPI, as `World` says

    host = f"host{world.rank}"
    apart = mock.patch.object(world.mpi, "Get_processor_name", return_value=host)
    alone = mock.patch.object(MPITransport, "open_shared_memory", Mirror.open_shared_memory)
    by = "headers" if world.size <= 32 else "words"
    noted = _Noted()
    with apart, alone, noted.methods_of(MPITransport), mr.MPIStrategy() as strategy:
        found = list(_each_call(strategy, noted.sent))
    noted = _Noted()
    with noted.methods_of(Mirror), mirrored(world.size) as strategy:
        for (call, sent), mirror in zip(found, _each_call(strategy, noted.sent), strict=True):
            world.require(
                mirror == (call, sent), f"{call}: mirrored ranks, {mirror[1]}, not {sent}"
            )
            yield {"call": call, "by": by, "ranks": world.size, "sent": sent}


def mirrors(world, sizes):
    """Count what calls take on mirrored ranks, and how long they take without the transport."""
    for size in sizes:
        noted = _Noted()
        with noted.methods_of(Mirror), mirrored(size) as strategy:
            for call, sent, spent in _each_call(strategy, noted.sent, noted.seconds_without):
                yield {"call": call, "by": "words", "ranks": size, "sent": sent, "seconds": spent}


def _each_call(strategy, noted, *measures):
    """Yield the name of each call, what it sends, and what `measures` find."""
    for name, (call, _) in CALLS.items():
        found = []

        def examine(action, found=found):
            for _ in range(_WARM_UPS):
                action()
            noted.clear()
            action()
            number, moved = Counter(), Counter()
            for method, sent in noted:
                for operation, part in _METHODS[method](sent):
                    number[operation] += 1
                    moved[operation] += part
            found.append([(each, number[each], moved[each]) for each in sorted(number)])
            found.extend(measure(action) for measure in measures)

        if call is None:
            examine(lambda: strategy.run(_nothing))
        else:
            strategy.run(lambda call=call: examine(lambda: call(mr.get_replica_context())))
        yield name, *found


class _Noted:
    """What the methods of a transport send, and how long they take."""

    def __init__(self):
        self.sent = []
        self._seconds = 0.0

    @contextlib.contextmanager
    def methods_of(self, transport):
        """Note the methods of a class."""
        with contextlib.ExitStack() as stack:
            for name in _METHODS:
                method = self._noting(name, getattr(transport, name))
                stack.enter_context(mock.patch.object(transport, name, method))
            yield

    def _noting(self, name, method):
        def noting(transport, *args, **options):
            before, start = transport.sent_bytes, time.perf_counter()
            result = method(transport, *args, **options)
            self._seconds += time.perf_counter() - start
            sent = transport.sent_bytes - before
            if name == "all_gather_blocks":  # which may have other lengths on other ranks
                sent = args[1].nbytes / transport.size
            self.sent.append((name, sent))
            return result

        return noting

    def seconds_without(self, action):
        """Return what a call takes beside them: the median of some batches."""
        start = time.perf_counter()
        action()
        number = max(1, round(_BATCH_SECONDS / (time.perf_counter() - start)))
        batches = []
        for _ in range(_BATCHES):
            self._seconds, start = 0.0, time.perf_counter()
            for _ in range(number):
                action()
            batches.append((time.perf_counter() - start - self._seconds) / number)
        return float(np.median(batches))


def strategies(world, times):
    """Measure how much memory a strategy is, and how long it takes to make it."""
    communicator, kept = world.mpi.COMM_WORLD, []
    duplicate = growth_bytes(lambda: kept.append(communicator.Dup()))
    taken = growth_bytes(lambda: kept.append(mr.MPIStrategy()))
    kept[1].close()
    kept[0].Free()
    taken, duplicate = world.greatest([taken, duplicate]).tolist()
    made, duplicated = [], []
    for _ in range(times):
        world.comm.Barrier()
        start = time.perf_counter()
        communicator.Dup().Free()
        middle = time.perf_counter()
        world.comm.Barrier()
        begin = time.perf_counter()
        with mr.MPIStrategy():
            end = time.perf_counter()
        of_duplicate, ours = world.greatest([middle - start, end - begin]).tolist()
        duplicated.append(of_duplicate)
        made.append(ours)
    memory = {"taken": taken, "duplicate": duplicate}
    yield {"ranks": world.size, "made": made, "duplicated": duplicated} | memory
