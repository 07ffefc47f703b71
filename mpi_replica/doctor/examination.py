"""The examination: of one process, which starts a small job, or of the ranks of a launcher."""

from __future__ import annotations

import faulthandler
import pickle
import subprocess
import sys
from collections.abc import Mapping

from ..core.exceptions import LaunchError, MPIReplicaError
from ..core.options import CommunicationOptions
from ..launcher.batch_system import read_allocation
from ..launcher.processes import ask
from ..ranks.launch import launcher_variable, number_in
from ..ranks.launcher_connection import RANK_VARIABLES
from ..strategy.mpi_strategy import MPIStrategy
from .checks import Check, from_json
from .libraries import launcher_checks, library_checks, wrong_launcher
from .places import facts_here, place_checks
from .speed import measure, speed_checks

# Of a collective call, of the job that is tried, and of the process: each ends before the next.
_CALL_SECONDS = 20.0
_JOB_SECONDS = 60
_PROCESS_SECONDS = 90


def examine(environ: Mapping[str, str], ranks: int | None = None) -> list[Check] | None:
    """Returns the checks; None on ranks that leave the report to rank 0.

    Alone, it starts a job of `ranks` ranks (2, or the tasks of a batch system) with the launcher
    of the library. Under a launcher it is collective: all ranks call it.
    """
    if launcher_variable(environ) is not None:
        return _examine_ranks(environ)
    checks = launcher_checks(environ)
    if any(check.verdict == "fail" for check in checks):
        return checks
    allocation = read_allocation(environ)
    if ranks is None and allocation.tasks is None:
        ranks = 2
    return checks + _examine_job(environ, ranks)


def _examine_job(environ: Mapping[str, str], ranks: int | None) -> list[Check]:
    """Starts a job in which `examine` is called under a launcher."""
    count = [] if ranks is None else ["-n", str(ranks)]
    command = [sys.executable, "-m", "mpi_replica", "run", *count, "--timeout", str(_JOB_SECONDS)]
    command += ["-m", "mpi_replica", "doctor", "--json"]
    try:
        done = ask(command, environ, _PROCESS_SECONDS)
    except subprocess.TimeoutExpired:
        return [Check("job", f"did not end within {_PROCESS_SECONDS} s", "fail", " ".join(command))]
    for line in done.stdout.splitlines():
        try:
            return from_json(line)
        except ValueError:
            continue  # what the launcher has to say
    written = " ".join(done.stderr.split()) or "It wrote nothing."
    advice = f"{written} Start it by hand: {' '.join(command)}"
    return [Check("job", f"ended with status {done.returncode}, no report", "fail", advice)]


def _examine_ranks(environ: Mapping[str, str]) -> list[Check] | None:
    is_first = not number_in(environ, *RANK_VARIABLES)
    wrong = wrong_launcher(environ)
    if wrong is not None:
        return [wrong] if is_first else None
    # A library that hangs while it starts is asked for nothing any more.
    faulthandler.dump_traceback_later(_PROCESS_SECONDS, exit=True)
    try:
        checks = _of_all_ranks(environ)
    except LaunchError as error:
        checks = [Check("launcher", "is not of this MPI library", "fail", str(error))]
    except MPIReplicaError as error:
        checks = [Check("collectives", type(error).__name__, "fail", str(error))]
    finally:
        faulthandler.cancel_dump_traceback_later()
    return checks if is_first else None


def _of_all_ranks(environ: Mapping[str, str]) -> list[Check]:
    options = CommunicationOptions(timeout_seconds=_CALL_SECONDS)
    with MPIStrategy(replicas_per_rank=1, communication_options=options) as strategy:
        mine = facts_here(strategy.cluster_resolver.cluster_spec()["worker"][strategy.rank])
        # As bytes: the parts of the facts are no leaves of a nest.
        facts = list(map(pickle.loads, strategy.gather_objects(pickle.dumps(mine))))
        speed = measure(strategy)
    libraries = [fact.library for fact in facts if fact.library is not None]
    name = launcher_variable(environ) or ""
    started = Check("launcher", f"fits: {name}={environ[name]}, and a world of {len(facts)}")
    return [started, *library_checks(libraries), *place_checks(facts), *speed_checks(speed)]
