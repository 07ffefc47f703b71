"""What the MPI library tells where a rank has died (ULFM, MPI 5's fault tolerance)."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from ..errors import RankLostError
from ..layout import compressed

__all__ = ["is_loss", "loss_error"]

# A rank that only hears of a loss learns a little later who it was, if it calls MPI meanwhile.
_SECONDS_TO_LEARN = 0.03
# One that can't send to a dead rank may be the first to meet it, before the library tells.
_SECONDS_TO_BE_SURE = 3.0


def is_loss(mpi: Any, error: BaseException, communicator: Any = None) -> bool:
    """Return whether `error` says that a rank has died, or that another rank has met this.

    Parameters
    ----------
    mpi : module
        ``mpi4py.MPI``.
    error : BaseException
        What came up in a call.
    communicator : Intracomm, optional
        The one of the call. Where a rank of it has died, each error says so: Open MPI's
        collectives then fail with ``ERR_OTHER``, too.
    """
    if not isinstance(error, mpi.Exception):
        return False
    classes = (mpi.ERR_PROC_FAILED, mpi.ERR_PROC_FAILED_PENDING, mpi.ERR_REVOKED)
    if error.Get_error_class() in classes:
        return True
    return communicator is not None and _is_lost(mpi, communicator)


def loss_error(mpi: Any, communicator: Any, hosts: Sequence[str], pids: Sequence[int]) -> Any:
    """Return the `RankLostError` of a communicator's rank, with the names of those that died."""
    limit = time.monotonic() + _SECONDS_TO_LEARN
    ranks: list[int] = []
    while not ranks and time.monotonic() < limit:
        ranks = _failed_ranks(mpi, communicator)
        mpi.COMM_SELF.Iprobe()
    many = len(ranks) > 1
    who = f"rank{'s' * many} {compressed(sorted(ranks))}" if ranks else "a rank"
    processes = ", ".join(f"pid {pids[rank]} on {hosts[rank]}" for rank in sorted(ranks)[:4])
    return RankLostError(
        f"{who}{f' ({processes})' * bool(processes)} {'have' if many else 'has'} died. No call of"
        " this strategy works until strategy.run_elastic has given the lost replicas to the ranks"
        " that are left. Outside of it the program can only end: train inside of run_elastic, or"
        " restore the last checkpoint."
    )


def _is_lost(mpi: Any, communicator: Any) -> bool:
    """Return whether a rank of a communicator has died, as this one knows after a while."""
    limit = time.monotonic() + _SECONDS_TO_BE_SURE
    while not _failed_ranks(mpi, communicator) and not communicator.Is_revoked():
        if time.monotonic() > limit:
            return False
        mpi.COMM_SELF.Iprobe()
    return True


def _failed_ranks(mpi: Any, communicator: Any) -> list[int]:
    try:
        failed = communicator.Get_failed()
        everyone = communicator.Get_group()
        return list(mpi.Group.Translate_ranks(failed, range(failed.Get_size()), everyone))
    except (NotImplementedError, mpi.Exception):
        return []
