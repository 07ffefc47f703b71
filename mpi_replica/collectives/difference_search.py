"""Where the bytes of several ranks begin to differ: found without exchanging all of them.

Each rank runs the same search over bytes of its own. A search yields what is to be exchanged and is
sent what all ranks gave; all come to the same result, since they decide by nothing else.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ..core.digests import DIGEST_BYTES, digest_of_bytes

#: Blocks of this size are exchanged; of larger ones, digests of their parts.
SMALL_BYTES = 1 << 12
# Parts of a block: a gigabyte takes three rounds of digests.
_PARTS = 64


class Difference(NamedTuple):
    """The first unit that is not the same on all ranks."""

    position: int
    #: Its bytes on each rank.
    units: tuple[bytes, ...]
    #: How many units differ: so many at least, or exactly.
    number: int
    is_exact: bool


#: Yields what to exchange, is sent what each rank gave, returns the difference if it finds one.
Search = Generator[bytes, Sequence[bytes], Difference | None]


def search(data: npt.NDArray[np.uint8], unit_bytes: int) -> Search:
    """Finds the first unit that differs, in bytes that are equally many on all ranks."""
    start, stop = 0, data.size // unit_bytes
    elsewhere, is_exact = 0, True
    while (stop - start) * unit_bytes > SMALL_BYTES:
        parts = _parts(start, stop)
        blocks = [data[a * unit_bytes : b * unit_bytes] for a, b in parts]
        differing = differing_units((yield b"".join(map(digest_of_bytes, blocks))), DIGEST_BYTES)
        if not differing:
            return None
        start, stop = parts[differing[0]]
        elsewhere += len(differing) - 1  # at least one unit in each
        is_exact = is_exact and len(differing) == 1
    rows = yield data[start * unit_bytes : stop * unit_bytes].tobytes()
    differing = differing_units(rows, unit_bytes)
    if not differing:
        return None
    at = differing[0] * unit_bytes
    units = tuple(row[at : at + unit_bytes] for row in rows)
    return Difference(start + differing[0], units, elsewhere + len(differing), is_exact)


def differing_units(rows: Sequence[bytes], unit_bytes: int) -> list[int]:
    """Returns which units are not the same in all rows.

    Examples
    --------
    >>> differing_units([b"aabbcc", b"aabxcx"], 2)
    [1, 2]
    """
    table = np.array([np.frombuffer(row, np.uint8) for row in rows])
    differs = (table != table[0]).any(axis=0).reshape(-1, unit_bytes)
    return [int(i) for i in np.flatnonzero(differs.any(axis=1))]


def _parts(start: int, stop: int) -> list[tuple[int, int]]:
    step = -(-(stop - start) // _PARTS)
    return [(a, min(a + step, stop)) for a in range(start, stop, step)]
