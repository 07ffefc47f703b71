"""The end of the job by a rank whose program fails before it has made a strategy with others.

They would wait for it for ever: for a strategy that all make, or for MPI, whose start and end are
collective (MPI 4.1, 11.2). A launcher ends a job with the first process that has failed, but one
that has started MPI ends only when all others do.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import signal
import sys
from collections.abc import Callable
from os import getpid, getppid
from pathlib import Path
from time import sleep
from types import FrameType

# How long the end of MPI may take here: others that have failed, too, come to theirs.
_SECONDS_TO_END = 10.0
# The same where MPI has not started here: this rank waits so long for its own.
_SECONDS_BEFORE_END = 1.0


def watch_program() -> None:
    """Has an error that the program of this process does not catch end the job."""
    atexit.register(_prepare_end, getpid())


def leave_to_strategies() -> None:
    """Undoes `watch_program`: a strategy of several ranks can tell the others."""
    atexit.unregister(_prepare_end)


def _prepare_end(process: int) -> None:
    if getpid() != process or not _has_failed():
        return
    act: Callable[[], object] | None = None
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is None or not mpi.Is_initialized():
        act = _end_of_others()
    elif not mpi.Is_finalized():
        act = _limit_of_end()
    if act is not None:
        # Python lets go of what sys holds behind all else: the program's handlers and its files.
        vars(sys)["_mpi_replica_last_act"] = _LastAct(act)


def _has_failed() -> bool:
    """Returns whether an error has ended the program.

    Consoles and pytest note in `sys`, too, what they have caught.
    """
    trace = getattr(sys, "last_traceback", None)
    if trace is None or hasattr(sys, "ps1"):
        return False
    # Of an error that nobody catches what Python itself has called: the program, or runpy.
    frame: FrameType = trace.tb_frame
    if frame.f_globals is not vars(sys.modules["__main__"]):
        is_runpy: bool = frame.f_globals.get("__name__") == "runpy"
        return is_runpy
    return frame.f_code.co_name == "<module>" and frame.f_code.co_filename != "<console>"


class _LastAct:
    """Does something when Python lets go of it, where no module has its names any more."""

    def __init__(self, act: Callable[[], object]) -> None:
        self._act = act

    def __del__(self) -> None:
        self._act()


def _limit_of_end() -> Callable[[], object]:
    """Returns what has a signal end this process where its end of MPI waits for others."""
    if signal.getsignal(signal.SIGALRM) is signal.SIG_IGN:  # Python takes handlers away itself
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
    return functools.partial(signal.setitimer, signal.ITIMER_REAL, _SECONDS_TO_END)


def _end_of_others() -> Callable[[], object] | None:
    """Returns what ends the job where MPI has not started here; None where its launcher does.

    Hydra, the launcher of MPICH and Intel MPI, would leave the others in their start. It ends them
    where a child of its own asks for it, by the protocol PMI 1.
    """
    with contextlib.suppress(OSError, KeyError, ValueError):
        if Path(f"/proc/{getppid()}/comm").read_text() == "hydra_pmi_proxy\n":
            connection, write, wait = int(os.environ["PMI_FD"]), os.write, sleep
            seconds = _SECONDS_BEFORE_END

            def end_others() -> None:
                wait(seconds)
                write(connection, b"cmd=abort exitcode=1\n")

            return end_others
    return None
