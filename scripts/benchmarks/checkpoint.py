"""checkpoint: saving and restoring, beside numpy's files and a checksum by hand.

By hand, rank 0 saves alone: `np.save` of each array into one file, a CRC-32 of its bytes, `fsync`,
and a rename that puts the file in the place of the older one. The other ranks wait, and where ranks
outnumber cores they take some from rank 0 then. To restore, each rank reads all with `np.load`, and
compares the checksums.

Files are written to a folder in TMPDIR or else in this checkout, on the file system that the rows
name, and removed at the end. What is read was written just before: it comes from memory, and not
from the disk. Half of the time that saving takes is the disk's, which is three times slower now and
then: what counts are the ratios, of batches that follow each other.

The last rows are the memory of the rank that takes the most, beside the state (see memory.py).
"""

import os
import tempfile
import zlib
from functools import partial
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
_LIMIT_SECONDS = 3


def launches(settings):
    """Return what to start for one library."""
    batches = settings.repeat or (3 if settings.quick else 15)
    parent = os.environ.get("TMPDIR", ROOT)
    # Made here, and not by a rank, so that it is removed whatever becomes of the ranks.
    with tempfile.TemporaryDirectory(prefix=".bench-", dir=parent) as folder:
        arguments = {"folder": folder, "is_quick": settings.quick}
        for ranks in settings.ranks or ([2] if settings.quick else [1, 2, 4]):
            yield Launch("times", ranks, {"batches": batches, **arguments}, limit_seconds=600)
        for ranks in settings.ranks or [2]:
            for name in _STATES:
                yield Launch("growth", ranks, {"name": name, **arguments})


def times(world, folder, batches, is_quick):
    """Measure saving and restoring of each state."""
    with mr.MPIStrategy() as strategy:
        for name, make in _STATES.items():
            arrays, state = make(strategy, is_quick)
            checkpoint, path = mr.Checkpoint(strategy, state=state), Path(folder, "ours")
            by_hand = _ByHand(world, Path(folder, "by hand"), arrays)
            _check(world, checkpoint, path, by_hand)
            ways = {
                "save": (checkpoint.save, "by hand, rank 0", by_hand.save),
                "restore": (checkpoint.restore, "by hand", by_hand.restore),
            }
            for what, (call, how, call_by_hand) in ways.items():
                loops = [world.repeated(each) for each in (partial(call, path), call_by_hand)]
                ours, others = world.in_turn(loops, batches, _LIMIT_SECONDS)
                against = beside(how, ours, others, goal=_MOST_RATIO)
                described = f"{what} {name}, {_size(arrays)}, {_file_system(folder)}"
                yield row(described, world.size, ours, against)


def growth(world, folder, name, is_quick):
    """Measure the memory of one state."""
    with mr.MPIStrategy() as strategy:
        arrays, state = _STATES[name](strategy, is_quick)
        size = _size(arrays)
        del arrays  # variables have copies
        checkpoint, path = mr.Checkpoint(strategy, state=state), Path(folder, "ours")
        for what, call in {"save": checkpoint.save, "restore": checkpoint.restore}.items():
            (extra,) = world.greatest([growth_bytes(partial(call, path))])
            described = f"memory: {what} {name}, {size}"
            yield Row(described, str(world.size), extra, unit="B", goal=_GOAL_BYTES)


class _ByHand:
    """How a program saves and restores arrays that are the same on all ranks."""

    def __init__(self, world, path, arrays):
        self._is_writer, self._path, self.arrays = world.rank == 0, path, arrays

    def save(self):
        """Write all arrays to a file, on rank 0."""
        if not self._is_writer:
            return
        new = self._path.with_suffix(".new")
        with open(new, "wb") as file:
            for array in self.arrays:
                np.save(file, array)
            np.save(file, self._checksums())
            file.flush()
            os.fsync(file.fileno())
        os.replace(new, self._path)

    def restore(self):
        """Read all arrays, on each rank."""
        with open(self._path, "rb") as file:
            self.arrays = [np.load(file) for _ in self.arrays]
            if not np.array_equal(np.load(file), self._checksums()):
                raise RuntimeError(f"{self._path} is corrupt")

    def _checksums(self):
        return np.array([zlib.crc32(array) for array in self.arrays])


def _check(world, checkpoint, path, by_hand):
    """Raise unless what was saved is what is restored, both ways."""
    expected = nests.contribution(by_hand.arrays, rank=0)
    checkpoint.save(path)
    by_hand.save()
    world.comm.Barrier()  # the file is there
    for value in checkpoint.state:
        if isinstance(value, mr.Variable):
            value.assign(np.zeros_like(value))
        else:
            value.fill(0)
    for array in by_hand.arrays:
        array.fill(0)
    checkpoint.restore(path)
    by_hand.restore()
    world.require(nests.are_equal(map(np.asarray, checkpoint.state), expected), "this runtime")
    world.require(nests.are_equal(by_hand.arrays, expected), "by hand")


def _one_array(strategy, is_quick):
    array = _filled([(25_600 if is_quick else 25_600_000,)])[0]
    return [array], [array.copy()]


def _variables(strategy, is_quick):
    arrays = _filled(nests.leaves_of(nests.resnet50(width=8 if is_quick else 64)))
    with strategy.scope():
        return arrays, [mr.Variable(array) for array in arrays]


def _small_arrays(strategy, is_quick):
    arrays = _filled([(2500,)] * (25 if is_quick else 10_000))
    return arrays, [array.copy() for array in arrays]


_STATES = {
    "one array": _one_array,
    "161 variables of ResNet-50": _variables,
    "arrays of 10 kB": _small_arrays,
}


def _filled(shapes):
    """Return arrays with numbers by which they are told apart."""
    return nests.contribution(nests.arrays_of(shapes), rank=0)


def _size(arrays):
    return quantity(sum(array.nbytes for array in arrays), "B")


def _file_system(folder):
    """Return the kind of the file system that a folder is on."""
    try:
        mounts = [line.split()[1:3] for line in Path("/proc/mounts").read_text().splitlines()]
    except OSError:
        return "unknown file system"
    around = [(len(place), kind) for place, kind in mounts if Path(folder).is_relative_to(place)]
    return max(around)[1]
