"""What gives each replica values and input of its own, as methods of a strategy.

Input is imported where it is asked for: programs that have their own save 7 ms.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..collectives.barrier import BarrierCall
from ..collectives.strategy_base import StrategyBase
from ..core import nest
from ..core.context import called_for, require_cross_replica
from ..core.options import InputOptions
from ..core.values import per_replica
from ..replicas.returned_values import joined_on_all_ranks

if TYPE_CHECKING:
    from ..data import DistributedDataset, InputContext, ValueContext


class Distribution(StrategyBase):
    """The part of a strategy that gives replicas their parts."""

    def experimental_distribute_values_from_function(
        self, value_fn: Callable[[ValueContext], Any]
    ) -> Any:
        """Return a nest of `PerReplica` made of what `value_fn` gives for each local replica.

        Collective.

        Parameters
        ----------
        value_fn : callable
            Called with a `ValueContext` for each replica of this rank; for replica 0 on a spare,
            whose `PerReplica` have no components.

        Returns
        -------
        nest of PerReplica
            The values themselves, no copies; of a `PerReplica` the component, and of a `Mirrored`
            what is in it.

        Raises
        ------
        StructureMismatchError
            It returned different nests.
        TypeError
            `value_fn` is not callable.
        ContextError
            It has drawn from ``strategy.rng``, or has made a call of the strategy that stands above
            the replicas, as ``reduce``, ``run`` and an assignment do.
        Exception
            What `value_fn` raised. All these on all ranks.

        Notes
        -----
        One message of 256 bytes a rank, which says that it raised nowhere. Counterpart of
        ``tf.distribute.Strategy.experimental_distribute_values_from_function``.

        Examples
        --------
        >>> import mpi_replica as mr
        >>> strategy = mr.MPIStrategy(num_replicas=2)
        >>> strategy.experimental_distribute_values_from_function(
        ...     lambda context: 10 * context.replica_id_in_sync_group)
        PerReplica:{
          0: 0,
          1: 10
        }
        """
        layout = self.engine.layout
        ids, number = layout.local_replica_ids, layout.num_replicas
        kind = "experimental_distribute_values_from_function"
        since = self.engine.agreement.num_raised
        try:
            from ..data import ValueContext

            if not callable(value_fn):
                raise TypeError(
                    f"value_fn must be callable, got {value_fn!r}. It gets a mr.ValueContext."
                )
            what = f"the value_fn of {kind}"
            rows = []
            for i in ids or (0,):
                with called_for(self.engine, i, what, "that"):
                    rows.append(value_fn(ValueContext(i, number)))
            if not ids:
                return nest.map_structure(lambda _: per_replica([], layout), rows[0])
            return joined_on_all_ranks(self, kind, rows, always_wrap=True)
        except Exception as error:
            self.engine.share(kind, error, since)

    def experimental_distribute_dataset(
        self, dataset: Any, options: InputOptions | None = None
    ) -> DistributedDataset:
        """Cut the global batches of `dataset` into a part for each replica.

        Parameters
        ----------
        dataset : mr.data.Dataset or iterable of batches
            The same on every rank. A global batch of n rows is cut into chunks of ``ceil(n / R)``;
            trailing replicas may get empty arrays. Those of torch, JAX and others stay theirs.
            Of batches in a list, and of those that are views of other arrays, no row of numpy can
            be written into: the next epoch would have it, too.
        options : InputOptions, optional
            How many steps are made ahead. ``PER_REPLICA`` is a `NotImplementedError`, as in tf.

        Returns
        -------
        DistributedDataset
            Its iterators give nests of `PerReplica`. All ranks end at the same step. Counterpart
            of ``tf.distribute.Strategy.experimental_distribute_dataset``.

        Raises
        ------
        ValueError
            The dataset is not batched; or it is an iterator, and steps are to be made ahead.
        TypeError
            It can't be iterated, or is distributed already; it is a dict or a tuple, whose items
            are no batches; `options` are none.
        NotImplementedError
            The replication mode is ``PER_REPLICA``.
        ContextError
            Called in a replica.

        Notes
        -----
        No communication; an error is raised here, and on the other ranks at their next collective
        call. A rank reads the rows of its own replicas only, where rows are reached by
        position; and the first row of a batch of which one of them gets none.

        Examples
        --------
        >>> import mpi_replica as mr
        >>> strategy = mr.MPIStrategy(num_replicas=2)
        >>> dataset = mr.data.Dataset.range(4).batch(4)
        >>> next(iter(strategy.experimental_distribute_dataset(dataset)))
        PerReplica:{
          0: array([0, 1]),
          1: array([2, 3])
        }
        """
        kind = "experimental_distribute_dataset"
        require_cross_replica(self, kind)
        since = self.engine.agreement.num_raised
        try:
            from ..data import DistributedDataset, DistributedIterator
            from ..data.inputs import Input

            if isinstance(dataset, (DistributedDataset, DistributedIterator)):
                raise TypeError(
                    f"{kind} got a {type(dataset).__name__}, which is distributed already: iterate"
                    " it."
                )
            made_of = Input.of_global_batches(self.engine, dataset, options)
            return DistributedDataset(self.engine, made_of)
        except Exception as error:
            self.engine.share(kind, error, since)

    def distribute_datasets_from_function(
        self, dataset_fn: Callable[[InputContext], Any], options: InputOptions | None = None
    ) -> DistributedDataset:
        """Make a dataset on each rank with `dataset_fn`, whose batches go to replicas as they are.

        Collective.

        Parameters
        ----------
        dataset_fn : callable
            Called with an `InputContext`: once for each rank, or under ``PER_REPLICA`` once for
            each replica. Gives a `mr.data.Dataset` or an iterable of batches of per-replica size.
        options : InputOptions, optional
            The replication mode, and how many steps are made ahead.

        Returns
        -------
        DistributedDataset
            Each step takes one batch for each local replica. All ranks end at the same step:
            replicas whose input has ended get empty arrays. Where a dataset has
            ``batch(..., drop_remainder=True)``, all end before a step in which a replica would get
            none of it. Counterpart of
            ``tf.distribute.Strategy.distribute_datasets_from_function``.

        Raises
        ------
        Exception
            What `dataset_fn` raised. All errors are raised on all ranks.
        TypeError, ValueError
            `dataset_fn` is not callable, or gives what can't be iterated; `options` are none; it
            gives an iterator, and steps are to be made ahead, or two pipelines of a rank get the
            same one.
        ContextError
            Called in a replica. Or `dataset_fn` has drawn from ``strategy.rng`` under
            ``PER_REPLICA``, or has made a call of the strategy that stands above the replicas, as
            ``reduce`` and ``run`` do.

        Notes
        -----
        One message of 256 bytes a rank, which says that `dataset_fn` raised nowhere.
        ``dataset.shard(context.num_input_pipelines, context.input_pipeline_id)`` gives each
        pipeline rows of its own. A checkpoint of mid-epoch goes on only where as many replicas
        take of each. Where a rank is lost, another one calls `dataset_fn` again for the pipelines
        that it takes over: a shuffled dataset that `dataset_fn` itself iterates, instead of giving
        it, is then in its next epoch.

        Examples
        --------
        >>> def dataset_fn(context):
        ...     return mr.data.Dataset.range(4).batch(context.get_per_replica_batch_size(4))
        >>> strategy = mr.MPIStrategy(num_replicas=2)
        >>> next(iter(strategy.distribute_datasets_from_function(dataset_fn)))
        PerReplica:{
          0: array([0, 1]),
          1: array([2, 3])
        }
        """
        kind = "distribute_datasets_from_function"
        require_cross_replica(self, kind)
        since = self.engine.agreement.num_raised
        try:
            from ..data import DistributedDataset
            from ..data.inputs import Input

            made_of = Input.from_function(self.engine, dataset_fn, options)
            made = DistributedDataset(self.engine, made_of)
        except Exception as error:
            self.engine.share(kind, error, since)
        if not self.engine.is_spare:
            self.engine.cross_replica(self.engine.make(kind, None, BarrierCall, kind))
        return made
