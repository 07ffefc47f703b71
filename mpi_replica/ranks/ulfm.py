"""What the MPI library says and does where a rank has died (ULFM, MPI 5's fault tolerance)."""

from __future__ import annotations

import pickle
from collections.abc import Generator, Sequence
from time import monotonic
from typing import Any

import numpy as np
import numpy.typing as npt

from ..core.exceptions import RankLostError
from ..core.layout import numbers_text
from .pause import pause
from .transport import Mailbox

# A rank that only hears of a loss learns a little later who it was, if it calls MPI meanwhile.
_SECONDS_TO_LEARN = 0.03
# One that can't send to a dead rank may be the first to meet it, before the library tells.
_SECONDS_TO_BE_SURE = 3.0


def is_loss(mpi: Any, error: BaseException, communicator: Any = None) -> bool:
    """Returns whether `error` says that a rank has died, or that another rank has met this.

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
    """Returns the `RankLostError` of a communicator's rank, with the names of those that died."""
    limit = monotonic() + _SECONDS_TO_LEARN
    ranks: list[int] = []
    while not ranks and monotonic() < limit:
        ranks = failed_ranks(mpi, communicator)
        mpi.COMM_SELF.Iprobe()
    who = numbers_text("rank", sorted(ranks)) if ranks else "a rank"
    have = "have" if len(ranks) > 1 else "has"
    processes = ", ".join(f"pid {pids[rank]} on {hosts[rank]}" for rank in sorted(ranks)[:4])
    return RankLostError(
        f"{who}{f' ({processes})' * bool(processes)} {have} died. No call of"
        " this strategy works until strategy.run_elastic has given the lost replicas to the ranks"
        " that are left. Outside of it the program can only end: train inside of run_elastic, or"
        " restore the last checkpoint."
    )


def _is_lost(mpi: Any, communicator: Any) -> bool:
    """Returns whether a rank of a communicator has died, as this one knows after a while."""
    limit = monotonic() + _SECONDS_TO_BE_SURE
    while not failed_ranks(mpi, communicator) and not communicator.Is_revoked():
        if monotonic() > limit:
            return False
        mpi.COMM_SELF.Iprobe()
    return True


def failed_ranks(mpi: Any, communicator: Any) -> list[int]:
    """Returns the ranks of a communicator that have died, as far as this one knows."""
    try:
        failed, everyone = communicator.Get_failed(), communicator.Get_group()
        ranks = list(mpi.Group.Translate_ranks(failed, range(failed.Get_size()), everyone))
        failed.Free()
        everyone.Free()
        return ranks
    except (NotImplementedError, mpi.Exception):
        return []


def all_gather_objects(communicator: Any, value: Any) -> list[Any]:
    """Returns the objects of all ranks, in their order. Collective.

    As mpi4py's ``allgather``, but without a blocking Allgatherv: where a rank dies in one of less
    than a kilobyte Open MPI 5.0.11 tells others that it has succeeded, and gives them nothing.
    """
    data = np.frombuffer(pickle.dumps(value), np.uint8)
    lengths = np.empty(communicator.Get_size(), np.int64)
    communicator.Iallgather(np.array([data.size]), lengths).Wait()
    ends = lengths.cumsum()
    everything = np.empty(ends[-1], np.uint8)
    communicator.Iallgatherv(data, (everything, (lengths, ends - lengths))).Wait()
    return [pickle.loads(part.data) for part in np.split(everything, ends[:-1])]


def begin_to_agree(communicator: Any, words: npt.NDArray[np.int32]) -> Any:
    """Returns the request of an agreement on `words`, while no other thread is in a mailbox.

    Open MPI 5.0.11 puts off what another rank sends to an agreement while another thread is in it,
    and writes an address over the word meanwhile (``era_cb_fn``). With a thread that called
    ``Iprobe`` again and again up to 1300 of 60,000 agreements of three ranks gave 0 where all had
    given 1, one of them on two ranks only. With this lock none did.
    """
    with Mailbox.lock:
        return communicator.Iagree(words)


def shrink(communicator: Any) -> Any:
    """Returns a communicator of the ranks that live. Collective.

    It agrees, too. Beside such a thread it failed, or named living ranks as dead.
    """
    with Mailbox.lock:
        return communicator.Shrink()


def agree(mpi: Any, communicator: Any, word: int) -> int:
    """Returns the bits that the words of all living ranks have in common. Collective.

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
    """
    steps = agree_in_steps(mpi, communicator, word)
    start = monotonic()
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]
        pause(monotonic() - start)


def agree_in_steps(mpi: Any, communicator: Any, word: int) -> Generator[None, None, int]:
    """Does as `agree`; yields while it goes on."""
    words = np.array([word], np.int32)
    try:
        request = begin_to_agree(communicator, words)
        while not request.Test():
            yield
    except mpi.Exception as error:
        if not is_loss(mpi, error):
            raise
    return int(words[0])
