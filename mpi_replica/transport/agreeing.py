"""Agreeing among all living ranks of a communicator, although some may be dead (ULFM)."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from .loss import is_loss
from .pausing import pause

__all__ = ["agree"]


def agree(mpi: Any, communicator: Any, word: int) -> tuple[int, bool]:
    """Return the bits that the words of all living ranks have in common. Collective.

    Parameters
    ----------
    mpi : module
        ``mpi4py.MPI``.
    communicator : Intracomm
    word : int
        Of this rank.

    Returns
    -------
    int
        The same on all ranks, whether ranks have died or not.
    bool
        Whether it came out that a rank has died.
    """
    words = np.array([word], np.int32)
    try:
        request = communicator.Iagree(words)
        start = time.monotonic()
        while not request.Test():
            pause(time.monotonic() - start)
    except mpi.Exception as error:
        if not is_loss(mpi, error):
            raise
        return int(words[0]), True
    return int(words[0]), False
