"""What torch and JAX need of a run: they keep for a thread what belongs to a replica."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..collectives.agreement.site import boundary
from ..core.exceptions import ContextError
from ..core.jax_state import (
    JaxState,
    call_among,
    devices_of_replicas,
    uncommitted,
    way_to_more_devices,
)
from ..core.library_state import LibraryState, forget_casts, needs_threads
from ..core.thread_state import ThreadState


def libraries_of_run(num_replicas: int, total: int, *, asks_for_threads: bool) -> RunLibraries:
    """Returns the libraries of a run that begins; most runs, without any, have the same ones."""
    if num_replicas == 1 and "torch" not in sys.modules and "jax" not in sys.modules:
        return _none(total)
    return RunLibraries(num_replicas, total, asks_for_threads=asks_for_threads)


@functools.cache
def _none(total: int) -> RunLibraries:
    return RunLibraries(1, total, asks_for_threads=False)


class RunLibraries:
    """The libraries of one run, as they are where it begins.

    Parameters
    ----------
    num_replicas : int
        How many replicas this rank has.
    total : int
        How many all ranks have.
    asks_for_threads : bool
        Whether each of several replicas gets a thread, whatever is imported.
    """

    def __init__(self, num_replicas: int, total: int, *, asks_for_threads: bool) -> None:
        self._total = total
        is_alone = num_replicas == 1
        #: Whether each replica has a thread of its own.
        self.has_threads = not is_alone and (asks_for_threads or needs_threads())
        self._share_a_thread = not is_alone and not self.has_threads
        jax = JaxState.of_this_thread() if self.has_threads else None
        self._state = ThreadState(LibraryState.of_this_thread(), jax)
        #: A device of JAX for each replica, where there are so many.
        self._devices = None if jax is None else devices_of_replicas(num_replicas)
        #: What finds torch's state that replicas of this rank share; None where none can be.
        self.shared_state: Any = None
        #: What torch keeps for the process, for each replica; None where none take turns with it.
        self.process_states: Any = None
        if self.has_threads and self._state.torch is not None:
            from . import torch_process_states, torch_shared_state  # torch is imported

            self.process_states = torch_process_states.ProcessStates(num_replicas)
            self.shared_state = torch_shared_state
            torch_shared_state.watch_optimizers()

    @boundary
    def call(
        self,
        position: int,
        function: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Any:
        """Calls a step function with what the caller's thread has; it leaves nothing behind.

        `position` is that of its replica among those of this rank.
        """
        if self._total > 1 and "jax" in sys.modules:
            function = functools.partial(call_among, self._total, function)
        if self._state == (None, None):
            return function(*args, **kwargs)
        device = None
        if self._devices is not None:
            device = self._devices[position]
            args, kwargs = uncommitted((args, kwargs), device)
        function = functools.partial(function, *args, **kwargs)
        if self.process_states is not None:
            function = functools.partial(self.process_states.in_turn, position, function)
        forget_casts()
        try:
            return self._state.hold_in(function, device)
        finally:
            forget_casts()

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

    def check_devices(self, position: int, devices: Sequence[Any]) -> None:
        """Raises where a compiled function with collectives is in the way of other replicas.

        Raises
        ------
        ContextError
            They share the device that it is for: there it would wait for ever.
        """
        if not self.has_threads or (self._devices and devices == [self._devices[position]]):
            return
        if self._devices is None:
            raise ContextError(
                "a function that JAX has compiled has collectives, and the replicas of this rank"
                " share a device, on which one would wait for the other for ever: JAX"
                f" {way_to_more_devices()}; or host one replica on each rank."
            )
        own = self._devices[position]
        why = "an argument is committed to it"
        what = (
            "Pass arrays as arguments of strategy.run, or put them nowhere: jax.device_put(x)"
            " without a device"
        )
        if sys.modules["jax"].config.jax_default_device != own:
            why = "the step has set jax.default_device"
            what = "Leave it as it is: in a step that is the device of the replica"
        raise ContextError(
            f"a function that JAX has compiled has collectives, and runs on {devices}, since {why};"
            f" this replica's device is {own}. There it may wait for ever for a replica that has"
            f" it. {what}."
        )
