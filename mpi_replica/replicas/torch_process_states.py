"""What torch keeps for the process: each replica of a rank has its own, while they take turns.

So that it draws what it would draw on a rank of its own, and that who puts a generator back, as
the backward pass of a checkpoint does, puts back its own alone. Imported where torch is, and a rank
hosts several replicas.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Self, TypeVar

import torch

T = TypeVar("T")


class ProcessState(NamedTuple):
    """The states of the default generators: of the CPU, and of CUDA where that has begun."""

    generators: tuple[tuple[torch.Generator, torch.Tensor], ...]

    @classmethod
    def of_now(cls) -> Self:
        """Returns what the process has."""
        generators = torch.default_generator, *torch.cuda.default_generators
        return cls(tuple([(one, one.get_state()) for one in generators]))

    def restore(self) -> None:
        """Has the process have it."""
        for generator, state in self.generators:
            generator.set_state(state)

    def draws_as(self, other: Self) -> bool:
        """Returns whether its generators give the same numbers."""
        return len(self.generators) == len(other.generators) and all(
            torch.equal(mine, its)
            for (_, mine), (_, its) in zip(self.generators, other.generators, strict=True)
        )


class ProcessStates:
    """Those of the replicas of this rank in a run, which begin with what the process has."""

    def __init__(self, num_replicas: int) -> None:
        #: By the position of the replica.
        self._states = [ProcessState.of_now()] * num_replicas

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
