"""Processes: those of a job on this host, as /proc shows them, and programs that are asked."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import glob
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Collection, Mapping, Sequence

# What each launcher sets for a rank. It has none of them itself: see `without_rank`.
_RANK_VARIABLES = (b"PMIX_RANK=", b"PMI_RANK=", b"OMPI_COMM_WORLD_RANK=")

_MOST_QUESTIONS = 3

# From linux/prctl.h.
_SET_PARENT_DEATH_SIGNAL = 1
_SET_CHILD_SUBREAPER = 36


def _children() -> dict[int, list[int]]:
    """Returns the children of all processes that have some; none where there is no /proc."""
    children: dict[int, list[int]] = {}
    for path in glob.iglob("/proc/[0-9]*/stat"):
        try:
            with open(path, "rb") as file:
                # The name of the program may hold spaces and brackets; behind it: state, parent.
                parent = int(file.read().rpartition(b")")[2].split()[1])
        except (OSError, IndexError):
            continue  # it has ended meanwhile
        children.setdefault(parent, []).append(int(path.split("/")[2]))
    return children


def descendants(pid: int, others: Collection[int] = ()) -> list[int]:
    """Returns the children of a process, theirs, and so on; parents before their children.

    The `others` are left out, and what is below them.
    """
    children, family = _children(), [pid]
    for process in family:
        family += [child for child in children.get(process, []) if child not in others]
    return family[1:]


def ranks_below(pid: int) -> list[int]:
    """Returns the ranks on this host that the launcher `pid` has started."""
    ranks: list[int] = []
    children, others = _children(), [pid]
    for process in others:
        for child in children.get(process, []):
            if _is_rank(child):  # what it starts inherits its variables, and is its own business
                ranks.append(child)
            else:
                others.append(child)
    return ranks


def _is_rank(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            variables = file.read().split(b"\0")
    except OSError:
        return False
    return any(text.startswith(_RANK_VARIABLES) for text in variables)


def send_signal(pid: int, number: int, *, to_group: bool = False) -> None:
    """Sends a signal to a process, if it is still there and may be sent one.

    `to_group`: and to those of its group, where it leads one.
    """
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(-pid if to_group and os.getpgid(pid) == pid else pid, number)


def adopt_orphans() -> None:
    """Makes processes whose parent ends the children of this one, where the system can."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def ends_with_parent() -> Callable[[], None] | None:
    """Returns what a child calls to get SIGTERM when its parent is killed; None if it can't."""
    if sys.platform != "linux":
        return None
    prctl = ctypes.CDLL(None).prctl
    return functools.partial(prctl, _SET_PARENT_DEATH_SIGNAL, int(signal.SIGTERM), 0, 0, 0)


def ask(
    words: Sequence[str], environ: Mapping[str, str] | None = None, seconds: float = 60
) -> subprocess.CompletedProcess[str]:
    """Runs a program that answers and ends; returns its status and what it has written.

    Raises
    ------
    OSError
        It can't be started.
    subprocess.TimeoutExpired
        It has not ended in this time.
    """
    for _ in range(_MOST_QUESTIONS):
        done = subprocess.run(
            words,
            env=environ,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=seconds,
            check=False,
        )
        if done.returncode != -signal.SIGKILL:  # by somebody else
            break
    return done
