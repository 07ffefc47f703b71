"""What Open MPI is told by environment variables, which it reads when it starts."""

from __future__ import annotations

import os
import sys

#: What its launcher sets with --with-ft ulfm. Without it a communicator can be revoked, too, but
#: the first rank that is lost ends the job.
FAULT_TOLERANCE = "OMPI_MCA_mpi_ft_enable"
#: With 1, MPI_Finalize waits for no other rank.
NO_FENCE = "OMPI_MCA_async_mpi_finalize"

_WINDOWS = "OMPI_MCA_osc"
_DEVICES = "/sys/class/infiniband"


def set_up_open_mpi() -> None:
    """Sets what Open MPI needs, unless MPI has started: with the import of mpi4py.MPI.

    Its windows over UCX print an error on each rank where there is no device for them, also when
    other windows are made. And MPI_Finalize of Open MPI 5.0.11 waits for a fence of all processes
    that were started, which now and then never ends where one of them was killed.
    """
    if "mpi4py.MPI" in sys.modules:
        return
    if not os.path.isdir(_DEVICES):
        os.environ.setdefault(_WINDOWS, "^ucx")
    if os.environ.get(FAULT_TOLERANCE) == "1":
        os.environ.setdefault(NO_FENCE, "1")
