"""What a batch system has given to a job, read from its environment variables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from ..core.exceptions import LaunchError
from ..ranks.launch import number_in, started_in_step
from .host_slots import hosts_of_pbs


class BatchAllocation(NamedTuple):
    """Hosts and tasks that a batch system has given to a job."""

    #: ``slurm`` or ``pbs``; empty outside of any.
    system: str = ""
    #: How many ranks were asked for; None where the job did not say.
    tasks: int | None = None
    hosts: int = 1
    cores_per_task: int | None = None
    #: Whether the process is in a step of Slurm, such as a shell started by ``srun --pty``.
    is_in_step: bool = False


def read_allocation(environ: Mapping[str, str]) -> BatchAllocation:
    """Returns what the batch system has given; an empty one outside of any.

    Raises
    ------
    LaunchError
        This process is one of several that ``srun`` has started, or the file that
        ``PBS_NODEFILE`` names can't be read.

    Examples
    --------
    >>> read_allocation({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_JOB_NUM_NODES": "2"})
    BatchAllocation(system='slurm', tasks=4, hosts=2, cores_per_task=None, is_in_step=False)
    """
    if "SLURM_JOB_ID" in environ:
        return _of_slurm(environ)
    if "PBS_NODEFILE" in environ:
        hosts = hosts_of_pbs(environ["PBS_NODEFILE"])
        tasks = sum(host.slots or 0 for host in hosts)
        return BatchAllocation("pbs", tasks or None, len(hosts) or 1)
    return BatchAllocation()


def _of_slurm(environ: Mapping[str, str]) -> BatchAllocation:
    started = started_in_step(environ)
    if started > 1:
        raise LaunchError(
            f"srun has started {started} processes (SLURM_STEP_NUM_TASKS={started}), and each of"
            " them would start a job of its own. Leave out one of the two: either"
            f" 'srun -n {started} python PROGRAM', or 'python -m mpi_replica run PROGRAM' in the"
            " batch script."
        )
    # In a step it is one process.
    tasks = None if started else number_in(environ, "SLURM_NTASKS")
    hosts = number_in(environ, "SLURM_JOB_NUM_NODES", "SLURM_NNODES") or 1
    per_host = number_in(environ, "SLURM_NTASKS_PER_NODE")
    if tasks is None and per_host is not None:
        tasks = per_host * hosts
    return BatchAllocation(
        "slurm", tasks, hosts, number_in(environ, "SLURM_CPUS_PER_TASK"), started > 0
    )
