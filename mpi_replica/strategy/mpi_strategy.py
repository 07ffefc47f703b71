"""The strategy over an MPI communicator: how it starts and how it ends."""

from __future__ import annotations

import weakref
from typing import Any

from ..collectives.barrier import CloseCall
from ..collectives.engine import Engine
from ..core.context import enter_open_strategy, open_strategies, require_cross_replica
from ..core.exceptions import RankLostError
from ..core.layout import Layout
from ..core.options import CommunicationOptions
from ..ranks import blas
from ..ranks.held_signals import HeldSignals
from ..ranks.interrupts import gate
from ..ranks.transport import Transport
from ..ranks.watch import event_log
from ..ranks.watch.watcher import watcher
from ..replicas.kept_by_runs import KeptByRuns
from . import job_end
from .start import Wishes, start
from .strategy import Strategy


class MPIStrategy(Strategy):
    """Replicas on the ranks of an MPI communicator.

    Collective over the communicator. Without mpirun it is one rank, and needs no MPI.

    Parameters
    ----------
    communicator : mpi4py.MPI.Intracomm, optional
        Default: COMM_WORLD. It is duplicated, and never used itself.
    replicas_per_rank : int, optional
        How many replicas this rank hosts; may differ between ranks. Default: 1.
    num_replicas : int, optional
        How many replicas all ranks host together, in contiguous blocks that differ by at most
        one. The environment variable ``MPI_REPLICA_NUM_REPLICAS`` gives its default.
    communication_options : CommunicationOptions, optional
        For all calls of this strategy.
    spares : int, optional
        How many ranks, the last ones, host no replicas: they wait in `run_elastic` until another
        rank is lost, and take its place. They may do nothing else: other calls are a
        `ContextError` there, `local_replica_ids` is empty, variables can be made. The environment
        variable ``MPI_REPLICA_SPARES``, 0 where it is not set, gives its default.
    replica_threads : bool, optional
        Whether each replica has a thread of its own where this rank hosts several. They take turns,
        also so: one runs at a time, until it waits at a collective. Without it they share the
        thread that calls `run`, unless torch or JAX is imported when `run` begins, which keep for
        a thread what belongs to a replica. Such a thread starts with what the caller's has of
        contextvars and of torch's modes; it can't do what Python keeps for the main thread, as
        ``signal.signal``. The environment variable ``MPI_REPLICA_THREADS``, 0 or 1, gives its
        default.
    seed : int, optional
        For ``ctx.rng`` and ``strategy.rng``; 0 or more, the same on all ranks. Default: 0 where the
        strategy is reproducible, otherwise another one each time.

    Raises
    ------
    ValueError
        Both numbers are given, or one is not positive, or asks for more than 1048576 replicas on a
        rank; `num_replicas` is less than the ranks;
        it or `seed` differs between them, or `seed` is negative; `communicator` is COMM_NULL or an
        intercommunicator;
        ``MPI_REPLICA_BLAS_THREADS`` is no positive integer, or differs between ranks.
    TypeError
        An argument is of another type.
    ContextError
        It is made in a replica, where the communicator has several ranks: each of them would make
        one, and ranks host different numbers.
    LaunchError
        A launcher without an MPI library, or one that does not fit it; different versions of
        Python on the ranks.

    Notes
    -----
    Use it as a context manager, or `close` it: closing is collective.

    What the agreement can't see is the order of a loop round a collective, since all its calls are
    on one line. A set of strings has another order in each process, unless PYTHONHASHSEED is set (a
    warning is logged when the strategy is made); a dict has the order in which its keys were put
    in. Sort, or give the dict itself to the collective: its values meet by their keys.

    A thread of each process watches how long its strategies wait: who is missing for longer than
    ``MPI_REPLICA_STALL_SECONDS`` (60) is logged, with the place where it is. It needs an MPI
    library for several threads; ``MPI_REPLICA_WATCH=0`` does without it.

    A reproducible strategy fixes the threads of BLAS while it is open, for the whole process:
    ``MPI_REPLICA_BLAS_THREADS`` (1) for each replica, in every layout. A BLAS library that is
    imported inside of a step is limited from the next `run` on: import it before. Where libraries
    or CPU kernels differ between the ranks, a warning is logged that names them.

    Examples
    --------
    >>> import mpi_replica as mr
    >>> with mr.MPIStrategy(num_replicas=4) as strategy:
    ...     strategy.num_replicas_in_sync
    4
    """

    def __init__(
        self,
        communicator: Any = None,
        *,
        replicas_per_rank: int | None = None,
        num_replicas: int | None = None,
        communication_options: CommunicationOptions | None = None,
        spares: int | None = None,
        replica_threads: bool | None = None,
        seed: int | None = None,
    ) -> None:
        job_end.shorten_tracebacks()
        transport, terms, survivors = start(
            communicator,
            spares,
            Wishes(replicas_per_rank, num_replicas, communication_options, replica_threads, seed),
        )
        layout, options, seed, is_traced, self.replica_threads = terms
        log = event_log.current if is_traced else None
        super().__init__(Engine(transport, layout, options, log), seed)
        self.survivors = survivors
        self._is_closed = False
        enter_open_strategy(self)
        self._release_blas = blas.hold(self) if options.reproducible else None
        gate.install(job_end.abort)
        if survivors is not None:  # without MPI there are none
            job_end.end_with_mpi()
            if survivors.may_be_needed:
                job_end.add_survivors(survivors)
        self._be_watched()
        if transport.size == 1:  # one that is not closed, and that nobody else may wait for
            weakref.finalize(self, watcher.remove, self.engine.watch).atexit = False

    def _be_watched(self) -> None:
        """Takes care of the waits of this rank, and of the end of the job."""
        engine = self.engine
        transport = engine.transport
        if transport.size > 1 or engine.is_spare:
            engine.watch.abort = job_end.abort
            job_end.add_engine(engine)
        is_traced = event_log.current is not None
        if transport.size > 1 or len(engine.layout.local_replica_ids) > 1 or is_traced:
            watcher.add(engine.watch, transport.hosts[transport.rank])

    def move(self, transport: Transport, layout: Layout) -> None:
        """Work over `transport` from now on, with the same replicas; see `Engine.move`."""
        watcher.remove(self.engine.watch)
        self.engine.layout.era.is_over = True
        self.engine.move(transport, layout)
        self._kept = KeptByRuns()
        self._be_watched()

    @property
    def communicator(self) -> Any:
        """The strategy's own communicator; None without MPI. Do not communicate on it."""
        return self.engine.transport.communicator

    @property
    def rank(self) -> int:
        """The rank of this process; one that waits as a spare has `size` or more."""
        return self.engine.layout.rank

    @property
    def size(self) -> int:
        """How many ranks host replicas: the same on all ranks, those that wait as spares, too."""
        return len(self.engine.layout.hosting_counts)

    @property
    def local_replica_ids(self) -> tuple[int, ...]:
        """Global ids of the replicas of this rank."""
        return self.engine.layout.local_replica_ids

    def close(self) -> None:
        """Give back the communicator. Collective; a second call does nothing.

        After it every collective call is a `ContextError`; mirrored variables can be read.

        Raises
        ------
        CollectiveMismatchError
            Other ranks are at another call; the strategy stays open.
        RankLostError
            The program has ended on another rank, or a rank has died where MPI has no fault
            tolerance.
        ContextError
            Called in a replica, or from another thread.

        Notes
        -----
        One message of 256 bytes a rank. Then the communicator is freed (``MPI_Comm_free``,
        collective, too), unless the MPI library has fault tolerance.

        Examples
        --------
        >>> strategy = mr.MPIStrategy()
        >>> strategy.close()
        >>> strategy.close()
        """
        if self._is_closed:
            return
        require_cross_replica(self, "close")
        gate.close()  # Ctrl-C in between would leave it open here, and closed on the other ranks
        try:
            self._close_everywhere()
        finally:
            gate.open()
        if gate.take():
            raise KeyboardInterrupt

    def _close_everywhere(self) -> None:
        engine, transport = self.engine, self.engine.transport
        if engine.agreement.final is not None or engine.is_spare:
            self._close_here()
            return
        signals = HeldSignals()  # a handler that raises would leave it open here alone
        call = engine.make("close", None, CloseCall, signals.hold)
        engine.watch.recorder.want_comparison()
        try:
            is_lost = False
            try:
                engine.cross_replica(call)
            except RankLostError:
                # Nobody else is needed to close it, and MPI keeps what was in flight.
                is_lost = transport.is_fault_tolerant and transport.loss is not None
                if not is_lost:
                    raise
            self._close_here()
            job_end.remove_engine(engine)
            if not is_lost:
                transport.close()
        finally:
            signals.release()

    def _close_here(self, *, stays_watched: bool = False) -> None:
        self._is_closed = True
        self.engine.agreement.close()
        open_strategies.discard(self)
        if self._release_blas is not None:
            self._release_blas()
        self.engine.group.pool.close()
        if not stays_watched:
            watcher.remove(self.engine.watch)

    def __enter__(self) -> MPIStrategy:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is None:
            self.close()
            return
        agreement = self.engine.agreement
        is_of_all = error is agreement.last_error or error is agreement.final
        # Else the others may be anywhere, also in a call that waits for this rank.
        self._close_here(stays_watched=not is_of_all and self.engine.transport.size > 1)
