"""Tensors of torch's own classes, as numpy takes them: hundreds at a time, in little time.

`array_libraries` takes any others.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from .array_libraries import Array


def tensor_types() -> frozenset[type]:
    """Returns torch's own types of tensors; none where the program has not imported it."""
    torch = sys.modules.get("torch")
    return frozenset() if torch is None else _tensor_types(torch)


@functools.cache
def _tensor_types(torch: Any) -> frozenset[type]:
    return frozenset({torch.Tensor, torch.nn.Parameter})


def arrays_of_tensors(leaves: Sequence[Any]) -> list[Array] | None:
    """Returns leaves as arrays in their own memory; None where not all are torch's plain tensors.

    In half the time that `to_numpy` takes for each, of which a network has hundreds. `tensors_of`
    gives results back.
    """
    if not leaves or not tensor_types().issuperset(map(type, leaves)):
        return None
    try:
        return [leaf.detach().numpy() if leaf.requires_grad else leaf.numpy() for leaf in leaves]
    except (TypeError, RuntimeError):  # on a device, of another layout or dtype, or transformed
        return None


def tensors_of(arrays: Sequence[Any]) -> list[Any]:
    """Returns numpy's arrays and scalars as tensors in their memory."""
    from_numpy = sys.modules["torch"].from_numpy
    return [from_numpy(np.asarray(array)) for array in arrays]
