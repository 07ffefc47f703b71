"""Every exception of the package.

An error says what is wrong, with the values; where: nest path, replica, rank, file:line; and
what to do. Errors that the ranks have agreed on carry the same text on every rank.
"""

from __future__ import annotations


class MPIReplicaError(BaseException):
    """Common base of all exceptions of the package.

    Each subclass also derives from the builtin that fits, so that ``except ValueError`` works
    too. The base itself is a `BaseException` because of `ReplicaStopped`.
    """


class ContextError(MPIReplicaError, RuntimeError):
    """A call was made in a context, or from a thread, where it is not legal.

    For example, ``strategy.run`` inside a replica, or ``ctx.all_reduce`` inside a ``merge_fn``.
    """


class StructureMismatchError(MPIReplicaError, ValueError):
    """Replicas passed values that differ in structure, key names, shape or dtype.

    They were at the same call: where they were not, `CollectiveMismatchError` is raised.
    """


class CollectiveMismatchError(MPIReplicaError, RuntimeError):
    """Replicas are at different calls, in another order, or one of them has none left."""


class DivergenceError(MPIReplicaError, RuntimeError):
    """What should be the same on all ranks is not: ``strategy.verify`` found the difference.

    The text names the first leaf and element that differ, and which replicas hold what.
    """


class RemoteReplicaError(MPIReplicaError, RuntimeError):
    """A replica elsewhere raised an exception that could not travel between processes.

    The text holds the type, the message and the traceback of the original.
    """


class CollectiveTimeoutError(MPIReplicaError, TimeoutError):
    """The ``timeout_seconds`` of a collective passed; the strategy can't be used any more.

    The text is the stall report: who waited, who was missing, and where those were.
    """


class RankLostError(MPIReplicaError, RuntimeError):
    """A rank died, or its program ended, while others still call collectives.

    Where the program has failed there, the text says how.
    """


class ReplicaStopped(MPIReplicaError):
    """Raised at the collective call of a replica whose partners failed.

    A `BaseException`, so that ``except Exception`` in a step function lets it pass. The failure
    is in ``__cause__``, and ``strategy.run`` raises it.
    """


class LaunchError(MPIReplicaError, RuntimeError):
    """The program was started by a launcher that does not fit the MPI library, or there is none."""


class CheckpointError(MPIReplicaError, OSError, ValueError):
    """A checkpoint is torn, corrupt, or of another program."""


class CorruptCheckpointError(CheckpointError):
    """A file of a checkpoint is missing, torn or corrupt: an older checkpoint may be whole."""


def text_of(error: BaseException) -> str:
    """Returns the text of an exception, also of one whose text can't be had. Never raises."""
    try:
        return str(error)
    except BaseException as broken:  # code of the program
        return f"<its str() raised {type(broken).__name__}>"


def add_note(error: BaseException, note: str) -> bool:
    """Adds a note to an exception, once; returns False where it takes none. Never raises."""
    try:
        if note not in getattr(error, "__notes__", ()):
            error.add_note(note)
    except BaseException:  # code of the program
        return False
    return True


def mark_reporter(error: BaseException, rank: int) -> None:
    """Notes the one rank that prints `error`, which all ranks have, should nobody catch it."""
    error.__dict__["_mpi_replica_rank_that_reports"] = rank


def reporter_of(error: BaseException) -> int | None:
    """Returns the rank that prints `error`, where all ranks have it."""
    rank: int | None = getattr(error, "_mpi_replica_rank_that_reports", None)
    return rank
