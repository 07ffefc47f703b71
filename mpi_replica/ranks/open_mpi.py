"""What Open MPI is told by environment variables, which it reads when it starts, or behind that."""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys

from .loaded_libraries import loaded_libraries

#: What its launcher sets with --with-ft ulfm. Without it a communicator can be revoked, too, but
#: the first rank that is lost ends the job.
FAULT_TOLERANCE = "OMPI_MCA_mpi_ft_enable"
#: With 1, MPI_Finalize comes without a fence of all processes that were started.
NO_FENCE = "OMPI_MCA_async_mpi_finalize"

# Where its library holds that.
_NO_FENCE_VALUE = "ompi_async_mpi_finalize"

_WINDOWS = "OMPI_MCA_osc"
_DEVICES = "/sys/class/infiniband"


def set_up_open_mpi() -> None:
    """Sets what Open MPI needs.

    Its windows over UCX print an error on each rank where there is no device for them, also when
    other windows are made. And the fence at the end of Open MPI 5.0.11 never comes to its own, now
    and then, where a process was killed.
    """
    has_started = "mpi4py.MPI" in sys.modules  # with that import
    if not has_started and not os.path.isdir(_DEVICES):
        os.environ.setdefault(_WINDOWS, "^ucx")
    if os.environ.get(FAULT_TOLERANCE) == "1" and NO_FENCE not in os.environ:
        os.environ[NO_FENCE] = "1"  # also later: who starts its MPI_T has it read them again
        if has_started:
            _end_without_fence()


def _end_without_fence() -> None:
    """Does as `NO_FENCE`: by MPI_T the library lets nobody write it (MPI_T_ERR_CVAR_SET_NEVER)."""
    for path in loaded_libraries():
        with contextlib.suppress(ValueError, OSError):  # one beside that which has it
            ctypes.c_bool.in_dll(ctypes.CDLL(path), _NO_FENCE_VALUE).value = True
