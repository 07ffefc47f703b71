"""What torch keeps for the process: each replica of a rank has its own, while they take turns.

So that it draws what it would draw on a rank of its own, and that who puts a generator back, as
the backward pass of a checkpoint does, puts back its own alone. Imported where torch is, and a rank
hosts several replicas.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NamedTuple, Self, TypeVar

import torch
from torch.nn.utils import parametrize

T = TypeVar("T")

#: What `parametrize` keeps in ``cached()``: how many of these are open, and the tensors.
_OF_CACHED = [name for name in ("_cache_enabled", "_cache") if hasattr(parametrize, name)]


class ProcessState(NamedTuple):
    """What torch keeps for the process."""

    #: The states of the default ones: of the CPU, and of CUDA where that has begun.
    generators: tuple[tuple[torch.Generator, torch.Tensor], ...]
    of_cached: dict[str, Any]

    @classmethod
    def of_now(cls) -> Self:
        """Returns what the process has."""
        generators = torch.default_generator, *torch.cuda.default_generators
        of_cached = {name: getattr(parametrize, name) for name in _OF_CACHED}
        return cls(tuple([(one, one.get_state()) for one in generators]), of_cached)

    def restore(self) -> None:
        """Has the process have it."""
        for generator, state in self.generators:
            generator.set_state(state)
        vars(parametrize).update(self.of_cached)

    def draws_as(self, other: Self) -> bool:
        """Returns whether its generators give the same numbers."""
        return len(self.generators) == len(other.generators) and all(
            torch.equal(mine, its)
            for (_, mine), (_, its) in zip(self.generators, other.generators, strict=True)
        )


class ProcessStates:
    """Those of the replicas of this rank in a run, which begin with what the process has."""

    def __init__(self, num_replicas: int) -> None:
        generators, of_cached = ProcessState.of_now()
        #: By the position of the replica; each has a cache of its own.
        self._states = [
            ProcessState(generators, {name: copy.copy(of_cached[name]) for name in of_cached})
            for _ in range(num_replicas)
        ]

    def enter(self, position: int) -> None:
        """Begins a turn of a replica. The hub, too, has the state of the first one."""
        self._states[position].restore()

    def leave(self, position: int) -> None:
        """Ends a turn of a replica."""
        self._states[position] = ProcessState.of_now()

    def in_turn(self, position: int, function: Callable[[], T]) -> T:
        """Calls the step function of a replica."""
        self.enter(position)
        try:
            return function()
        finally:
            self.leave(position)

    def in_all_turns(self, function: Callable[..., T], *args: object) -> T:
        """Calls a merge_fn, which would run for each replica on a rank of its own."""
        before = self._states[0]
        try:
            return self.in_turn(0, lambda: function(*args))
        finally:
            after = self._states[0]
            for position, state in enumerate(self._states):
                if state.draws_as(before):
                    self._states[position] = state._replace(generators=after.generators)
