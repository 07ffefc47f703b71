"""The array libraries that are known, and by which ways their arrays are numpy's, and back.

torch, JAX and CuPy are looked up where the program has imported them. Any other library is met by
the array API standard: ``__dlpack__`` and ``__array_namespace__``. Arrays on a device other than
the host's memory are copied to the host, and results to that device.

Of each way: `library` is its name, `dtype` numpy's dtype of an array, without a copy; `take` gives
the array of numpy, `give` a result as an array of the library on the device of another one, `copy`
an array in memory of its own, and `divide` an array over a number, which can be differentiated.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from .imported_libraries import imported_library
from .torch_tensors import array_of_bfloat16, tensor_of

#: Of numpy.
Array = np.ndarray[Any, Any]

#: What nearly all leaves are: asking for a base class takes longer.
COMMON_TYPES = frozenset(
    {np.ndarray, float, int, bool, *(np.dtype(code).type for code in "?bBhHiIlLqQefdFDSU")}
)


class TorchWay:
    """torch.Tensor, by its values: what is differentiated goes by `replicas.torch_gradients`."""

    @staticmethod
    def library(tensor: Any) -> str:
        return "torch"

    @staticmethod
    def dtype(tensor: Any) -> np.dtype[Any]:
        TorchWay._require_dense(tensor)
        none = sys.modules["torch"].empty(0, dtype=tensor.dtype, device="cpu")
        dtype: np.dtype[Any] = TorchWay.take(none).dtype
        return dtype

    @staticmethod
    def take(tensor: Any) -> Array:
        if tensor.dtype is sys.modules["torch"].bfloat16:  # an error of torch's takes 10 us
            return TorchWay._take_other(tensor)
        try:
            return tensor.detach().numpy()  # type: ignore[no-any-return]
        except (TypeError, RuntimeError):  # nearly all are dense, on the host, and of such a dtype
            return TorchWay._take_other(tensor)

    @staticmethod
    def _take_other(tensor: Any) -> Array:
        torch = sys.modules["torch"]
        TorchWay._require_dense(tensor)
        plain = tensor.detach().cpu().resolve_conj().resolve_neg()
        if plain.dtype is torch.bfloat16:
            return array_of_bfloat16(plain)
        try:
            array: Array = plain.numpy()
        except TypeError as error:
            wider = torch.complex64 if tensor.is_complex() else torch.float32
            raise TypeError(
                f"a torch tensor of {tensor.dtype} can't be communicated: numpy has no such dtype."
                f" Convert it first, tensor.to({wider}) say."
            ) from error
        return array

    @staticmethod
    def give(like: Any, result: Array) -> Any:
        tensor = tensor_of(result)
        return tensor if like.is_cpu else tensor.to(like.device)

    @staticmethod
    def copy(tensor: Any) -> Any:
        return tensor.clone()

    @staticmethod
    def bounds(tensor: Any) -> tuple[int, int]:
        """Returns from where to where a tensor lies; as from 0 to 0 where it has no one place."""
        try:
            begin, size = tensor.data_ptr(), tensor.nbytes
            if not tensor.is_contiguous():
                lasts = zip(tensor.shape, tensor.stride(), strict=True)
                size = (sum([(n - 1) * s for n, s in lasts]) + 1) * tensor.element_size()
        except (NotImplementedError, RuntimeError):  # a sparse tensor, say
            begin = 0
        return (begin, begin + size) if begin else (0, 0)

    @staticmethod
    def widened(tensor: Any) -> Any:
        torch = sys.modules["torch"]
        if tensor.dtype in (torch.float16, torch.bfloat16):
            return tensor.float()
        return tensor if tensor.is_floating_point() or tensor.is_complex() else tensor.double()

    @staticmethod
    def narrowed(tensor: Any, like: Any) -> Any:
        is_real = like.is_floating_point() and not tensor.is_complex()
        return tensor.to(like.dtype) if is_real or like.is_complex() else tensor

    @staticmethod
    def divide(total: Any, count: float) -> Any:
        wide = TorchWay.widened(total)
        # by a number a GPU multiplies with its reciprocal, which has other bits
        divisor = count if wide.is_cpu or not wide.is_floating_point() else wide.new_full((), count)
        return TorchWay.narrowed(wide / divisor, total)

    @staticmethod
    def require_untransformed(tensor: Any) -> None:
        """Raises where a tensor has no values, as JAX's have none that it traces.

        Raises
        ------
        TypeError
            It is one of a function that ``torch.func`` transforms.
        """
        if sys.modules["torch"]._C._functorch.is_functorch_wrapped_tensor(tensor):
            raise TypeError(
                "a tensor in a function that torch.func transforms (grad, vmap) stands for others,"
                " and has no values of its own: all_reduce and all_gather can be called with it."
                " Call this outside of such functions."
            )

    @staticmethod
    def _require_dense(tensor: Any) -> None:
        TorchWay.require_untransformed(tensor)
        if tensor.is_meta:
            raise TypeError("a torch tensor on meta has no values to communicate.")
        if sys.modules["torch"].masked.is_masked_tensor(tensor):
            raise TypeError(
                "masked tensors can't be taken as their numbers alone: the mask would be lost. Pass"
                " tensor.to_tensor(value), or data and mask (get_data(), get_mask()) as two leaves."
            )
        if tensor.is_nested:
            raise TypeError(
                "a nested torch tensor can't be communicated: its rows differ in length. Pass them"
                " as leaves (tensor.unbind()), or tensor.to_padded_tensor(padding)."
            )
        if tensor.is_quantized:
            raise TypeError(
                "a quantized torch tensor can't be communicated: numpy has no such dtype. Pass"
                " tensor.dequantize()."
            )
        torch = sys.modules["torch"]
        if tensor.layout is not torch.strided:
            has_rows = tensor.layout is torch.sparse_coo and tensor.sparse_dim() == 1
            raise TypeError(
                f"a torch tensor with layout {tensor.layout} on {tensor.device} can't be"
                " communicated. Pass a dense one (tensor.to_dense())"
                + (
                    ", or reduce its rows: mr.IndexedSlices(g.values(), g.indices()[0], g.shape)"
                    " with g = tensor.coalesce()."
                    if has_rows
                    else "."
                )
            )


class JaxWay:
    """jax.Array."""

    @staticmethod
    def library(array: Any) -> str:
        return "jax"

    @staticmethod
    def dtype(array: Any) -> np.dtype[Any]:
        jax = sys.modules["jax"]
        if isinstance(array, jax.core.Tracer):
            raise TypeError(
                f"{array!r} has no values yet: in a function that JAX traces (jit, grad, vmap) only"
                " all_reduce and all_gather can be called with it. Call this between such"
                " functions."
            )
        if not isinstance(array.dtype, np.dtype):
            raise TypeError(
                f"a JAX array of {array.dtype} can't be communicated: numpy has no such dtype."
                " Of random keys pass jax.random.key_data(keys)."
            )
        return np.dtype(array.dtype)

    @staticmethod
    def take(array: Any) -> Array:
        JaxWay.dtype(array)
        return np.asarray(array)

    @staticmethod
    def give(like: Any, result: Array) -> Any:
        jax = sys.modules["jax"]
        # An array over several devices has a layout that may not fit the result.
        is_there = like.committed and len(like.devices()) == 1
        array = jax.numpy.asarray(result)
        return jax.device_put(array, like.sharding) if is_there else array

    @staticmethod
    def anew(array: Any, values: Array) -> Any:
        """Returns an array of these values that is weak where `array` is.

        A weak one gives way to the dtype of others, as the number of Python of which JAX made it.
        """
        jnp = sys.modules["jax"].numpy
        if array.weak_type:
            zeros = jnp.full(values.shape, values.dtype.type(0).item())
            if zeros.dtype == values.dtype:  # it was not made with another jax_enable_x64
                return zeros.at[...].set(values)
        return jnp.asarray(values)

    @staticmethod
    def copy(array: Any) -> Any:
        return array  # nobody can write into it

    @staticmethod
    def widened(array: Any) -> Any:
        jnp = sys.modules["jax"].numpy
        if not jnp.issubdtype(array.dtype, jnp.inexact):
            return array.astype(float)  # of as many bits as JAX has
        return array.astype(jnp.float32) if array.itemsize < 4 else array

    @staticmethod
    def narrowed(array: Any, like: Any) -> Any:
        jnp = sys.modules["jax"].numpy
        kind = jnp.inexact if jnp.issubdtype(array.dtype, jnp.floating) else jnp.complexfloating
        return array.astype(like.dtype) if jnp.issubdtype(like.dtype, kind) else array

    @staticmethod
    def divide(total: Any, count: float) -> Any:
        return JaxWay.narrowed(JaxWay.widened(total) / count, total)


class _OnHost:
    """An array of any library, asked for by DLPack as one in the memory of the host.

    ``np.from_dlpack(array, device="cpu")`` asks so, too, but only from numpy 2.1 on.
    """

    def __init__(self, array: Any) -> None:
        self._array = array

    def __dlpack__(self, **wishes: Any) -> Any:
        wishes.pop("dl_device", None)
        return self._array.__dlpack__(dl_device=_HOST, **wishes)

    def __dlpack_device__(self) -> tuple[int, int]:
        return _HOST


class StandardWay:
    """An array of a library that follows the array API standard."""

    @staticmethod
    def library(array: Any) -> str:
        return str(array.__array_namespace__().__name__)

    @staticmethod
    def dtype(array: Any) -> np.dtype[Any]:
        none = array.__array_namespace__().empty(0, dtype=array.dtype)
        dtype: np.dtype[Any] = StandardWay.take(none).dtype
        return dtype

    @staticmethod
    def take(array: Any) -> Array:
        is_here = array.__dlpack_device__()[0] == _HOST[0]
        return np.from_dlpack(array if is_here else _OnHost(array))

    @staticmethod
    def give(like: Any, result: Array) -> Any:
        return like.__array_namespace__().asarray(result, device=like.device)

    @staticmethod
    def copy(array: Any) -> Any:
        return array.__array_namespace__().asarray(array, copy=True)


class CuPyWay(StandardWay):
    """cupy.ndarray, which follows that standard but for a few names."""

    @staticmethod
    def library(array: Any) -> str:
        return "cupy"

    @staticmethod
    def dtype(array: Any) -> np.dtype[Any]:
        dtype: np.dtype[Any] = array.dtype
        return dtype

    @staticmethod
    def take(array: Any) -> Array:
        here: Array = array.get()
        return here

    @staticmethod
    def give(like: Any, result: Array) -> Any:
        with like.device:
            return sys.modules["cupy"].asarray(result)

    @staticmethod
    def copy(array: Any) -> Any:
        with array.device:
            return array.copy()


#: The memory of the host, as DLPack numbers devices.
_HOST = (1, 0)

Way = type[TorchWay] | type[JaxWay] | type[StandardWay]


def _found_way(kind: type) -> Way | None:
    """Returns how arrays of a type are taken; None where numpy takes it as it is."""
    if kind in COMMON_TYPES or issubclass(kind, (np.ndarray, np.generic, int, float, complex, str)):
        return None
    torch, jax, cupy = map(imported_library, ("torch", "jax", "cupy"))
    if torch is not None and issubclass(kind, torch.Tensor):
        return TorchWay
    if jax is not None and issubclass(kind, (jax.Array, jax.core.Tracer)):
        return JaxWay
    if cupy is not None and issubclass(kind, cupy.ndarray):
        return CuPyWay
    if hasattr(kind, "__dlpack__") and hasattr(kind, "__array_namespace__"):
        return StandardWay
    return None


# An array of a library has a type only where that is imported.
way_of: Callable[[type], Way | None] = functools.lru_cache(maxsize=1024)(_found_way)
