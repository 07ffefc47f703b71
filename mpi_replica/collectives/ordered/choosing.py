"""Which exchange an ordered reduction gets."""

from __future__ import annotations

import logging

from ...layout import Layout
from ...options import CommunicationImplementation
from ...transport import SharedMemoryError, Transport
from .exchanges import (
    AlltoallExchange,
    Carry,
    Exchange,
    LocalExchange,
    SharedMemoryExchange,
    window_bytes,
)

__all__ = ["Exchanges"]

_SHARED_MEMORY = CommunicationImplementation.SHARED_MEMORY
_ALLTOALL = CommunicationImplementation.ALLTOALL

_log = logging.getLogger("mpi_replica")


class Exchanges:
    """The exchanges of a strategy, made when they are first needed."""

    def __init__(self, transport: Transport, layout: Layout, carry: Carry) -> None:
        self._about = transport, layout, carry
        self._known: dict[CommunicationImplementation, Exchange] = {}
        #: Why there is no shared memory, where that is known.
        self._problem: SharedMemoryError | None = None
        if transport.size == 1:
            self._known = dict.fromkeys(CommunicationImplementation, LocalExchange(*self._about))

    def get(self, implementation: CommunicationImplementation) -> Exchange | None:
        """Return the exchange for an ordered sum; None where `open` must come first."""
        return self._known.get(implementation)

    def open(self, implementation: CommunicationImplementation) -> Exchange:
        """Make the exchange for `implementation`. Collective.

        Raises
        ------
        ValueError
            Shared memory was asked for, and can't be had; on every rank.
        """
        alltoall = self._known[_ALLTOALL] = AlltoallExchange(*self._about)
        if implementation is _ALLTOALL:
            return alltoall
        shared = self._open_shared_memory()
        if implementation is _SHARED_MEMORY and shared is None:
            raise ValueError(
                f"implementation=SHARED_MEMORY can't be had: {self._problem}. Use AUTO or ALLTOALL."
            )
        transport, _, _ = self._about
        if shared is None and transport.rank == 0 and len(set(transport.hosts)) == 1:
            _log.warning(
                "reproducible sums go by Alltoallv, which is slower than shared memory: %s.",
                self._problem,
            )
        found = self._known[implementation] = shared or alltoall
        return found

    def _open_shared_memory(self) -> Exchange | None:
        """Return the exchange by shared memory; None where it can't be had."""
        if self._problem is None and _SHARED_MEMORY not in self._known:
            transport, layout, _ = self._about
            part_bytes, size_bytes = window_bytes(layout)
            try:
                if not part_bytes:
                    raise SharedMemoryError(
                        f"{layout.num_replicas} replicas would need {size_bytes >> 20} MiB of it"
                    )
                window = transport.open_shared_memory(size_bytes)
            except SharedMemoryError as problem:
                self._problem = problem
            else:
                self._known[_SHARED_MEMORY] = SharedMemoryExchange(*self._about, window)
        return self._known.get(_SHARED_MEMORY)
