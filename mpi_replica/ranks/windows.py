"""Memory that the ranks of one host share: windows of MPI."""

from __future__ import annotations

from typing import Any

import numpy as np

from .host import lack_of_shared_memory
from .transport import ALIGNMENT, Bytes, SharedMemoryError, Transport


class SharedWindows:
    """The windows that the ranks of a transport have opened.

    Parameters
    ----------
    mpi : module
        ``mpi4py.MPI``.
    """

    def __init__(self, mpi: Any) -> None:
        self._mpi = mpi
        self._windows: list[tuple[Any, Any]] = []  # and the communicator of each

    def open(self, transport: Transport, size_bytes: int) -> Bytes:
        """Does what `Transport.open_shared_memory` promises, for `transport`."""
        mpi, is_first = self._mpi, transport.rank == 0
        host = transport.communicator.Split_type(mpi.COMM_TYPE_SHARED)
        problem = ""
        if host.Get_size() < transport.size:
            problem = f"the ranks are on {len(set(transport.hosts))} hosts"
        elif is_first:
            problem = lack_of_shared_memory(size_bytes)
        _raise_on_all(problem, transport, host)
        try:
            # All of it on rank 0: one block for all ranks. Open MPI 4.1 does not align it.
            least = size_bytes + ALIGNMENT if is_first else 0
            window = mpi.Win.Allocate_shared(least, 1, comm=host)
        except mpi.Exception as error:
            problem = f"the MPI library gives none ({error})"
        _raise_on_all(problem, transport, host)
        window.Set_errhandler(mpi.ERRORS_RETURN)
        window.Lock_all(mpi.MODE_NOCHECK)
        memory: Bytes = np.frombuffer(window.Shared_query(0)[0], np.uint8)
        start = -memory.ctypes.data % ALIGNMENT  # alike on all ranks, whose pages are the same
        memory = memory[start : start + size_bytes]
        if is_first:
            memory[:] = 0  # while it is known to be there
        self._windows.append((window, host))
        return memory

    def sync(self) -> None:
        """Shows this rank's writes to the others, and theirs to it: before and after a barrier."""
        for window, _ in self._windows:
            window.Sync()

    def free(self) -> None:
        """Gives the memory back. Collective."""
        for window, host in self._windows:
            window.Unlock_all()
            window.Free()
            host.Free()


def _raise_on_all(problem: str, transport: Transport, host: Any) -> None:
    """Raises the problem of any rank on all ranks. Collective."""
    for text in filter(None, transport.all_gather_bytes(problem.encode())):
        host.Free()
        raise SharedMemoryError(text.decode())
