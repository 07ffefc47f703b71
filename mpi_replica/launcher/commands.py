"""The command line of a job, for each launcher. Nothing is started here."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from .host_slots import HostSlots
from .output import MPICH_MARK

#: Between the first signal to a job that has run too long, and its end.
SECONDS_TO_SAVE = 10

#: In Slurm, for a question and for a job that is started again. Else launchers wait for the cores
#: of the job's last step, which goes on for minutes in the eyes of Slurm when a host is lost; also
#: those of the libraries, which start their daemons with srun.
OVERLAP = {"SLURM_OVERLAP": "1"}

_SRUN_BINDINGS = {"none": "none", "core": "cores", "socket": "sockets"}


class Request(NamedTuple):
    """What a launcher is asked to start."""

    ranks: int
    #: The command of each rank.
    program: Sequence[str]
    hostfile: str | None = None
    #: Where not empty the ranks are on these hosts alone, whatever a hostfile or batch system says.
    hosts: Sequence[HostSlots] = ()
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
    #: Whether our own launcher ends the others where a rank has failed.
    is_watched: bool = False


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


def question(
    launcher: str, version: tuple[int, ...], path: str, host: str, program: Sequence[str]
) -> list[str]:
    """Returns the command that asks a host whether it still answers, by what a program prints.

    What is printed is the answer, not the status: Open MPI 5 prints it and then, on a busy machine
    one time of ten, does not end. Nor does a launcher end by itself whose host is silent, and what
    it has started, such as ssh, outlives it. SIGTERM does not end that of Open MPI.

    Examples
    --------
    >>> " ".join(question("mpich", (5, 0), "mpiexec", "node1", ["hostname"]))
    'mpiexec -hosts node1:1 -n 1 hostname'
    """
    request = Request(1, program, hosts=[HostSlots(host, 1)], mpi_type="none")
    return command(launcher, version, path, request)


def _of_openmpi(version: tuple[int, ...], request: Request) -> list[str]:
    is_old = version < (5,)
    words = []
    if request.is_elastic:
        words += ["--with-ft", "ulfm"]
    if request.tag:
        words += ["--tag-output"] if is_old else ["--output", "rank"]
    if request.hosts:
        # Without a number it is one slot; with a star the host's cores, as in a hostfile. In a job
        # of Slurm it takes no star, and no more slots than Slurm has given.
        words += ["--host", ",".join(_host(host, ":*") for host in request.hosts)]
    elif request.hostfile is not None:
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
    if request.hosts:  # with more ranks than slots it begins with the first host again
        words += ["-hosts", ",".join(_host(host) for host in request.hosts)]
    elif request.hostfile is not None:
        words += ["-f", request.hostfile]
    if request.bind is not None:
        words += ["-bind-to", request.bind]
    return words


def _of_srun(version: tuple[int, ...], request: Request) -> list[str]:
    # mpirun gives its input to rank 0, and ends at the first Ctrl-C: so shall srun.
    words = [f"--mpi={request.mpi_type}", "--input=0", "--quit-on-interrupt"]
    # What sbatch --export says is srun's default, too: with NONE or a list ranks would get nothing
    # of what they are given here.
    words.append("--export=ALL")
    # Else the first rank of several that have saved and end with a status would end the others.
    words.append("--kill-on-bad-exit=0" if request.is_watched else "--kill-on-bad-exit")
    words += _places_of_srun(request)
    # Else it waits for ever for the cores of the step around it, and for minutes for those of a
    # step of which a host is lost: Slurm takes it to be running.
    if request.is_in_step or request.hosts:
        words.append("--overlap")
    if request.cores_per_task is not None:  # srun no longer takes it from the job
        words.append(f"--cpus-per-task={request.cores_per_task}")
    if request.bind is not None:
        words.append(f"--cpu-bind={_SRUN_BINDINGS[request.bind]}")
    if request.tag:
        words.append("--label")
    return words


def _host(host: HostSlots, unknown: str = "") -> str:
    """Returns a host as it stands in a list; `unknown` is behind it where slots are not said."""
    return host.name + (unknown if host.slots is None else f":{host.slots}")


def _places_of_srun(request: Request) -> list[str]:
    """Returns the options that say to srun which hosts the ranks are on.

    By the manual ``--nodelist`` says which hosts there are at least, and ``--nodes`` how many;
    tasks go by cores, not by slots, and ``--ntasks-per-node`` is a limit where ``-n`` is given,
    which srun 22.05 ignores. With ``--distribution=arbitrary`` each task is where the list says,
    in its order: the manual has the list in the file of SLURM_HOSTFILE, and srun 22.05 takes it
    from ``--nodelist``, too, where it names a host as often as it has tasks (the manual's ``n1*2``
    is refused there), and as many as ``-n`` says.
    """
    names = [host.name for host in request.hosts]
    words = []
    places = [host.name for host in request.hosts for _ in range(host.slots or 0)]
    if len(places) >= request.ranks and all(host.slots is not None for host in request.hosts):
        names = places[: request.ranks]
        words = ["--distribution=arbitrary"]
    return [f"--nodes={len(set(names))}", f"--nodelist={','.join(names)}", *words] if names else []


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
