"""A few bytes of every rank, or many, of lengths that only their rank knows."""

from __future__ import annotations

import pickle
import struct
from collections.abc import Sequence
from typing import IO, Any

import numpy as np

from ..core.exceptions import MPIReplicaError, in_words
from .agreement.group import Group
from .agreement.steps import Agree, Gather, Steps

#: What has a size that is known only after the ranks agreed is allocated then; above this size
#: the ranks agree once more that all of them could.
LARGE_BYTES = 1 << 20

_LENGTH = struct.Struct("<Q")
_FOLLOWS = 1  # the bit of the first byte that tells that the blob does not stand behind it


def pickled(kind: str, value: Any, who: str) -> bytes:
    """Returns the blob of an object, which `who` has given to the call `kind`.

    Raises
    ------
    TypeError
        It can't be pickled.
    """
    try:
        return pickle.dumps(value, protocol=5)
    except (MemoryError, MPIReplicaError):  # the latter of a call that pickling has made
        raise
    except Exception as error:
        raise TypeError(
            f"{kind} can't pickle the {type(value).__name__} of {who}. Give what it is made of."
            f" pickle raised {in_words(error)}"
        ) from error


def loaded(file: IO[bytes]) -> Any:
    """Returns the next object in a file of pickles."""
    return _Unpickler(file).load()


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        found = super().find_class(module, name)
        return _scalar if found is _numpy_scalar else found


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
