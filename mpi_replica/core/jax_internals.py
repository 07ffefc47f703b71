"""The private names of JAX that this package needs, and nothing else knows.

A collective in a function that JAX traces is a primitive of its own, with an ordered effect, so
that none is dropped, merged or moved before another. It comes back as a call of Python where the
compiled function runs. Imported where JAX is imported.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, cast

import jax
import numpy as np
from jax._src import callback as jax_callback
from jax._src import core, dispatch, effects
from jax._src.config import UserConfig
from jax._src.interpreters import ad, batching, mlir, partial_eval, pxla

from .array_ways import Array

#: Shapes and dtypes of arrays, one for each leaf.
Forms = Sequence[Any]


class TracedCall(Protocol):
    """A collective call of a traced function: what all replicas that run it have in common."""

    def forms(self, values: Forms) -> list[tuple[tuple[int, ...], np.dtype[Any]]]:
        """Returns shape and dtype of each result."""

    def perform(self, arrays: Sequence[Array]) -> list[Array]:
        """Performs the call, for the replica whose thread runs the function or waits for it."""

    def perform_compiled(self, arrays: Sequence[Array]) -> list[Array]:
        """Performs the call where compiled code is at it, in whatever thread."""

    def stacked(self) -> TracedCall:
        """Returns the call of arrays with one more dimension, which is the first."""

    def transposed(self) -> TracedCall:
        """Returns the call that goes back through this one."""

    def tangents(
        self, values: Sequence[Any], results: Sequence[Any], tangents: dict[int, Any]
    ) -> dict[int, Any]:
        """Returns the tangents of the results, of those of the values at these places."""


class CollectiveEffect(effects.Effect):
    """What keeps collectives in their order, and all of them."""

    def __str__(self) -> str:
        return "mpi_replica"


#: How many replicas there are in a step: a function that was traced for others is traced anew.
number_of_replicas = jax.make_user_context(1)

_EFFECT = CollectiveEffect()
for _kind in (
    effects.lowerable_effects,
    effects.ordered_effects,
    effects.shardable_ordered_effects,  # `_lower` refuses several devices, with more to say
    effects.control_flow_allowed_effects,
    effects.remat_allowed_effects,
    effects.custom_derivatives_allowed_effects,
):
    _kind.add_type(CollectiveEffect)

_primitive = core.Primitive("mpi_replica")
_primitive.multiple_results = True


def bind(call: TracedCall, values: Sequence[Any]) -> list[Any]:
    """Returns the results of a call, as JAX traces it; or performs it, where nothing is traced.

    Raises
    ------
    NotImplementedError
        The function is for several devices of this rank.
    """
    if jax.sharding.get_abstract_mesh().manual_axes:
        raise NotImplementedError(_SEVERAL_DEVICES)
    return cast("list[Any]", _primitive.bind(*map(jax.numpy.asarray, values), call=call))


_SEVERAL_DEVICES = (
    "a collective of mpi_replica in a function that JAX spreads over several devices (shard_map,"
    " pmap, a sharded array): each of them would make the call. Call it outside of that function,"
    " with its results."
)


def is_staged() -> bool:
    """Returns whether JAX writes down what runs here, to run it later: perhaps in other replicas.

    As in jit, scan, while_loop and cond; not in grad or vmap alone.
    """
    trace = core.trace_ctx.trace
    while trace is not None:
        if isinstance(trace, partial_eval.DynamicJaxprTrace):
            return True
        trace = getattr(trace, "parent_trace", None)
    return False


def is_transformed() -> bool:
    """Returns whether JAX traces what runs here in any way: also in grad, jvp or vmap alone."""
    return not isinstance(core.trace_ctx.trace, core.EvalTrace)


def _abstract(*values: Any, call: TracedCall) -> Any:
    return [core.ShapedArray(*form) for form in call.forms(values)], {_EFFECT}


def _perform(*values: Any, call: TracedCall) -> list[Any]:
    results = call.perform([np.asarray(value) for value in values])
    forms = call.forms(values)
    pairs = zip(results, forms, strict=True)
    return [jax.numpy.asarray(result, dtype) for result, (_, dtype) in pairs]


class _Results(tuple[Array, ...]):
    """What JAX gets of a call that compiled code makes.

    It goes through them in a thread that may be XLA's own, and narrows what has more bits than this
    thread is allowed: it is allowed as many as the function was compiled with.
    """

    has_64_bits: bool

    def __iter__(self) -> Iterator[Array]:
        with jax.enable_x64(self.has_64_bits):
            yield from super().__iter__()


def _lower(context: Any, *values: Any, call: TracedCall) -> Any:
    if getattr(context.module_context.axis_context, "num_devices", 1) not in (None, 1):
        raise NotImplementedError(_SEVERAL_DEVICES)
    forms = [(aval.shape, aval.dtype) for aval in context.avals_out]
    has_64_bits = jax.config.jax_enable_x64  # where it is compiled: in the thread of the program

    def called(*arrays: Array) -> _Results:
        results = call.perform_compiled(arrays)
        pairs = zip(results, forms, strict=True)
        made = _Results(
            [np.ascontiguousarray(array, dtype).reshape(shape) for array, (shape, dtype) in pairs]
        )
        made.has_64_bits = has_64_bits
        return made

    results, token, _ = jax_callback.emit_python_callback(
        context,
        called,
        context.tokens_in.get(_EFFECT),
        list(values),
        context.avals_in,
        context.avals_out,
        has_side_effect=True,
        returns_token=True,
    )
    context.set_tokens_out(context.tokens_in.update_tokens(mlir.TokenSet({_EFFECT: token})))
    return results


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], *, call: TracedCall) -> Any:
    results = _primitive.bind(*primals, call=call)
    inexact = jax.numpy.inexact
    places = [i for i, p in enumerate(primals) if jax.dtypes.issubdtype(p.dtype, inexact)]
    if all(type(tangents[place]) is ad.Zero for place in places):
        return results, [_no_tangent(result) for result in results]
    given = {place: ad.instantiate_zeros(tangents[place]) for place in places}
    found = call.tangents(primals, results, given)
    return results, [
        found[place] if place in found else _no_tangent(result)
        for place, result in enumerate(results)
    ]


def _no_tangent(value: Any) -> Any:
    return ad.Zero(jax.typeof(value).to_tangent_aval())


def _transpose(cotangents: Sequence[Any], *values: Any, call: TracedCall) -> Any:
    given = [ad.instantiate_zeros(cotangent) for cotangent in cotangents]
    return _primitive.bind(*given, call=call.transposed())


def _batch(values: Sequence[Any], axes: Sequence[Any], *, call: TracedCall) -> Any:
    size = next(v.shape[a] for v, a in zip(values, axes, strict=True) if a is not None)
    stacked = [
        batching.bdim_at_front(value, axis, size) for value, axis in zip(values, axes, strict=True)
    ]
    results = _primitive.bind(*stacked, call=call.stacked())
    return results, [0] * len(results)


_primitive.def_effectful_abstract_eval(_abstract)
_primitive.def_impl(_perform)
mlir.register_lowering(_primitive, _lower, cacheable=False)
ad.primitive_jvps[_primitive] = _jvp
ad.primitive_transposes[_primitive] = _transpose
batching.primitive_batchers[_primitive] = _batch


def _run_directly(execute: Callable[[], Any], devices: Sequence[Any]) -> Any:
    return execute()


#: Runs a compiled function with collectives, on these devices; set by who makes the calls.
run_compiled: Callable[[Callable[[], Any], Sequence[Any]], Any] = _run_directly

_execute = pxla.ExecuteReplicated.__call__


def _executed(executable: Any, *args: Any) -> Any:
    """Runs a compiled function. JAX has no other place that its errors and its waits go through."""
    if _EFFECT not in executable.ordered_effects:
        return _execute(executable, *args)
    devices = executable._local_devices
    return run_compiled(functools.partial(_execute_to_last_call, executable, args), devices)


def _execute_to_last_call(executable: Any, args: Sequence[Any]) -> Any:
    """Runs a compiled function; returns when its collectives are done, also where JAX goes on."""
    tokens = dispatch.runtime_tokens
    try:
        results = _execute(executable, *args)
        tokens.current_tokens[_EFFECT].block_until_ready()
    except BaseException:
        # they hold the error, which would come up again at the next call, and at the end
        tokens.current_tokens.pop(_EFFECT, None)
        for device in executable._local_devices:
            tokens.output_runtime_tokens.pop(device, None)
        raise
    return results


pxla.ExecuteReplicated.__call__ = _executed


#: Those of ``jax.make_user_context``, of which JAX has no list: found once, and noted from now on.
_user_contexts = [one for one in gc.get_objects() if type(one) is UserConfig]

_init_user_context = UserConfig.__init__


def _note_user_context(context: Any, *args: Any, **kwargs: Any) -> None:
    _init_user_context(context, *args, **kwargs)
    _user_contexts.append(context)


UserConfig.__init__ = _note_user_context


def options_of_thread() -> tuple[tuple[Any, Any], ...]:
    """Returns the options of the thread that calls: each with its value, if it has one there."""
    holders = jax.config._value_holders.values()
    options = [option for option in holders if hasattr(option, "_update_thread_local_hook")]
    options += [context._obj for context in _user_contexts]
    return tuple([(option, option.get_local()) for option in options])


def restore(options: Sequence[tuple[Any, Any]]) -> None:
    """Gives options of the thread that calls these values."""
    for option, value in options:
        if option.get_local() is not value:
            option.set_local(value)
            hook = getattr(option, "_update_thread_local_hook", None)  # of user contexts none
            if hook is not None:
                hook(None if type(value) is object else value)  # what stands for no own value
