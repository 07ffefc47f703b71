"""What a host has for its ranks: cores, and memory that they can share."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence

# For the module of MPI: see `pause.py`.
from os import getpid as getpid

# macOS does not have it.
_affinity: Callable[[int], Iterable[int]] = getattr(
    os, "sched_getaffinity", lambda _: range(os.cpu_count() or 1)
)

# Where MPI libraries on Linux have it. To write to more than is there would end the process.
_SHARED_MEMORY_FOLDER = "/dev/shm"

# Linux makes one up each time that it starts. Containers of one machine see the same.
_BOOT_ID = "/proc/sys/kernel/random/boot_id"


def cores() -> frozenset[int]:
    """Returns the cores that this process may run on."""
    return frozenset(_affinity(0))


def machine(host: str) -> str:
    """Returns the id of the machine whose cores `host` has: hosts in containers may share one.

    It is the name of the host where the system does not tell.
    """
    try:
        with open(_BOOT_ID, encoding="ascii") as file:
            return file.read().strip() or host
    except OSError:
        return host


def is_crowded(machine: str, places: Sequence[tuple[str, frozenset[int]]]) -> bool:
    """Returns whether a machine has more ranks than cores.

    `places` are machine and cores of each rank.
    """
    cores_of_ranks = [cores for other, cores in places if other == machine]
    return len(cores_of_ranks) > len(frozenset().union(*cores_of_ranks))


def free_shared_memory() -> int | None:
    """Returns how many bytes of shared memory are free; None where the system does not tell."""
    try:
        space = os.statvfs(_SHARED_MEMORY_FOLDER)
    except OSError:
        return None
    return space.f_bavail * space.f_frsize


def lack_of_shared_memory(size_bytes: int) -> str:
    """Returns why there is not so much memory to share; an empty text where there is."""
    free = free_shared_memory()
    if free is None:
        return ""  # this system has it elsewhere
    if free >= size_bytes:
        return ""
    return (
        f"{size_bytes >> 10} KiB are needed in {_SHARED_MEMORY_FOLDER}, and {free >> 10} are free"
    )
