"""What torch and JAX keep for a thread, together: so that work in another thread finds it there."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, Self, TypeVar

from .jax_state import JaxState
from .library_state import LibraryState

T = TypeVar("T")


class ThreadState(NamedTuple):
    """What each library keeps; None where it is not imported, or is left as it is."""

    torch: LibraryState | None
    jax: JaxState | None

    @classmethod
    def of_this_thread(cls) -> Self:
        """Returns the state of the thread that calls."""
        return cls(LibraryState.of_this_thread(), JaxState.of_this_thread())

    def outside_of_inference(self) -> Self:
        """Returns it without torch's inference mode.

        What is made in that can't be used outside of it, and who iterates may leave it in between.
        """
        if self.torch is None:
            return self
        return self._replace(torch=self.torch._replace(is_inference=False))

    def hold_in(self, function: Callable[[], T], device: Any = None) -> T:
        """Calls `function` in this state, in the thread that calls, and leaves nothing of it.

        JAX computes on `device`, where that is not None.
        """
        if self.jax is not None:
            function = functools.partial(self.jax.hold_in, function, device)
        return function() if self.torch is None else self.torch.hold_in(function)
