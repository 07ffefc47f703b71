"""Start a program on some ranks with one of the MPI libraries, and read what it measured.

The process that starts never imports `mpi4py.MPI` itself: that would start MPI in it, and a
launcher that is started inside an MPI process takes it for its parent.

Environment variables
---------------------
MPI_REPLICA_TEST_MPICH
    Python interpreter beside which MPICH is installed. Default ``.venv-mpich/bin/python``, which
    is made where it is missing. Open MPI is taken from the interpreter that runs this, if it has
    it, and else from ``.venv``.
MPI_REPLICA_TEST_ARRAYS, MPI_REPLICA_TEST_ARRAYS_MPICH
    Python interpreters beside which torch and JAX are installed, with Open MPI and with MPICH.
    Default ``.venv-arrays/bin/python`` and ``.venv-arrays-mpich/bin/python``, which are made where
    they are missing.
"""

import contextlib
import importlib.metadata
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
PROGRAM = ROOT / "scripts" / "bench.py"
LIBRARIES = ("openmpi", "mpich")

# scripts/environment.sh knows what it takes; both are called with its path as the first argument.
_MAKE = 'set -e; source "$0"; "$1" "$2" "$3" >&2'
START = 'set -e; source "$0"; open_mpi_environment "$1"; shift; exec "$@"'

# They would make other strategies than those that are to be measured.
_UNWANTED = ("MPI_REPLICA_NUM_REPLICAS", "MPI_REPLICA_REPRODUCIBLE", "MPI_REPLICA_TRANSPORT")


@dataclass(frozen=True)
class Launch:
    """One start of the launcher: a part of a table on some ranks."""

    part: str
    ranks: int
    arguments: dict = field(default_factory=dict)
    environment: dict = field(default_factory=dict)
    #: After this time the launcher ends the job.
    limit_seconds: float = 300
    #: Whether it may end with another exit status than 0.
    may_fail: bool = False
    #: On how many hosts, as many ranks on each; 0 for this machine as it is.
    hosts: int = 0


@dataclass(frozen=True)
class Outcome:
    """How a launch ended."""

    launch: Launch
    #: What the numbers depend on, in words.
    facts: str
    #: What the part yielded on rank 0, and what ranks told, in the order in which it was written.
    records: list
    status: int
    #: What the ranks wrote to stdout and stderr.
    output: str
    #: When the launcher ended, by ``time.monotonic()``, as the ranks on this host see it, too.
    ended: float


def has_what_tables_need():
    """Return whether this interpreter can import the package, and what its examples need."""
    return sys.version_info >= (3, 11) and all(
        importlib.util.find_spec(name)
        for name in ("numpy", "mpi4py", "optree", "greenlet", "threadpoolctl", "sklearn", "tqdm")
    )


def find_interpreter(library, *, arrays=False):
    """Return the path of the interpreter beside which an MPI library is installed.

    With `arrays` one that has torch and JAX, too.
    """
    if arrays:
        suffix = "" if library == "openmpi" else f"-{library}"
        given = os.environ.get(f"MPI_REPLICA_TEST_ARRAYS{suffix.replace('-', '_').upper()}")
        return given or _made(f".venv-arrays{suffix}", library, make="make_array_environment")
    if library == "mpich":
        return os.environ.get("MPI_REPLICA_TEST_MPICH") or _made(".venv-mpich", library)
    names = {distribution.name for distribution in importlib.metadata.distributions()}
    if library in names and has_what_tables_need():
        return sys.executable
    return _made(".venv", library)


def _made(folder, library, make="make_environment"):
    """Return the interpreter of an environment as of scripts/test; make it where it is missing."""
    extras = f"{library},examples,test"  # train_digits.py is one of the programs that are measured
    command = ["bash", "-c", _MAKE, ROOT / "scripts" / "environment.sh", make, folder, extras]
    subprocess.run(command, check=True)
    return str(ROOT / folder / "bin" / "python")


def start(library, python, table, launch):
    """Run a part of a table on the ranks of one library, and wait for the end of all.

    Parameters
    ----------
    library : {'openmpi', 'mpich'}
    python : str
        The interpreter beside which it is installed, with its launcher.
    table : str
        The name of the module.
    launch : Launch

    Returns
    -------
    Outcome

    Raises
    ------
    hosts.namespaces.NoHostsError
        The machine does not let us make the hosts that the launch needs.
    """
    variables = {name: value for name, value in os.environ.items() if name not in _UNWANTED}
    variables["MPIEXEC_TIMEOUT"] = str(int(launch.limit_seconds))
    variables |= launch.environment
    with (
        _mpiexec(library, python, launch) as (mpiexec, additions),
        tempfile.NamedTemporaryFile("r") as file,  # what is written to stdout may be cut up
    ):
        variables |= additions
        command = ["bash", "-c", START, ROOT / "scripts" / "environment.sh", str(launch.ranks)]
        command += [*mpiexec, "-n", str(launch.ranks), python, PROGRAM, "--worker"]
        command.append(json.dumps([table, launch.part, launch.arguments, file.name]))
        status, output = _run(command, variables, launch.limit_seconds + 30)
        ended = time.monotonic()
        records = [json.loads(line) for line in file]
    facts = next((record["facts"] for record in records if "facts" in record), "")
    records = [record for record in records if "facts" not in record]
    return Outcome(launch, facts, records, status, output, ended)


@contextlib.contextmanager
def _mpiexec(library, python, launch):
    """Give the command that is the launcher, and what it needs in its environment."""
    mpiexec = str(Path(python).with_name("mpiexec"))
    if not launch.hosts:
        yield [mpiexec], {}
        return
    from hosts.namespaces import ENVIRONMENT, HOSTS, joined_hosts  # of the tests

    with joined_hosts() as network:
        hosts = HOSTS[: launch.hosts]
        options = network.options(library, launch.ranks // launch.hosts, hosts)
        yield [*network.prefix(ROOT), mpiexec, *options], ENVIRONMENT


def _run(command, variables, limit_seconds):
    """Return exit status and output of a launcher; end it and its ranks if it takes too long."""
    with subprocess.Popen(
        command,
        env=variables,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,  # so that all that is in it can be ended
    ) as launcher:
        try:
            output, _ = launcher.communicate(timeout=limit_seconds)
        except BaseException:  # Ctrl-C does not reach another session
            launcher.terminate()  # a launcher that is asked to end takes its ranks with it
            with contextlib.suppress(subprocess.TimeoutExpired):
                launcher.communicate(timeout=10)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(launcher.pid, signal.SIGKILL)
            raise
    return launcher.returncode, output
