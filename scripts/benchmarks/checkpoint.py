"""checkpoint: saving and restoring, beside numpy's files and a checksum by hand.

By hand, rank 0 saves alone: `np.save` of each array into one file, a CRC-32 of its bytes, `fsync`,
and a rename that puts the file in the place of the older one. It restores them with `np.load`,
compares the checksums, and broadcasts each array. The other ranks wait, and where ranks outnumber
cores they take some from rank 0 then.

Files are written to a folder in TMPDIR or else in this checkout, on the file system that the rows
name, and removed at the end. What is read was written just before: it comes from memory, and not
from the disk. How fast a disk is changes by itself: what counts are the ratios, of batches that
follow each other.

The last rows are the memory of the rank that takes the most, beside the state (see memory.py).
"""

import contextlib
import os
import tempfile
import zlib
from pathlib import Path

import numpy as np

import mpi_replica as mr

from . import nests
from .launching import ROOT, Launch
from .measuring import beside, row
from .memory import growth_bytes
from .tables import Row, quantity

# Goals: 0.8 x as fast, and memory of a rank.
_MOST_RATIO = 1.25
_GOAL_BYTES = 64e6

# What the rounds of a row may take.
_LIMIT_SECONDS = 5


def launches(settings):
    """Return what to start for one library."""
    batches = settings.repeat or (3 if settings.quick else 9)
    counts = settings.ranks or ([2] if settings.quick else [1, 2, 4])
    for ranks in counts:
        arguments = {"batches": batches, "is_quick": settings.quick}
        yield Launch("times", ranks, arguments, limit_seconds=600)
    for ranks in counts:
        for name in _STATES:
            yield Launch("growth", ranks, {"name": name, "is_quick": settings.quick})


def times(world, batches, is_quick):
    """Measure saving and restoring of each state."""
    with mr.MPIStrategy() as strategy, _folder(world) as folder:
        for name, make in _STATES.items():
            arrays, state = make(strategy, is_quick)
            checkpoint, path = mr.Checkpoint(strategy, state=state), folder / "ours"
            by_hand = _ByHand(world, folder / "by hand", arrays)
            ways = {
                "save": (lambda c=checkpoint, p=path: c.save(p), by_hand.save),
                "restore": (lambda c=checkpoint, p=path: c.restore(p), by_hand.restore),
            }
            for what, calls in ways.items():
                loops = [world.repeated(call) for call in calls]
                ours, others = world.in_turn(loops, batches, _LIMIT_SECONDS)
                against = beside("by hand, rank 0", ours, others, goal=_MOST_RATIO)
                described = f"{what} {name}, {_size(arrays)}, {_file_system(folder)}"
                yield row(described, world.size, ours, against)
            _check(world, checkpoint, path, arrays, by_hand)


def growth(world, name, is_quick):
    """Measure the memory of one state."""
    with mr.MPIStrategy() as strategy, _folder(world) as folder:
        arrays, state = _STATES[name](strategy, is_quick)
        size = _size(arrays)
        del arrays  # variables have copies
        checkpoint, path = mr.Checkpoint(strategy, state=state), folder / "ours"
        for what, call in {"save": checkpoint.save, "restore": checkpoint.restore}.items():
            (extra,) = world.greatest([growth_bytes(lambda call=call: call(path))])
            described = f"memory: {what} {name}, {size}"
            yield Row(described, str(world.size), extra, unit="B", goal=_GOAL_BYTES)


class _ByHand:
    """How a program saves and restores arrays that are the same on all ranks."""

    def __init__(self, world, path, arrays):
        self._world, self._path, self.arrays = world, path, arrays
        self._checksums = []

    def save(self):
        """Write all arrays to a file, on rank 0."""
        if self._world.rank:
            return
        new = self._path.with_suffix(".new")
        with open(new, "wb") as file:
            for array in self.arrays:
                np.save(file, array)
            self._checksums = [zlib.crc32(array) for array in self.arrays]
            file.flush()
            os.fsync(file.fileno())
        os.replace(new, self._path)

    def restore(self):
        """Read all arrays on rank 0, for all."""
        if self._world.rank == 0:
            with open(self._path, "rb") as file:
                self.arrays = [np.load(file) for _ in self.arrays]
            if [zlib.crc32(array) for array in self.arrays] != self._checksums:
                raise RuntimeError(f"{self._path} is corrupt")
        if self._world.size > 1:
            for array in self.arrays:
                self._world.comm.Bcast(array)


def _check(world, checkpoint, path, arrays, by_hand):
    """Raise unless what was saved is what is restored, both ways."""
    values = [np.asarray(value) for value in nests.leaves_of(checkpoint.state)]
    world.require(nests.are_equal(by_hand.arrays, arrays), "by hand")
    world.require(nests.are_equal(values, arrays), "this runtime")


def _one_array(strategy, is_quick):
    array = _filled([(25_600 if is_quick else 25_600_000,)])[0]
    return [array], array.copy()


def _variables(strategy, is_quick):
    arrays = _filled(nests.leaves_of(nests.resnet50(width=8 if is_quick else 64)))
    with strategy.scope():
        return arrays, [mr.Variable(array) for array in arrays]


def _small_arrays(strategy, is_quick):
    arrays = _filled([(1000,)] * (25 if is_quick else 25_000))
    return arrays, [array.copy() for array in arrays]


_STATES = {
    "one array": _one_array,
    "161 variables of ResNet-50": _variables,
    "arrays of 4 kB": _small_arrays,
}


def _filled(shapes):
    """Return arrays with numbers by which they are told apart."""
    return nests.contribution(nests.arrays_of(shapes), rank=0)


def _size(arrays):
    return quantity(sum(array.nbytes for array in arrays), "B")


@contextlib.contextmanager
def _folder(world):
    """Make a folder for all ranks, which is removed at the end. Collective."""
    with contextlib.ExitStack() as stack:
        name = None
        if world.rank == 0:
            parent = os.environ.get("TMPDIR", ROOT)
            name = stack.enter_context(tempfile.TemporaryDirectory(prefix=".bench-", dir=parent))
        yield Path(world.comm.bcast(name))
        world.comm.Barrier()  # no rank is still at its files


def _file_system(folder):
    """Return the kind of the file system that a folder is on."""
    try:
        mounts = [line.split()[1:3] for line in Path("/proc/mounts").read_text().splitlines()]
    except OSError:
        return "unknown file system"
    around = [(len(place), kind) for place, kind in mounts if folder.is_relative_to(place)]
    return max(around)[1]
