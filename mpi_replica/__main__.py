"""The command line: ``python -m mpi_replica``."""

from __future__ import annotations

import argparse
import contextlib
import functools
import io
import json
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from .core.exceptions import LaunchError, in_words
from .doctor.checks import text, to_json, would_work
from .doctor.examination import examine
from .launcher.elasticity import RANKS_LOST
from .launcher.job import Options, plan
from .launcher.output import open_standard_streams, show, show_for_shell, tell
from .launcher.supervisor import start
from .ranks.watch.event_log import (
    LAST_VARIABLE,
    SAMPLES_VARIABLE,
    TRACE_VARIABLE,
    clear_parts,
    folder_of_parts,
    make_folder_of_parts,
    names_of_parts,
)
from .trace import plot, table
from .trace.trace_file import merge, read

# That of argparse for a mistake in the command line.
_NOT_STARTED = 2

_DESCRIPTION = "Start a program on several MPI ranks, or look whether one would run here."

_RUN = """\
Start a program on several MPI ranks, with the launcher of the MPI library that mpi4py loads, and
with the settings that this library needs here. Plain mpirun, mpiexec and srun work as well.

  python -m mpi_replica run -n 4 train.py --epochs 3     a script
  python -m mpi_replica run -n 4 -m package.train        a module
  python -m mpi_replica run -n 4 ./simulate input.toml   any other program
  python -m mpi_replica run train.py                     in a batch job: a rank for each task
"""

_RUN_END = """\
Options stand before the program; all behind it is the program's own.

signals      SIGTERM, SIGUSR1, SIGUSR2 and SIGHUP go on to the ranks. Where the launcher would not
             hand one on (Open MPI: SIGTERM, SIGHUP; MPICH: SIGUSR2, SIGHUP) it goes to the ranks
             of this host. Ctrl-C ends the job; at the third all of it on this host is killed.
exit status  that of the program: of the first rank that failed with Open MPI, of all joined by
             "or" with MPICH; 128 + n when it died of signal n; 124 after --timeout; 2 when the
             job could not be started. With --elastic that of the ranks that are left; 1 where
             none is.
losses       a rank that ends without having told how (killed, crashed, os._exit, its host gone) is
             lost. Where the job can't go on without it, what is left is ended, and the same command
             started again, as often as --restarts says, on the hosts that still answer. Default: 3
             where that repeats little: before a strategy was made, or where the program calls
             CheckpointManager.restore_or_initialize. MPI_REPLICA_RESTART=1, 2, ... tells it.
Slurm        srun starts the ranks where it speaks a protocol of the library (srun --mpi=list):
             pmix for Open MPI, pmi2 for MPICH. Elsewhere the library's launcher does.
set for all  PYTHONHASHSEED=0, and as many threads of BLAS as a rank has cores, or as
             MPI_REPLICA_BLAS_THREADS or else OMP_NUM_THREADS says (OMP_NUM_THREADS,
             OPENBLAS_NUM_THREADS, MKL_NUM_THREADS), unless they are set already. Reproducible
             strategies have MPI_REPLICA_BLAS_THREADS or 1, whatever else is set.
"""


_DOCTOR = """\
Look whether a job would run here, and how well: MPI library and launcher, hosts, cores, threads of
BLAS, shared memory, clocks, and the time of the collectives. Each line is ok, warn or fail, and
says what to do. Exit status 0: a job would work; 1: it would not.

  python -m mpi_replica doctor                  starts a small job with the launcher that fits
  mpirun -n 4 python -m mpi_replica doctor      looks at the job that this mpirun starts
"""

_TRACE = """\
Say where the time of a job has gone: for each rank, for each call site, and who makes the others
wait. A trace comes from run --trace FILE, strategy.trace(FILE) or MPI_REPLICA_TRACE=FILE; what the
ranks of a job have left beside FILE is put together first. https://ui.perfetto.dev shows FILE.
"""

_Parsers = Any
_T = TypeVar("_T")


def main(arguments: Sequence[str] | None = None) -> int:
    """Does what the command line says; returns the exit status."""
    parser = argparse.ArgumentParser(
        "python -m mpi_replica", description=_DESCRIPTION, allow_abbrev=False
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _add_run(commands)
    _add_doctor(commands)
    _add_trace(commands)
    options, unknown = parser.parse_known_args(arguments)
    if unknown:  # by the command's own, whose usage fits
        options.parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    if isinstance(sys.stdout, io.TextIOWrapper):  # its encoding may lack µ, and letters of names
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        return int(options.function(options))
    except LaunchError as error:
        tell(str(error), options.name)
        return _NOT_STARTED


def _add_command(
    commands: _Parsers, name: str, function: Callable[[argparse.Namespace], int], **texts: str
) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        **texts,
    )
    parser.set_defaults(function=function, name=name, parser=parser)
    return parser


def _add_run(commands: _Parsers) -> None:
    parser = _add_command(
        commands,
        "run",
        _run,
        help="start a program on several ranks",
        usage="python -m mpi_replica run [options] (PROGRAM | -m MODULE | -c TEXT) [arguments]",
        description=_RUN,
        epilog=_RUN_END,
    )
    add = parser.add_argument
    add(
        "-n",
        "-np",
        dest="ranks",
        type=_positive_int,
        metavar="RANKS",
        help="number of ranks; default: the tasks that Slurm or PBS has given to the job",
    )
    add("--replicas", type=_positive_int, metavar="R", help="of all ranks together; default: n")
    add("--hostfile", metavar="FILE", help="hosts to use, in the format of the MPI library")
    add(
        "--bind",
        choices=["none", "core", "socket"],
        help="bind each rank to a core (with one thread of BLAS) or a socket; default: none, and"
        " with srun as Slurm does",
    )
    add("--tag", action="store_true", help="begin each line of output with its rank: [2] text")
    add(
        "--timeout",
        dest="timeout_seconds",
        type=_positive_float,
        metavar="SECONDS",
        help="end a job that runs longer, with status 124: SIGTERM first, SIGKILL 10 s later",
    )
    add(
        "--mpi",
        metavar="LIBRARY",
        help="openmpi, mpich or the path of an mpiexec; default: the library that mpi4py loads",
    )
    add(
        "--launcher",
        choices=["auto", "mpiexec", "srun"],
        default="auto",
        help="in a job of Slurm; default: auto, see below",
    )
    add(
        "--elastic",
        dest="is_elastic",
        action="store_true",
        help="go on without a rank that is lost (strategy.run_elastic); Open MPI 5",
    )
    add(
        "--spares",
        type=_natural,
        metavar="K",
        help="of the ranks, those that wait until another one is lost; default: 0",
    )
    add(
        "--on-loss",
        choices=["ok", "warn-status"],
        help="exit status when the program has ended well although ranks were lost: 0 (ok, the"
        f" default), or {RANKS_LOST}",
    )
    add(
        "--restarts",
        type=_natural,
        metavar="N",
        help="start the job again where a rank was lost, up to N times; default: 3 where that"
        " repeats little, see below",
    )
    add(
        "--restart-on",
        choices=["loss", "any"],
        help="loss (the default), or any: also where the program ends by an error of its own",
    )
    add(
        "--min-ranks",
        type=_positive_int,
        metavar="RANKS",
        help="how many ranks it must have where it is started again, on the hosts that still"
        " answer; default: 1",
    )
    of_trace = functools.partial(add, dest="variables", action="append", default=[])
    of_trace(
        "--trace",
        type=_trace_path,
        metavar="FILE",
        help="record where the time goes; see trace --help",
    )
    of_trace(
        "--trace-last",
        type=_seconds_kept,
        metavar="SECONDS",
        help="how much of the end is kept at least; default: all",
    )
    of_trace(
        "--no-samples",
        action="append_const",
        const=(SAMPLES_VARIABLE, "0"),
        help="don't look at the lines of a traced program",
    )
    add("--dry-run", action="store_true", help="print the line for a shell, and start nothing")
    add("-m", dest="module", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    add("-c", dest="text", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    add("program", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)


def _add_doctor(commands: _Parsers) -> None:
    parser = _add_command(
        commands, "doctor", _doctor, help="look whether a job would run here", description=_DOCTOR
    )
    parser.add_argument(
        "-n",
        type=_positive_int,
        metavar="RANKS",
        help="ranks of the small job; default: the tasks of the batch system, otherwise 2",
    )
    parser.add_argument("--json", action="store_true", help="one line of JSON")


def _add_trace(commands: _Parsers) -> None:
    parser = _add_command(
        commands, "trace", _trace, help="say where the time of a job has gone", description=_TRACE
    )
    parser.add_argument("file", metavar="FILE")
    parser.add_argument("--json", action="store_true", help="one line of JSON")
    parser.add_argument("--plot", metavar="PICTURE", help="draw it, as .png or .svg; matplotlib")


def _trace(options: argparse.Namespace) -> int:
    try:
        if names_of_parts(options.file):
            merge(options.file, is_over=False)
        found = read(options.file)
        if options.plot:
            plot.draw(found, options.plot)
        of_job = found["otherData"]["mpi_replica"]
        shown = json.dumps(of_job) if options.json else table.text(of_job)
    except (OSError, ValueError, ModuleNotFoundError) as error:
        raise LaunchError(str(error)) from None
    except (LookupError, TypeError, AttributeError) as error:  # of what has other contents
        raise LaunchError(
            f"{options.file}, or what ranks have left for it, is damaged: {in_words(error)}"
        ) from error
    show(shown, "the table")
    return 0


def _doctor(options: argparse.Namespace) -> int:
    checks = examine(os.environ, options.n)
    if checks is None:
        return 0
    show(to_json(checks) if options.json else text(checks), "the report")
    return 0 if would_work(checks) else 1


def _run(options: argparse.Namespace) -> int:
    program = options.program
    for flag, words in (("-m", options.module), ("-c", options.text)):
        if words is not None:  # argparse ends the words of an option at "--": others follow it
            program = [flag, *words, *program]
    if program[:1] == ["--"]:
        program = program[1:]
    if not program:
        raise LaunchError("there is no program to start. See python -m mpi_replica run --help.")
    if program[0].startswith("-") and program[0] not in ("-m", "-c"):
        raise LaunchError(f"{program[0]} is no option of run: see --help.")
    variables = dict(options.variables)
    trace = variables.get(TRACE_VARIABLE)
    if variables and not (trace or os.environ.get(TRACE_VARIABLE)):
        raise LaunchError(
            "--trace-last and --no-samples are for a trace: ask for --trace FILE, too, or leave"
            " them out."
        )
    # The others have the names under which the command line puts them.
    wanted = {name: getattr(options, name) for name in Options._fields if name != "program"}
    job = plan(Options(program, **wanted), os.environ)
    if options.dry_run:
        show_for_shell(job.line)
        return 0
    open_standard_streams()
    if trace:
        _begin_trace(trace)
    status = start(job, os.environ)
    if trace:
        _end_trace(trace)
    return status


def _begin_trace(path: str) -> None:
    """Sees to it that a trace can be written; what an earlier job has left for one goes."""
    clear_parts(path)
    try:
        make_folder_of_parts(path)
    except OSError as error:
        raise LaunchError(f"--trace {path}: nothing can be written there: {error}") from None


def _end_trace(path: str) -> None:
    """Makes the trace, and says what there is to see in it."""
    try:
        missing = merge(path)["missing"]
    except Exception as error:  # the status is that of the job
        with contextlib.suppress(OSError):  # what is in it may be put together later
            os.rmdir(folder_of_parts(path))
        tell(f"there is no trace {path}: {error}")
        return
    lacks = f" It lacks {'; '.join(missing)}." if missing else ""
    tell(f"{path} is written.{lacks} See: python -m mpi_replica trace {shlex.quote(path)}")


def _trace_path(path: str) -> tuple[str, str]:
    with contextlib.suppress(OSError):  # `plan` says that the working directory is gone
        path = os.path.abspath(path)
    return TRACE_VARIABLE, path


def _seconds_kept(text: str) -> tuple[str, str]:
    return LAST_VARIABLE, f"{_positive_float(text):g}"


def _positive_int(text: str) -> int:
    return _natural(text, least=1)


def _natural(text: str, least: int = 0) -> int:
    number = _number(int, text, "integer")
    if number < least:
        raise argparse.ArgumentTypeError(f"{text} is less than {least}")
    return number


def _positive_float(text: str) -> float:
    number = _number(float, text, "number of seconds")
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is no number of seconds above 0")
    return number


def _number(kind: Callable[[str], _T], text: str, what: str) -> _T:
    try:
        return kind(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no {what}") from None


if __name__ == "__main__":
    sys.exit(main())
