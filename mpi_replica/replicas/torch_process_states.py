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


def _anomaly() -> tuple[bool, bool]:
    return torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()


def _set_anomaly(switches: tuple[bool, bool]) -> None:
    torch.set_anomaly_enabled(*switches)


#: How each switch is asked for, and set. Those of ``torch.backends`` are properties that torch may
#: freeze, and not all can be asked for: of TF32 it is an error where two ways to set it were mixed.
_SWITCHES: list[tuple[Callable[[], Any], Callable[[Any], Any]]] = [
    (torch.get_default_dtype, torch.set_default_dtype),
    (_anomaly, _set_anomaly),
    (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
    *[
        (getattr(torch._C, f"_get_{asked}"), getattr(torch._C, f"_set_{switched}"))
        for asked, switched in (
            ("cudnn_enabled", "cudnn_enabled"),
            ("cudnn_benchmark", "cudnn_benchmark"),
            ("cudnn_deterministic", "cudnn_deterministic"),
            ("mkldnn_enabled", "mkldnn_enabled"),
            ("cudnn_sdp_enabled", "sdp_use_cudnn"),
            ("flash_sdp_enabled", "sdp_use_flash"),
            ("math_sdp_enabled", "sdp_use_math"),
            ("mem_efficient_sdp_enabled", "sdp_use_mem_efficient"),
            ("overrideable_sdp_enabled", "sdp_use_overrideable"),
        )
        if hasattr(torch._C, f"_get_{asked}") and hasattr(torch._C, f"_set_{switched}")
    ],
]
_GETTERS = [getter for getter, _ in _SWITCHES]
#: The states of the default generators: of the CPU, and of CUDA where that has begun. What
#: `parametrize` keeps: how many ``cached()`` are open, and their tensors. And switches. Plain
#: tuples: each replica makes one at each collective, and one with names takes a third longer.
_State: TypeAlias = tuple[list[torch.Tensor], tuple[int, dict[Any, Any]], tuple[Any, ...]]


def _switches() -> tuple[Any, ...]:
    return tuple([getter() for getter in _GETTERS])


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
        now = _switches()
        if switches != now:
            for (_, switch), wanted, present in zip(_SWITCHES, switches, now, strict=True):
                if wanted != present:
                    switch(wanted)

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
