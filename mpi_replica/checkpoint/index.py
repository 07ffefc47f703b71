"""The index of a checkpoint: what is in it, and where. Written last, so that it is never torn."""

from __future__ import annotations

import json
import math
import os
import re
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self

import numpy as np

from ..core.argument_checks import absolute_path
from ..core.array_ways import Array
from ..core.exceptions import CheckpointError, CorruptCheckpointError
from ..core.randomness import Generators
from .array_kinds import order_in_memory
from .decoder import decoded
from .dtype_texts import dtype_from, dtype_text
from .files import TAKE_OLDER, Extent, head_of, names_in, read_small

#: Of an index: some hundred bytes for each array.
MOST_BYTES = 1 << 30

_FORMAT = "mpi_replica checkpoint"
# With 2 came tensors, and the state of objects of replicas; with 3 arrays in Fortran's order.
_VERSION_IN_C_ORDER, _VERSION = 2, 3
_READABLE = (1, _VERSION_IN_C_ORDER, _VERSION)
SUFFIX = ".index"

# Under this name the index says when it was written: stands so near to its beginning.
_NUMBER = "number"
_HEAD_BYTES = 256

_IN_MEMORY = Extent(0, 0, 0)


class ArrayRecord(NamedTuple):
    """An array of a checkpoint."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    #: Name of its file, in the folder of the index; empty where it is in memory.
    file: str
    extent: Extent
    #: In memory: the bits of a sum follow from it, also of an array that is made anew.
    order: Literal["C", "F"] = "C"

    @classmethod
    def of(cls, array: Array, file: str = "", extent: Extent = _IN_MEMORY) -> Self:
        return cls(array.dtype, array.shape, file, extent, order_in_memory(array))


class Index(NamedTuple):
    """The content of a checkpoint: state, and where its arrays lie."""

    #: Of each saved object, what `Encoder.encode` gave.
    state: dict[str, Any]
    #: By the names by which the state refers to them.
    arrays: dict[str, ArrayRecord]
    num_replicas: int
    #: What the ranks told of the random numbers of their replicas.
    of_ranks: list[Any]
    #: Of each `PerReplica` by its name, and of each replica by its id, what `Encoder.encode` gave.
    of_replicas: dict[str, dict[str, Any]]

    def files(self) -> list[str]:
        """Returns the names of the files that it refers to."""
        return list(dict.fromkeys(record.file for record in self.arrays.values()))


def checkpoint_path(path: str | os.PathLike[str]) -> Path:
    """Returns the path of a checkpoint, as a program gives it, from the root on.

    Raises
    ------
    TypeError, ValueError
        It is none.
    """
    if isinstance(path, str) and not path:  # it would be the working folder
        raise ValueError("path must name a checkpoint in a folder, got ''.")
    return Path(absolute_path("path", path))


def index_path(path: Path) -> Path:
    """Returns the path of the index of a checkpoint.

    Raises
    ------
    ValueError
        It can have none.
    """
    if not path.name:
        raise ValueError(f"path must name a checkpoint in a folder, got {str(path)!r}.")
    return path.with_name(f"{path.name}{SUFFIX}")


def order_of(path: Path) -> int:
    """Returns a number that is greater the later an index was written; 0 where it says none.

    An old one says none, and one that is torn before it.

    Raises
    ------
    CheckpointError
        It is there and can't be read.
    """
    match = re.search(rb'"%s": (\d+)' % _NUMBER.encode(), head_of(path, _HEAD_BYTES))
    return int(match[1]) if match else 0


def is_torn(path: Path) -> bool:
    """Returns whether an index is not whole."""
    try:
        unpacked(read_small(path, MOST_BYTES), path)
    except CheckpointError as error:
        return isinstance(error, CorruptCheckpointError)
    return False


def _order_among_others(path: Path) -> int:
    """Returns what `order_of` does; 0 for an index of another user, in a folder of several."""
    try:
        return order_of(path)
    except CheckpointError as error:
        if isinstance(error.__cause__, PermissionError) and path.stat().st_uid != os.geteuid():
            return 0
        raise


def packed(index: Index, folder: Path) -> bytes:
    """Returns the bytes of an index: a line of JSON, and its checksum.

    It is the last one in `folder`: a clock would not tell, since other hosts have others.

    Raises
    ------
    CheckpointError
        It is larger than an index that is read, or another one can't be read.
    ValueError
        Its JSON can't be written.
    """
    arrays = {name: packed_record(record) for name, record in index.arrays.items()}
    is_in_c_order = all([record.order == "C" for record in index.arrays.values()])
    version = _VERSION_IN_C_ORDER if is_in_c_order else _VERSION
    indices = [folder / name for name in names_in(folder) if name.endswith(SUFFIX)]
    number = 1 + max(map(_order_among_others, indices), default=0)
    data = json.dumps(
        {
            "format": _FORMAT,
            "version": version,
            _NUMBER: number,
            "num_replicas": index.num_replicas,
            "of_ranks": index.of_ranks,
            "of_replicas": index.of_replicas,
            "state": index.state,
            "arrays": arrays,
        }
    ).encode()
    line = b"%s\n%08x\n" % (data, zlib.crc32(data))
    if len(line) > MOST_BYTES:
        raise CheckpointError(
            f"the index of a checkpoint would have {len(line)} bytes, and {MOST_BYTES} can be"
            " restored. Numbers, texts and bytes stand in it, arrays in files beside it: put long"
            " lists and texts into arrays, by np.array(numbers) or np.frombuffer(data, np.uint8)."
        )
    return line


def unpacked(data: bytes, path: Path) -> Index:
    """Undoes `packed`; `path` is where the index is.

    Raises
    ------
    CheckpointError
        It is torn, corrupt, or no index of this format.
    """
    line, _, rest = data.partition(b"\n")
    if rest != b"%08x\n" % zlib.crc32(line):
        raise CorruptCheckpointError(
            f"{path} is torn or corrupt: its checksum does not fit. {TAKE_OLDER}"
        )
    try:
        body = json.loads(line)
        if body["format"] != _FORMAT:
            raise ValueError(f"format {body['format']!r}")
        version = body["version"]
        index = _checked_index(body) if version in _READABLE else None
    except _WRONG as error:
        raise CheckpointError(f"{path} is no index of a checkpoint: {error}.") from error
    if index is None:
        raise CheckpointError(
            f"{path} has version {version!r} of the format, and this package reads those up to"
            f" {_VERSION}."
            " Use the version of mpi_replica that wrote it."
        )
    return index


# What comes of JSON that holds something else than it should.
_WRONG = (
    *(ValueError, TypeError, LookupError, AttributeError, ImportError),
    *(OverflowError, RecursionError),
)


def _checked_index(body: Any) -> Index:
    """Returns the index; whatever it says makes sense, so that restoring does not fail midway."""
    arrays = {name: unpacked_record(*entry) for name, entry in body["arrays"].items()}
    for file in {record.file for record in arrays.values()}:
        _check_name(file)
    for shape in {record.shape for record in arrays.values()}:
        np.broadcast_to(np.empty((), np.uint8), shape)  # raises where numpy has no such shape
    state, of_ranks, number = dict(body["state"]), list(body["of_ranks"]), int(body["num_replicas"])
    of_replicas = {name: dict(parts) for name, parts in body["of_replicas"].items()}
    for value in (state, of_replicas):
        decoded(value, lambda name, library="": np.empty((), arrays[name].dtype))
    for name, parts in of_replicas.items():
        if set(parts) != set(map(str, range(number))):
            raise ValueError(f"components of replicas {list(parts)} for value {name} of {number}")
    Generators(0).restore(all_generators(of_ranks))
    return Index(state, arrays, number, of_ranks, of_replicas)


def all_generators(of_ranks: Sequence[Any]) -> dict[str, Any]:
    """Returns the state of the generators of all replicas, from what each rank told of its own."""
    replicas = {name: state for own in of_ranks for name, state in own["replicas"].items()}
    return {**of_ranks[0], "replicas": replicas}


def packed_record(record: ArrayRecord) -> list[Any]:
    """Returns a record as plain data."""
    order = [record.order] * (record.order != "C")
    return [dtype_text(record.dtype), list(record.shape), record.file, *record.extent, *order]


def unpacked_record(
    dtype: Any,
    shape: Sequence[int],
    file: str,
    offset: int,
    size_bytes: int,
    crc32: int,
    order: Literal["C", "F"] = "C",
) -> ArrayRecord:
    """Undoes `packed_record`.

    Raises
    ------
    ValueError, TypeError
        It says what can't be.
    """
    made = ArrayRecord(
        dtype_from(dtype),
        tuple(int(n) for n in shape),
        file,
        Extent(int(offset), int(size_bytes), int(crc32)),
        order,
    )
    if order not in ("C", "F"):
        raise ValueError(f"an array in the order {order!r}")
    if min(*made.extent, *made.shape) < 0 or offset + size_bytes > _MOST_OFFSET:
        raise ValueError(f"an array with {shape} items at {offset}")
    if math.prod(made.shape) * made.dtype.itemsize != size_bytes:
        raise ValueError(f"an array of {size_bytes} bytes with shape {shape} and dtype {dtype}")
    return made


def _check_name(file: Any) -> None:
    if not isinstance(file, str) or Path(file).name != file or file in ("", "..") or "\0" in file:
        raise ValueError(f"an array in {file!r}, which is no name of a file")
    os.fsencode(file)


_MOST_OFFSET = (1 << 63) - 1  # of the system's files
