"""The header by which ranks agree: 256 bytes or more that tell where a rank is.

It holds the fingerprint of the call, the chain of notes, and a state; these are compared. Beside
them it says whether clocks are due, and a small payload may follow.
"""

from __future__ import annotations

import hashlib
import struct

import numpy as np
import numpy.typing as npt

from ...ranks.transport import HEADER_BYTES

# fingerprint, chain of notes, state; then whether this rank would compare clocks now, and the
# length of the payload. Numbers of 8 bytes in the payload are aligned.
_HEAD = struct.Struct("<QQBBH4x")
#: What must be the same on all ranks.
COMPARED_BYTES = 17
_CHAIN_START = 8
_CLOCKS_START = 17
_LENGTH = struct.Struct("<H")
_LENGTH_START = 18

#: Where the payload begins.
PAYLOAD_START = _HEAD.size
#: The largest payload that travels in a header of whatever size.
INLINE_BYTES = HEADER_BYTES - PAYLOAD_START

#: States: the local replicas are at one call; they are not, or failed; the program has ended.
AGREES, REPORTS, LEAVES = 0, 1, 2

#: Returns what stands before the payload, out of fingerprint, chain of notes, state, whether
#: clocks are due, and the bytes of the payload.
head = _HEAD.pack


def payloads(headers: bytes, size_bytes: int) -> list[bytes]:
    """Returns the payloads of all ranks, of which each header has so many bytes."""
    parts = []
    for start in range(PAYLOAD_START, len(headers), size_bytes):
        (length,) = _LENGTH.unpack_from(headers, start - PAYLOAD_START + _LENGTH_START)
        parts.append(headers[start : start + length])
    return parts


def chains(headers: bytes, size_bytes: int) -> list[bytes]:
    """Returns the chains of notes of all ranks, of which each header has so many bytes."""
    starts = range(_CHAIN_START, len(headers), size_bytes)
    return [headers[start : start + _CHAIN_START] for start in starts]


def states(headers: bytes, size_bytes: int) -> list[int]:
    """Returns the states of all ranks, of which each header has so many bytes."""
    return list(headers[COMPARED_BYTES - 1 :: size_bytes])


def are_clocks_due(headers: bytes, size_bytes: int) -> bool:
    """Returns whether all ranks would compare clocks now."""
    return all(headers[_CLOCKS_START::size_bytes])


def words(mine: bytes) -> npt.NDArray[np.uint64]:
    """Returns words; the maximum of the first two is theirs only where all ranks have the same.

    The last one has the state, and below it whether clocks are *not* due.
    """
    compared = mine[:COMPARED_BYTES]
    word = int.from_bytes(hashlib.blake2b(compared, digest_size=8).digest(), "little")
    return np.array(
        [word, ~np.uint64(word), compared[-1] << 1 | (not mine[_CLOCKS_START])], np.uint64
    )


def state_of_words(greatest: npt.NDArray[np.uint64]) -> int:
    """Returns the greatest state of all ranks."""
    return int(greatest[2]) >> 1


def are_clocks_due_by_words(greatest: npt.NDArray[np.uint64]) -> bool:
    """Returns whether all ranks would compare clocks now."""
    return not int(greatest[2]) & 1
