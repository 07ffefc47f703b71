"""How tests call `python -m mpi_replica`, in a process of its own."""

import contextlib
import os
import re
import signal
import subprocess
import time

from launching import ROOT, find_interpreter, rank_environment

LIMIT_SECONDS = 60

# Without what `run` has to set by itself.
SET_BY_RUN = (
    *("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "PYTHONHASHSEED"),
    *("PRTE_MCA_rmaps_default_mapping_policy", "MPIEXEC_TIMEOUT"),
    *("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "MPI4PY_LIBMPI"),
)


def variables(additions=None):
    """Return the environment of a user who has set nothing."""
    found = rank_environment(LIMIT_SECONDS, dict.fromkeys(SET_BY_RUN))
    return found | {"PYTHONPATH": str(ROOT)} | (additions or {})


@contextlib.contextmanager
def started(library, *arguments, env=None, cwd=ROOT, stdout=subprocess.PIPE):
    """Start ``python -m mpi_replica ARGUMENTS`` and yield the process; it does not outlive this."""
    command = [find_interpreter(library), "-m", "mpi_replica", *map(str, arguments)]
    with subprocess.Popen(
        command,
        cwd=cwd,
        env=variables(env),
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    ) as process:
        try:
            yield process
        finally:
            interrupt_until_it_ends(process)


def interrupt_until_it_ends(process):
    """Send SIGINT, again and again: of two that come at once a process sees one."""
    limit = time.monotonic() + LIMIT_SECONDS
    while process.poll() is None:
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=0.2)
        if time.monotonic() > limit:
            process.kill()
    for pipe in (process.stdout, process.stderr):
        if pipe is not None:
            pipe.close()


def call(library, *arguments, env=None, cwd=ROOT):
    """Return the `CompletedProcess` of ``python -m mpi_replica ARGUMENTS``."""
    with started(library, *arguments, env=env, cwd=cwd) as process:
        out, error = process.communicate(timeout=LIMIT_SECONDS)
        return subprocess.CompletedProcess(process.args, process.returncode, out, error)


def ready(process, ranks=2):
    """Return the process ids of the ranks, when all of them have told that they are ready."""
    found = []
    while len(found) < ranks:
        line = process.stdout.readline()
        assert line, process.stderr.read()
        found += [int(pid) for pid in re.findall(r"ready (\d+)", line)]
    return found


def is_running(pid):
    """Return whether a process is there that has not ended."""
    try:
        os.kill(pid, 0)
        with open(f"/proc/{pid}/stat", encoding="utf-8") as file:
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
