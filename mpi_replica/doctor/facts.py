"""What a rank tells about itself and its host."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import NamedTuple

from ..numerics import Numerics, numerics_here
from ..transport.host import cores, free_shared_memory
from ..transport.launch import library
from ..transport.library_facts import LibraryFacts

__all__ = ["Facts", "facts_here"]


class Facts(NamedTuple):
    """The facts of a rank."""

    host: str
    cores: frozenset[int]
    #: Bytes that are free.
    shared_memory: int | None
    #: The threads of each BLAS library that is loaded, by its file.
    blas_threads: Mapping[str, int]
    numerics: Numerics
    #: hash() of a string.
    string_hash: int
    python: str
    #: None without MPI.
    library: LibraryFacts | None


def facts_here(host: str) -> Facts:
    """Return the facts of this process."""
    from threadpoolctl import threadpool_info  # here: other programs pay nothing for it

    found = [info for info in threadpool_info() if info["user_api"] == "blas"]
    return Facts(
        host,
        cores(),
        free_shared_memory(),
        {os.path.basename(info["filepath"]): info["num_threads"] for info in found},
        numerics_here(),
        hash("mpi_replica"),
        f"{sys.version_info.major}.{sys.version_info.minor}.{sys.version_info.micro}",
        library(),
    )
