"""The end of a whole job by one of its ranks."""

from __future__ import annotations

import errno
import faulthandler
import os
import socket
from contextlib import suppress
from time import sleep
from types import ModuleType

from .launcher_connection import note_end, tell_end

# How long the others of a host wait to be ended by the first one that aborts the job.
_SECONDS_TO_END = 10.0
# How long a rank waits in MPI_Abort. Open MPI 5.0.11 waits there for an answer of mpirun, and for
# ever where that is stopped, or has gone just then.
_SECONDS_TO_ABORT = 30.0


def abort_job(mpi: ModuleType, status: int) -> None:
    """Ends the processes of all ranks with this exit status.

    Of the ranks of a host the first one asks for it: where several call MPI_Abort at about the same
    time behind a loss, Open MPI 5.0.11's mpirun may stay when all of them are gone, or report 0
    (3 ranks, mpi4py alone: 5 of 85 jobs; one after another 0 of 120).
    """
    note_end("abort", status)
    tell_end()
    try:
        seat = socket.socket(socket.AF_UNIX)  # held until the process ends
        if job := os.environ.get("PMIX_NAMESPACE"):
            seat.bind(f"\0mpi_replica-abort-{job}")  # a name without a file
    except OSError as error:  # no socket to be had must not keep the job from its end
        if error.errno == errno.EADDRINUSE:
            sleep(_SECONDS_TO_END)
    with suppress(OSError, RuntimeError):  # no file or thread to be had
        nowhere = os.open(os.devnull, os.O_WRONLY)
        # By a thread of C: mpi4py holds the GIL in Abort, so no other one could end the process.
        faulthandler.dump_traceback_later(_SECONDS_TO_ABORT, exit=True, file=nowhere)
    mpi.COMM_WORLD.Abort(status)
    os._exit(status)  # MPICH returns, and its launcher ends the processes a little later
