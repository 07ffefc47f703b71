"""The end of the job by a rank whose program fails before it has made a strategy with others.

They would wait for it for ever: for the strategy, or for MPI, whose start and end are collective
(MPI 4.1, 11.2). A launcher ends a job with the first process that has failed, but one that has
started MPI ends only when all others do.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import os
import sys
from os import getpid, getppid
from pathlib import Path
from time import sleep

# How long it waits for the end of the others, which may have failed, too.
_SECONDS_TO_END = 2.0
# For the others to print why, where they have failed, too.
_SECONDS_TO_PRINT = 0.3


def watch_program() -> None:
    """Has an error that the program of this process does not catch end the job."""
    # Python takes `__file__` away before this is needed.
    atexit.register(_end_job, getpid(), getattr(sys.modules["__main__"], "__file__", None))


def leave_to_strategies() -> None:
    """Does that no more: from now on strategies can tell the other ranks."""
    atexit.unregister(_end_job)


def _end_job(process: int, file: str | None) -> None:
    if getpid() != process or not _has_failed(file):
        return
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # of the program
            stream.flush()
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is None or not mpi.Is_initialized():
        _end_start()
    elif not mpi.Is_finalized():
        with open(os.devnull, "w") as nowhere:
            # Not in Python, which mpi4py lets no other thread run meanwhile.
            faulthandler.dump_traceback_later(_SECONDS_TO_END, exit=True, file=nowhere)
            mpi.Finalize()
            faulthandler.cancel_dump_traceback_later()


def _has_failed(file: str | None) -> bool:
    """Returns whether an error has ended the program, in this file or of ``-c``, ``-m`` or stdin.

    Consoles and pytest note in `sys`, too, what they have caught.
    """
    trace = getattr(sys, "last_traceback", None)
    if trace is None or hasattr(sys, "ps1"):
        return False
    first = trace.tb_frame  # of an error that nobody catches it is what Python itself has called
    if first.f_globals.get("__name__") == "runpy":
        return True
    is_of_program = first.f_globals is vars(sys.modules["__main__"])
    return is_of_program and first.f_code.co_filename in (file, "<string>", "<stdin>")


def _end_start() -> None:
    """Ends the job where MPI has not started here.

    Hydra, the launcher of MPICH and Intel MPI, would leave the others in their start. It ends them
    where a child of its own asks for it, by the protocol PMI 1.
    """
    with contextlib.suppress(OSError, KeyError, ValueError):
        if Path(f"/proc/{getppid()}/comm").read_text() == "hydra_pmi_proxy\n":
            sleep(_SECONDS_TO_PRINT)
            os.write(int(os.environ["PMI_FD"]), b"cmd=abort exitcode=1\n")
