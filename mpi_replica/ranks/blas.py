"""The threads of BLAS, of which reproducible strategies fix the number.

A matrix product cuts its sums among the threads, so that their number decides the bits. Left alone
it follows the cores of a host, and with them the layout.
"""

from __future__ import annotations

import os
import sys
import threading
import weakref
from collections.abc import Callable, Mapping
from typing import Any

_THREADS = "MPI_REPLICA_BLAS_THREADS"


class _ThreadState(threading.local):
    """What each thread has limited: OpenMP keeps a number of threads for each thread."""

    #: How many modules there were when this thread limited the libraries.
    modules = -1


class _Limit:
    """Limits the BLAS libraries of the process while strategies hold it, in any order."""

    def __init__(self) -> None:
        # It may be taken twice: the garbage collector may release a strategy at any line here.
        self._lock = threading.RLock()
        self._holders = 0
        #: What the libraries are limited to; 0 where nobody holds them.
        self.threads = 0
        # By path of the file: the library's controls, and its number of threads before.
        self._before: dict[str, tuple[Any, int]] = {}

    def hold(self, threads: int) -> None:
        """Limits all libraries until `release` was called as often as this."""
        with self._lock:
            self._holders += 1
            self.threads = threads
            self.apply()

    def release(self) -> None:
        """Restores what was before, if this is the last holder."""
        with self._lock:
            self._holders -= 1
            if self._holders:
                return
            self.threads = 0
            for library, number in self._before.values():
                library.set_num_threads(number)
            self._before.clear()

    def apply(self) -> None:
        """Limits what is loaded now, and keeps the numbers of what was not limited yet."""
        # Here: other programs pay nothing for it.
        from threadpoolctl import ThreadpoolController

        with self._lock:
            if not self._holders:
                return
            modules = len(sys.modules)
            for library in ThreadpoolController().select(user_api="blas").lib_controllers:
                self._before.setdefault(library.filepath, (library, library.num_threads))
                library.set_num_threads(self.threads)
            _state.modules = modules


_state = _ThreadState()
_limit = _Limit()  # one, since the libraries are the process's


def threads_asked_for(environ: Mapping[str, str]) -> int | None:
    """Returns how many threads of BLAS a variable gives to each replica; None where it is not set.

    Raises
    ------
    ValueError
        It is no positive integer.

    Examples
    --------
    >>> threads_asked_for({"MPI_REPLICA_BLAS_THREADS": "2"})
    2
    """
    text = environ.get(_THREADS)
    if text is None:
        return None
    try:
        threads = int(text)
    except ValueError:
        threads = 0
    if threads < 1:
        raise ValueError(
            f"{_THREADS}={text!r} is not a positive integer. It is how many threads of BLAS each"
            " replica of a reproducible strategy has: give such a number, or unset it for 1."
        )
    return threads


def threads_per_replica() -> int:
    """Returns how many threads of BLAS each replica has in a reproducible strategy.

    The replicas of a rank run one at a time, so it is the number of the process as well.

    Raises
    ------
    ValueError
        The environment variable is no positive integer, or it has changed while another
        reproducible strategy is open.
    """
    threads = threads_asked_for(os.environ) or 1
    if _limit.threads not in (0, threads):
        raise ValueError(
            f"{_THREADS}={os.environ.get(_THREADS, '1')!r}, but a reproducible strategy that is"
            f" still open has fixed the threads of BLAS at {_limit.threads}. Close it first, or"
            " give the same number."
        )
    return threads


def hold(owner: object) -> Callable[[], Any]:
    """Fixes the threads of all BLAS libraries while `owner` lives, or until the result is called.

    The last one of a process restores what was before.

    Parameters
    ----------
    owner : object
        The strategy. One that was never closed lets go when it is collected.

    Returns
    -------
    callable
        Ends the hold. A second call does nothing.
    """
    _limit.hold(threads_per_replica())
    release = weakref.finalize(owner, _limit.release)
    release.atexit = False  # there is nothing left to restore it for
    return release


def refresh() -> None:
    """Limits BLAS libraries that were loaded since this thread did so last (scipy has its own).

    A library comes with a module that is imported. Without a new one it costs 0.1 µs.
    """
    if _state.modules != len(sys.modules):
        _limit.apply()
