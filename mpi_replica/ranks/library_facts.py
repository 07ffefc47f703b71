"""What an MPI library can do, asked of it while it runs."""

from __future__ import annotations

import ctypes
import os
import re
from typing import Any, NamedTuple

from .loaded_libraries import loaded_libraries
from .open_mpi import FAULT_TOLERANCE

# From the version on that was tried.
_SOUND_PERSISTENT_COLLECTIVES = re.compile(
    r"Open MPI v|MPICH Version:\s*(4\.1\.[3-9]|4\.[2-9]|[5-9]|\d\d)"
)

_GPU_QUESTIONS = {"CUDA": "MPIX_Query_cuda_support", "ROCm": "MPIX_Query_rocm_support"}


class LibraryFacts(NamedTuple):
    """What an MPI library is and can do, in a process where it has started."""

    #: Name and version, as it tells them first.
    version: str
    #: ``single``, ``funneled``, ``serialized`` or ``multiple``.
    thread_level: str
    #: Whether a job goes on without a lost rank (ULFM).
    is_fault_tolerant: bool
    #: Kinds of GPU whose memory it takes; None where it can't be asked.
    gpus: tuple[str, ...] | None


def library_facts(mpi: Any) -> LibraryFacts:
    """Returns the facts of the library behind the module `mpi4py.MPI`."""
    version = mpi.Get_library_version().strip("\0 \n").splitlines()[0].partition(",")[0]
    levels = {
        getattr(mpi, f"THREAD_{name.upper()}"): name
        for name in ("single", "funneled", "serialized", "multiple")
    }
    return LibraryFacts(
        " ".join(version.split()), levels[mpi.Query_thread()], is_fault_tolerant(mpi), _gpus(mpi)
    )


def is_fault_tolerant(mpi: Any) -> bool:
    """Returns whether the library behind the module `mpi4py.MPI` goes on without a lost rank."""
    if "Open MPI" in mpi.Get_library_version() and os.environ.get(FAULT_TOLERANCE) != "1":
        return False
    own = mpi.COMM_SELF.Dup()
    own.Set_errhandler(mpi.ERRORS_RETURN)
    try:
        own.Revoke()
    except (NotImplementedError, mpi.Exception):
        return False
    finally:
        own.Free()
    return True


def has_sound_persistent_collectives(mpi: Any) -> bool:
    """Returns whether persistent collectives can be used, where the library has them.

    Those of MPICH 4.0 and of Intel MPI 2021.19 can't: on 2 and 4 ranks some found after an
    Allgather what had come the time before, without an error, or died of a segmentation fault.
    Right were those of MPICH 4.1.3, 4.2.3, 4.3.2 and 5.0, and of Open MPI 5.0.11.
    """
    return _SOUND_PERSISTENT_COLLECTIVES.match(mpi.Get_library_version()) is not None


def is_intel_mpi(mpi: Any) -> bool:
    """Returns whether the library behind the module `mpi4py.MPI` is Intel's."""
    return str(mpi.Get_library_version()).startswith("Intel")


def _gpus(mpi: Any) -> tuple[str, ...] | None:
    info = mpi.COMM_WORLD.Get_info()
    kinds = info.Get("mpi_memory_alloc_kinds") or ""  # MPI 4.1
    info.Free()
    gpus = {name for name in _GPU_QUESTIONS if name.lower() in kinds}
    answers = []
    for path in loaded_libraries():
        library = ctypes.CDLL(path)
        for name, question in _GPU_QUESTIONS.items():
            ask = getattr(library, question, None)
            if ask is not None:
                answers.append(name)
                gpus |= {name} if ask() == 1 else set()
    return tuple(sorted(gpus)) if gpus or answers or kinds else None
