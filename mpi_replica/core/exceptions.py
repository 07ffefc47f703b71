"""Every exception of the package.

An error says what is wrong, with the values; where: nest path, replica, rank, file:line; and
what to do. Errors that the ranks have agreed on carry the same text on every rank.
"""

from __future__ import annotations

import os
from os import getpid


class MPIReplicaError(BaseException):
    """Common base of all exceptions of the package.

    Each subclass also derives from the builtin that fits, so that ``except ValueError`` works
    too. The base itself is a `BaseException` because of `ReplicaStopped`, which ``except
    MPIReplicaError`` in a step function would stop: catch narrower ones there.
    """


class ContextError(MPIReplicaError, RuntimeError):
    """A call was made in a context, or from a thread, where it is not legal.

    For example, ``strategy.run`` inside a replica, ``ctx.all_reduce`` inside a ``merge_fn``, any
    collective call on a spare, or of a strategy that is closed. The program must make it elsewhere:
    the text says where, or what to call instead. Where it is caught, a strategy that is open works
    on.
    """


class StructureMismatchError(MPIReplicaError, ValueError):
    """Replicas passed values that differ in structure, key names, shape or dtype.

    They were at the same call: where they were not, `CollectiveMismatchError` is raised. All ranks
    raise it, and none has a result. The text names the leaf and who passed what. Where it is
    caught, the strategy works on.
    """


class CollectiveMismatchError(MPIReplicaError, RuntimeError):
    """Replicas are at different calls, in another order, or one of them has none left.

    All ranks raise it, with the calls and their places. Where it is caught, the strategy works on.
    Only where two strategies wait for each other, neither of them can be used any more.
    """


class DivergenceError(MPIReplicaError, RuntimeError):
    """What should be the same on all ranks is not: ``strategy.verify`` found the difference.

    The text names the first leaf and element that differ, and which replicas hold what. All ranks
    raise it, and nothing has changed. The text says how to go on with what rank 0 has; or restore a
    checkpoint.
    """


class RemoteReplicaError(MPIReplicaError, RuntimeError):
    """A replica elsewhere raised an exception that could not travel between processes.

    The text holds the type, the message and the traceback of the original, which can't be pickled:
    the rank where it was raised has it itself. Deal with it as with that one. Exceptions whose
    arguments pickle knows, and that can be made of them, travel.
    """


class CollectiveTimeoutError(MPIReplicaError, TimeoutError):
    """The ``timeout_seconds`` of a collective passed; the strategy can't be used any more.

    The text is the stall report: who waited, who was missing, and where those were; without the
    thread that watches, which call has waited how long. End the program, or make a new strategy on
    all ranks. The job ends with status 1 also where the error is caught: its message is still on
    its way, and MPI could wait for it when the program ends.
    """


class RankLostError(MPIReplicaError, RuntimeError):
    """A rank died, or its program ended, while others still call collectives.

    Where the program has failed there, the text says how. The strategy can't be used any more: end
    the program, and go on with a `CheckpointManager` when it is started again. Inside of
    ``strategy.run_elastic`` let it pass: that goes on. Values of replicas that have moved since
    raise it, too, when they are used.
    """

    # Whether the program has ended elsewhere by itself: it is none of a loss.
    _is_of_program = False


class ReplicaStopped(MPIReplicaError):
    """Raised at the collective call of a replica whose partners failed.

    A `BaseException`, so that ``except Exception`` in a step function lets it pass. The failure
    is in ``__cause__``, and ``strategy.run`` raises it. Clean up in ``finally``, and let it pass:
    every further call of that run raises it again.
    """


class LaunchError(MPIReplicaError, RuntimeError):
    """The program was started by a launcher that does not fit the MPI library, or there is none.

    Raised where a strategy is made, also where the ranks run different versions of Python, and by
    ``python -m mpi_replica run``. The text says what to install, set or start instead.
    """


class CheckpointError(MPIReplicaError, OSError, ValueError):
    """A checkpoint is torn, corrupt, or of another program; or a file can't be written or read.

    Raised on all ranks. When it is saved, the older checkpoint is as it was; when it is restored,
    nothing has changed, unless a file changes meanwhile. ``restore(path, strict=False)`` takes what
    fits of one of another program. Also raised by ``run_elastic``, where other objects are in the
    state than at the last commit.
    """


class CorruptCheckpointError(CheckpointError):
    """A file of a checkpoint is missing, torn or corrupt: an older checkpoint may be whole.

    Raised on all ranks when it is restored, as `CheckpointError` is. ``restore_or_initialize`` of
    a `CheckpointManager` takes the newest one that is whole, and raises it where none is.
    """


def text_of(error: BaseException) -> str:
    """Returns the text of an exception, also of one whose text can't be had. Never raises."""
    try:
        return str.__str__(str(error))  # of no class of the program, which may not travel
    except BaseException as broken:  # code of the program
        return f"<its str() raised {type(broken).__name__}>"


def in_words(error: BaseException) -> str:
    """Returns "ValueError: no rows", or its name alone where it has no text. Never raises."""
    return f"{type(error).__name__}: {text_of(error)}".removesuffix(": ")


def add_note(error: BaseException, note: str) -> bool:
    """Adds a note to an exception, once; returns False where it takes none. Never raises."""
    try:
        if note not in getattr(error, "__notes__", ()):
            error.add_note(note)
    except BaseException:  # code of the program
        return False
    return True


# Tells this process from others of the same id: of containers, of other hosts.
_process = os.urandom(8)


def mark_reporter(error: BaseException, is_here: bool) -> None:
    """Notes whether this is the rank that prints `error`, which all have, if nobody catches it."""
    mark = _process, getpid(), is_here
    BaseException.__setattr__(error, "_mpi_replica_reporter", mark)  # its own may raise


def is_reported_here(error: BaseException) -> bool | None:
    """Returns whether this is the rank that prints `error`; None where others don't have it."""
    *process, is_here = getattr(error, "_mpi_replica_reporter", (b"", 0, None))
    # A copy may have come from another rank.
    return is_here if process == [_process, getpid()] else None
