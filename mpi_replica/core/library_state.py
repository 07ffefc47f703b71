"""What torch keeps for a thread, so that a replica finds what its caller had, and leaves nothing.

``torch.no_grad``, ``inference_mode``, ``autocast`` and the default device hold in one thread, and
contextvars know nothing of them. torch is looked up where the program has imported it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NamedTuple, Self, TypeVar

from .imported_libraries import imported_library

T = TypeVar("T")


def needs_threads() -> bool:
    """Returns whether a library is in use that keeps for a thread what belongs to a replica."""
    return "torch" in sys.modules or "jax" in sys.modules


def is_recording() -> bool:
    """Returns whether torch writes down what runs in this thread, to run it later."""
    torch: Any = imported_library("torch")
    if not hasattr(torch, "get_autocast_dtype"):  # as in `LibraryState.of_this_thread`
        return False
    c = torch._C
    if c._get_tracing_state() is not None:
        return True
    if c._get_dispatch_mode(c._TorchDispatchModeKey.PROXY) is not None:
        return True
    # Who records before autograd is known for the process alone, and that it is done, for a thread.
    if not c._dispatch_tls_is_dispatch_key_included(c.DispatchKey.PreDispatch):
        return False
    proxies: Any = sys.modules.get("torch.fx.experimental.proxy_tensor")
    return hasattr(proxies, "get_proxy_mode") and proxies.get_proxy_mode() is not None


def forget_casts() -> None:
    """Has torch forget the casts of weights that autocast keeps, for the process.

    Called where another replica may go on, so that none finds those of others, on any layout.
    """
    torch = imported_library("torch")
    if torch is not None:
        torch.clear_autocast_cache()


def _num_autocasts(torch: Any) -> int:
    torch.autocast_increment_nesting()  # it is told where it changes only
    count: int = torch.autocast_decrement_nesting()
    return count


#: Whether torch.compile was told not to look into this package.
_is_untraced = False


def _leave_untraced() -> None:
    """Tells torch.compile, where it is in use, that calls of this package are to be made as is."""
    global _is_untraced
    rules: Any = sys.modules.get("torch._dynamo.trace_rules")
    if hasattr(rules, "add") and not _is_untraced:
        rules.add(__name__.partition(".")[0])
        _is_untraced = True


class LibraryState(NamedTuple):
    """What torch keeps for a thread."""

    records: bool
    is_inference: bool
    #: ``torch.autocast`` for each type of device: its name, whether it is enabled, and the dtype.
    autocasts: tuple[tuple[str, bool, Any], ...]
    caches_casts: bool
    #: How many autocasts are open: at the end of the outermost one torch forgets its casts.
    num_autocasts: int
    num_threads: int
    #: None where none was set.
    default_device: Any
    #: The current device of CUDA, and its stream.
    cuda: tuple[Any, Any] | None

    @classmethod
    def of_this_thread(cls) -> Self | None:
        """Returns the state of the thread that calls; None where torch is not imported.

        Also where that is being imported, or is older than 2.4, which has other names for it.
        """
        torch: Any = imported_library("torch")
        if not hasattr(torch, "get_autocast_dtype"):
            return None
        _leave_untraced()
        cuda = None
        if torch.cuda.is_initialized():
            cuda = torch.cuda.current_device(), torch.cuda.current_stream()
        devices = ("cpu",) if cuda is None else ("cpu", "cuda")
        return cls(
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            tuple(
                [(d, torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in devices]
            ),
            torch.is_autocast_cache_enabled(),
            _num_autocasts(torch),
            torch.get_num_threads(),
            # Asking for the device takes longer than all else; it is a mode, as others may be.
            torch.get_default_device() if torch._C._len_torch_function_stack() else None,
            cuda,
        )

    def hold_in(self, function: Callable[[], T]) -> T:
        """Calls `function` in this state, in the thread that calls, and leaves nothing of it."""
        torch = sys.modules["torch"]
        inference, in_threads = torch.inference_mode, torch.autograd.set_multithreading_enabled
        # The end of the first also ends what the function has left, with all that belongs to it.
        # The second: what goes back through a collective must run in the thread of its replica, and
        # two replicas on one device would wait for each other in the thread of that device.
        with inference(self.is_inference), in_threads(False):
            self._restore()
            try:
                return function()
            finally:
                self._restore()

    def _restore(self) -> None:
        """Puts the thread that calls into this state, where it is in another one."""
        now = LibraryState.of_this_thread()
        if now is None or now == self:
            return
        torch = sys.modules["torch"]
        torch.set_grad_enabled(self.records)
        for device, is_enabled, dtype in self.autocasts:
            torch.set_autocast_enabled(device, is_enabled)
            torch.set_autocast_dtype(device, dtype)
        torch.set_autocast_cache_enabled(self.caches_casts)
        for _ in range(self.num_autocasts - now.num_autocasts):
            torch.autocast_increment_nesting()
        for _ in range(now.num_autocasts - self.num_autocasts):
            torch.autocast_decrement_nesting()
        if now.num_threads != self.num_threads:
            torch.set_num_threads(self.num_threads)
        if now.default_device != self.default_device:
            torch.set_default_device(self.default_device)
        if self.cuda is not None and now.cuda != self.cuda:
            device, stream = self.cuda
            torch.cuda.set_device(device)
            torch.cuda.set_stream(stream)
