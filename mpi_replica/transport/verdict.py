"""The last thing that the ranks of a job agree on: whether all that live have ended well."""

from __future__ import annotations

import time
from typing import Any, NamedTuple

import numpy as np

from .loss import is_loss
from .pausing import pause

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
    words = np.array([is_well], np.int32)
    has_lost = False
    try:
        request = world.Iagree(words)
        start = time.monotonic()
        while not request.Test():
            pause(time.monotonic() - start)
    except mpi.Exception as error:
        if not is_loss(mpi, error):
            raise
        has_lost = True
    return Verdict(bool(words[0]), has_lost or world.Get_failed().Get_size() > 0)
