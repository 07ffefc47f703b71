"""What a replica calls: its id, and the collectives."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, cast

import numpy as np

from ..collectives.gather import AllGather
from ..collectives.merge import MergeCall, check_merge_call
from ..collectives.reduce import AllReduce
from ..collectives.sparse import reduce_values
from ..collectives.strategy_base import StrategyBase
from ..core import nest
from ..core.array_libraries import is_traced_by_jax, recorded_by_torch
from ..core.context import current_state, current_strategy, is_in_merge_fn, require_default
from ..core.exceptions import ContextError
from ..core.jax_state import require_version
from ..core.options import CommunicationOptions, ReduceOp
from ..core.values import DistributedValues, component_of
from .merge_fn import call_directly
from .replica import Replica


class ReplicaContext(Replica):
    """What a replica calls: its id, and the collectives.

    Inside the function given to ``strategy.run``, `get_replica_context` returns it.

    Parameters
    ----------
    strategy : Strategy
        The strategy whose replica this is.
    replica_id_in_sync_group : int or None
        The id of the replica, from 0 to ``num_replicas_in_sync - 1``.

    Raises
    ------
    TypeError
        `strategy` is no strategy.
    ValueError
        It is no such id.

    Notes
    -----
    Made by hand it is a context manager; its collectives, and components of variables synchronized
    on read, then need a strategy with one replica. Counterpart of ``tf.distribute.ReplicaContext``.

    Examples
    --------
    >>> import mpi_replica as mr
    >>> def step():
    ...     return mr.get_replica_context().all_reduce("sum", 1.0)
    >>> mr.MPIStrategy(num_replicas=2).run(step)
    PerReplica:{
      0: np.float64(2.0),
      1: np.float64(2.0)
    }
    """

    def all_reduce(
        self,
        reduce_op: ReduceOp | str,
        value: Any,
        options: CommunicationOptions | None = None,
        *,
        out: Any = None,
    ) -> Any:
        """Combine the values of all replicas and give every replica the result.

        Collective: every replica calls it, in the same order, with the same structure.

        Parameters
        ----------
        reduce_op : ReduceOp or str
            SUM, MEAN, MIN, MAX or PROD; strings in any case.
        value : nest of array_like or IndexedSlices
            Leaves of equal shape and dtype on every replica. A list is a nest: write
            ``np.array([1, 2])`` for an array. A `PerReplica` stands for this replica's component.
            Arrays of torch, JAX and others that know DLPack are taken as numpy's, and the results
            are of the same library. Where torch records a leaf, the result is part of its graph:
            what is differentiated is the sum of the losses of all replicas, and a way back is a
            collective call, which every replica makes. In functions that JAX traces (jit, grad,
            scan) values may be traced ones: the call is made where the function runs.
        options : CommunicationOptions, optional
            Fields that are set win over those of the strategy.
        out : nest of numpy.ndarray or torch.Tensor, optional
            Where the results go, so that nothing is allocated: a nest like `value`, of writable
            C-contiguous arrays, or tensors in the memory of the host, with the dtypes and shapes of
            the results. `value` itself for a reduction in place. Otherwise it shares no memory with
            it. On all replicas alike. Each replica needs one of its own: a global that serves where
            a rank hosts one replica is the same array for all replicas of a rank, which fill it one
            after the other.

        Returns
        -------
        nest of numpy.ndarray
            `out` where it is given. Otherwise fresh C-contiguous arrays; a 0-d result is a numpy
            scalar. The same bits on every replica. SUM and MEAN accumulate float16, bfloat16,
            float8_e4m3fn and float8_e5m2 in float32, in the order of a tree over the replicas: the
            same bits on every layout. MEAN of integers and bools is float64; integers wrap around,
            as numpy's do. For `IndexedSlices`: the slices of all replicas, one behind the other.

        Raises
        ------
        StructureMismatchError
            A leaf differs in path, shape or dtype between replicas; on every rank.
        CollectiveMismatchError
            Replicas are at different calls, or at one with another op; on every rank.
        TypeError
            A leaf can't be reduced: SUM of bool, MIN and MAX of long doubles, strings, dates,
            objects; it has a mask, a unit or labels, which would be lost; a leaf of `out` has
            another dtype than its result; on every rank.
        ValueError
            A leaf of `out` has another shape, is read-only, not C-contiguous, or shares memory with
            another leaf, or with the value, or another part of `out`, of another replica of the
            rank; on every rank.
        ContextError
            Not called by this replica.

        Notes
        -----
        One message of 256 bytes a rank where all leaves together have 232 bytes or less. A call
        that follows on the same call as before, as in a loop, has one message, as large as it
        needs: for up to 32 KiB of leaves, and 128 KiB of all ranks, of which there are 32 at most.
        Otherwise that of 256 bytes, one Allreduce for each 512 KiB of a large leaf (2 MiB in place,
        and where ranks share cores), and for each 1 MiB of leaves below 64 KiB; or for each
        ``bytes_per_pack``. Where every rank has one replica, a leaf of 512 KiB to 2 MiB takes one
        Allreduce, as does a smaller one into `out`, and large leaves that are C-contiguous are not
        copied. Sums of these narrow floats with more than 64 KiB as float32, divided by the number
        of replicas, are one Alltoallv and one Allgatherv for each 1 MiB of float32, as they are
        where every rank has one replica; smaller ones take one Allgatherv, or none where they
        travel with the first message. Results of one call may lie beside each other in one block of
        memory: a kept one keeps up to 64 KiB, or 16 MiB where it has 512 KiB and more. The memory
        of such a one comes back with its last view, and is used again: for 16 calls the strategy
        keeps it, so much that results and this together have at most 16 MiB more than the results
        that have ever lived at once.

        Reproducible sums that do not travel with the first message, and have more than 64 KiB,
        divided by the number of replicas, go through a window of shared memory where all ranks are
        on one host: one barrier for each 512 KiB, and one more; the first such call, which makes
        the window, sends one more message of 256 bytes and two Allgathervs. Between hosts that is
        one Alltoallv and one Allgatherv for each 1 MiB; smaller ones take one Allgatherv. Two ranks
        that each host a whole subtree of the order, as with one replica each, do one Allreduce for
        each 2 MiB (0.7 MB with several replicas on a rank), and each looks for NaN: the sum of two
        numbers has no order. Counterpart of ``tf.distribute.ReplicaContext.all_reduce``.

        Examples
        --------
        >>> import numpy as np, mpi_replica as mr
        >>> mr.get_replica_context().all_reduce("MEAN", {"a": np.array([1, 2])})
        {'a': array([1., 2.])}
        """
        if current_state() is not self._state or self._state is None:  # before a call of `_check`
            self._check("all_reduce", "strategy.reduce")
        try:
            leaves, structure, is_plain = nest.flatten_plain(value)
        except Exception as error:
            return self.meet(self._engine.failed("all_reduce", options, error))
        if not is_plain or not leaves:
            return self._reduce_components(reduce_op, leaves, structure, options, out)
        call = self._strategy.engine.make(
            "all_reduce",
            options,
            AllReduce,
            "all_reduce",
            reduce_op,
            [leaves],
            structure,
            out,
            is_plain,
        )
        return self.meet(call) if self._place is None else self._place.meet(call)

    def all_gather(self, value: Any, axis: int, options: CommunicationOptions | None = None) -> Any:
        """Concatenate the values of all replicas along `axis`, and give every replica the result.

        Collective: every replica calls it, in the same order, with the same structure.

        Parameters
        ----------
        value : nest of array_like
            Leaves of one dimension or more. All dimensions but `axis` are equal on every replica;
            that one may differ, and be 0. Every fixed-size dtype, and strings: the widest item
            size wins. Arrays of torch, JAX and others as for `all_reduce`; where JAX traces them,
            shapes are equal on all replicas.
        axis : int
            The dimension along which to gather; negative ones count from the end.
        options : CommunicationOptions, optional
            Fields that are set win over those of the strategy.

        Returns
        -------
        nest of numpy.ndarray
            Fresh C-contiguous arrays, in the order of the replica ids.

        Raises
        ------
        ValueError
            A leaf is a scalar, or `axis` is out of range; on every rank.
        StructureMismatchError, CollectiveMismatchError, ContextError
            As for `all_reduce`.
        TypeError
            `axis` is no int, or a leaf has objects, a mask, a unit or labels; on every rank.
        NotImplementedError
            A leaf is `IndexedSlices`.

        Notes
        -----
        One message of 256 bytes a rank where value and extents fit into it, or a larger one where
        it follows on the same call as before, as for `all_reduce`. Otherwise that, one Allgatherv
        for each leaf of 64 KiB and more, and one for each 1 MiB of smaller ones; one further
        message of 256 bytes where the results have more than 1 MiB. Along another axis than the
        first, one Allgatherv for each row of 256 KiB and more, and for each 1 MiB of shorter rows,
        which are copied to their place. Results as those of `all_reduce`. Counterpart of
        ``tf.distribute.ReplicaContext.all_gather``.

        Examples
        --------
        >>> import numpy as np, mpi_replica as mr
        >>> mr.get_replica_context().all_gather(np.array([1, 2]), axis=0)
        array([1, 2])
        """
        self._check("all_gather", "strategy.gather")

        engine, kind = self._engine, "all_gather"
        try:
            leaves, structure, is_plain = nest.flatten_plain(value)
            if not is_plain:
                leaves = self._components(leaves)
        except Exception as error:
            return self.meet(engine.failed(kind, options, error))
        if (not is_plain or not leaves) and is_traced_by_jax(leaves):
            return _jax_collectives().all_gather(self, axis, leaves, structure, options)
        if not is_plain and (recorded := recorded_by_torch(leaves)):
            return _torch_gradients().all_gather(self, axis, leaves, recorded, structure, options)
        call = engine.make(
            kind, options, AllGather, kind, axis, [leaves], structure, plain=is_plain
        )
        return self.meet(call)

    def merge_call(
        self,
        merge_fn: Callable[..., Any],
        args: tuple[Any, ...] | list[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Gather the arguments of all replicas and run `merge_fn` in cross-replica context.

        Collective: every replica calls it, with the same function.

        Parameters
        ----------
        merge_fn : callable
            Called as ``merge_fn(strategy, *args, **kwargs)``, once on each rank, with the same
            arguments everywhere: each leaf is a `PerReplica` with a component of every replica
            (``None`` from all replicas is None, a variable stays itself).
        args, kwargs : tuple or list, and mapping
            Nests of arrays and of any objects that can be pickled. Arrays of torch, JAX and others
            that know DLPack are of the same library in `merge_fn`, on the device of this rank's
            own argument. Those of numpy and torch are in C order there, on every rank, since the
            bits of a sum follow from the order, and each in memory of its own: what is written into
            one is in no other. On its own rank it is in the replica's argument when `merge_fn` has
            ended; where two have memory in common, as the last has it that was changed. So is it
            with a part of a file (`numpy.memmap`), a plain array in `merge_fn`. All else, also
            arrays of objects, of texts of any length, of other classes (masked, quantized,
            sparse ones), and inside of objects, is itself on its own rank: it keeps its order
            there, and shares what it shares. Elsewhere it is as pickle makes it. Where torch
            records a leaf, `merge_fn` gets constants: no gradient passes what it computes.

        Returns
        -------
        object
            What `merge_fn` returned; of each PerReplica in it, this replica's component. An
            argument that it returns unchanged is the replica's own, with its graph (a view of one
            may be of a copy). In a strategy all other arrays of numpy, but in `IndexedSlices`, come
            in C order: those in another one are copied, and so are arrays and `IndexedSlices` that
            are, or were given to, another replica's. Any other object, also an array of JAX, is one
            for all replicas of a rank: a replica copies what it changes, or donates to a function
            of JAX.

        Raises
        ------
        CollectiveMismatchError
            The replicas gave different functions, or are at different calls; on every rank. Also
            where what `merge_fn` returned differs between ranks, because it used something from
            outside: pass what differs through `args`. Of arrays above 64 KiB shape and dtype are
            compared, of objects that are no numbers, texts, bytes, dates, ranges or sets the class,
            of a PerReplica nothing.
        StructureMismatchError
            The nests of the arguments differ; on every rank.
        TypeError, ValueError
            `merge_fn` can't be called; `args` is no tuple or list; `kwargs` is no mapping; an
            object that is no array can't be pickled, or has 2 GiB or more as pickle writes it; of
            an array in another order than C's, not aligned, or in memory of another one,
            `merge_fn` has changed shape or dtype in place, or has written where it refuses that.

        Notes
        -----
        An exception in `merge_fn` is raised by ``strategy.run``, on every rank. One message of 256
        bytes a rank where all arguments fit into it, else one Allgatherv more. Array leaves of
        64 KiB and more are gathered when `merge_fn` looks at them; looking is a collective call
        too. The components of such a leaf share memory: one that is kept keeps those of all
        replicas, ``x.copy()`` does not. Counterpart of ``tf.distribute.ReplicaContext.merge_call``.

        Examples
        --------
        >>> import mpi_replica as mr
        >>> mr.get_replica_context().merge_call(lambda strategy, x: x + 1, args=(2,))
        3
        """
        self._check("merge_call", "the function itself, with the strategy as first argument")
        strategy = self._strategy
        named = {} if kwargs is None else kwargs

        if strategy.is_default and self._place is None:
            self._engine.check_thread("merge_call")
            check_merge_call(merge_fn, args, named)
            return call_directly(strategy, merge_fn, args, named)

        call = self._engine.make(
            "merge_call",
            None,
            MergeCall,
            merge_fn,
            args,
            named,
            strategy.name_of_variable,
            self.replica_id,
            self._engine,
        )
        return self.meet(call)

    def _reduce_components(
        self,
        reduce_op: ReduceOp | str,
        leaves: list[Any],
        structure: nest.Structure,
        options: CommunicationOptions | None,
        out: Any,
    ) -> Any:
        try:
            mine = self._components(leaves)
        except Exception as error:
            return self.meet(self._engine.failed("all_reduce", options, error))
        if is_traced_by_jax(mine):
            return _jax_collectives().all_reduce(self, reduce_op, mine, structure, options, out)
        if recorded := recorded_by_torch(mine):
            return _torch_gradients().all_reduce(
                self, reduce_op, mine, recorded, structure, options, out
            )
        return reduce_values(
            self._engine, self.meet, reduce_op, lambda: mine, structure, options, out
        )

    def _components(self, leaves: list[Any]) -> list[Any]:
        # Most have none, and some have hundreds of leaves.
        if not any([isinstance(leaf, DistributedValues) for leaf in leaves]):
            return leaves
        mine, number = self.replica_id, self.num_replicas_in_sync
        return [component_of(leaf, mine, number) for leaf in leaves]

    def _check(self, call: str, instead: str) -> None:
        """Raises unless this is the context of the code that runs."""
        state = current_state()
        if state is not None and state is self._state:
            return
        current = get_replica_context()
        if current is self:
            self.require_run(call)
            return
        if current is None:
            where = "a merge_fn" if is_in_merge_fn() else "scope()"
            raise ContextError(
                f"{call} was called in cross-replica context ({where}): it needs a replica. Use"
                f" {instead}."
            )
        if state is None or state.strategy is not self._strategy:
            raise ContextError(
                f"{call} of a ReplicaContext of {self._strategy!r} was called outside of its"
                " strategy.run (mismatching strategies). Get the context with"
                " mr.get_replica_context() where you use it."
            )
        raise ContextError(
            f"{call} of the ReplicaContext of replica {self._replica_id} was called in replica"
            f" {current._replica_id} (mismatching ReplicaContext). Get the context with"
            " mr.get_replica_context() where you use it."
        )


@functools.cache
def _torch_gradients() -> Any:
    """Returns the module, which imports torch: where torch records something, it is imported."""
    from . import torch_gradients

    return torch_gradients


@functools.cache
def _jax_collectives() -> Any:
    """Returns the module, which imports JAX: where JAX traces something, it is imported.

    Raises
    ------
    ImportError
        It does not know this version of JAX.
    """
    require_version()
    from . import jax_collectives

    return jax_collectives


class _DefaultReplicaContext(ReplicaContext):
    """That of the default strategy's only replica, where no other one is meant.

    What the threads of a step compute with a wrong id is as silent as a collective there.
    """

    @property
    def num_replicas_in_sync(self) -> int:
        require_default("num_replicas_in_sync")
        return super().num_replicas_in_sync

    @property
    def replica_id_in_sync_group(self) -> int:
        require_default("replica_id_in_sync_group")
        return super().replica_id_in_sync_group

    @property
    def rng(self) -> np.random.Generator:
        require_default("rng")
        return super().rng


@functools.cache
def _default_context() -> ReplicaContext:
    return _DefaultReplicaContext(cast("StrategyBase", current_strategy()), 0)


def get_replica_context() -> ReplicaContext | None:
    """Return the context of the current replica; None in cross-replica context.

    Returns
    -------
    ReplicaContext or None
        Outside of any strategy that of the default strategy's only replica. In a thread, greenlet
        or new ``contextvars.Context`` that a step starts, nothing of it can be used (calls, id,
        rng, number of replicas): hand on what the step has got. In a copy of the step's own context
        it is the replica's, but for calls in another thread.

    Notes
    -----
    No communication. Counterpart of ``tf.distribute.get_replica_context``.

    Examples
    --------
    >>> strategy = mr.MPIStrategy(num_replicas=2)
    >>> strategy.run(lambda: mr.get_replica_context().num_replicas_in_sync)
    PerReplica:{
      0: 2,
      1: 2
    }
    >>> with strategy.scope():
    ...     mr.get_replica_context() is None
    True
    """
    state = current_state()
    if state is None:
        return _default_context()
    return cast("ReplicaContext | None", state.replica_context)


# What torch.compile looks for in what it is not to compile, and says in its error, where a function
# is to be one graph.
for _call in (
    get_replica_context,
    ReplicaContext.all_reduce,
    ReplicaContext.all_gather,
    ReplicaContext.merge_call,
):
    vars(_call)["_torchdynamo_disable"] = True
    vars(_call)["_torchdynamo_disable_msg"] = (
        "a collective of mpi_replica can't be part of a compiled graph: leave fullgraph=True away,"
        " or compile the functions between the collectives"
    )
