"""What programs of mpi4py do around their steps, as methods of a strategy."""

from __future__ import annotations

from .collectives.barrier import Barrier
from .context import StrategyLike, require_cross_replica
from .options import CommunicationOptions

__all__ = ["MessagePassing"]


class MessagePassing:
    """The part of a strategy that mpi4py has, and tf.distribute has not."""

    def barrier(self: StrategyLike, options: CommunicationOptions | None = None) -> None:
        """Return when all ranks have come.

        Collective: all ranks call it, in the same order.

        Parameters
        ----------
        options : CommunicationOptions, optional
            Fields that are set win over those of the strategy.

        Raises
        ------
        CollectiveMismatchError
            Ranks are at another call, or at another barrier; on every rank.
        ContextError
            Called in a replica, where every collective waits for all replicas; or from another
            thread.

        Notes
        -----
        One message of 256 bytes a rank. Other collectives need none before them. Counterpart of
        ``MPI.Comm.Barrier``.

        Examples
        --------
        One rank writes a file, and all read it. Where ranks are on several hosts, the folder must
        be one that all of them see.

        >>> import pathlib, tempfile, mpi_replica as mr
        >>> strategy = mr.MPIStrategy()
        >>> folder = strategy.extended.broadcast_to(tempfile.mkdtemp()).value
        >>> file = pathlib.Path(folder, "words.txt")
        >>> if strategy.rank == 0:
        ...     written = file.write_text("one two")
        >>> strategy.barrier()
        >>> file.read_text()
        'one two'
        """
        require_cross_replica(self, "barrier")
        self.engine.cross_replica(self.engine.make("barrier", options, Barrier))
