"""Agreeing among all living ranks of a communicator, although some may be dead (ULFM)."""

from __future__ import annotations

import time
from collections.abc import Generator
from typing import Any

import numpy as np

from .loss import is_loss
from .pausing import pause

__all__ = ["agree", "agreeing"]


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
    steps = agreeing(mpi, communicator, word)
    start = time.monotonic()
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]
        pause(time.monotonic() - start)


def agreeing(mpi: Any, communicator: Any, word: int) -> Generator[None, None, tuple[int, bool]]:
    """Do as `agree`; yield while it goes on."""
    words = np.array([word], np.int32)
    try:
        request = communicator.Iagree(words)
        while not request.Test():
            yield
    except mpi.Exception as error:
        if not is_loss(mpi, error):
            raise
        return int(words[0]), True
    return int(words[0]), False
