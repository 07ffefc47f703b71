"""Arrays of other libraries: taken as numpy arrays without a copy, and given back as they came.

torch and JAX are looked up where the program has imported them, and never imported here. Any other
library is met by the array API standard: ``__dlpack__`` and ``__array_namespace__``. Arrays on a
device other than the host's memory are copied to the host, and results to that device.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

__all__ = ["COMMON_TYPES", "GiveBack", "give_back", "taken", "ways_back"]

Array = np.ndarray[Any, Any]

#: What nearly all leaves are: asking for a base class takes longer.
COMMON_TYPES = frozenset({np.ndarray, float, int, bool, np.float32, np.float64, np.int64})

#: Turns a result into an array of the library of what was given.
GiveBack = Callable[[Any], Any]


def taken(value: Any) -> Any:
    """Return an array of another library as one of numpy, and anything else as it is.

    Raises
    ------
    TypeError
        It has no values, as in a traced function, or numpy has no such dtype.
    """
    way = _way_of(type(value))
    return value if way is None else way.take(value)


def ways_back(leaves: Sequence[Any]) -> list[GiveBack | None] | None:
    """Return how results are given back for leaves; None where all are numpy's and Python's."""
    ways = [_way_of(type(leaf)) for leaf in leaves]
    if not any(ways):
        return None
    return [
        None if way is None else functools.partial(way.give, leaf)
        for way, leaf in zip(ways, leaves, strict=True)
    ]


def give_back(results: list[Any], ways: Sequence[GiveBack | None] | None) -> list[Any]:
    """Return the results, each as its way says."""
    if ways is None:
        return results
    return [
        result if way is None else way(np.asarray(result))
        for result, way in zip(results, ways, strict=True)
    ]


class _Torch:
    """torch.Tensor. Nothing is recorded for gradients: a collective is not differentiated."""

    @staticmethod
    def take(tensor: Any) -> Array:
        torch = sys.modules["torch"]
        if tensor.layout is not torch.strided or tensor.is_meta:
            raise TypeError(
                f"a torch tensor with layout {tensor.layout} on {tensor.device} can't be"
                " communicated. Pass a dense one (tensor.to_dense())."
            )
        plain = tensor.detach().cpu().resolve_conj().resolve_neg()
        if plain.dtype is torch.bfloat16:  # numpy knows it by ml_dtypes only
            numbers: Array = plain.view(torch.int16).numpy().view(_bfloat16())
            return numbers
        try:
            array: Array = plain.numpy()
        except TypeError as error:
            raise TypeError(
                f"a torch tensor of {tensor.dtype} can't be communicated: numpy has no such dtype."
                " Convert it first, tensor.to(torch.float32) say."
            ) from error
        return array

    @staticmethod
    def give(like: Any, result: Array) -> Any:
        torch = sys.modules["torch"]
        if result.dtype.name == "bfloat16":
            tensor = torch.from_numpy(result.view(np.int16)).view(torch.bfloat16)
        else:
            tensor = torch.from_numpy(result)
        return tensor.to(like.device)


class _Jax:
    """jax.Array."""

    @staticmethod
    def take(array: Any) -> Array:
        jax = sys.modules["jax"]
        if isinstance(array, jax.core.Tracer):
            raise TypeError(
                f"{array!r} has no values yet: a collective can't be called in a function that jax"
                " traces (jit, grad, vmap). Call it between such functions."
            )
        return np.asarray(array)

    @staticmethod
    def give(like: Any, result: Array) -> Any:
        jax = sys.modules["jax"]
        devices = like.devices()
        # An array over several devices has a layout that may not fit the result.
        device = next(iter(devices)) if len(devices) == 1 else None
        return jax.device_put(jax.numpy.asarray(result), device)


class _Standard:
    """An array of a library that follows the array API standard, such as CuPy."""

    @staticmethod
    def take(array: Any) -> Array:
        return np.from_dlpack(array, device="cpu")

    @staticmethod
    def give(like: Any, result: Array) -> Any:
        return like.__array_namespace__().asarray(result, device=like.device)


_Way = type[_Torch] | type[_Jax] | type[_Standard]


def _way_of(kind: type) -> _Way | None:
    """Return how arrays of a type are taken; None where numpy takes it as it is."""
    if kind in COMMON_TYPES or issubclass(kind, (np.ndarray, np.generic, int, float, complex, str)):
        return None
    torch, jax = sys.modules.get("torch"), sys.modules.get("jax")
    if torch is not None and issubclass(kind, torch.Tensor):
        return _Torch
    if jax is not None and issubclass(kind, (jax.Array, jax.core.Tracer)):
        return _Jax
    if hasattr(kind, "__dlpack__") and hasattr(kind, "__array_namespace__"):
        return _Standard
    return None


def _bfloat16() -> np.dtype[Any]:
    try:
        import ml_dtypes
    except ImportError as error:
        raise TypeError(
            "a torch tensor of bfloat16 needs the package ml_dtypes, by which numpy knows bfloat16:"
            " pip install ml_dtypes. Or convert it to float32."
        ) from error
    dtype: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
    return dtype
