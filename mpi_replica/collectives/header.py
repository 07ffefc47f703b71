"""The header by which ranks agree: 256 bytes that tell where a rank is.

It holds the fingerprint of the call, the chain of notes, and a state; these are compared. A small
payload may follow.
"""

from __future__ import annotations

import hashlib
import struct

import numpy as np
import numpy.typing as npt

from ..transport import HEADER_BYTES

__all__ = [
    "AGREES",
    "INLINE_BYTES",
    "LEAVES",
    "REPORTS",
    "compared_part",
    "header",
    "header_without_payload",
    "payloads",
    "payloads_of_equals",
    "state_of_words",
    "states",
    "words",
]

# fingerprint, chain of notes, state; then the length of the payload
_COMPARED = struct.Struct("<QQB")
_LENGTH = struct.Struct("<H")
_START = _COMPARED.size + _LENGTH.size

#: The largest payload that travels in a header.
INLINE_BYTES = HEADER_BYTES - _START

#: States: the local replicas are at one call; they are not, or failed; the program has ended.
AGREES, REPORTS, LEAVES = 0, 1, 2

#: Returns the compared part of a header, out of fingerprint, chain of notes, and state.
compared_part = _COMPARED.pack
#: Returns the whole header, where there is no payload, out of the same.
header_without_payload = struct.Struct(f"{_COMPARED.format}{HEADER_BYTES - _COMPARED.size}x").pack


def header(compared: bytes, payload: bytes) -> bytes:
    """Return the header of a rank."""
    return (compared + _LENGTH.pack(len(payload)) + payload).ljust(HEADER_BYTES, b"\0")


def payloads_of_equals(headers: bytes, mine: bytes, payload: bytes) -> list[bytes] | None:
    """Return the payloads of all ranks, or None where a rank's compared part is not as `mine`."""
    size = len(headers)
    if not payload:  # then no rank has one
        count = size // HEADER_BYTES
        return [b""] * count if headers == mine * count else None
    compared, payload_bytes = mine[: _COMPARED.size], len(payload)
    found = []
    for start in range(0, size, HEADER_BYTES):
        if not headers.startswith(compared, start):
            return None
        found.append(headers[start + _START : start + _START + payload_bytes])
    # Where a rank's payload has another length, the bytes of its length differ.
    lengths = mine[_COMPARED.size : _START]
    if all(headers.startswith(lengths, at) for at in range(_COMPARED.size, size, HEADER_BYTES)):
        return found
    return payloads(headers)


def payloads(headers: bytes) -> list[bytes]:
    """Return the payloads of all ranks."""
    found = []
    for start in range(_START, len(headers), HEADER_BYTES):
        (length,) = _LENGTH.unpack_from(headers, start - _LENGTH.size)
        found.append(headers[start : start + length])
    return found


def states(headers: bytes) -> list[int]:
    """Return the states of all ranks."""
    return list(headers[_COMPARED.size - 1 :: HEADER_BYTES])


def words(compared: bytes) -> npt.NDArray[np.uint64]:
    """Return words whose maximum over the ranks is theirs only where all ranks have the same."""
    word = int.from_bytes(hashlib.blake2b(compared, digest_size=8).digest(), "little")
    return np.array([word, ~np.uint64(word), compared[-1]], np.uint64)


def state_of_words(greatest: npt.NDArray[np.uint64]) -> int:
    """Return the greatest state of all ranks."""
    return int(greatest[2])
