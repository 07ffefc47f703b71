"""Arrays of other libraries: taken as numpy arrays without a copy, and given back as they came.

Libraries are looked up where the program has imported them (`array_ways`), and torch and JAX
imported here only for an array that comes from a rank that has.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from .array_ways import COMMON_TYPES, Array, JaxWay, StandardWay, TorchWay, Way, way_of
from .gpu_tensors import ToGpus
from .imported_libraries import imported_library
from .jax_state import JaxState, is_staged
from .thread_owners import is_stand_in
from .torch_tensors import in_this_mode, tensor_of

#: Turns results into arrays of the libraries of what was given.
GiveBack = Callable[[Sequence[Any]], list[Any]]


def to_numpy(value: Any) -> Any:
    """Returns an array of another library as one of numpy, and anything else as it is.

    Raises
    ------
    TypeError
        It has no values, as in a traced function, or numpy has no such dtype.
    """
    way = way_of(type(value))
    return value if way is None else way.take(value)


def way_back(leaves: Sequence[Any], *, is_of_call: bool = True) -> GiveBack | None:
    """Returns how results are given back for leaves; None where all are numpy's and Python's.

    Those of a call come to a GPU in the order of the stream that is current now. All others are
    there when they are given: nobody knows in which stream they will be used.
    """
    if COMMON_TYPES.issuperset(map(type, leaves)):
        return None
    ways = [way_of(type(leaf)) for leaf in leaves]
    if not any(ways):
        return None
    to_gpus = ToGpus(leaves) if is_of_call else None
    give = functools.partial(_give, leaves, ways, to_gpus)
    if is_of_call and JaxWay in ways and is_stand_in() and (state := JaxState.of_this_thread()):
        # another thread will give them, which may not have the x64 of this one, say
        give = functools.partial(state.hold_elsewhere, give)
    return in_this_mode(give) if is_of_call and TorchWay in ways else give


def _give(
    leaves: Sequence[Any],
    ways: Sequence[Way | None],
    to_gpus: ToGpus | None,
    results: Sequence[Any],
) -> list[Any]:
    given = {} if to_gpus is None else to_gpus.copied(results)
    return [
        given[place]
        if place in given
        else result
        if way is None
        else way.give(leaf, np.asarray(result))
        for place, (result, way, leaf) in enumerate(zip(results, ways, leaves, strict=True))
    ]


def give_back(results: list[Any], way: GiveBack | None) -> list[Any]:
    """Returns the results as the way says; as they are without one."""
    return results if way is None else way(results)


def by_numpy(compute: Callable[..., Any], first: Any, *others: Any) -> Any:
    """Returns what `compute` makes of arrays, as an array of the library of the first one."""
    way = way_of(type(first))
    result = compute(to_numpy(first), *map(to_numpy, others))
    return result if way is None else way.give(first, np.asarray(result))


def dtype_of(value: Any) -> np.dtype[Any] | None:
    """Returns numpy's dtype for an array of another library, and None for anything else.

    Nothing is copied, also where the array is on a device.

    Raises
    ------
    TypeError
        As for `to_numpy`.
    """
    way = way_of(type(value))
    return None if way is None else way.dtype(value)


def recorded_by_torch(leaves: Sequence[Any]) -> list[int]:
    """Returns which leaves are tensors that torch would record here, by their places.

    Those that need gradients; and under a transform of ``torch.func`` all of them.
    """
    torch = imported_library("torch")
    if torch is None:
        return []
    forward, records = torch.autograd.forward_ad, torch.is_grad_enabled()
    is_transformed = torch._C._are_functorch_transforms_active()
    if not (records or is_transformed or forward._current_level >= 0):
        return []
    kind = torch.Tensor
    tensors = [i for i, leaf in enumerate(leaves) if isinstance(leaf, kind)]
    if is_transformed:
        return tensors
    found = [i for i in tensors if leaves[i].requires_grad] if records else []
    if forward._current_level >= 0:
        has_tangent = [i for i in tensors if forward.unpack_dual(leaves[i]).tangent is not None]
        return sorted({*found, *has_tangent})
    return found


def is_traced_by_jax(leaves: Sequence[Any]) -> bool:
    """Returns whether JAX traces some of these leaves: they have no values yet, or not only.

    Of no leaves, whether it traces the code that calls.
    """
    jax = imported_library("jax")
    if jax is not None and not leaves:
        return is_staged()
    return jax is not None and any([isinstance(leaf, jax.core.Tracer) for leaf in leaves])


def values_of(value: Any) -> Any:
    """Returns an array of any library without what is recorded for its gradients."""
    return value.detach() if way_of(type(value)) is TorchWay else value


def as_constants(leaves: list[Any]) -> tuple[list[Any], dict[int, Any]]:
    """Returns leaves of which torch records nothing; and those that it does, by the new ids.

    Of JAX's none is weak, since those of other ranks are not, nor are the results of other calls.
    One in a file becomes a plain array, as it is on other ranks; it is found by the new id, too.

    Raises
    ------
    TypeError
        JAX traces one of them, or a function of torch transforms it.
    """
    if is_traced_by_jax(leaves):
        raise TypeError(
            "merge_call got a value that JAX traces, of which there is no number yet. Call it"
            " between traced functions; in them there are all_reduce and all_gather."
        )
    if any([_is_weak(leaf) for leaf in leaves]):
        leaves = [leaf.astype(leaf.dtype) if _is_weak(leaf) else leaf for leaf in leaves]
    originals: dict[int, Any] = {}
    for index in recorded_by_torch(leaves):
        if not originals:
            leaves = list(leaves)
        constant = leaves[index].detach()
        try:  # what was given from outside of the function is one of its tensors now, too
            TorchWay.require_untransformed(constant)
        except TypeError as error:
            raise TypeError(f"merge_call: {error}") from None
        originals[id(constant)] = leaves[index]
        leaves[index] = constant
    for index, leaf in enumerate(leaves):
        if type(leaf) is np.memmap and not leaf.flags.owndata:  # what is computed of one owns it
            if not originals:
                leaves = list(leaves)
            leaves[index] = plain = np.asarray(leaf)
            originals[id(plain)] = leaf
    return leaves, originals


def _is_weak(value: Any) -> bool:
    # Random keys, which are arrays of JAX, are asked for it in vain.
    return way_of(type(value)) is JaxWay and getattr(value, "weak_type", False)


def memory_of(value: Any, array: Any = None) -> Any:
    """Returns a torch tensor as an array in its own memory; anything else as it is.

    `array` is the tensor as `to_numpy` gives it, where that is known.

    Raises
    ------
    TypeError
        It has no such memory, or torch would have to record what is written there; the text goes on
        after its name.
    """
    if way_of(type(value)) is not TorchWay:
        return value
    torch = sys.modules["torch"]
    if value.requires_grad and torch.is_grad_enabled():
        raise TypeError(
            "is a tensor that needs gradients: what is written into it is no part of torch's graph."
            " Call it under torch.no_grad(), or give tensor.detach(), which has the same memory."
        )
    if not value.is_cpu or value.layout is not torch.strided or value.is_conj() or value.is_neg():
        raise TypeError(
            f"is a tensor on {value.device} with layout {value.layout}: results can be written into"
            " plain memory of the host only. Leave out= away: the results are tensors on that"
            " device then."
        )
    return TorchWay.take(value) if array is None else array


def address_of(value: Any, array: Array) -> tuple[str, int]:
    """Returns where the elements of an array of another library are, for as long as it lives.

    `array` is it as `to_numpy` gives it: its memory, or a copy of what is on a device.
    """
    if way_of(type(value)) is TorchWay and not value.is_cpu:
        # a conjugate view has the memory of the other one
        return f"{value.device} {value.is_conj()} {value.is_neg()}", value.data_ptr()
    return "", array.ctypes.data


def note_written(values: Sequence[Any]) -> None:
    """Tells torch of its tensors among these that their memory was written."""
    torch = imported_library("torch")
    if torch is not None:
        kind, increment_version = torch.Tensor, torch.autograd.graph.increment_version
        for value in values:
            if isinstance(value, kind) and not value.is_inference():
                increment_version(value)


def copy_of(value: Any) -> Any:
    """Returns an array in memory of its own, and itself where nobody can write into it."""
    way = way_of(type(value))
    if way is not None:
        return way.copy(value)
    return value.copy() if isinstance(value, (np.ndarray, np.void)) else value


def is_strided(value: Any) -> bool:
    """Returns whether it is an array of numpy or torch whose elements lie there in some order.

    Those of an array of objects lie elsewhere; and other classes, as masked arrays, hold more.
    """
    if type(value) is np.ndarray:
        return not value.dtype.hasobject
    if way_of(type(value)) is not TorchWay or origin_of(value) is None:
        return False
    is_dense = value.layout is sys.modules["torch"].strided
    return is_dense and not value.is_quantized and not value.is_nested


def is_in_c_order(array: Any) -> bool:
    """Returns whether the elements of an array that `is_strided` lie there in C order, as such.

    Aligned, too: numpy adds up those of others in other portions, so that a sum has other bits.
    """
    if isinstance(array, np.ndarray):
        flags = array.flags
        return flags.c_contiguous and flags.aligned
    return array.is_contiguous() and not (array.is_conj() or array.is_neg())


def copied(array: Any, order: Literal["C", "K"]) -> Any:
    """Returns a copy of an array that `is_strided`, which can be written where that can.

    It lies in memory in C order, or, by "K" and but for gaps, as the array does.
    """
    if isinstance(array, np.ndarray):
        copy = array.copy(order)
        copy.flags.writeable = array.flags.writeable
        return copy
    torch = sys.modules["torch"]
    plain = array.detach().resolve_conj().resolve_neg()
    formats = {"C": torch.contiguous_format, "K": torch.preserve_format}
    return plain.clone(memory_format=formats[order]).requires_grad_(array.requires_grad)


def mean_of(losses: Any, weights: Any, count: float) -> Any:
    """Returns the sum of `losses` times `weights` over `count`, by torch or JAX itself.

    So it can be differentiated. None where the losses are no array of theirs. The weights, which
    may be None, have no more dimensions than the losses, and lack the last ones.
    """
    way: Any = way_of(type(losses))
    if way is None or issubclass(way, StandardWay):
        return None
    weighted = way.widened(losses)
    if isinstance(weights, (int, float)):  # as such it has no dtype that could be the result's
        weighted = weighted * weights
    elif weights is not None:
        if way_of(type(weights)) is not way:
            weights = np.array(to_numpy(weights))
            weights = TorchWay.give(losses, weights) if way is TorchWay else weights
        weighted = weighted * weights.reshape(weights.shape + (1,) * (losses.ndim - weights.ndim))
    return way.narrowed(way.divide(weighted.sum(), count), losses)


def divided(total: Any, count: Any) -> Any:
    """Returns an array of torch or JAX over `count`, in its dtype; it can be differentiated."""
    way: Any = way_of(type(total))
    return way.divide(total, count)


class Origin(NamedTuple):
    """Which library's an array is, as plain data that can travel to another rank."""

    library: str
    #: Whether torch records what is computed with it, for gradients.
    is_recorded: bool


def origin_of(value: Any) -> Origin | None:
    """Returns which library's an array is; None for numpy's, and for objects that hold more."""
    kind = type(value)
    way = way_of(kind)
    if way is None:
        return None
    if way is TorchWay:
        torch = sys.modules["torch"]
        is_plain = kind is torch.Tensor or kind is torch.nn.Parameter
        return Origin("torch", value.requires_grad) if is_plain else None
    return Origin(way.library(value), False)


def from_numpy(array: Array, origin: Origin, beside: Any) -> Any:
    """Returns an array that came from another rank as one of the library that it had there.

    On the device of `beside`, where that is an array of the same library.
    """
    if not array.flags.aligned:
        array = array.copy()
    module = importlib.import_module("jax.numpy" if origin.library == "jax" else origin.library)
    way, other = way_of(type(beside)), origin_of(beside)
    if way is not None and other is not None and other.library == origin.library:
        result = way.give(beside, array)
    else:
        result = tensor_of(array) if origin.library == "torch" else module.asarray(array)
    return result.requires_grad_() if origin.is_recorded else result


def library_of(value: Any) -> str | None:
    """Returns the name of the library whose array `value` is; None where numpy takes it as it is.

    Unlike `origin_of` also for objects that hold more, as quantized tensors.
    """
    way = way_of(type(value))
    return None if way is None else way.library(value)


def require_library(library: str) -> None:
    """Raises where no array of this library can be made; numpy's has no name.

    Raises
    ------
    TypeError
        It is not installed; or it is another one than torch and JAX, and the program has not
        imported it.
    """
    if not library:
        return
    try:
        if library in ("torch", "jax"):
            importlib.import_module(library)
    except ImportError as error:
        raise TypeError(f"it has an array of {library}, which is not installed here.") from error
    if library != "jax" and not hasattr(sys.modules.get(library), "asarray"):
        raise TypeError(f"it has an array of {library}, which this program has not imported.")


def of_library(array: Array, library: str) -> Any:
    """Returns an array in the memory of the host as one of a library that is there."""
    return from_numpy(array, Origin(library, False), None) if library else array


def written(live: Any, array: Array) -> Any:
    """Returns an array of another library with the values of `array`, on the device where it is.

    `array` has its dtype and shape, and nobody else holds it. A tensor of torch is written into:
    whoever looks into its memory sees them. What can't be written is replaced.
    """
    way = way_of(type(live))
    if way is TorchWay and not _shares_elements(live):
        torch = sys.modules["torch"]
        # torch refuses to write into a tensor that was made in this mode from outside of it.
        with torch.inference_mode(live.is_inference()), torch.no_grad():
            return live.copy_(tensor_of(array))
    if way is TorchWay:
        return TorchWay.give(live, array).requires_grad_(live.requires_grad)
    if way is JaxWay:
        new = JaxWay.anew(live, array)
        return sys.modules["jax"].device_put(new, live.sharding) if live.committed else new
    return array if way is None else way.give(live, array)


def _shares_elements(tensor: Any) -> bool:
    """Returns whether elements share memory, as in an expanded tensor."""
    return any(s == 0 and n > 1 for s, n in zip(tensor.stride(), tensor.shape, strict=True))
