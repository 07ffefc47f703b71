"""The files of MPI libraries in this process."""

from __future__ import annotations

import os


def loaded_libraries() -> list[str]:
    """Returns the files of MPI libraries that this process has loaded, where the system tells."""
    try:
        with open("/proc/self/maps", "rb") as file:  # names are bytes, and may be no text
            paths = {line.split(None, 5)[5].strip() for line in file if b"/libmpi" in line}
    except OSError:
        return []
    return sorted(os.fsdecode(path) for path in paths if _is_library(path))


def _is_library(path: bytes) -> bool:
    name = os.path.basename(path)  # programs map files of data, too
    return name.startswith(b"libmpi") and b".so" in name and os.path.isfile(path)
