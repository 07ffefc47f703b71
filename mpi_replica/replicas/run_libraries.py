"""What torch and JAX need of a run: they keep for a thread what belongs to a replica."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..collectives.agreement.call import Call
from ..collectives.reduce import AllReduce
from ..core.exceptions import ContextError
from ..core.jax_state import JaxState
from ..core.library_state import LibraryState, needs_threads


def libraries_of_run(*, asks_for_threads: bool, is_alone: bool) -> RunLibraries:
    """Returns the libraries of a run that begins; most runs, without any, have the same ones."""
    if is_alone and "torch" not in sys.modules:
        return _none()
    return RunLibraries(asks_for_threads=asks_for_threads, is_alone=is_alone)


@functools.cache
def _none() -> RunLibraries:
    return RunLibraries(asks_for_threads=False, is_alone=True)


class RunLibraries:
    """The libraries of one run, as they are where it begins.

    Parameters
    ----------
    asks_for_threads : bool
        Whether each of several replicas gets a thread, whatever is imported.
    is_alone : bool
        Whether this rank has one replica.
    """

    def __init__(self, *, asks_for_threads: bool, is_alone: bool) -> None:
        #: Whether each replica has a thread of its own.
        self.has_threads = not is_alone and (asks_for_threads or needs_threads())
        self._share_a_thread = not is_alone and not self.has_threads
        self._torch = LibraryState.of_this_thread()
        self._jax = JaxState.of_this_thread() if self.has_threads else None
        #: What finds torch's state that replicas of this rank share; None where none can be.
        self._shared_state: Any = None
        if self.has_threads and self._torch is not None:
            from . import torch_shared_state  # torch is imported

            self._shared_state = torch_shared_state
            torch_shared_state.watch_optimizers()

    def call(
        self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """Calls a step function with what the caller's thread has; it leaves nothing behind."""
        if self._torch is None and self._jax is None:
            return function(*args, **kwargs)
        step = functools.partial(function, *args, **kwargs)
        if self._jax is not None:
            step = functools.partial(self._jax.hold_in, step)
        return step() if self._torch is None else self._torch.hold_in(step)

    def check(self) -> None:
        """Raises where a library has come meanwhile that needs threads; called at a collective.

        Raises
        ------
        ContextError
            It has, and the replicas of this rank share one.
        """
        if self._share_a_thread and needs_threads():
            raise ContextError(
                "torch or JAX was imported inside of a step, on a rank with several replicas: they"
                " share a thread, and what such a library keeps for a thread would pass from one to"
                " the other. Import it at the top of the program, before strategy.run."
            )

    def versions_of(self, call: Call) -> Any:
        """Returns what finds tensors in a call that are written before it is performed, or None."""
        if self._shared_state is None or type(call) is not AllReduce:
            return None
        return self._shared_state.Versions(call)
