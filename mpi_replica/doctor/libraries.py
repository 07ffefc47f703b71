"""Checks of the MPI library, and of the launcher that belongs to it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from ..core.exceptions import LaunchError
from ..launcher.library import find_launcher, find_library
from ..ranks.library_facts import LibraryFacts
from .checks import Check, advise

_OPEN_MPI = "OMPI_COMM_WORLD_SIZE"


def launcher_checks(environ: Mapping[str, str]) -> list[Check]:
    """Returns whether there is an MPI library, and the launcher that belongs to it."""
    try:
        launcher = find_launcher(environ)
    except LaunchError as error:
        return [Check("mpiexec", "none that fits", "fail", str(error))]
    return [Check("mpiexec", f"{launcher.path}, of {launcher.library}")]


def wrong_launcher(environ: Mapping[str, str]) -> Check | None:
    """Returns what is wrong with the launcher of this process, as far as its variables tell.

    MPICH ends a process that Open MPI's launcher has started, so that it is asked for nothing.
    """
    if _OPEN_MPI not in environ:
        return None
    try:
        library = find_library(environ)
    except LaunchError as error:
        return Check("launcher", f"{_OPEN_MPI}={environ[_OPEN_MPI]}", "fail", str(error))
    if library.kind == "openmpi":
        return None
    return Check(
        "launcher",
        "is not of this MPI library",
        "fail",
        f"{environ[_OPEN_MPI]} processes were started by the launcher of Open MPI"
        f" ({_OPEN_MPI}={environ[_OPEN_MPI]}), but mpi4py loads {library}: each would see an MPI"
        " world of 1, or end at once. Use the mpiexec of that library, or python -m mpi_replica"
        " run, which finds it.",
    )


def library_checks(facts: Sequence[LibraryFacts]) -> list[Check]:
    """Returns what the library of the ranks can do; the facts stand in the order of the ranks."""
    first = facts[0]
    versions = list(dict.fromkeys(fact.version for fact in facts))
    library = Check("MPI library", first.version)
    if len(versions) > 1:
        advice = "Use the same MPI library on all hosts."
        library = Check("MPI library", " and ".join(versions), "fail", advice)
    advice = ""
    if first.thread_level != "multiple":
        advice = (
            "No thread can watch who is missing: a rank that never comes is not reported, and"
            " timeouts have no report. Use a library built for MPI_THREAD_MULTIPLE."
        )
    gpus = "unknown: the library can't be asked"
    if first.gpus is not None:
        gpus = ", ".join(first.gpus) or "no"
    return [
        library,
        advise("thread level", first.thread_level, advice),
        Check("fault tolerance", _tolerance(first)),
        Check("GPU-aware", gpus),
    ]


def _tolerance(facts: LibraryFacts) -> str:
    """Returns whether a job goes on without a lost rank."""
    if facts.is_fault_tolerant:
        return "ULFM: yes"
    if re.match(r"Open MPI v(?:[5-9]|\d\d)", facts.version):
        return "yes with run --elastic (mpirun --with-ft ulfm)"
    return "no: a lost rank ends the job; save checkpoints, or use Open MPI 5"
