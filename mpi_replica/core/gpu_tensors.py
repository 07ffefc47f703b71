"""What a call reduces or gathers of torch on a GPU passes through page-locked memory of the host.

From and to page-locked memory a GPU copies by itself, several times as fast as by way of the
driver's own buffers, and nobody needs to wait for a copy to it. torch keeps such memory for reuse,
and gives none of it away that a GPU still reads (its caching allocator of the host). What is copied
once, as for a checkpoint, would only make that memory larger.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from .imported_libraries import imported_library
from .torch_tensors import tensor_of, tensor_types

_ALIGNMENT = 64
# torch rounds memory for good up to a power of two: of one block for all, much would be waste.
_BLOCK_BYTES = 1 << 24


def on_host(leaves: Sequence[Any]) -> Sequence[Any]:
    """Returns leaves with plain tensors on a GPU as copies in page-locked memory of the host.

    `leaves` itself where there are none. They are copied together, and waited for once.
    """
    places = _on_gpus(leaves)
    if not places:
        return leaves
    here = list(leaves)
    # Resolved there: torch would conjugate what a copy shall become before the copy is here.
    tensors = [leaves[place].detach().resolve_conj().resolve_neg() for place in places]
    for place, copy in zip(places, _page_locked(tensors), strict=True):
        here[place] = copy
    current_stream = sys.modules["torch"].cuda.current_stream
    for device in {tensor.device for tensor in tensors}:
        current_stream(device).synchronize()
    return here


def own_results(each: Sequence[Sequence[Any]], results: list[Any]) -> list[list[Any]]:
    """Returns one replica's results as ones of those that gave `each` of these leaves.

    Each may write into its results: they are copies, where none are made on the way to a GPU.
    """
    if not any(isinstance(result, np.ndarray) for result in results):
        return [results] * len(each)
    return [results if _are_on_gpus(leaves) else [*map(_own, results)] for leaves in each]


def _own(result: Any) -> Any:
    return result.copy() if isinstance(result, np.ndarray) else result


class ToGpus:
    """Copies results to where leaves are that are tensors on a GPU.

    They come there in the order of the streams that are current when it is made, by the replica's
    thread: the one that gives results back can have others.
    """

    def __init__(self, leaves: Sequence[Any]) -> None:
        self._devices = {place: leaves[place].device for place in _on_gpus(leaves)}
        devices = set(self._devices.values())
        self._streams = [sys.modules["torch"].cuda.current_stream(device) for device in devices]

    def copied(self, results: Sequence[Any]) -> dict[int, Any]:
        """Returns the tensors of those leaves by their places; nobody waits for them."""
        if not self._devices:
            return {}
        tensors, others = {}, {}
        for place in self._devices:
            array = np.asarray(results[place])
            inside = _inside_of_block(array)
            if inside is None:
                others[place] = tensor_of(array)
            else:
                tensors[place] = inside
        if others:
            tensors |= zip(others, _page_locked(list(others.values())), strict=True)
        make_current = sys.modules["torch"].cuda.stream
        with contextlib.ExitStack() as stack:
            for stream in self._streams:
                stack.enter_context(make_current(stream))
            return {
                place: tensor.to(self._devices[place], non_blocking=True)
                for place, tensor in tensors.items()
            }


Lend: TypeAlias = Callable[[int], npt.NDArray[np.uint8]]


def page_locked_bytes(size_bytes: int) -> npt.NDArray[np.uint8]:
    """Returns memory from which GPUs copy by themselves; torch keeps what comes back."""
    lent: npt.NDArray[np.uint8] = _block(size_bytes).numpy()
    return lent


def lender(leaves: Sequence[Any], lend: Lend) -> Lend:
    """Returns what lends memory for results that are given back as `leaves` are."""
    return page_locked_bytes if _are_on_gpus(leaves) else lend


def _are_on_gpus(leaves: Sequence[Any]) -> bool:
    """Returns whether all leaves are plain tensors on a GPU: results are copied to there."""
    return bool(leaves) and len(_on_gpus(leaves)) == len(leaves)


def _on_gpus(leaves: Sequence[Any]) -> list[int]:
    """Returns which leaves are plain tensors on a GPU, by their places."""
    torch = imported_library("torch")
    if torch is None or not torch.cuda.is_initialized():
        return []
    plain = tensor_types()
    return [
        place
        for place, leaf in enumerate(leaves)
        if type(leaf) in plain
        and leaf.is_cuda
        and leaf.layout is torch.strided
        and not leaf.is_quantized
    ]


def _block(size_bytes: int) -> Any:
    """Returns page-locked memory, as a tensor of bytes."""
    torch = sys.modules["torch"]
    return torch.empty(size_bytes, dtype=torch.uint8, device="cpu", pin_memory=True)


def _page_locked(tensors: Sequence[Any]) -> list[Any]:
    """Returns copies of tensors in a few blocks; those from a GPU are on their way."""
    sizes = [tensor.nbytes + -tensor.nbytes % _ALIGNMENT for tensor in tensors]
    copies: list[Any] = []
    block, start = _block(0), 0
    for tensor, size in zip(tensors, sizes, strict=True):
        if start + size > block.nbytes:
            block, start = _block(_size_of_block(sizes[len(copies) :])), 0
        place = block[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        copies.append(place.copy_(tensor, non_blocking=True))
        start += size
    return copies


def _size_of_block(sizes: Sequence[int]) -> int:
    """Returns how large a block is that holds the first tensors of these sizes; one at least."""
    size_bytes = sizes[0]
    for size in sizes[1:]:
        if size_bytes + size > _BLOCK_BYTES:
            break
        size_bytes += size
    return size_bytes


def _inside_of_block(array: np.ndarray[Any, Any]) -> Any:
    """Returns an array in memory of `page_locked_bytes` as a tensor there; None of others.

    As a part of torch's own tensor: so torch knows of the block that a GPU reads it.
    """
    torch = sys.modules["torch"]
    whole = array.base
    block = whole.base if isinstance(whole, np.ndarray) else None
    if not isinstance(block, torch.Tensor) or not array.flags.c_contiguous:
        return None
    if block.dtype is not torch.uint8 or block.ndim != 1 or not block.is_pinned():
        return None
    start = array.ctypes.data - block.data_ptr()
    return block[start : start + array.nbytes].view(tensor_of(array).dtype).view(array.shape)
