"""The environment variables that a job needs, beside those of the user."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from ..core.exceptions import LaunchError
from ..ranks.blas import threads_asked_for

_BLAS_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
_NUM_REPLICAS = "MPI_REPLICA_NUM_REPLICAS"
_SPARES = "MPI_REPLICA_SPARES"

# With these Open MPI starts more ranks than cores.
_CROWDED = {"PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe"}
_CROWDED_BEFORE_5 = {"OMPI_MCA_rmaps_base_oversubscribe": "1"}

# Of the user's variables, those that ranks on other hosts must have, too.
_OF_THE_JOB = ("MPI_REPLICA_", "MPI4PY_", "PYTHON")


class Host(NamedTuple):
    """What a host has for the job."""

    cores: int
    is_root: bool = False


def settings(
    launcher: str,
    ranks: int,
    host: Host,
    environ: Mapping[str, str],
    *,
    version: tuple[int, ...] = (5,),
    hosts: int = 1,
    is_allocated: bool = False,
    cores_per_rank: int | None = None,
    replicas: int | None = None,
    spares: int | None = None,
) -> dict[str, str]:
    """Returns the variables to add. What the user has set is left alone.

    Parameters
    ----------
    launcher : {'openmpi', 'mpich', 'srun'}
        What starts the ranks.
    ranks : int
        Number of ranks, on all hosts.
    host : Host
        Other hosts are taken to be like this one.
    environ : mapping
        The variables that are set already.
    version : tuple of int, optional
        That of the launcher.
    hosts : int
        Number of hosts.
    is_allocated : bool
        Whether a batch system or a hostfile says how many ranks a host may have.
    cores_per_rank : int, optional
        Where it is known. Default: the host's, in equal parts.
    replicas : int, optional
        Number of replicas on all ranks.
    spares : int, optional
        Number of ranks that wait for the loss of another one.

    Raises
    ------
    LaunchError
        ``MPI_REPLICA_BLAS_THREADS`` is no positive integer.

    Examples
    --------
    >>> settings("mpich", 2, Host(cores=8), {"OMP_NUM_THREADS": "1"})
    {'OPENBLAS_NUM_THREADS': '1', 'MKL_NUM_THREADS': '1', 'PYTHONHASHSEED': '0'}
    """
    ranks_here = -(-ranks // hosts)
    added: dict[str, str] = {}
    if launcher == "openmpi":
        if host.is_root:  # it refuses root unless told twice
            added |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
        # It counts cores where the system counts hardware threads: up to two a core.
        if not is_allocated and host.cores < 2 * ranks_here:
            added |= _CROWDED_BEFORE_5 if version < (5,) else _CROWDED
        if host.cores < ranks_here:
            added["OMPI_MCA_mpi_yield_when_idle"] = "1"
    try:
        threads = threads_asked_for(environ)
    except ValueError as error:
        raise LaunchError(str(error)) from error
    if threads is None:
        # Not in the variable itself: reproducible strategies have as many in every layout.
        threads = max(1, cores_per_rank or host.cores // ranks_here)
        # The libraries would take their own variables for newer than the user's common one.
        common = environ.get("OMP_NUM_THREADS", "").partition(",")[0]
        threads = (int(common) if common.isdecimal() else 0) or threads
    added |= dict.fromkeys(_BLAS_THREADS, str(threads))
    # Sets of strings have one order on all ranks: without it a warning is logged.
    added["PYTHONHASHSEED"] = "0"
    added = {name: value for name, value in added.items() if not environ.get(name)}
    if replicas is not None:  # what is asked for on the command line wins
        added[_NUM_REPLICAS] = str(replicas)
    if spares is not None:
        added[_SPARES] = str(spares)
    return added


def for_other_hosts(added: Mapping[str, str], environ: Mapping[str, str]) -> list[str]:
    """Returns the names of the variables that Open MPI shall hand to ranks on other hosts.

    Those whose names begin with OMPI_MCA_ it hands over by itself.

    Examples
    --------
    >>> for_other_hosts({"PYTHONHASHSEED": "0"}, {"HOME": "/", "MKL_NUM_THREADS": "2"})
    ['MKL_NUM_THREADS', 'PYTHONHASHSEED']
    """
    names = {*added, *environ}
    return sorted(n for n in names if n.startswith(_OF_THE_JOB) or n in _BLAS_THREADS)
