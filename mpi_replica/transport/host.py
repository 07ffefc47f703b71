"""What a host has for its ranks: cores, and memory that they can share."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Sequence

__all__ = [
    "FAULT_TOLERANCE",
    "NO_FENCE",
    "cores",
    "free_shared_memory",
    "is_crowded",
    "lack_of_shared_memory",
    "machine",
    "make_end_without_fence",
    "make_windows_quiet",
]

# macOS does not have it.
_affinity: Callable[[int], Iterable[int]] = getattr(
    os, "sched_getaffinity", lambda _: range(os.cpu_count() or 1)
)

# Where MPI libraries on Linux have it. To write to more than is there would end the process.
_SHARED_MEMORY_FOLDER = "/dev/shm"

# Linux makes one up each time that it starts. Containers of one machine see the same.
_BOOT_ID = "/proc/sys/kernel/random/boot_id"


def cores() -> frozenset[int]:
    """Return the cores that this process may run on."""
    return frozenset(_affinity(0))


def machine(host: str) -> str:
    """Return what is the same for all hosts that share the cores of one machine.

    That of `host` is its own name where the system does not tell.
    """
    try:
        with open(_BOOT_ID, encoding="ascii") as file:
            return file.read().strip() or host
    except OSError:
        return host


def is_crowded(machine: str, places: Sequence[tuple[str, frozenset[int]]]) -> bool:
    """Return whether it has more ranks than cores for them; `places` are those of all ranks."""
    taken = [cores for other, cores in places if other == machine]
    return len(taken) > len(frozenset().union(*taken))


def free_shared_memory() -> int | None:
    """Return how many bytes of shared memory are free; None where the system does not tell."""
    try:
        space = os.statvfs(_SHARED_MEMORY_FOLDER)
    except OSError:
        return None
    return space.f_bavail * space.f_frsize


def lack_of_shared_memory(size_bytes: int) -> str:
    """Return why there is not so much memory to share; an empty text where there is."""
    free = free_shared_memory()
    if free is None:
        return ""  # this system has it elsewhere
    if free >= size_bytes:
        return ""
    return (
        f"{size_bytes >> 10} KiB are needed in {_SHARED_MEMORY_FOLDER}, and {free >> 10} are free"
    )


# Open MPI's windows over UCX print an error on each rank where there is no device for them, also
# when other windows are made. The variable is read when MPI starts: with the import of mpi4py.MPI.
_DEVICES = "/sys/class/infiniband"
_WINDOWS = "OMPI_MCA_osc"
#: What Open MPI's launcher sets with --with-ft ulfm. Without it a communicator can be revoked, too,
#: but the first rank that is lost ends the job.
FAULT_TOLERANCE = "OMPI_MCA_mpi_ft_enable"
#: With 1, MPI_Finalize of Open MPI waits for no other rank.
NO_FENCE = "OMPI_MCA_async_mpi_finalize"


def make_windows_quiet() -> None:
    """Keep Open MPI from printing an error that is none, if MPI has not started yet."""
    if "mpi4py.MPI" not in sys.modules and not os.path.isdir(_DEVICES):
        os.environ.setdefault(_WINDOWS, "^ucx")


def make_end_without_fence() -> None:
    """Keep Open MPI from waiting for dead ranks at its end, if MPI has not started yet.

    MPI_Finalize of Open MPI 5.0.11 waits for a fence of all processes that were started, which now
    and then never ends where one of them was killed.
    """
    if "mpi4py.MPI" not in sys.modules and os.environ.get(FAULT_TOLERANCE) == "1":
        os.environ.setdefault(NO_FENCE, "1")
