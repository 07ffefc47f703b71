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

_NO_PAYLOAD = bytes(HEADER_BYTES - _COMPARED.size)

compared_part = _COMPARED.pack


def header(compared: bytes, payload: bytes) -> bytes:
    """Return the header of a rank."""
    if not payload:
        return compared + _NO_PAYLOAD
    return (compared + _LENGTH.pack(len(payload)) + payload).ljust(HEADER_BYTES, b"\0")


def payloads_of_equals(headers: bytes, mine: bytes, payload: bytes) -> list[bytes] | None:
    """Return the payloads of all ranks, or None where a rank's compared part is not as `mine`."""
    count = len(headers) // HEADER_BYTES
    if not payload:  # then no rank has one
        return [b""] * count if headers == mine * count else None
    if not all(
        headers.startswith(mine[: _COMPARED.size], start)
        for start in range(0, len(headers), HEADER_BYTES)
    ):
        return None
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
