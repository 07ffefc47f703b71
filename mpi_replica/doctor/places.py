"""Checks of the hosts: who runs where, with which cores, threads and memory."""

from __future__ import annotations

from collections.abc import Sequence

from ..layout import compressed
from ..numerics import differences
from .check import Check
from .facts import Facts

__all__ = ["place_checks"]

# A container often has 64 MB, and libraries take several MB for each rank.
_LITTLE_SHARED_MEMORY = 64 << 20


def place_checks(facts: Sequence[Facts]) -> list[Check]:
    """Return the checks of all ranks, whose facts stand in their order."""
    return [_hosts(facts), _binding(facts), _shared_memory(facts), _blas(facts), _equal(facts)]


def _by_host(facts: Sequence[Facts]) -> dict[str, list[Facts]]:
    found: dict[str, list[Facts]] = {}
    for fact in facts:
        found.setdefault(fact.host, []).append(fact)
    return found


def _cores(ranks: Sequence[Facts]) -> frozenset[int]:
    """Return the cores of one host on which any of these ranks may run."""
    return frozenset[int]().union(*(fact.cores for fact in ranks))


def _hosts(facts: Sequence[Facts]) -> Check:
    hosts = _by_host(facts)
    value = ", ".join(f"{len(ranks)} on {host}" for host, ranks in hosts.items())
    crowded = {host: (len(ranks), len(_cores(ranks))) for host, ranks in hosts.items()}
    for host, (ranks, cores) in crowded.items():
        if ranks > cores:
            return Check(
                "ranks",
                value,
                "warn",
                f"{host} has {ranks} ranks for {cores} cores: each exchange waits for its turn of"
                " a core. Start fewer ranks, with several replicas on each (--replicas).",
            )
    return Check("ranks", value)


def _binding(facts: Sequence[Facts]) -> Check:
    counts = [len(fact.cores) for fact in facts]
    is_bound = any(
        fact.cores != _cores(ranks) for ranks in _by_host(facts).values() for fact in ranks
    )
    value = f"{_range(counts)} core{'s' * (set(counts) != {1})} a rank"
    value += ", bound" if is_bound else ", not bound"
    for rank, fact in enumerate(facts):
        threads = max(fact.blas_threads.values(), default=1)
        if threads > len(fact.cores):
            return Check(
                "binding",
                value,
                "warn",
                f"rank {rank} has {threads} threads of BLAS for {len(fact.cores)} cores: they wait"
                " for each other. Start with --bind none (mpirun of Open MPI: --bind-to none), or"
                f" set OMP_NUM_THREADS={len(fact.cores)}.",
            )
    return Check("binding", value)


def _shared_memory(facts: Sequence[Facts]) -> Check:
    found = [(fact.shared_memory, fact.host) for fact in facts if fact.shared_memory is not None]
    if not found:
        return Check("shared memory", "unknown: this system does not tell")
    least, host = min(found)
    value = f"{least >> 20} MiB free on {host}"
    if least < _LITTLE_SHARED_MEMORY:
        return Check(
            "shared memory",
            value,
            "warn",
            "Ranks of one host exchange data through it, and a library that gets too little may"
            " end the program. Give the container more: docker run --shm-size=1g (or --ipc=host).",
        )
    return Check("shared memory", value)


def _blas(facts: Sequence[Facts]) -> Check:
    threads = [max(fact.blas_threads.values(), default=1) for fact in facts]
    names = list(dict.fromkeys(name for fact in facts for name in fact.numerics.blas))
    value = f"{', '.join(names) or 'no BLAS that is known'}; {_range(threads)} a rank"
    for host, ranks in _by_host(facts).items():
        total = sum(max(fact.blas_threads.values(), default=1) for fact in ranks)
        cores = len(_cores(ranks))
        if total > max(cores, len(ranks)):
            return Check(
                "BLAS threads",
                value,
                "warn",
                f"{len(ranks)} ranks on {host} have {total} threads for {cores} cores. Set"
                f" OMP_NUM_THREADS={max(1, cores // len(ranks))}, or start with python -m"
                " mpi_replica run, which does.",
            )
    return Check("BLAS threads", value)


def _equal(facts: Sequence[Facts]) -> Check:
    """Compare what must be the same for all ranks."""
    value = f"Python {facts[0].python}, numpy {facts[0].numerics.numpy}"
    told = differences([fact.numerics for fact in facts])
    if told is not None:
        return Check("same on all ranks", value, "warn", told)
    hashes = [fact.string_hash for fact in facts]
    if len(set(hashes)) > 1:
        other = compressed([rank for rank, found in enumerate(hashes) if found != hashes[0]])
        return Check(
            "same on all ranks",
            value,
            "warn",
            f"hash() of strings is another one on ranks {other} than on rank 0: a loop over a set"
            " of strings has another order there. Set PYTHONHASHSEED=0.",
        )
    return Check("same on all ranks", value)


def _range(numbers: Sequence[int]) -> str:
    low, high = min(numbers), max(numbers)
    return str(low) if low == high else f"{low}-{high}"
