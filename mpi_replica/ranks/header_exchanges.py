"""The exchanges of headers, each of which can be done again and again: one for each size."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from .library_facts import has_sound_persistent_collectives
from .transport import HEADER_BYTES, LARGER_HEADER_BYTES, Bytes
from .two_level import TwoLevelExchange, is_two_level

# Of the headers of all ranks together: beyond it a reduction costs less than what all send to all.
_MOST_BYTES = (1 << 17) + (1 << 11)


def sizes_of_headers(ranks: int) -> Sequence[int]:
    """Returns the bytes that headers of so many ranks can have, the least first."""
    larger = [size for size in LARGER_HEADER_BYTES if size * ranks <= _MOST_BYTES]
    return [HEADER_BYTES, *larger]


class Exchange(Protocol):
    """One that can be done again and again, as a persistent request of MPI."""

    def Start(self) -> None:
        """Begins, with what stands in the header now."""

    def Test(self) -> bool:
        """Returns whether all headers have come."""

    def Free(self) -> None:
        """Gives back what it holds."""


class HeaderExchanges:
    """Memory and requests for the headers of some ranks.

    Parameters
    ----------
    mpi : module
        ``mpi4py.MPI``.
    communicator : mpi4py.MPI.Intracomm
        Its ranks. Collective.
    hosts : sequence of str
        Where each rank is, in any order.

    Attributes
    ----------
    headers : dict
        Where those of all ranks are put, by the bytes of each.
    of_size : dict
        What this rank gives, and the request that sends it; None where the library has no
        persistent collectives, which are MPI-4, or none that are right.
    """

    def __init__(self, mpi: Any, communicator: Any, hosts: Sequence[str]) -> None:
        ranks = len(hosts)
        self.headers: dict[int, Bytes] = {}
        self.of_size: dict[int, tuple[memoryview, Exchange | None]] = {}
        # What users send on theirs must not meet messages from rank to rank.
        self._own: Any = communicator.Dup() if is_two_level(hosts) else None
        is_persistent = has_sound_persistent_collectives(mpi)
        for size in sizes_of_headers(ranks):
            mine, every = np.zeros(size, np.uint8), np.zeros(size * ranks, np.uint8)
            request: Exchange | None = None
            with contextlib.suppress(NotImplementedError):
                if self._own is not None:
                    request = TwoLevelExchange(mpi, self._own, hosts, mine, every)
                elif is_persistent:
                    request = communicator.Allgather_init(mine, every)
            self.headers[size], self.of_size[size] = every, (mine.data, request)

    def revoke(self) -> None:
        """Makes those from rank to rank fail on all ranks."""
        if self._own is not None:
            self._own.Revoke()

    def free(self) -> None:
        """Gives back what it holds. Collective."""
        for size, (header, request) in self.of_size.items():
            if request is not None:
                request.Free()
            self.of_size[size] = header, None
        if self._own is not None:
            self._own.Free()
