"""The strategy: the face of the package, thin."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NoReturn, Self

import numpy as np

from ..collectives import cross_replica
from ..collectives.agreement.site import call_site
from ..collectives.components import with_all_components
from ..collectives.engine import Engine
from ..core.argument_checks import check_call
from ..core.context import (
    Scope,
    is_in_merge_fn,
    require_above,
    require_common_draw,
    require_cross_replica,
)
from ..core.jax_state import require_untransformed
from ..core.options import CommunicationOptions, ReduceOp
from ..core.randomness import Generators
from ..core.values import local_results
from ..ranks import blas
from ..replicas.kept_by_runs import KeptByRuns
from ..replicas.run import Run
from ..replicas.run_arguments import RunArguments
from ..replicas.variables import Variable
from .distribution import Distribution
from .elastic.run_elastic import Elastic
from .extended import StrategyExtended
from .rank_calls import MessagePassing
from .resolver import MPIClusterResolver
from .trace_context import Traced
from .verification import Verifying


class Strategy(Distribution, MessagePassing, Verifying, Traced, Elastic):
    """Runs a computation on replicas: the base of all strategies.

    Notes
    -----
    Counterpart of ``tf.distribute.Strategy``. It is never made directly: make an `MPIStrategy`,
    or get the current one with `get_strategy`. A strategy belongs to the thread that made it, or
    that first ran it; two threads use two strategies.

    Examples
    --------
    >>> isinstance(mr.MPIStrategy(), mr.Strategy), isinstance(mr.get_strategy(), mr.Strategy)
    (True, True)
    """

    #: Whether this is the default strategy, which holds outside of all others.
    is_default = False

    def __init__(self, engine: Engine, seed: int | None = None) -> None:
        super().__init__()
        #: What the strategy communicates with.
        self.engine = engine
        self.generators = Generators(seed, self._before_draw)
        self._extended = StrategyExtended(self)
        self._kept = KeptByRuns()

    def __repr__(self) -> str:
        layout = self.engine.layout
        size = len(layout.hosting_counts)
        return f"<{type(self).__name__}: {layout.num_replicas} replicas on {size} ranks>"

    def __copy__(self) -> NoReturn:
        raise TypeError("a strategy can't be copied: its ranks would not know of the copy.")

    def __deepcopy__(self, memo: Any) -> NoReturn:
        self.__copy__()

    def __reduce__(self) -> NoReturn:
        raise TypeError("a strategy can't be pickled: it holds communicators.")

    @property
    def extended(self) -> StrategyExtended:
        """Further methods, for library code (`tf.distribute.StrategyExtended`)."""
        return self._extended

    @property
    def num_replicas_in_sync(self) -> int:
        """How many replicas all ranks host together."""
        return self.engine.layout.num_replicas

    @property
    def per_replica_call(self) -> tuple[str, str, str] | None:
        """While it calls a function for each replica of a rank: that function and the call."""
        return self.engine.per_replica_call

    @property
    def is_in_run(self) -> bool:
        """Whether a step is under way."""
        return bool(self.engine.agreement.runs)

    @property
    def is_between_replicas(self) -> bool:
        """Whether a step is under way, and the code that runs now is in none of its replicas."""
        runs = self.engine.agreement.runs
        return bool(runs) and runs[-1].is_here()

    @property
    def cluster_resolver(self) -> MPIClusterResolver:
        """Hosts and ranks, in tf's words."""
        return MPIClusterResolver(self.engine.transport)

    @property
    def rng(self) -> np.random.Generator:
        """Random numbers for code above the replicas: the same on all ranks that draw alike.

        What a ``merge_fn`` draws in a run that fails is drawn again, and so is what only some ranks
        have drawn when they hear of an error of another one, as of input.

        Raises
        ------
        ContextError
            Read or drawn from in a replica, whose own are those of ``ctx.rng``. Drawn from in a
            function that is called for a replica, or that makes rows of a distributed dataset by
            their position, which each rank does for its own replicas.
        """
        require_above(self, "strategy.rng")
        return self.generators.shared

    def _before_draw(self) -> None:
        require_common_draw(self.per_replica_call)
        runs = self.engine.agreement.runs
        if runs and self.engine.is_in_its_thread():
            for run in runs:
                run.will_draw(self.generators.shared)
        elif self.engine.layout.size > 1 and self.engine.is_in_its_thread():
            self.engine.agreement.notes.add_draw(self.generators.shared)

    def scope(self) -> Scope[Self]:
        """Return a context manager in which this is the current strategy, above all replicas.

        Variables made inside belong to the strategy. It may be nested and entered again.

        Returns
        -------
        context manager
            What ``with`` gives is the strategy itself.

        Raises
        ------
        ContextError
            When entered inside a replica, or while another strategy is the current one.

        Notes
        -----
        No communication. Counterpart of ``tf.distribute.Strategy.scope``.

        Examples
        --------
        >>> strategy = mr.MPIStrategy(num_replicas=2)
        >>> with strategy.scope():
        ...     v = mr.Variable(1.0)
        >>> v.strategy is strategy
        True
        """
        return Scope(self)

    def run(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...] | list[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        options: CommunicationOptions | None = None,
    ) -> Any:
        """Run `fn` on every replica.

        Collective: it ends with an agreement, so that it raises on every rank or on none.

        Parameters
        ----------
        fn : callable
            Called once for each replica of this rank, one at a time in the order of their ids; they
            switch only at collectives. What replicas of a rank share: module state, ``np.random``'s
            global generator, warnings filters, the working directory; none writes into an array
            that another one has given to a call, or returned. A step function must not hold a lock
            over a collective. Each runs in a copy of the caller's contextvars context. Where torch
            or JAX is imported, each of several replicas of a rank has a thread of its own, as
            ``MPIStrategy(replica_threads=True)`` asks for: then ``threading.local`` is a replica's
            own, what torch keeps for a thread is as the caller has it, and ``signal.signal`` can't
            be called.
        args, kwargs : tuple or list, and mapping
            Nests. Each replica gets its component of a `DistributedValues` leaf. The array of a
            `Mirrored` can't be written to, nor one that several replicas of a rank get, as any that
            is no `PerReplica` (that the tensor of a `Mirrored` was is an error when the step ends).
            Variables are passed whole, all else by reference; other tensors of torch, and
            parameters and buffers of modules, one replica of a rank may write in a run, and draw
            from a generator of numpy, Python or torch. Containers are new for each replica.
        options : CommunicationOptions, optional
            For the agreement at the end.

        Returns
        -------
        nest
            What the replicas of this rank returned: each leaf a `PerReplica`, also with one local
            replica. ``None`` from all replicas of all ranks is None; a variable stays itself. Keys
            of dicts are in the order in which all replicas have filled them, or else sorted.

        Raises
        ------
        BaseException
            What a replica raised, on every rank; of several, that of the lowest replica id, behind
            one of another rank's input, say, that came before its run. Notes tell where it is from.
        CollectiveMismatchError
            Ranks ran different functions, or replicas made different collective calls.
        StructureMismatchError
            The replicas returned different nests.
        RemoteReplicaError
            A replica elsewhere raised an exception that can't be pickled: of a class that is made
            in a function, say, or of arguments such as an open file.
        ValueError, TypeError
            `args` is no tuple or list, a `PerReplica` lacks the component of a replica, `fn` is
            not callable; on every rank.
        ContextError
            Called in a replica, or from another thread; a replica has written into the tensor of a
            `Mirrored`, or several of a rank into one other tensor, or a parameter or buffer.

        Notes
        -----
        One message of 256 bytes a rank beyond those of `fn`. Counterpart of
        ``tf.distribute.Strategy.run``.

        Examples
        --------
        >>> import mpi_replica as mr
        >>> strategy = mr.MPIStrategy(num_replicas=2)
        >>> strategy.run(lambda: mr.get_replica_context().replica_id_in_sync_group)
        PerReplica:{
          0: 0,
          1: 1
        }
        """
        require_cross_replica(self, "run")
        engine = self.engine
        engine.check_thread("strategy.run")
        site = call_site(1)
        try:
            require_untransformed("run")
            if engine.options.reproducible:
                blas.refresh()
            merged = engine.options if options is None else engine.options.merge(options)
            if not callable(fn):
                raise TypeError(f"strategy.run needs a callable, got {fn!r}.")
            check_call(args, {} if kwargs is None else kwargs)
            arguments = RunArguments.of(args, kwargs or {}, engine.layout)
            run = Run(self, fn, arguments, site, merged)
        except Exception as error:
            engine.fail("run", error)
        return run.execute(self._kept)

    def reduce(self, reduce_op: ReduceOp | str, value: Any, axis: Any) -> Any:
        """Combine a value of all replicas to one, and give it to every rank.

        Collective: all ranks call it, in the same order.

        Parameters
        ----------
        reduce_op : ReduceOp or str
            SUM, MEAN, MIN, MAX or PROD; strings in any case.
        value : nest of PerReplica
            What `run` returned, or a distributed batch. A `Mirrored` is itself under MEAN, MIN and
            MAX, and so is what is the same on all ranks.
        axis : None, int or tuple of int
            None combines element by element: all components have one shape. Otherwise each
            component is reduced along these axes too, where extents may differ; MEAN weighs by
            element count.

        Returns
        -------
        nest of numpy.ndarray
            Fresh arrays; a 0-d result is a numpy scalar. For dtypes, `IndexedSlices`, and arrays of
            torch, JAX and others, see `ReplicaContext.all_reduce`.

        Raises
        ------
        ValueError
            SUM or PROD of a value that is not per replica, or MEAN, MIN or MAX of one that differs
            between ranks; `axis` out of range, or not None for `IndexedSlices`; on every rank.
        StructureMismatchError, CollectiveMismatchError, TypeError, ContextError
            As for `ReplicaContext.all_reduce`.

        Notes
        -----
        Messages as for `ReplicaContext.all_reduce`; none where the components of all replicas are
        at hand (in a ``merge_fn``). What is no value per replica does not travel: a hash of it
        does. Counterpart of ``tf.distribute.Strategy.reduce``.

        Examples
        --------
        >>> import mpi_replica as mr
        >>> strategy = mr.MPIStrategy(num_replicas=2)
        >>> ids = strategy.run(lambda: mr.get_replica_context().replica_id_in_sync_group)
        >>> strategy.reduce("SUM", ids, axis=None)
        np.int64(1)
        """
        require_cross_replica(self, "reduce")
        return cross_replica.reduce(
            self.engine, "reduce", reduce_op, value, axis, None, plain_is_component=self.is_default
        )

    def gather(self, value: Any, axis: int) -> Any:
        """Concatenate a value of all replicas along `axis`, and give it to every rank.

        Collective: all ranks call it, in the same order.

        Parameters
        ----------
        value : nest of PerReplica
            Components of one dimension or more; all dimensions but `axis` are equal.
        axis : int
            The dimension along which to gather.

        Returns
        -------
        nest of numpy.ndarray
            Fresh C-contiguous arrays, in the order of the replica ids. Arrays of torch, JAX and
            others as for `ReplicaContext.all_reduce`.

        Raises
        ------
        ValueError
            A leaf is not per replica, or has scalar components; `axis` is out of range.
        StructureMismatchError, CollectiveMismatchError, NotImplementedError, ContextError
            As for `ReplicaContext.all_gather`.

        Notes
        -----
        Messages as for `ReplicaContext.all_gather`. Counterpart of
        ``tf.distribute.Strategy.gather``.

        Examples
        --------
        >>> import numpy as np, mpi_replica as mr
        >>> strategy = mr.MPIStrategy(num_replicas=2)
        >>> rows = strategy.run(lambda: np.array([1, 2]))
        >>> strategy.gather(rows, axis=0)
        array([1, 2, 1, 2])
        """
        require_cross_replica(self, "gather")
        return cross_replica.gather(self.engine, value, axis, plain_is_component=self.is_default)

    def experimental_local_results(self, value: Any) -> tuple[Any, ...]:
        """Return the components of `value` that are here, as a tuple.

        No communication outside of a ``merge_fn``. There it looks at large arguments (see
        `ReplicaContext.merge_call`); and it is collective for what was made outside, as results of
        `run`, batches and variables that are synchronized on read. Of these a rank has the
        components of its own replicas, which stay the objects that they are (but for copies in C
        order, and constants of what torch records), and gets the others as `gather_objects` gives
        them: write into copies.

        Parameters
        ----------
        value : object
            A nest. Outside of a nest, a value that is not distributed comes back alone. What is
            mirrored comes for each replica, as one object.

        Returns
        -------
        tuple
            One entry for each replica of this rank; in a ``merge_fn`` one for every replica. For a
            nest: one nest each. Counterpart of
            ``tf.distribute.Strategy.experimental_local_results``.

        Raises
        ------
        ContextError
            A large argument of a ``merge_fn``, on several ranks, that was not looked at before it
            returned. In a ``merge_fn``, what was made outside of it, in a function that is called
            for each replica.
        TypeError
            In a ``merge_fn``, a component of what was made outside of it can't be pickled; on every
            rank.
        ValueError
            A variable of a strategy that has its replicas elsewhere.
        RankLostError
            It was made before a rank was lost, and replicas have moved since.

        Examples
        --------
        >>> import mpi_replica as mr
        >>> strategy = mr.MPIStrategy(num_replicas=2)
        >>> strategy.experimental_local_results(strategy.run(lambda: 7))
        (7, 7)
        """
        layout = self.engine.layout
        if not is_in_merge_fn():
            return local_results(value, layout)
        value = with_all_components(self.engine, value)
        return local_results(value, layout, range(layout.num_replicas))

    def name_of_variable(self, value: Any) -> str | None:
        """Return a name for a variable, the same on all ranks; None for anything else."""
        return value.identity if isinstance(value, Variable) else None
