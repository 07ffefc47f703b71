"""The command line of a job, for each launcher. Nothing is started here."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from .output import MPICH_MARK

#: Between the first signal to a job that has run too long, and its end.
SECONDS_TO_SAVE = 10

_SRUN_BINDINGS = {"none": "none", "core": "cores", "socket": "sockets"}


class Request(NamedTuple):
    """What a launcher is asked to start."""

    ranks: int
    #: The command of each rank.
    program: Sequence[str]
    hostfile: str | None = None
    #: ``none``, ``core`` or ``socket``; None leaves it to the launcher.
    bind: str | None = None
    #: Whether output shows its rank: ``own``, as the launcher does it, or ``marked`` for `Tags`.
    tag: str | None = None
    #: Names of the variables that Open MPI hands to other hosts.
    exported: Sequence[str] = ()
    #: For srun: the type of MPI, the cores of a task, and whether another step is around it.
    mpi_type: str = ""
    cores_per_task: int | None = None
    is_in_step: bool = False
    #: Whether the job goes on without a lost rank.
    is_elastic: bool = False


def command(launcher: str, version: tuple[int, ...], path: str, request: Request) -> list[str]:
    """Returns the command that starts a job.

    Parameters
    ----------
    launcher : {'openmpi', 'mpich', 'srun'}
        Whose options to use.
    version : tuple of int
        The version of the launcher.
    path : str
        The launcher itself.
    request : Request
        What to start.

    Examples
    --------
    >>> command("mpich", (5, 0), "mpiexec", Request(2, ["python", "a.py"], tag="own"))
    ['mpiexec', '-prepend-rank', '-n', '2', 'python', 'a.py']
    """
    options = {"openmpi": _of_openmpi, "mpich": _of_mpich, "srun": _of_srun}[launcher]
    return [path, *options(version, request), "-n", str(request.ranks), *request.program]


def _of_openmpi(version: tuple[int, ...], request: Request) -> list[str]:
    is_old = version < (5,)
    words = []
    if request.is_elastic:
        words += ["--with-ft", "ulfm"]
    if request.tag:
        words += ["--tag-output"] if is_old else ["--output", "rank"]
    if request.hostfile is not None:
        words += ["--hostfile", request.hostfile]
    # By itself it binds each of two ranks to one core, and all threads of BLAS with it.
    binding = request.bind or "none"
    if binding == "socket" and not is_old:
        binding = "package"
    if binding != "none":  # also for more ranks than cores, as with MPICH
        binding += ":overload-allowed"
    words += ["--bind-to", binding]
    for name in request.exported:
        words += ["-x", name]
    return words


def _of_mpich(version: tuple[int, ...], request: Request) -> list[str]:
    words = []
    if request.tag:  # of its own it gives a tag to each piece of a line
        marks = request.tag == "marked"
        words += ["-prepend-pattern", MPICH_MARK] if marks else ["-prepend-rank"]
    if request.hostfile is not None:
        words += ["-f", request.hostfile]
    if request.bind is not None:
        words += ["-bind-to", request.bind]
    return words


def _of_srun(version: tuple[int, ...], request: Request) -> list[str]:
    # mpirun gives its input to rank 0, and ends at the first Ctrl-C: so shall srun.
    words = [f"--mpi={request.mpi_type}", "--input=0", "--quit-on-interrupt", "--kill-on-bad-exit"]
    if request.is_in_step:
        words.append("--overlap")  # else it waits for ever for the cores of the step around it
    if request.cores_per_task is not None:  # srun no longer takes it from the job
        words.append(f"--cpus-per-task={request.cores_per_task}")
    if request.bind is not None:
        words.append(f"--cpu-bind={_SRUN_BINDINGS[request.bind]}")
    if request.tag:
        words.append("--label")
    return words


def shell_line(
    variables: Mapping[str, str], words: Sequence[str], timeout_seconds: float | None = None
) -> str:
    """Returns the line for a shell that does the same.

    Examples
    --------
    >>> shell_line({"PYTHONHASHSEED": "0"}, ["mpiexec", "-n", "2", "python", "my file.py"])
    "PYTHONHASHSEED=0 mpiexec -n 2 python 'my file.py'"
    """
    limit = []
    if timeout_seconds is not None:
        limit = ["timeout", f"--kill-after={SECONDS_TO_SAVE}", f"{timeout_seconds:g}"]
    assignments = [f"{name}={shlex.quote(value)}" for name, value in variables.items()]
    return " ".join([*assignments, shlex.join([*limit, *words])])
