"""What JAX keeps for a thread: its options, where a context manager has set them.

Such as ``jax.enable_x64`` or ``jax.default_device``. JAX is looked up where the program has
imported it. It has no public name for the options of a thread: where the private ones have gone,
nothing is handed on.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NamedTuple, Self, TypeVar

T = TypeVar("T")


class JaxState(NamedTuple):
    """The options of a thread: each with its value there, which may be none of its own."""

    options: tuple[tuple[Any, Any], ...]

    @classmethod
    def of_this_thread(cls) -> Self | None:
        """Returns the options of the thread that calls; None where JAX is not imported."""
        config = getattr(sys.modules.get("jax"), "config", None)
        holders = getattr(config, "_value_holders", {}).values()
        options = [option for option in holders if hasattr(option, "_update_thread_local_hook")]
        return cls(tuple([(option, option.get_local()) for option in options])) if options else None

    def hold_in(self, function: Callable[[], T]) -> T:
        """Calls `function` with these options, and leaves nothing of others that it sets."""
        self._restore()
        try:
            return function()
        finally:
            self._restore()

    def _restore(self) -> None:
        for option, value in self.options:
            if option.get_local() is not value:
                option.set_local(value)
                hook = option._update_thread_local_hook
                if hook is not None:
                    hook(None if type(value) is object else value)  # what stands for no own value
