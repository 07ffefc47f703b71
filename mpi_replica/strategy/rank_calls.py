"""What programs of mpi4py do around their steps, as methods of a strategy."""

from __future__ import annotations

from typing import Any

from ..collectives.barrier import BarrierCall
from ..collectives.objects import ObjectGather
from ..collectives.strategy_base import StrategyBase
from ..core.context import require_cross_replica
from ..core.options import CommunicationOptions


class MessagePassing(StrategyBase):
    """The part of a strategy that mpi4py has, and tf.distribute has not."""

    def barrier(self, options: CommunicationOptions | None = None) -> None:
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
        self.engine.cross_replica(self.engine.make("barrier", options, BarrierCall, "barrier"))

    def gather_objects(
        self, value: Any, options: CommunicationOptions | None = None
    ) -> tuple[Any, ...]:
        """Return the objects of all replicas, on every rank.

        Collective: all ranks call it, in the same order. For arrays `gather` is faster.

        Parameters
        ----------
        value : nest
            What `run` returned, or any object that can be pickled. What is no `PerReplica` in it
            stands for each replica of its rank; ranks may give objects of other kinds. All replicas
            return one nest from `run`: what differs in keys or lengths goes as a set, a text, or an
            object of your own.
        options : CommunicationOptions, optional
            Fields that are set win over those of the strategy.

        Returns
        -------
        tuple
            One entry for each replica, in the order of their ids; for a nest, one nest each: what
            `experimental_local_results` gives, of the replicas of all ranks. Entries are what
            pickle made of the objects, the same on all ranks, and nobody else's. Arrays in them
            are read-only where those given are, such as parts of what replicas of a rank share.

        Raises
        ------
        TypeError
            An object can't be pickled, or not be loaded on some rank; on every rank.
        ValueError
            A `PerReplica` is one of another strategy.
        CollectiveMismatchError
            Ranks are at different calls; on every rank.
        ContextError
            Called in a replica, where ``ctx.merge_call`` takes objects; or from another thread.

        Notes
        -----
        Two messages of 256 bytes a rank; one Allgatherv more where the objects don't fit into the
        first, and one message of 256 bytes where they have more than 1 MiB. Counterpart of
        ``MPI.Comm.allgather``.

        Examples
        --------
        >>> import mpi_replica as mr
        >>> strategy = mr.MPIStrategy(num_replicas=2)
        >>> names = strategy.run(lambda: f"of {mr.get_replica_context().replica_id_in_sync_group}")
        >>> strategy.gather_objects(names)
        ('of 0', 'of 1')

        One object of each rank, however many replicas it has:

        >>> dict(strategy.gather_objects((strategy.rank, "any object")))
        {0: 'any object'}
        """
        require_cross_replica(self, "gather_objects")
        engine = self.engine
        objects: tuple[Any, ...] = engine.cross_replica(
            engine.make("gather_objects", options, ObjectGather, value, engine.layout)
        )
        return objects
