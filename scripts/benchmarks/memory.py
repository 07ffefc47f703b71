"""memory: how far a call's peak lies above its inputs and results.

Each case has processes of its own. When strategy and inputs are there, every page of them touched,
memory that was freed meanwhile is given back to the system, the resident size is read, and the
kernel is told to forget the peak before it (5 in /proc/self/clear_refs). Then the call is made
twice, and the first result is dropped before the second call. What counts is the peak since then
(VmHWM), without the resident size before and without the bytes of one result, by the sizes of its
arrays: so all that the call takes for a while, that this runtime keeps, that the MPI library takes
for its messages, and that Python takes for the objects. The rank that takes the most counts.

Where a system has no such file, the peak before the call can't be forgotten: there, growth of
``ru_maxrss`` is what counts, which is less if the peak before was above the resident size.
"""

import ctypes
import gc
import resource
import sys
from contextlib import suppress
from functools import partial
from pathlib import Path

import numpy as np

import mpi_replica as mr

from . import nests
from .launching import Launch
from .tables import Row, quantity

_GOAL_BYTES = 16e6
_COUNT = 25_600_000  # of float32: 102 MB
_GATHERED = 25_000_000  # of all ranks: 100 MB
_WIDTH = 500

# macOS counts bytes, all others count kilobytes.
_UNIT_OF_MAXRSS = 1 if sys.platform == "darwin" else 1 << 10


def launches(settings):
    """Return what to start for one library."""
    for ranks in settings.ranks or [2]:
        for case in CASES:
            yield Launch("growth", ranks, {"case": case, "parts": 64 if settings.quick else 1})


def growth(world, case, parts):
    """Measure one case, with one of so many parts of its data."""
    make, call = CASES[case]
    with mr.MPIStrategy() as strategy:
        value, results = make(parts, world), []

        def counted(context):
            result = call(world, context, value)
            results.append(sum(leaf.nbytes for leaf in nests.leaves_of(result)))

        twice = world.in_replica(strategy, counted)
        (extra,) = world.greatest([growth_bytes(lambda: twice(2)) - results[0]])
    goal = _GOAL_BYTES if world.size == 2 and "by hand" not in case else None
    inputs = sum(leaf.nbytes for leaf in nests.leaves_of(value))
    what = f"{case}: {quantity(inputs, 'B')}, result {quantity(results[0], 'B')}"
    yield Row(what, str(world.size), extra, unit="B", goal=goal)


def growth_bytes(action):
    """Return how far the peak in `action` lies above the resident size before it."""
    gc.collect()
    with suppress(AttributeError):  # glibc has it
        ctypes.CDLL(None).malloc_trim(0)
    before = resident_bytes()
    action()
    return peak_bytes() - before


def resident_bytes():
    """Return the resident size and forget the peak before; the peak where that can't be done."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return peak_bytes()
    return _of_status("VmRSS")


def peak_bytes():
    """Return the greatest resident size since `resident_bytes` was called."""
    with suppress(OSError):
        return _of_status("VmHWM")
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _UNIT_OF_MAXRSS


def _of_status(name):
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1]) << 10
    raise OSError(f"/proc/self/status has no {name}")


# Values, of which a trial takes one of so many parts.


def _gradients(parts, world):
    return nests.arrays_of(nests.resnet50(64 if parts == 1 else 8))


def _array(parts, world, dtype=np.float32, order="C"):
    array = np.empty((_COUNT // parts // _WIDTH, _WIDTH), dtype, order)
    array.fill(1)
    return array


def _arrays(parts, world, count, length):
    return nests.arrays_of([(length,)] * (count // parts))


def _block(parts, world, axis):
    length = _GATHERED // parts // world.size // _WIDTH
    return nests.arrays_of((length, _WIDTH) if axis == 0 else (_WIDTH, length))


# Calls


def _reduce(world, context, value, op="SUM"):
    return context.all_reduce(op, value)


def _reduce_in_turn(world, context, value):
    """Reduce more and less of it, each more than the 32 MiB of which malloc may keep a part."""
    for eighths in (3, 7, 5):
        context.all_reduce("SUM", value[: len(value) * eighths // 8])
    return context.all_reduce("SUM", value)


def _gather(world, context, value, axis=0):
    return context.all_gather(value, axis=axis)


def _merge(world, context, value):
    sums = []

    def merge(strategy, gradients):
        pairs = [(gradient, None) for gradient in nests.leaves_of(gradients)]
        totals = strategy.extended.batch_reduce_to("SUM", pairs)
        # Of the sums only what is counted is left.
        sums.extend(np.broadcast_to(np.float32(0), total.value.shape) for total in totals)

    context.merge_call(merge, args=(value,))
    return sums


def _by_hand(world, context, value):
    """Reduce as an expert does it, which takes what the MPI library itself needs."""
    result, length = np.empty_like(value), (1 << 20) // value.itemsize
    send, receive = value.reshape(-1), result.reshape(-1)
    for start in range(0, value.size, length):
        piece = slice(start, start + length)
        world.comm.Allreduce(send[piece], receive[piece], world.mpi.SUM)
    return result


CASES = {
    "all_reduce of ResNet-50's gradients": (_gradients, _reduce),
    "all_reduce of one array": (_array, _reduce),
    "all_reduce of one array in four sizes": (_array, _reduce_in_turn),
    "all_reduce of one array in Fortran order": (partial(_array, order="F"), _reduce),
    "all_reduce of one big-endian array": (partial(_array, dtype=">f4"), _reduce),
    "all_reduce of float16": (partial(_array, dtype=np.float16), _reduce),
    "all_reduce of 20,000 arrays of 1 kB": (partial(_arrays, count=20_000, length=250), _reduce),
    "all_reduce(MAX) of one array": (_array, partial(_reduce, op="MAX")),
    "all_gather along axis 0": (partial(_block, axis=0), _gather),
    "all_gather along axis 1": (partial(_block, axis=1), partial(_gather, axis=1)),
    "all_gather of 5000 arrays of 4 kB": (partial(_arrays, count=5000, length=1000), _gather),
    "merge_call that reduces ResNet-50's gradients": (_gradients, _merge),
    "Allreduce of one array by hand, 1 MiB pieces": (_array, _by_hand),
}
