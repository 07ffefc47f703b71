"""What the bits of a rank's results depend on, beside the program: libraries and CPU kernels."""

from __future__ import annotations

import itertools
import logging
import os
import sys
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ..core.layout import sides
from .blas import threads_per_replica

_NAMES = {"openblas": "OpenBLAS", "mkl": "MKL", "blis": "BLIS", "flexiblas": "FlexiBLAS"}

# How the user chooses the CPU kernels of a library; MKL tells nobody which ones it uses.
_KERNEL_SETTINGS = {
    "OpenBLAS": "OPENBLAS_CORETYPE=...",
    "MKL": "MKL_CBWR=COMPATIBLE",
    "BLIS": "BLIS_ARCH_TYPE=...",
}

_log = logging.getLogger("mpi_replica")


class Numerics(NamedTuple):
    """The numerics of a rank."""

    blas_threads: int
    #: The kind of CPU, such as ``x86_64``.
    machine: str
    #: exp, sin and others of Python, and some of numpy, are those of the C library.
    c_library: str
    numpy: str
    #: By which numpy chooses its own kernels: of what it was built for, what is enabled here.
    cpu_features: tuple[str, ...]
    #: The BLAS libraries that are loaded, each with its version, CPU kernel and kind of threads.
    blas: tuple[str, ...]


def numerics_here() -> Numerics:
    """Returns the numerics of this process.

    Raises
    ------
    ValueError
        `MPI_REPLICA_BLAS_THREADS` is no positive integer; see `threads_per_replica`.
    """
    from threadpoolctl import threadpool_info  # here: other programs pay nothing for it

    libraries = {
        " ".join(
            [
                _NAMES.get(info["internal_api"], info["internal_api"]),
                *filter(None, map(info.get, ("version", "architecture", "threading_layer"))),
            ]
        )
        for info in threadpool_info()
        if info["user_api"] == "blas"
    }
    name = "CS_GNU_LIBC_VERSION"
    return Numerics(
        threads_per_replica(),
        os.uname().machine,
        (os.confstr(name) if name in os.confstr_names else None) or "",
        np.__version__,
        _cpu_features(),
        tuple(sorted(libraries)),
    )


def _cpu_features() -> tuple[str, ...]:
    module = sys.modules.get("numpy._core._multiarray_umath")  # under no public name of numpy's
    is_enabled = getattr(module, "__cpu_features__", {})
    known = (*getattr(module, "__cpu_baseline__", ()), *getattr(module, "__cpu_dispatch__", ()))
    return tuple(feature for feature in known if is_enabled.get(feature))


def compare(facts: Sequence[Numerics], rank: int) -> None:
    """Compares the numerics of the ranks; rank 0 logs a warning where they differ.

    No communication: `facts` holds those of all ranks, on each of them.

    Raises
    ------
    ValueError
        The number of BLAS threads differs between ranks.
    """
    threads = [str(fact.blas_threads) for fact in facts]
    if len(set(threads)) > 1:
        raise ValueError(
            f"MPI_REPLICA_BLAS_THREADS differs between ranks: {sides(threads)}. The bits of matrix"
            " products depend on it. Give the same on all (Open MPI hands it to other hosts with"
            " mpiexec -x MPI_REPLICA_BLAS_THREADS)."
        )
    text = differences(facts) if rank == 0 else None
    if text is not None:
        _log.warning(text)


def differences(facts: Sequence[Numerics]) -> str | None:
    """Returns what differs between the ranks and what follows, as a text for the user.

    Parameters
    ----------
    facts : sequence of Numerics
        In the order of the ranks.

    Returns
    -------
    str or None
        None where the ranks compute alike. A library that only some ranks have loaded beside the
        ones that all have is no difference: it serves another part of the program.

    Examples
    --------
    >>> one = Numerics(1, "x86_64", "glibc 2.36", "2.4.0", ("AVX2", "AVX512F"), ("MKL 2025.2",))
    >>> two = one._replace(numpy="2.4.1", cpu_features=("AVX2",))
    >>> print(differences([one, one, two]))  # doctest: +ELLIPSIS
    The ranks of a reproducible strategy compute differently: ... numpy: ranks 0-1: 2.4.0; \
rank 2: 2.4.1. numpy's CPU kernels: ranks 0-1: AVX512F; rank 2: without. Use ...
    """
    if len(facts) < 2:
        return None
    first, *others = [set(fact.cpu_features) for fact in facts]
    apart = first.union(*others) - first.intersection(*others)  # what some ranks lack
    libraries = [fact.blas for fact in facts]
    topics = {
        "machine": [fact.machine for fact in facts],
        "C library": [fact.c_library or "unknown" for fact in facts],
        "numpy": [fact.numpy for fact in facts],
        "numpy's CPU kernels": [
            ", ".join(name for name in fact.cpu_features if name in apart) or "without"
            for fact in facts
        ],
        "BLAS": [] if _fit(libraries) else [", ".join(names) or "unknown" for names in libraries],
    }
    topics = {name: values for name, values in topics.items() if len(set(values)) > 1}
    if not topics:
        return None
    findings = " ".join(f"{name}: {sides(values)}." for name, values in topics.items())
    settings = []
    if "machine" not in topics and (apart or "BLAS" in topics):
        known = {text.partition(" ")[0] for names in libraries for text in names}
        settings = [setting for name, setting in _KERNEL_SETTINGS.items() if name in known]
    if "machine" not in topics and apart:
        settings.append(f"NPY_DISABLE_CPU_FEATURES='{' '.join(sorted(apart))}'")
    advice = " Use the same environment and the same type of CPU on all hosts."
    if settings:
        advice += (
            " Where only the CPUs differ, kernels that all of them have can be chosen, in the"
            f" environment of all ranks: {', '.join(settings)}."
        )
    return (
        "The ranks of a reproducible strategy compute differently: the same computation will not"
        f" have the same bits on all of them. {findings}{advice}"
    )


def _fit(libraries: Sequence[tuple[str, ...]]) -> bool:
    """Returns whether of any two ranks one has loaded all that the other has."""
    by_size = sorted(map(frozenset, set(libraries)), key=len)
    is_unknown = len(by_size) > 1 and not by_size[0]
    return not is_unknown and all(less <= more for less, more in itertools.pairwise(by_size))
