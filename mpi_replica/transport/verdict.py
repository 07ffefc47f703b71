"""The last thing that the ranks of a job agree on: whether all that live have ended well."""

from __future__ import annotations

from typing import Any, NamedTuple

from .agreeing import agree

__all__ = ["Verdict", "agree_on_end"]


class Verdict(NamedTuple):
    """How a job has ended, as all ranks that live say alike."""

    is_well: bool
    #: Whether a rank has died.
    has_lost: bool


def agree_on_end(mpi: Any, is_well: bool) -> Verdict:
    """Return whether this and all other living ranks have ended well. Collective over COMM_WORLD.

    Parameters
    ----------
    mpi : module
        ``mpi4py.MPI``, of a library with ULFM.
    is_well : bool
        Of this rank.
    """
    if mpi.Is_finalized() or not mpi.Is_initialized():  # the program does it by hand
        return Verdict(is_well, False)
    world = mpi.COMM_WORLD
    world.Set_errhandler(mpi.ERRORS_RETURN)
    are_well, has_lost = agree(mpi, world, int(is_well))
    return Verdict(bool(are_well), has_lost or world.Get_failed().Get_size() > 0)
