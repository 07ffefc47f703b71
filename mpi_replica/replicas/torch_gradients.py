"""Gradients through collectives, for torch.

What is differentiated is the sum of the losses of all replicas, as in tf: the way back of a sum is
the sum of what comes back on all replicas, of a mean their mean, of a gather the sum of it, cut to
this replica's rows. So a way back is a collective call like any other: agreed, with its lines.

Imported where torch records a leaf, and so has been imported.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from torch.autograd.function import Function, once_differentiable

from ..collectives.agreement.site import CallSite
from ..collectives.engine import failing
from ..collectives.gather import AllGather
from ..collectives.reduce import AllReduce
from ..collectives.sparse import has_slices
from ..collectives.strategy_base import StrategyBase
from ..core import nest
from ..core.array_libraries import recorded_by_torch
from ..core.context import current_state
from ..core.exceptions import ContextError
from ..core.options import CommunicationOptions, ReduceOp
from .replica import Replica

_ADVICE = (
    "A replica takes part in the way back of a collective where its own loss depends on a result of"
    " it: where it does not, add `+ 0 * y.sum()` of such a result y to the loss, and make the same"
    " backward passes on every replica"
)
_SHOWN = 3


def all_reduce(
    context: Replica,
    reduce_op: ReduceOp | str,
    leaves: Sequence[Any],
    structure: nest.Structure,
    options: CommunicationOptions | None,
    out: Any,
) -> Any:
    """Returns ``all_reduce`` of a nest in which torch records some of the leaves."""
    owner = _Owner(context.strategy, context.replica_id_in_sync_group, "all_reduce", options)
    try:
        op = ReduceOp.of(reduce_op)
        if out is not None:
            raise TypeError(
                "all_reduce with out= got a value that needs gradients: what is written into memory"
                " that is there is no part of torch's graph. Leave out= away, call it under"
                " torch.no_grad(), or detach() the value."
            )
    except Exception as error:
        engine = context.strategy.engine
        return context.meet(engine.make("all_reduce", options, failing, error))
    return nest.unflatten(structure, _Pass(owner, op, leaves, structure).results())


def all_gather(
    context: Replica,
    axis: int,
    leaves: Sequence[Any],
    structure: nest.Structure,
    options: CommunicationOptions | None,
) -> Any:
    """Returns ``all_gather`` of a nest in which torch records some of the leaves."""
    owner = _Owner(context.strategy, context.replica_id_in_sync_group, "all_gather", options)
    return nest.unflatten(structure, _Pass(owner, axis, leaves, structure).results())


class _Owner(NamedTuple):
    """What a collective call is, and whose."""

    strategy: StrategyBase
    replica_id: int
    kind: str
    options: CommunicationOptions | None
    #: The call that it goes back through: its line, which one it was in its run, and that run.
    through: tuple[str, int, int] | None = None

    def back(self, line: str, context: Replica) -> Self:
        """Returns what goes back through this call, which was made at a line."""
        context.num_recorded += 1
        through = line, context.num_recorded, self._run
        return self._replace(kind=f"gradient of {self.kind}", through=through)

    @property
    def words(self) -> str:
        """Which call it goes back through: what no other one on the same line has."""
        if self.through is None:
            return ""
        line, number, run = self.through
        # Counted from now, so that steps which are alike have calls that are alike.
        runs = self._run - run
        return f"call {number} at {line}" + (f", {runs} runs before" if runs else "")

    @property
    def _run(self) -> int:
        return self.strategy.engine.agreement.last_run_ordinal

    def context(self) -> Replica:
        """Returns the context of the replica, where the code that calls is part of it.

        Raises
        ------
        ContextError
            It is not.
        """
        state = current_state()
        context = None if state is None else state.replica_context
        if isinstance(context, Replica) and context.strategy is self.strategy:
            if context.replica_id_in_sync_group == self.replica_id:
                return context
            where = f"by replica {context.replica_id_in_sync_group}"
        elif self.strategy.num_replicas_in_sync == 1:
            return Replica(self.strategy, 0)
        else:
            where = "outside of its strategy.run"
        raise ContextError(
            f"the {self.kind} ({self.words}) of replica {self.replica_id} was called for {where}:"
            " it is a collective call. Make the backward pass in the function that is given to"
            " strategy.run, in each replica that of its own loss."
        )


class _Pass:
    """A nest that goes through a collective; also gradients, on their way back through one.

    Parameters
    ----------
    owner : _Owner
    how : ReduceOp or int
        How leaves are reduced; or the axis along which they are gathered.
    leaves : sequence
    structure : nest.Structure, optional
        Where these are. Default: in a list, where they are several.
    words : str
        What else must be the same.
    """

    def __init__(
        self,
        owner: _Owner,
        how: ReduceOp | int,
        leaves: Sequence[Any],
        structure: nest.Structure | None = None,
        words: str = "",
    ) -> None:
        self._origin = owner
        self.how = how
        self._leaves = leaves
        if structure is None:
            structure = nest.flatten([0] * len(leaves) if len(leaves) > 1 else 0)[1]
        self._structure = structure
        self._paths = nest.leaf_paths(self._structure)
        self._recorded = recorded_by_torch(leaves)
        self._words = words

    def results(self) -> list[Any]:
        """Returns the results; those of leaves that torch records are part of its graph."""
        if not self._recorded:
            return self._perform(self._leaves)
        function = _AllGather if isinstance(self.how, int) else _REDUCTIONS[self.how]
        outputs = function.apply(self, *[self._leaves[i] for i in self._recorded])
        for index, output in zip(self._recorded, outputs, strict=True):
            self._results[index] = output
        return self._results

    def forward(self, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Performs the call; `tensors` are the leaves that torch records, as plain ones."""
        leaves = list(self._leaves)
        for index, tensor in zip(self._recorded, tensors, strict=True):
            leaves[index] = tensor
        self._results = self._perform(leaves)
        return tuple([self._results[index] for index in self._recorded])

    def alike(self, how: ReduceOp | int, tensors: Sequence[torch.Tensor]) -> list[Any]:
        """Returns the same of other tensors: tangents, or those that `vmap` has stacked."""
        return _Pass(self._origin, how, tensors, words=self._words).results()

    def back(self, op: ReduceOp, tensors: Sequence[torch.Tensor]) -> list[Any]:
        """Returns the tensors, which go back, combined over all replicas."""
        return _Pass(self.way_back, op, tensors).results()

    def used(self, gradients: Sequence[Any]) -> list[int]:
        """Returns which of the results some replica uses, where this one has these gradients."""
        if len(gradients) == 1:
            return [0]
        mask = np.array([gradient is not None for gradient in gradients], np.uint8)
        asking = _Pass(self.way_back, ReduceOp.MAX, [mask], words="which results are used")
        return [int(index) for index in np.flatnonzero(asking.results()[0])]

    def start(self, position: int) -> int:
        """Returns where this replica's rows begin in a result that was gathered."""
        return int(self._blocks[self._recorded[position]].offsets[self._origin.replica_id])

    def _perform(self, leaves: Sequence[Any]) -> list[Any]:
        owner = self._origin
        context = owner.context()
        engine = owner.strategy.engine
        words = ", ".join(filter(None, [owner.words, self._words, self._recorded_in_words()]))
        if isinstance(self.how, int):
            words = f"axis={self.how}, {words}"
        call = engine.make(owner.kind, owner.options, self._call, leaves, words)
        if owner.through is not None:
            call.advice = _ADVICE
        results: list[Any] = context.meet(call)
        if self._recorded:
            self.way_back = owner.back(call.site.line, context)
            self._blocks = call.gathering.leaves if isinstance(call, AllGather) else []
        return results

    def _call(
        self, site: CallSite, options: CommunicationOptions, leaves: Sequence[Any], words: str
    ) -> AllReduce | AllGather:
        structure, kind = self._structure, self._origin.kind
        if isinstance(self.how, int):
            return AllGather(site, options, kind, self.how, [leaves], structure, words, self._paths)
        if has_slices([leaves]):
            raise TypeError(
                f"{kind} got IndexedSlices beside leaves that need gradients. Reduce them in a call"
                " of their own."
            )
        return AllReduce(
            site,
            options,
            kind,
            self.how,
            [leaves],
            structure,
            detail=words,
            paths=self._paths,
        )

    def _recorded_in_words(self) -> str:
        """Returns of which leaves torch records what becomes: replicas must have the same."""
        recorded = self._recorded
        if not recorded:
            return ""
        if len(recorded) == len(self._leaves):
            return "all with gradients"
        shown = [f"value{self._paths[index]}" for index in recorded[:_SHOWN]]
        more = "" if len(recorded) <= _SHOWN else f" and {recorded[_SHOWN:]}"
        return f"gradients of {', '.join(shown)}{more}"


class _Collective(Function):
    """What the ways through collectives have in common; a `_Pass` says what is to be done."""

    @staticmethod
    def forward(through: _Pass, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Performs the call."""
        return through.forward(tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
        """Keeps what the way back needs."""
        ctx.through, *tensors = inputs
        ctx.set_materialize_grads(False)
        ctx.likes = [(t.shape, t.dtype, t.device) for t in output]
        ctx.shapes = [t.shape for t in tensors]


def _wanted(ctx: Any, gradients: Sequence[torch.Tensor | None]) -> dict[int, torch.Tensor]:
    """Returns the gradients of the results that some replica uses: zeros where not this one."""
    wanted = {}
    for index in ctx.through.used(gradients):
        gradient = gradients[index]
        if gradient is None:
            shape, dtype, device = ctx.likes[index]
            gradient = torch.zeros(shape, dtype=dtype, device=device)
        wanted[index] = gradient
    return wanted


def _as_arguments(found: dict[int, Any], count: int) -> tuple[Any, ...]:
    """Returns what `backward` returns: a gradient for each argument, the first of which is none."""
    return None, *[found.get(index) for index in range(count)]


def _tangents(ctx: Any, tangents: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
    """Returns the tangents of all inputs: the same are sent on all replicas."""
    return [
        torch.zeros(shape, dtype=dtype, device=device) if tangent is None else tangent
        for tangent, shape, (_, dtype, device) in zip(tangents, ctx.shapes, ctx.likes, strict=True)
    ]


class _AllReduce(_Collective):
    """SUM and MEAN: what goes back goes the same way."""

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[Any, ...]:
        """Returns what goes back, combined over the replicas as the values were."""
        wanted = _wanted(ctx, gradients)
        through = ctx.through
        totals = through.back(through.how, list(wanted.values()))
        return _as_arguments(dict(zip(wanted, totals, strict=True)), len(gradients))

    @staticmethod
    def jvp(ctx: Any, _: None, *tangents: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
        """Returns the tangents, combined as the values were."""
        through = ctx.through
        return tuple(through.alike(through.how, _tangents(ctx, tangents)))

    @staticmethod
    def vmap(_: Any, in_dims: tuple[Any, ...], through: _Pass, *tensors: torch.Tensor) -> Any:
        """Returns the results of stacked values: items are combined one by one."""
        return tuple(through.alike(through.how, tensors)), in_dims[1:]


class _WeighedReduce(_AllReduce):
    """Reductions whose derivative by a replica's value depends on the values of all."""

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
        """Keeps what the way back needs."""
        _Collective.setup_context(ctx, inputs, output)
        ctx.save_for_backward(*inputs[1:], *output)
        ctx.save_for_forward(*inputs[1:], *output)


class _AllReduceExtreme(_WeighedReduce):
    """MIN and MAX: all goes to who has the extremum; ties get equal parts, as those of amax."""

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[Any, ...]:
        """Returns what goes back, where this replica has the extremum."""
        wanted = _wanted(ctx, gradients)
        saved, count = ctx.saved_tensors, len(gradients)
        are_mine = [_is_same(saved[i], saved[count + i]) for i in wanted]
        numbers = [mine.to(torch.int32) for mine in are_mine]
        found = ctx.through.back(ReduceOp.SUM, [*wanted.values(), *numbers])
        totals, owners = found[: len(wanted)], found[len(wanted) :]
        parts = {
            i: total * (mine / number).to(total.dtype)
            for i, total, mine, number in zip(wanted, totals, numbers, owners, strict=True)
        }
        return _as_arguments(parts, count)

    @staticmethod
    def jvp(ctx: Any, _: None, *tangents: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
        """Returns the mean of the tangents of those that have the extremum."""
        saved, count = ctx.saved_tensors, len(tangents)
        numbers = [_is_same(saved[i], saved[count + i]).to(torch.int32) for i in range(count)]
        masked = [t * n.to(t.dtype) for t, n in zip(_tangents(ctx, tangents), numbers, strict=True)]
        found = ctx.through.alike(ReduceOp.SUM, [*masked, *numbers])
        pairs = zip(found[:count], found[count:], strict=True)
        return tuple(total / number.to(total.dtype) for total, number in pairs)


class _AllReduceProduct(_WeighedReduce):
    """PROD: a replica's value counts as much as the product of all others is; of first order."""

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[Any, ...]:
        """Returns what goes back times the product of the other replicas' values."""
        wanted = _wanted(ctx, gradients)
        totals = ctx.through.back(ReduceOp.SUM, list(wanted.values()))
        others = _products_of_others(ctx.through.way_back, [ctx.saved_tensors[i] for i in wanted])
        parts = {i: t * o.conj() for i, t, o in zip(wanted, totals, others, strict=True)}
        return _as_arguments(parts, len(gradients))

    @staticmethod
    def jvp(ctx: Any, _: None, *tangents: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
        """Returns the sum of the tangents, each times the product of the others' values."""
        through = ctx.through
        others = _products_of_others(through.way_back, ctx.saved_tensors[: len(tangents)])
        pairs = zip(_tangents(ctx, tangents), others, strict=True)
        return tuple(through.alike(ReduceOp.SUM, [t * o for t, o in pairs]))


class _AllGather(_Collective):
    """all_gather: what goes back is the sum of it, cut to the rows of this replica."""

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[Any, ...]:
        """Returns the rows of this replica, of the sum of what goes back."""
        wanted = _wanted(ctx, gradients)
        through = ctx.through
        axis = through.how
        totals = through.back(ReduceOp.SUM, list(wanted.values()))
        rows = {
            i: total.narrow(axis, through.start(i), ctx.shapes[i][axis])
            for i, total in zip(wanted, totals, strict=True)
        }
        return _as_arguments(rows, len(gradients))

    @staticmethod
    def jvp(ctx: Any, _: None, *tangents: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
        """Returns the tangents of all replicas."""
        through = ctx.through
        return tuple(through.alike(through.how, _tangents(ctx, tangents)))

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], through: Any, *tensors: torch.Tensor) -> Any:
        """Returns the results of stacked values, which are gathered along the next axis."""
        stacked = [
            tensor.expand(info.batch_size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
            for tensor, dim in zip(tensors, in_dims[1:], strict=True)
        ]
        axis = through.how if through.how < 0 else through.how + 1
        return tuple(through.alike(axis, stacked)), (0,) * len(stacked)


_REDUCTIONS: dict[ReduceOp, type[_Collective]] = {
    ReduceOp.SUM: _AllReduce,
    ReduceOp.MEAN: _AllReduce,
    ReduceOp.MIN: _AllReduceExtreme,
    ReduceOp.MAX: _AllReduceExtreme,
    ReduceOp.PROD: _AllReduceProduct,
}


def _is_same(value: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
    return (value == result) | (value.isnan() & result.isnan())


def _products_of_others(owner: _Owner, values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Returns, for each value of this replica, the product of those of all other replicas."""
    are_zero = [value == 0 for value in values]
    numbers = [is_zero.to(torch.int32) for is_zero in are_zero]
    factors = [
        value.detach().masked_fill(zero, 1) for value, zero in zip(values, are_zero, strict=True)
    ]
    products = _Pass(owner, ReduceOp.PROD, factors).results()
    zeros = _Pass(owner, ReduceOp.SUM, numbers).results()
    return [
        (product / factor).masked_fill(count != number, 0)
        for product, factor, count, number in zip(products, factors, zeros, numbers, strict=True)
    ]
