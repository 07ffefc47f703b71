"""A few bytes of every rank, or many, of lengths that only their rank knows."""

from __future__ import annotations

import io
import pickle
import struct
import sys
from collections.abc import Sequence
from typing import IO, Any, Literal

import numpy as np

from ..core.exceptions import MPIReplicaError, in_words
from ..ranks import Bytes
from .agreement.group import Group
from .agreement.steps import Agree, Gather, Steps

#: What has a size that is known only after the ranks agreed is allocated then; above this size
#: the ranks agree once more that all of them could.
LARGE_BYTES = 1 << 20

# Memory of so many bytes stays where it is, if the blob of an object may do without it.
_BESIDE_BYTES = 1 << 16

_LENGTH = struct.Struct("<Q")
_FOLLOWS = 1  # the bit of the first byte that tells that the blob does not stand behind it


def pickled(kind: str, value: Any, who: str, beside: list[Bytes] | None = None) -> bytes:
    """Returns the blob of an object, which `who` has given to the call `kind`.

    The memory of large arrays is not in the blob, but added to `beside`, where that is given: then
    `unpickled` must have as much.

    Raises
    ------
    TypeError
        It can't be pickled.
    """
    try:
        if beside is None:
            return pickle.dumps(value, protocol=5)
        file = io.BytesIO()
        _Pickler(file, beside).dump(value)
        return file.getvalue()
    except (MemoryError, MPIReplicaError):  # the latter of a call that pickling has made
        raise
    except Exception as error:
        raise TypeError(
            f"{kind} can't pickle the {type(value).__name__} of {who}. Give what it is made of."
            f" pickle raised {in_words(error)}"
        ) from error


def unpickled(blob: bytes | memoryview, beside: Sequence[np.ndarray[Any, Any]]) -> Any:
    """Returns the object of a blob, whose large arrays get the memory `beside`."""
    if not beside:
        return pickle.loads(blob)
    return _Unpickler(io.BytesIO(blob), beside).load()


class _Pickler(pickle.Pickler):
    """Leaves out the memory of large arrays of numpy, also of those that export no buffer."""

    def __init__(self, file: IO[bytes], beside: list[Bytes]) -> None:
        super().__init__(file, protocol=5)
        self._beside = beside

    def reducer_override(self, value: Any) -> Any:
        if type(value) is not np.ndarray or value.nbytes < _BESIDE_BYTES:
            return NotImplemented
        if value.dtype.hasobject or not value.flags.forc:
            return NotImplemented
        order: Literal["C", "F"] = "C" if value.flags.c_contiguous else "F"
        self._beside.append(value.reshape(-1, order=order).view(np.uint8))
        place = len(self._beside) - 1
        return _Beside, (place, value.dtype, value.shape, order, value.flags.writeable)


class _Beside:
    """Stands in a blob for an array of which the memory is not in it."""


def behind_sizes(blob: bytes, beside: Sequence[Bytes]) -> bytes:
    """Returns a blob with the sizes of what travels beside it in front."""
    return np.array([len(beside), *(data.nbytes for data in beside)], np.int64).tobytes() + blob


def sizes_before(blob: memoryview) -> tuple[list[int], memoryview]:
    """Returns the sizes in front of a blob, and the blob."""
    number = int.from_bytes(blob[:8], sys.byteorder)
    end = 8 * (1 + number)
    return np.frombuffer(blob[8:end], np.int64).tolist(), blob[end:]


def loaded(file: IO[bytes]) -> Any:
    """Returns the next object in a file of pickles."""
    return _Unpickler(file).load()


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: IO[bytes], beside: Sequence[np.ndarray[Any, Any]] = ()) -> None:
        super().__init__(file)
        self._beside = beside

    def find_class(self, module: str, name: str) -> Any:
        found = super().find_class(module, name)
        if found is _Beside:
            return self._array
        return _scalar if found is _numpy_scalar else found

    def _array(
        self,
        place: int,
        dtype: np.dtype[Any],
        shape: tuple[int, ...],
        order: Literal["C", "F"],
        is_writeable: bool,
    ) -> np.ndarray[Any, Any]:
        array = self._beside[place].view(dtype).reshape(shape, order=order)
        array.flags.writeable = is_writeable
        return array


_numpy_scalar: Any = np.void(b"").__reduce__()[0]


def _scalar(dtype: np.dtype[Any], data: Any) -> Any:
    """Returns what numpy makes of a pickled scalar, which loses what is written into a record."""
    scalar = _numpy_scalar(dtype, data)
    return scalar.copy() if isinstance(scalar, np.void) else scalar


def payload_of(group: Group, blob: bytes, mark: int = 0) -> bytes:
    """Returns what of a blob travels with the header: all of it, or its length.

    `mark` is a small number that `marks` tells all ranks.
    """
    group.lay_by_reserve(LARGE_BYTES)
    if len(blob) < group.sizes.room_bytes:
        return bytes([mark << 1]) + blob
    return bytes([mark << 1 | _FOLLOWS]) + _LENGTH.pack(len(blob))


def marks(payloads: Sequence[bytes]) -> list[int]:
    """Returns the mark of each rank."""
    return [data[0] >> 1 for data in payloads]


def all_blobs(group: Group, blob: bytes) -> Steps[list[memoryview]]:
    """Returns the blob of each rank, in rank order; their payloads have come.

    One Allgatherv where not all of them did with the header, and one further small message where
    they have more than `LARGE_BYTES` together.
    """
    sizes = group.sizes
    payloads = sizes.payloads()
    if not any([data[0] & _FOLLOWS for data in payloads]):
        if sizes.are_larger:
            sizes.learn(sizes.size_of(max(map(len, payloads))))
        return [memoryview(data)[1:] for data in payloads]
    lengths = [
        _LENGTH.unpack(data[1:])[0] if data[0] & _FOLLOWS else len(data) - 1 for data in payloads
    ]
    sizes.learn(sizes.size_of(1 + max(lengths)))
    total = sum(lengths)
    if total > LARGE_BYTES:
        receive = yield Agree(lambda: (b"", np.empty(total, np.uint8)))
    else:
        receive = group.with_reserve(lambda: np.empty(total, np.uint8))
    yield Gather(np.frombuffer(blob, np.uint8), receive, lengths)
    ends = np.cumsum(lengths).tolist()
    return [receive[end - n : end].data for end, n in zip(ends, lengths, strict=True)]
