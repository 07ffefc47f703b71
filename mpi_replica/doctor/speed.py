"""Checks that need all ranks: clocks, and how long the collectives take."""

from __future__ import annotations

import time
from typing import NamedTuple, cast

import numpy as np

from ..replicas.replica_context import ReplicaContext, get_replica_context
from ..strategy.strategy import Strategy
from .checks import Check, advise

_ROUNDS = 100
_ARRAY_BYTES = 8 << 20
_ARRAY_ROUNDS = 5

_LONG_AGREEMENT_SECONDS = 1e-3
_SLOW_BYTES_PER_SECOND = 100e6
_LARGE_OFFSET_SECONDS = 1.0


class Speed(NamedTuple):
    """What was measured, as the slowest rank has seen it."""

    #: Of one agreement that carries one number.
    agreement_seconds: float
    #: Of arrays of 8 MiB.
    bytes_per_second: float
    #: By how much the clocks of the ranks differ at most; and how well that is known.
    offset_seconds: float
    uncertainty_seconds: float


def measure(strategy: Strategy) -> Speed:
    """Measures. Collective: all ranks call it, and get the same."""
    measured = strategy.experimental_local_results(strategy.run(_step))[0]
    seconds, array_seconds, offset, uncertainty = (float(number) for number in measured)
    return Speed(seconds, _ARRAY_BYTES / array_seconds, offset, uncertainty)


def _step() -> tuple[float, float, float, float]:
    """Returns what the slowest rank has measured, on each replica."""
    context = cast(ReplicaContext, get_replica_context())
    stamps = []
    durations = []
    for _ in range(_ROUNDS):
        begun = time.perf_counter()
        context.all_reduce("SUM", 1.0)
        durations.append(time.perf_counter() - begun)
        # All ranks leave an exchange at about the same time.
        stamps.append(time.time())
    values = np.ones(_ARRAY_BYTES // 4, np.float32)
    total = np.empty_like(values)
    times = []
    for _ in range(_ARRAY_ROUNDS):
        begun = time.perf_counter()
        context.all_reduce("SUM", values, out=total)
        times.append(time.perf_counter() - begun)
    mine = np.array(stamps)
    spread = context.all_reduce("MAX", mine) - context.all_reduce("MIN", mine)
    best = int(np.argmin(spread))  # where no rank was held up
    slowest = context.all_reduce("MAX", (float(np.median(durations)), float(np.median(times))))
    return float(slowest[0]), float(slowest[1]), float(spread[best]), float(min(durations))


def speed_checks(speed: Speed) -> list[Check]:
    """Returns the checks of what was measured."""
    agreement = f"{speed.agreement_seconds * 1e6:.1f} µs"
    slow_agreement = slow_arrays = wrong_clocks = ""
    if speed.agreement_seconds > _LONG_AGREEMENT_SECONDS:
        slow_agreement = (
            "A few µs are usual on one host, and tens between hosts. Look whether ranks"
            " outnumber cores, other programs use them, or the network is not the fast one."
        )
    else:
        agreement += ", with one number to add up"
    arrays = f"{speed.bytes_per_second / 1e9:.2g} GB/s with {_ARRAY_BYTES >> 20} MiB"
    if speed.bytes_per_second < _SLOW_BYTES_PER_SECOND:
        slow_arrays = (
            "Less than 1 GBit/s. Look whether other programs use the cores, and which network the"
            " library has chosen (Open MPI: --mca pml_base_verbose 10; MPICH:"
            " MPIR_CVAR_DEBUG_SUMMARY=1)."
        )
    clocks = (
        f"{speed.offset_seconds * 1e6:.0f} µs apart at most (to within"
        f" {speed.uncertainty_seconds * 1e6:.0f} µs)"
    )
    if speed.offset_seconds > _LARGE_OFFSET_SECONDS:
        wrong_clocks = (
            "Times in reports and logs of different hosts can't be compared. Start NTP there."
        )
    return [
        advise("agreement", agreement, slow_agreement),
        advise("all_reduce", arrays, slow_arrays),
        advise("clocks", clocks, wrong_clocks),
    ]
