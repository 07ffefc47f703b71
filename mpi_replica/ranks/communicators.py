"""The communicator that a strategy is given."""

from __future__ import annotations

from typing import Any


def checked_communicator(mpi: Any, communicator: Any) -> Any:
    """Returns the communicator, COMM_WORLD in place of None.

    Parameters
    ----------
    mpi : module
        ``mpi4py.MPI``.
    communicator : Intracomm or None

    Raises
    ------
    TypeError, ValueError
        `communicator` is not an intracommunicator.
    """
    if communicator is None:
        return mpi.COMM_WORLD
    if not isinstance(communicator, mpi.Comm):
        raise TypeError(
            f"communicator must be an mpi4py intracommunicator, got {communicator!r}."
            " Leave it out for COMM_WORLD."
        )
    if communicator == mpi.COMM_NULL:
        raise ValueError(
            "communicator is COMM_NULL: this rank is not part of it (Split with UNDEFINED and"
            " Create_group give it to ranks outside). Make the strategy only on the ranks inside."
        )
    if communicator.Is_inter():
        raise ValueError(
            "communicator is an intercommunicator: its two groups can't form one world of"
            " replicas. Use communicator.Merge() to make an intracommunicator."
        )
    return communicator


def ranks_in_world(mpi: Any, communicator: Any) -> tuple[int, ...]:
    """Returns the ranks that the processes of a communicator have in COMM_WORLD, ascending.

    None where some may be of another world: those that ``Spawn`` starts have one of their own.
    """
    if mpi.Comm.Get_parent() != mpi.COMM_NULL:
        return ()
    group, world = communicator.Get_group(), mpi.COMM_WORLD.Get_group()
    ranks = group.Translate_ranks(None, world)
    group.Free()
    world.Free()
    return () if mpi.UNDEFINED in ranks else tuple(sorted(ranks))
