"""Tensors of torch's own classes, as numpy takes them: hundreds at a time, in little time.

`array_libraries` takes any others.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from .imported_libraries import imported_library
from .thread_owners import is_stand_in

_GiveBack = Callable[[Sequence[Any]], list[Any]]  # as in `array_libraries`


def tensor_types() -> frozenset[type]:
    """Returns torch's own types of tensors; none where the program has not imported it."""
    return _tensor_types(imported_library("torch")) if "torch" in sys.modules else frozenset()


@functools.cache
def _tensor_types(torch: Any) -> frozenset[type]:
    return frozenset() if torch is None else frozenset({torch.Tensor, torch.nn.Parameter})


def arrays_of_tensors(leaves: Sequence[Any]) -> list[np.ndarray[Any, Any]] | None:
    """Returns leaves as arrays in their own memory; None where not all are torch's plain tensors.

    In half the time that `to_numpy` takes for each, of which a network has hundreds. `tensors_of`
    gives results back.
    """
    if not leaves or not tensor_types().issuperset(map(type, leaves)):
        return None
    narrow = sys.modules["torch"].bfloat16
    try:
        return [
            array_of_bfloat16(leaf)
            if leaf.dtype is narrow
            else leaf.detach().numpy()
            if leaf.requires_grad
            else leaf.numpy()
            for leaf in leaves
        ]
    except (TypeError, RuntimeError):  # on a device, of another layout or dtype, or transformed
        return None


def tensors_of(arrays: Sequence[Any]) -> list[Any]:
    """Returns numpy's arrays and scalars as tensors in their memory."""
    from_numpy = sys.modules["torch"].from_numpy
    # A call of `tensor_of` for each takes a quarter longer.
    return [
        from_numpy(array) if array.dtype.kind != "V" else tensor_of(array)
        for array in map(np.asarray, arrays)
    ]


def in_this_mode(give: _GiveBack) -> _GiveBack:
    """Returns what gives tensors in the inference mode of now, also where another thread does."""
    if not is_stand_in():
        return give
    is_inference = sys.modules["torch"].is_inference_mode_enabled()
    return functools.partial(_give_in_mode, give, is_inference)


def _give_in_mode(give: _GiveBack, is_inference: bool, results: Sequence[Any]) -> list[Any]:
    with sys.modules["torch"].inference_mode(is_inference):
        return give(results)


def tensor_of(array: np.ndarray[Any, Any]) -> Any:
    """Returns an array of numpy as a tensor in its memory."""
    torch = sys.modules["torch"]
    if array.dtype.kind == "V" and array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def array_of_bfloat16(tensor: Any) -> np.ndarray[Any, Any]:
    """Returns a tensor of bfloat16, which numpy knows by ml_dtypes only, as an array in its memory.

    Raises
    ------
    TypeError
        It is on a device, or ml_dtypes is not installed.
    """
    numbers: np.ndarray[Any, Any] = tensor.detach().view(sys.modules["torch"].int16).numpy()
    return numbers.view(_bfloat16())


@functools.cache
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
