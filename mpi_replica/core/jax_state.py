"""What JAX keeps for a thread, and what a replica needs of it: options, and a device of its own.

The options are those that a context manager has set, such as ``jax.enable_x64``. On one device a
compiled function waits for another one: where that waits in a collective, for ever. JAX is looked
up where the program has imported it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, ParamSpec, Self, TypeVar

import numpy as np

from . import nest
from .array_ways import JaxWay
from .exceptions import ContextError
from .imported_libraries import imported_library
from .more_than_numbers import is_sparse_of_jax

P = ParamSpec("P")
T = TypeVar("T")

# Each has threads of its own.
_MOST_DEVICES = 64

# Of JAX, in which the private names of `jax_internals` mean what they mean there. pyproject.toml
# says the same.
_OLDEST, _NEWER = (0, 9), (0, 12)


def ask_for_devices(count: int) -> None:
    """Has JAX start with so many devices of the CPU, or more, where it has not started.

    Not where the program says how many there are.
    """
    config = getattr(sys.modules.get("jax"), "config", None)
    if config is None or "host_platform_device_count" in os.environ.get("XLA_FLAGS", ""):
        return
    count = min(count, _MOST_DEVICES)
    try:
        if config.jax_num_cpu_devices < count:
            config.update("jax_num_cpu_devices", count)
    except (AttributeError, RuntimeError):  # an old version; or it has started
        pass


def devices_of_replicas(count: int) -> Sequence[Any] | None:
    """Returns a device for each replica of this rank; None where JAX has fewer, or is not used."""
    jax: Any = imported_library("jax")
    if not hasattr(jax, "local_devices"):
        return None
    ask_for_devices(count)
    default = jax.config.jax_default_device
    platform = default if default is None or isinstance(default, str) else default.platform
    devices = jax.local_devices(backend=platform)
    return devices[:count] if len(devices) >= count else None


def way_to_more_devices() -> str:
    """Returns why JAX has fewer devices than there are replicas, and how it gets more."""
    jax = sys.modules["jax"]
    backend, count = jax.default_backend(), len(jax.local_devices())
    if backend == "cpu":
        why = f"has {count}, the most that a strategy asks for by itself"
        if count < _MOST_DEVICES:
            why = "had started before the strategy was made"
        return (
            f"{why}. Write at the top of the program, before JAX is used:\n    import jax\n"
            "    jax.config.update('jax_num_cpu_devices', N)\nwith as many as a rank has replicas"
        )
    return (
        f"computes on a {backend}, of which this rank sees too few. Compute on the host, by this at"
        " the top of the program:\n    import jax\n    jax.config.update('jax_platforms', 'cpu')\n"
        "where each replica gets a device"
    )


def uncommitted(value: Any, device: Any) -> Any:
    """Returns a nest with arrays of JAX that are committed to other devices as ones on `device`.

    Computations follow such an array to its device, where they may meet those of other replicas.
    """
    jax = sys.modules["jax"]

    def here(leaf: Any) -> Any:
        if is_sparse_of_jax(type(leaf)):
            return jax.tree_util.tree_map(here, leaf)
        if not isinstance(leaf, jax.Array) or not leaf.committed or leaf.devices() == {device}:
            return leaf
        if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.extended):
            return jax.device_put(leaf, device)
        with jax.default_device(device):
            return JaxWay.anew(leaf, np.asarray(leaf))

    return nest.map_structure(here, value)


class JaxState(NamedTuple):
    """The options of a thread: each with its value there, which may be none of its own."""

    options: tuple[tuple[Any, Any], ...]

    @classmethod
    def of_this_thread(cls) -> Self | None:
        """Returns the options of the thread that calls; None where JAX is not imported."""
        internals = _internals()
        return None if internals is None else cls(internals.options_of_thread())

    def hold_in(self, function: Callable[[], T], device: Any) -> T:
        """Calls `function` with these options, and leaves nothing of others that it sets.

        It computes on `device`, where that is not None.
        """
        restore = _internals().restore
        restore(self.options)
        try:
            if device is None:
                return function()
            with sys.modules["jax"].default_device(device):
                return function()
        finally:
            restore(self.options)

    def hold_elsewhere(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Calls `function` with these options in a thread that has its own, which it gets back."""
        restore = _internals().restore
        own = _internals().options_of_thread()
        restore(self.options)
        try:
            return function(*args, **kwargs)
        finally:
            restore(own)


def call_among(num_replicas: int, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Calls a step function of one of so many replicas.

    What JAX has traced where there were others, as outside of a run, it traces anew.
    """
    internals = _internals()
    if internals is None:
        return function(*args, **kwargs)
    with internals.number_of_replicas(num_replicas):
        return function(*args, **kwargs)


def is_staged() -> bool:
    """Returns whether JAX writes down what runs here, to run it later, perhaps in other replicas.

    As in jit, scan, while_loop and cond; not in grad or vmap alone.
    """
    internals = _internals()
    return internals is not None and bool(internals.is_staged())


def require_unstaged(name: str, what: str) -> None:
    """Raises where `name` "was read", say, while JAX traces a function, to run it later.

    Raises
    ------
    ContextError
        It does.
    """
    if "jax" in sys.modules and is_staged():
        raise ContextError(
            f"{name} {what} in a function that JAX traces (jit, scan, while_loop, cond): JAX would"
            " keep what came of it this once, for all later calls, and of several replicas. Do it"
            " outside of that function, and pass the result as an argument."
        )


def require_untransformed(name: str) -> None:
    """Raises where `name` is called in a function that JAX differentiates or maps.

    Raises
    ------
    ContextError
        It is: the way back, say, would be outside of the replicas.
    """
    internals = _internals() if "jax" in sys.modules else None
    if internals is not None and internals.is_transformed():
        raise ContextError(
            f"{name} was called in a function that JAX differentiates or maps (grad, vjp, jvp,"
            " vmap): what it does then would be outside of the replicas. Do that in the function"
            f" that is given to strategy.{name}: strategy.{name}(jax.grad(step), args=...)."
        )


def require_version() -> None:
    """Raises where JAX has another version than those whose private names are known here.

    Raises
    ------
    ImportError
        It has.
    """
    jax: Any = sys.modules["jax"]
    if not _OLDEST <= jax.__version_info__ < _NEWER:
        raise ImportError(
            "collectives in functions that JAX traces need JAX 0.9 to 0.11, and this is"
            f" {jax.__version__}. Write pip install 'jax>=0.9,<0.12', or call them between such"
            " functions."
        )


def _internals() -> Any:
    """Returns the module of JAX's private names; None where JAX is not imported, or has others."""
    if not hasattr(imported_library("jax"), "config"):
        return None
    try:
        from . import jax_internals
    except (ImportError, AttributeError):
        return None
    return jax_internals
