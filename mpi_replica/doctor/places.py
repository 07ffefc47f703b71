"""Checks of the hosts: who runs where, with which cores, threads and memory."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import NamedTuple

from ..core.layout import numbers_text
from ..ranks.host import cores, free_shared_memory, machine
from ..ranks.launch import library
from ..ranks.library_facts import LibraryFacts
from ..ranks.numerics import Numerics, differences, numerics_here
from .checks import Check, advise

# A container often has 64 MB, and libraries take several MB for each rank.
_LITTLE_SHARED_MEMORY = 64 << 20


class RankFacts(NamedTuple):
    """What a rank tells about itself and its host."""

    host: str
    #: Whose cores these are: hosts in containers may share one.
    machine: str
    cores: frozenset[int]
    #: Bytes that are free.
    shared_memory: int | None
    #: The most of any BLAS library that is loaded.
    blas_threads: int
    numerics: Numerics
    #: hash() of a string.
    string_hash: int
    python: str
    #: None without MPI.
    library: LibraryFacts | None


def facts_here(host: str) -> RankFacts:
    """Returns the facts of this process."""
    from threadpoolctl import threadpool_info  # here: other programs pay nothing for it

    threads = [info["num_threads"] for info in threadpool_info() if info["user_api"] == "blas"]
    return RankFacts(
        host,
        machine(host),
        cores(),
        free_shared_memory(),
        max(threads, default=1),
        numerics_here(),
        hash("mpi_replica"),
        f"{sys.version_info.major}.{sys.version_info.minor}.{sys.version_info.micro}",
        library(),
    )


def place_checks(facts: Sequence[RankFacts]) -> list[Check]:
    """Returns the checks of all ranks, whose facts stand in their order."""
    return [
        advise("ranks", *_ranks(facts)),
        advise("binding", *_binding(facts)),
        advise("shared memory", *_shared_memory(facts)),
        advise("BLAS threads", *_blas(facts)),
        advise("same on all ranks", *_equal(facts)),
    ]


# Each of these gives the value of a check, and what to do.


def _ranks(facts: Sequence[RankFacts]) -> tuple[str, str]:
    machines = _by_machine(facts)
    value = ", ".join(f"{len(ranks)} on {name}" for name, ranks in machines)
    for name, ranks in machines:
        num_cores = len(_cores(ranks))
        if len(ranks) > num_cores:
            return value, (
                f"{name} has {len(ranks)} ranks for {num_cores} cores: each exchange waits for its"
                " turn of a core. Start fewer ranks, with several replicas on each (--replicas)."
            )
    return value, ""


def _binding(facts: Sequence[RankFacts]) -> tuple[str, str]:
    counts = [len(fact.cores) for fact in facts]
    is_bound = any(fact.cores != _cores(ranks) for _, ranks in _by_machine(facts) for fact in ranks)
    value = f"{_range(counts)} core{'s' * (set(counts) != {1})} a rank"
    value += ", bound" if is_bound else ", not bound"
    for rank, fact in enumerate(facts):
        threads = fact.blas_threads
        if threads > len(fact.cores):
            return value, (
                f"rank {rank} has {threads} threads of BLAS for {len(fact.cores)} cores: they wait"
                " for each other. Start with --bind none (mpirun of Open MPI: --bind-to none), or"
                f" set OMP_NUM_THREADS={len(fact.cores)}."
            )
    return value, ""


def _shared_memory(facts: Sequence[RankFacts]) -> tuple[str, str]:
    free = [(fact.shared_memory, fact.host) for fact in facts if fact.shared_memory is not None]
    if not free:
        return "unknown: this system does not tell", ""
    least, host = min(free)
    value = f"{least >> 20} MiB free on {host}"
    if least >= _LITTLE_SHARED_MEMORY:
        return value, ""
    return value, (
        "Ranks of one host exchange data through it, and a library that gets too little may"
        " end the program. Give the container more: docker run --shm-size=1g (or --ipc=host)."
    )


def _blas(facts: Sequence[RankFacts]) -> tuple[str, str]:
    names = list(dict.fromkeys(name for fact in facts for name in fact.numerics.blas))
    threads = _range([fact.blas_threads for fact in facts])
    value = f"{', '.join(names) or 'no BLAS that is known'}; {threads} a rank"
    for name, ranks in _by_machine(facts):
        total = sum(fact.blas_threads for fact in ranks)
        num_cores = len(_cores(ranks))
        if total > max(num_cores, len(ranks)):
            return value, (
                f"{len(ranks)} ranks on {name} have {total} threads for {num_cores} cores. Set"
                f" OMP_NUM_THREADS={max(1, num_cores // len(ranks))}, or start with python -m"
                " mpi_replica run, which does."
            )
    return value, ""


def _equal(facts: Sequence[RankFacts]) -> tuple[str, str]:
    value = f"Python {facts[0].python}, numpy {facts[0].numerics.numpy}"
    text = differences([fact.numerics for fact in facts])
    if text is not None:
        return value, text
    first = facts[0].string_hash
    others = [rank for rank, fact in enumerate(facts) if fact.string_hash != first]
    if not others:
        return value, ""
    return value, (
        f"hash() of strings is another one on {numbers_text('rank', others)} than on rank 0: a loop"
        " over a set of strings has another order there. Set PYTHONHASHSEED=0."
    )


def _by_machine(facts: Sequence[RankFacts]) -> list[tuple[str, list[RankFacts]]]:
    """Returns a name for each machine, of its hosts, and its ranks."""
    machines: dict[str, list[RankFacts]] = {}
    for fact in facts:
        machines.setdefault(fact.machine, []).append(fact)
    names: dict[str, list[list[RankFacts]]] = {}
    for ranks in machines.values():
        hosts = list(dict.fromkeys(fact.host for fact in ranks))
        name = hosts[0] if len(hosts) == 1 else f"one machine ({', '.join(hosts)})"
        names.setdefault(name, []).append(ranks)
    return [
        (name if len(alike) == 1 else f"{name} (machine {number})", ranks)
        for name, alike in names.items()
        for number, ranks in enumerate(alike, 1)
    ]


def _cores(ranks: Sequence[RankFacts]) -> frozenset[int]:
    """Returns the cores of one machine on which any of these ranks may run."""
    return frozenset[int]().union(*(fact.cores for fact in ranks))


def _range(numbers: Sequence[int]) -> str:
    low, high = min(numbers), max(numbers)
    return str(low) if low == high else f"{low}-{high}"
