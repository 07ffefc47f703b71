"""What goes back through collectives: the functions of torch's graph.

Each has a pass (`torch_gradients`) that performs the call, and those on the way back of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.function import Function

from ..core.options import ReduceOp


class _Collective(Function):
    """What the ways through collectives have in common; a pass says what is to be done."""

    @staticmethod
    def keep(ctx: Any, inputs: Sequence[Any], outputs: Sequence[torch.Tensor]) -> None:
        """Keeps what the way back needs."""
        ctx.through, *tensors = inputs
        ctx.set_materialize_grads(False)
        ctx.likes = [(t.shape, t.dtype, t.device) for t in outputs]
        ctx.shapes = [t.shape for t in tensors]

    @classmethod
    def performed(cls, ctx: Any, *inputs: Any) -> tuple[torch.Tensor, ...]:
        """Performs the call."""
        through, *tensors = inputs
        outputs: tuple[torch.Tensor, ...] = through.forward(tensors)
        cls.keep(ctx, inputs, outputs)
        return outputs

    @staticmethod
    def jvp(ctx: Any, _: None, *tangents: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
        """Returns the tangents of all replicas, combined as the values were."""
        through = ctx.through
        return tuple(through.tangents(through.how, _tangents(ctx, tangents)))


def _forms(function: type[_Collective]) -> tuple[type[_Collective], type[_Collective]]:
    """Returns a function as torch calls it, and as the transforms of ``torch.func`` do.

    These need `setup_context`, for which torch looks at the signature at each call: 30 us.
    """
    name = function.__name__.strip("_")

    def forward(through: Any, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        results: tuple[torch.Tensor, ...] = through.forward(tensors)
        return results

    transformed = {"forward": staticmethod(forward), "setup_context": staticmethod(function.keep)}
    plain = {"forward": staticmethod(function.performed)}
    return type(name, (function,), plain), type(name, (function,), transformed)


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
    def vmap(_: Any, in_dims: tuple[Any, ...], through: Any, *tensors: torch.Tensor) -> Any:
        """Returns the results of stacked values: items are combined one by one."""
        dims = in_dims[1:]
        stacked = [  # along the first axis: where values are stacked, replicas may differ
            tensor if dim is None else tensor.movedim(dim, 0)
            for tensor, dim in zip(tensors, dims, strict=True)
        ]
        results = through.stacked(through.how, stacked)
        return results, tuple([None if dim is None else 0 for dim in dims])


class _WeighedReduce(_AllReduce):
    """Reductions whose derivative by a replica's value depends on the values of all."""

    @staticmethod
    def keep(ctx: Any, inputs: Sequence[Any], outputs: Sequence[torch.Tensor]) -> None:
        """Keeps what the way back needs."""
        _Collective.keep(ctx, inputs, outputs)
        ctx.save_for_backward(*inputs[1:], *outputs)
        ctx.save_for_forward(*inputs[1:], *outputs)


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
            i: total * (mine.to(total.dtype) / number)
            for i, total, mine, number in zip(wanted, totals, numbers, owners, strict=True)
        }
        return _as_arguments(parts, count)

    @staticmethod
    def jvp(ctx: Any, _: None, *tangents: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
        """Returns the mean of the tangents of those that have the extremum."""
        saved, count = ctx.saved_tensors, len(tangents)
        numbers = [_is_same(saved[i], saved[count + i]).to(torch.int32) for i in range(count)]
        masked = [t * n.to(t.dtype) for t, n in zip(_tangents(ctx, tangents), numbers, strict=True)]
        found = ctx.through.tangents(ReduceOp.SUM, [*masked, *numbers])
        pairs = zip(found[:count], found[count:], strict=True)
        return tuple(total / number.to(total.dtype) for total, number in pairs)


class _AllReduceProduct(_WeighedReduce):
    """PROD: a replica's value counts as much as the product of all others is."""

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[Any, ...]:
        """Returns what goes back times the product of the other replicas' values."""
        wanted = _wanted(ctx, gradients)
        totals = ctx.through.back(ReduceOp.SUM, list(wanted.values()))
        others = _products_of_others(ctx.through, [ctx.saved_tensors[i] for i in wanted])
        parts = {i: t * o.conj() for i, t, o in zip(wanted, totals, others, strict=True)}
        return _as_arguments(parts, len(gradients))

    @staticmethod
    def jvp(ctx: Any, _: None, *tangents: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
        """Returns the sum of the tangents, each times the product of the others' values."""
        through = ctx.through
        others = _products_of_others(through, ctx.saved_tensors[: len(tangents)])
        pairs = zip(_tangents(ctx, tangents), others, strict=True)
        return tuple(through.tangents(ReduceOp.SUM, [t * o for t, o in pairs]))


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
    def vmap(info: Any, in_dims: tuple[Any, ...], through: Any, *tensors: torch.Tensor) -> Any:
        """Returns the results of stacked values, which are gathered along the next axis."""
        stacked = [
            tensor.expand(info.batch_size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
            for tensor, dim in zip(tensors, in_dims[1:], strict=True)
        ]
        axis = through.how if through.how < 0 else through.how + 1
        return through.stacked(axis, stacked), (0,) * len(stacked)


GATHER = _forms(_AllGather)
_SUM, _EXTREME, _PRODUCT = map(_forms, (_AllReduce, _AllReduceExtreme, _AllReduceProduct))
REDUCTIONS = {
    ReduceOp.SUM: _SUM,
    ReduceOp.MEAN: _SUM,
    ReduceOp.MIN: _EXTREME,
    ReduceOp.MAX: _EXTREME,
    ReduceOp.PROD: _PRODUCT,
}


def _is_same(value: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
    return (value == result) | (value.isnan() & result.isnan())


def _products_of_others(through: Any, values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Returns, for each value of this replica, the product of those of all other replicas.

    Of them themselves: a product of all over the own value is NaN where that is 0 or infinite.
    """
    mine = through.replica_id
    products = []
    for stack in through.stacks_of_all(values):
        others = torch.cat([stack[:mine], stack[mine + 1 :]])
        wide = torch.promote_types(others.dtype, torch.float32)  # as the reduction itself
        products.append(others.prod(0, dtype=wide).to(others.dtype))
    return products
