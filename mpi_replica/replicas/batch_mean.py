"""Means over the rows of the global batch, of which replicas may have different numbers.

A mean of the replicas' means is another number: a row counts more where there are few.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..core import nest
from ..core.argument_checks import integer
from ..core.array_libraries import (
    by_numpy,
    divided,
    dtype_of,
    is_traced_by_jax,
    library_of,
    mean_of,
    recorded_by_torch,
    to_numpy,
)
from ..core.dtypes import accumulation, is_narrow_float
from ..core.exceptions import ContextError
from ..core.indexed_slices import IndexedSlices
from ..core.more_than_numbers import require_only_numbers
from ..core.options import CommunicationOptions, ReduceOp
from .replica_context import ReplicaContext, get_replica_context


def mean_over_global_batch(
    sums: Any, rows: float, options: CommunicationOptions | None = None
) -> Any:
    """Return means over all rows of the global batch; the same on every replica.

    Collective: every replica calls it, as ``ctx.all_reduce``.

    Parameters
    ----------
    sums : nest of array_like or IndexedSlices
        What this replica has added up over its own rows, such as losses and gradients; zeros where
        it has no rows.
    rows : int or float
        How many rows these are, or the sum of their weights; 0 or more. In a function that JAX
        traces it may be a traced number.
    options : CommunicationOptions, optional
        As for ``all_reduce``.

    Returns
    -------
    nest of numpy.ndarray
        The sums over all replicas, divided by the rows of all. Means of integers are float64. The
        sums must not overflow: sum up float16 in float32. Arrays of torch, JAX and others, and
        gradients of torch, as for ``all_reduce``. Where JAX traces a function, its traced `rows`
        are not looked at, and what is divided by no rows is NaN or infinite, and no error.

    Raises
    ------
    ValueError
        `rows` is negative or not finite, or 0 on all replicas; on every rank.
    TypeError
        `rows` is no real number; on every rank.
    ContextError
        Called in cross-replica context. Outside of any strategy it is for one replica.
    StructureMismatchError, CollectiveMismatchError
        As for ``all_reduce``.

    Notes
    -----
    Costs one ``all_reduce`` of `sums` and a number. In cross-replica context, for rows themselves,
    ``strategy.reduce("MEAN", value, axis=0)`` gives this mean.

    Examples
    --------
    >>> import mpi_replica as mr, numpy as np
    >>> rows_of = [np.array([1.0, 2.0, 3.0]), np.array([10.0])]
    >>> def step():
    ...     rows = rows_of[mr.get_replica_context().replica_id_in_sync_group]
    ...     return float(mr.mean_over_global_batch(rows.sum(), len(rows)))
    >>> mr.MPIStrategy(num_replicas=2).run(step)  # the mean of the means would be 6
    PerReplica:{
      0: 4.0,
      1: 4.0
    }
    """
    context = _replica("mean_over_global_batch")
    is_traced = is_traced_by_jax([rows, *nest.flatten(sums)[0]])
    error: Exception | None = None
    if isinstance(rows, (int, float, np.integer, np.floating)) and not isinstance(rows, bool):
        try:
            got = "" if 0 <= float(rows) < np.inf else repr(rows)
        except OverflowError:
            got = "an int beyond all floats"
        if got:
            error = ValueError(f"rows must be 0 or more, and finite, got {got}.")
    elif not is_traced or not _is_real_scalar(rows):
        error = TypeError(f"rows must be a number, got {rows!r}: how many rows `sums` are of.")
    if error is not None:
        if is_traced:
            raise error
        # the other replicas wait for it in theirs
        context.meet(context.strategy.engine.failed("all_reduce", options, error))
    if is_traced:
        # a float: JAX's integers have 32 bits, most of the time
        total = context.all_reduce(ReduceOp.SUM, {"rows": rows * 1.0, "sums": sums}, options)
        count = total["rows"]
        return nest.map_structure(lambda leaf: divided(leaf, count), total["sums"])
    # float64 holds the number of any rows; and replicas may count in ints and in floats
    total = context.all_reduce(ReduceOp.SUM, {"rows": np.float64(rows), "sums": sums}, options)
    count = float(total["rows"])
    if not count:
        raise ValueError(
            "mean_over_global_batch got no rows from any replica: there is no mean of nothing."
            " Leave out empty batches."
        )
    return nest.map_structure(lambda leaf: _divided(leaf, count), total["sums"])


def _is_real_scalar(value: Any) -> bool:
    """Returns whether an array, which JAX may trace, is one real number."""
    return getattr(value, "shape", None) == () and value.dtype.kind not in "bc"


def compute_average_loss(
    per_example_loss: Any, sample_weight: Any = None, global_batch_size: int | None = None
) -> Any:
    """Return this replica's part of the mean loss: the parts of all replicas add up to it.

    So do the gradients of it: ``ctx.all_reduce("SUM", gradients)`` gives those of the mean.
    Collective where `global_batch_size` is not given.

    Parameters
    ----------
    per_example_loss : array_like, shape (rows, ...)
        The losses of this replica's rows. torch and JAX compute with their own arrays: what they
        record, or trace, can be differentiated.
    sample_weight : array_like, optional
        Weights of the losses, broadcast from the left: a weight for each row, say.
    global_batch_size : int, optional
        The rows of all replicas together. Default: they are added up, by one ``all_reduce`` of a
        number. tf multiplies this replica's rows by the number of replicas instead, which is wrong
        for a last batch whose rows are spread unevenly.

    Returns
    -------
    numpy scalar, or torch.Tensor or jax.Array as the losses are
        The sum of the weighted losses over `global_batch_size`; in their dtype if that is a float,
        of integers in float64.

    Raises
    ------
    ValueError
        The losses are one number, most likely a mean over rows; no replica has rows,
        `global_batch_size` is not positive, or the weights do not fit; losses or weights are lists
        of unlike lengths.
    TypeError
        Losses or weights are no numbers, or have a mask or a unit; `global_batch_size` is no int;
        or it is not given, where JAX traces and losses have no values yet.
    ContextError
        Called in cross-replica context. Outside of any strategy it is for one replica.

    Notes
    -----
    Counterpart of ``tf.nn.compute_average_loss``.

    Examples
    --------
    >>> import mpi_replica as mr, numpy as np
    >>> float(mr.compute_average_loss(np.array([1.0, 2.0, 6.0])))
    3.0
    >>> float(mr.compute_average_loss(np.array([1.0, 2.0]), global_batch_size=4))
    0.75
    """
    context = _replica("compute_average_loss")
    shape = _shape("per_example_loss", per_example_loss)
    if not shape:
        raise ValueError(
            "compute_average_loss got one number as per_example_loss, not the loss of each row: a"
            " mean over rows would be divided by them again. Leave it unreduced"
            " (reduction='none' of torch's losses), or give [loss] for a single row."
        )
    rows = shape[0]
    weight_shape = () if sample_weight is None else _shape("sample_weight", sample_weight)
    lengths = zip(weight_shape, shape, strict=False)
    if len(weight_shape) > len(shape) or any(w not in (1, n) for w, n in lengths):
        raise ValueError(
            f"sample_weight has shape {tuple(weight_shape)}, and the losses {tuple(shape)}. Give a"
            " weight for each loss, or for each row."
        )
    if global_batch_size is None:
        _require_values(per_example_loss)
        rows = int(context.all_reduce(ReduceOp.SUM, np.int64(rows)))
    else:
        rows = integer("global_batch_size", global_batch_size)
    if rows < 1:
        raise ValueError(
            f"compute_average_loss got {rows} rows of all replicas together: there is no mean of"
            " nothing. Leave out empty batches."
        )
    mean = mean_of(per_example_loss, sample_weight, float(rows))
    if mean is not None:
        return mean
    losses = np.asarray(to_numpy(per_example_loss))
    dtype = losses.dtype
    is_float = dtype.kind in "fc" or is_narrow_float(dtype)
    weighted = losses.astype(accumulation(dtype, ReduceOp.MEAN)[0], copy=False)
    if isinstance(sample_weight, (int, float)):  # a number has no dtype that could be the result's
        weighted = weighted * sample_weight
    elif sample_weight is not None:
        weights = np.asarray(to_numpy(sample_weight))
        weighted = weighted * weights.reshape(weights.shape + (1,) * (losses.ndim - weights.ndim))
    average = _divided(weighted.sum(), float(rows))
    is_narrowed = is_float and (average.dtype.kind != "c" or dtype.kind == "c")
    return average.astype(dtype) if is_narrowed else average


def _shape(name: str, value: Any) -> tuple[int, ...]:
    """Returns the shape of an argument of `compute_average_loss`, where it is of numbers."""
    if library_of(value) is not None:
        return np.shape(value)
    try:
        require_only_numbers(value, takes_labels=True)
    except TypeError as error:
        raise TypeError(f"{name} of compute_average_loss: {error}") from None
    try:
        array = np.asarray(value)
    except ValueError as error:
        raise ValueError(
            f"{name} of compute_average_loss is no array: {error} Give rows of one length."
        ) from None
    if array.dtype.kind in "OSUMm" or array.dtype.type is np.void:
        raise TypeError(
            f"{name} of compute_average_loss must be numbers, got {value!r}. Give an array of them."
        )
    return array.shape


def _require_values(losses: Any) -> None:
    try:
        dtype_of(losses)
    except TypeError as error:
        raise TypeError(
            f"{error} Or give compute_average_loss the global_batch_size: then it calls none."
        ) from None


def _replica(name: str) -> ReplicaContext:
    context = get_replica_context()
    if context is None:
        raise ContextError(
            f"{name} was called in cross-replica context: it needs the rows of each replica. Call"
            " it in the function that is given to run."
        )
    return context


def _divided(total: Any, count: float) -> Any:
    """Returns `total` over `count`, in its dtype where that holds fractions; it may be changed."""
    if isinstance(total, IndexedSlices):
        return total.divided(lambda rows: _divided(rows, count))
    if recorded_by_torch([total]):  # numpy would end what is recorded
        return divided(total, count)
    if library_of(total) is not None:
        return by_numpy(lambda x: _divided(x if x.flags.writeable else x.copy(), count), total)
    dtype = total.dtype
    if dtype.kind in "biu":
        return total / count
    wide, _ = accumulation(dtype, ReduceOp.SUM)  # float16 and bfloat16 can't hold many counts
    with np.errstate(all="ignore"):  # an error on one rank alone
        if wide == dtype and isinstance(total, np.ndarray):
            return np.divide(total, dtype.type(count), out=total)
        return (total / wide.type(count)).astype(dtype)
