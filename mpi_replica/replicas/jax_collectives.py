"""Collectives in functions that JAX traces: compiled, differentiated, or mapped over a batch.

What is differentiated is the sum of the losses of all replicas, as in tf: the way back of a sum is
the sum of what comes back on all replicas, of a mean their mean, of a gather the sum of it, cut to
this replica's rows. So a way back is a collective call like any other.

Imported where JAX traces a leaf, and so has been imported.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np

from ..collectives.agreement.call import Call
from ..collectives.agreement.site import CallSite, site_in_jax
from ..collectives.gather import AllGather
from ..collectives.reduce import AllReduce, none_error
from ..collectives.sparse import has_slices
from ..core import nest
from ..core.argument_checks import integer
from ..core.array_ways import Array
from ..core.dtypes import accumulation, as_array
from ..core.exceptions import ContextError
from ..core.jax_internals import Forms, bind
from ..core.options import CommunicationOptions, ReduceOp
from ..core.ufuncs import EXTREMES
from .jax_executions import execution_under_way, replica_here
from .replica import Replica

_ADVICE = (
    "A replica takes part in the way back of a collective where its own loss depends on a result of"
    " it: where it does not, add `+ 0 * y.sum()` of such a result y to the loss, and differentiate"
    " the same functions on every replica"
)


def all_reduce(
    context: Replica,
    reduce_op: ReduceOp | str,
    leaves: Sequence[Any],
    structure: nest.Structure,
    options: CommunicationOptions | None,
    out: Any,
) -> Any:
    """Returns ``all_reduce`` of a nest of which JAX traces some leaves."""
    op = ReduceOp.of(reduce_op)
    if out is not None:
        raise TypeError(
            "all_reduce with out= got values that JAX traces: they have no memory that could be"
            " written. Leave out= away."
        )
    if has_slices([leaves]):
        raise TypeError(
            "all_reduce got IndexedSlices beside values that JAX traces. Reduce them in a call of"
            " their own, outside of the traced function."
        )
    return _traced("all_reduce", op, context, leaves, structure, options)


def all_gather(
    context: Replica,
    axis: int,
    leaves: Sequence[Any],
    structure: nest.Structure,
    options: CommunicationOptions | None,
) -> Any:
    """Returns ``all_gather`` of a nest of which JAX traces some leaves."""
    axis = integer("axis", axis)
    return _traced("all_gather", axis, context, leaves, structure, options)


def _traced(
    kind: str,
    how: ReduceOp | int,
    context: Replica,
    leaves: Sequence[Any],
    structure: nest.Structure,
    options: CommunicationOptions | None,
) -> Any:
    paths = nest.leaf_paths(structure)
    values = [_value(kind, how, path, leaf) for path, leaf in zip(paths, leaves, strict=True)]
    call = TracedCollective(
        kind, how, site_in_jax(), options, structure, paths, context.num_replicas_in_sync
    )
    return nest.unflatten(structure, bind(call, values))


def _array_of_jax(array: Array) -> Any:
    value = jnp.asarray(array)
    if value.dtype != array.dtype and array.dtype.kind in "iu":
        narrow = array.astype(value.dtype)
        if not np.array_equal(narrow, array):
            raise TypeError(
                f"its values do not fit into {value.dtype}, and JAX computes without 64 bits. Pass"
                " floats, or write jax.config.update('jax_enable_x64', True)."
            )
    return value


def _value(kind: str, how: ReduceOp | int, path: str, leaf: Any) -> Any:
    """Returns a leaf as an array of JAX, checked."""
    if leaf is None and isinstance(how, ReduceOp):
        raise none_error(kind, path, how)
    try:
        value = leaf if isinstance(leaf, jax.Array) else _array_of_jax(as_array(leaf))
        if not isinstance(value.dtype, np.dtype):
            raise TypeError(
                f"numpy has no dtype {value.dtype}. Of random keys pass jax.random.key_data(keys)."
            )
        if isinstance(how, ReduceOp):
            accumulation(value.dtype, how)
    except TypeError as error:
        raise TypeError(f"{kind} of value{path}: {error}") from None
    if not isinstance(how, ReduceOp):
        if not value.ndim:
            raise ValueError(
                f"{kind} got a scalar for value{path}. Only arrays can be concatenated: write"
                " x[None]."
            )
        if not -value.ndim <= how < value.ndim:
            raise ValueError(
                f"axis {how} is out of range for value{path} of shape {value.shape}. It must be"
                f" from {-value.ndim} to {value.ndim - 1}."
            )
    return value


@dataclasses.dataclass(frozen=True, eq=False)
class TracedCollective:
    """A collective call of a traced function: what all replicas that run it have in common.

    Parameters
    ----------
    kind : str
        The name of the call.
    how : ReduceOp or int
        How leaves are reduced; or the axis along which they are gathered.
    site : CallSite
        Where it stands inside of the traced function.
    options : CommunicationOptions, optional
    structure : nest.Structure
    paths : sequence of str
        Where the leaves are in it.
    num_replicas : int
        For how many it is traced.
    cuts : bool
        Whether it goes back through a gather: a sum, of which each replica gets its own rows.
    through : str
        The call that it goes back through.
    words : str
        What else must be the same.
    """

    kind: str
    how: ReduceOp | int
    site: CallSite
    options: CommunicationOptions | None
    structure: nest.Structure
    paths: Sequence[str]
    num_replicas: int
    cuts: bool = False
    through: str = ""
    words: str = ""

    def forms(self, values: Forms) -> list[tuple[tuple[int, ...], np.dtype[Any]]]:
        return [self._form(value.shape, value.dtype) for value in values]

    def _form(
        self, shape: tuple[int, ...], dtype: np.dtype[Any]
    ) -> tuple[tuple[int, ...], np.dtype[Any]]:
        if isinstance(self.how, ReduceOp):
            return shape, jax.dtypes.canonicalize_dtype(accumulation(dtype, self.how)[1])
        extents, count = list(shape), self.num_replicas
        extents[self.how] = extents[self.how] // count if self.cuts else extents[self.how] * count
        return tuple(extents), dtype

    def perform(self, arrays: Sequence[Array]) -> list[Array]:
        context = replica_here()
        return self.made_by(context, arrays, None, context.meet)

    def perform_compiled(self, arrays: Sequence[Array]) -> list[Array]:
        execution = execution_under_way()
        return execution.perform(
            lambda: self.made_by(
                execution.context, arrays, execution.site, execution.context.meet_elsewhere
            )
        )

    def made_by(
        self,
        context: Replica,
        arrays: Sequence[Array],
        outer: CallSite | None,
        meet: Callable[[Call], Any],
    ) -> list[Array]:
        """Returns the results of the call, made by a replica.

        Parameters
        ----------
        context : Replica
        arrays : sequence of numpy.ndarray
        outer : CallSite, optional
            Where the function runs in which it stands. Default: here.
        meet : callable
            How the replica waits for the others.
        """
        count = self.num_replicas
        if context.num_replicas_in_sync != count:
            advice = "JAX has kept the function. Compile one for each strategy."
            if self.through:
                advice = (
                    "Differentiate in the function that is given to strategy.run, and call there"
                    " what jax.vjp has returned."
                )
            raise ContextError(
                f"{self.kind} at {self.site.line} was traced for {count} replicas, and runs where"
                f" there are {context.num_replicas_in_sync}. {advice}"
            )
        call = context.strategy.engine.make(self.kind, self.options, self._call, arrays, outer)
        call.through, call.advice = self.through, _ADVICE if self.through else ""
        results: list[Array] = meet(call)
        if isinstance(self.how, ReduceOp) or not self.cuts:
            return results
        mine = context.replica_id
        return [np.split(result, count, self.how)[mine] for result in results]

    def _call(
        self,
        here: CallSite,
        options: CommunicationOptions,
        arrays: Sequence[Array],
        outer: CallSite | None,
    ) -> Call:
        site = self.site.inside_of(outer or here)
        if isinstance(self.how, ReduceOp) or self.cuts:
            op = self.how if isinstance(self.how, ReduceOp) else ReduceOp.SUM
            return AllReduce(
                site,
                options,
                self.kind,
                op,
                [arrays],
                self.structure,
                plain=nest.ARRAYS,
                detail=self.words,
                paths=self.paths,
            )
        extents = ", ".join([str(array.shape[self.how]) for array in arrays])
        return AllGather(
            site,
            options,
            self.kind,
            self.how,
            [arrays],
            self.structure,
            f"axis={self.how}, traced for {extents} rows{self.words}",
            self.paths,
        )

    def stacked(self) -> Self:
        if isinstance(self.how, ReduceOp) or self.how < 0:
            return self
        return dataclasses.replace(self, how=self.how + 1)

    def transposed(self) -> Self:
        cuts = not isinstance(self.how, ReduceOp) and not self.cuts
        kind, through = f"gradient of {self.kind}", f"the call at {self.site.line}"
        return dataclasses.replace(self, kind=kind, cuts=cuts, through=through, words="")

    def tangents(
        self, values: Sequence[Any], results: Sequence[Any], tangents: dict[int, Any]
    ) -> dict[int, Any]:
        places, how = list(tangents), self.how
        given = list(tangents.values())
        if how is ReduceOp.PROD:
            gather = self._of(places, 0, " to differentiate their product")
            factors = tuple([values[place][None] for place in places])
            _, found = jax.jvp(
                lambda *rows: [jnp.prod(stack, 0) for stack in bind(gather, rows)],
                factors,
                tuple([tangent[None] for tangent in given]),
            )
            return dict(zip(places, found, strict=True))
        if how in EXTREMES:
            given = self._shares(places, values, results, given)
            how = ReduceOp.SUM
        found = bind(self._of(places, how, "tangents"), given)
        return dict(zip(places, found, strict=True))

    def _shares(
        self, places: Sequence[int], values: Sequence[Any], results: Sequence[Any], given: list[Any]
    ) -> list[Any]:
        """Returns tangents, weighed: ties get equal parts, as those of ``amax``."""
        pairs = [(values[place], results[place]) for place in places]
        are_mine = [(x == y) | (jnp.isnan(x) & jnp.isnan(y)) for x, y in pairs]
        numbers = [mine.astype(jnp.int32) for mine in are_mine]
        counts = bind(self._of(places, ReduceOp.SUM, "how many have the extremum"), numbers)
        # Narrow floats can't count that far, and JAX divides integers in 32 bits.
        wide = [jnp.promote_types(tangent.dtype, jnp.float32) for tangent in given]
        return [
            tangent * (number.astype(dtype) / count).astype(tangent.dtype)
            for tangent, number, count, dtype in zip(given, numbers, counts, wide, strict=True)
        ]

    def _of(self, places: Sequence[int], how: ReduceOp | int, words: str) -> Self:
        """Returns a call of the leaves at some places."""
        paths = [self.paths[place] for place in places]
        return dataclasses.replace(self, how=how, paths=paths, words=words)
