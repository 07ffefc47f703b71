"""What torch keeps for the process: each replica of a rank has its own, while they take turns.

So that it draws what it would draw on a rank of its own, and that who puts a generator back, as
the backward pass of a checkpoint does, or a switch, as the end of ``detect_anomaly`` does, puts
back its own alone. Imported where torch is, and a rank hosts several replicas.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar

import torch

T = TypeVar("T")

_parametrize: Any = torch.nn.utils.parametrize
_HAS_CACHE = hasattr(_parametrize, "_cache_enabled") and hasattr(_parametrize, "_cache")

#: The default dtype, whether anomalies are looked for, and whether NaN is one.
_Switches: TypeAlias = tuple[torch.dtype, bool, bool]
#: The states of the default generators: of the CPU, and of CUDA where that has begun. What
#: `parametrize` keeps: how many ``cached()`` are open, and their tensors. And switches. Plain
#: tuples: each replica makes one at each collective, and one with names takes a third longer.
_State: TypeAlias = tuple[list[torch.Tensor], tuple[int, dict[Any, Any]], _Switches]


def _switches() -> _Switches:
    checks_nan = torch.is_anomaly_check_nan_enabled()
    return torch.get_default_dtype(), torch.is_anomaly_enabled(), checks_nan


def _state() -> _State:
    generators = torch.default_generator, *torch.cuda.default_generators
    cache = (_parametrize._cache_enabled, _parametrize._cache) if _HAS_CACHE else (0, {})
    return [one.get_state() for one in generators], cache, _switches()


class ProcessStates:
    """Those of the replicas of this rank in a run, which begin with what the process has."""

    def __init__(self, num_replicas: int) -> None:
        generators, cache, switches = _state()
        #: By the position of the replica; each has a cache of its own.
        self._states = [
            (generators, (cache[0], dict(cache[1])), switches) for _ in range(num_replicas)
        ]

    def enter(self, position: int) -> None:
        """Begins a turn of a replica. The hub, too, has the state of the first one."""
        generators, cache, switches = self._states[position]
        torch.default_generator.set_state(generators[0])
        for index in range(1, len(generators)):
            torch.cuda.default_generators[index - 1].set_state(generators[index])
        if _HAS_CACHE:
            _parametrize._cache_enabled, _parametrize._cache = cache
        if switches != _switches():
            dtype, looks_for_anomalies, checks_nan = switches
            torch.set_default_dtype(dtype)
            torch.set_anomaly_enabled(looks_for_anomalies, checks_nan)

    def leave(self, position: int) -> None:
        """Ends a turn of a replica."""
        self._states[position] = _state()

    def in_turn(self, position: int, function: Callable[[], T]) -> T:
        """Calls the step function of a replica."""
        self.enter(position)
        try:
            return function()
        finally:
            self.leave(position)

    def in_all_turns(self, function: Callable[..., T], *args: object) -> T:
        """Calls a merge_fn, which would run for each replica on a rank of its own."""
        before, _, switches_before = self._states[0]
        try:
            return self.in_turn(0, lambda: function(*args))
        finally:
            after, _, switches_after = self._states[0]
            for position, (generators, cache, switches) in enumerate(self._states):
                if len(generators) == len(before) and all(map(torch.equal, generators, before)):
                    generators = after
                if switches == switches_before:
                    switches = switches_after
                self._states[position] = generators, cache, switches
