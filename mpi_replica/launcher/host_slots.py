"""The hosts of a job, and how many ranks each of them has room for."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from itertools import repeat
from typing import NamedTuple

from ..core.exceptions import LaunchError
from .processes import ask

# A line of a hostfile: of Open MPI, `n1 slots=2 max-slots=4`, or of MPICH, `n1:2`.
_SLOTS_OF_OPEN_MPI = re.compile(r"(?<![\w-])(?:slots|cpu|count)\s*=\s*(\d+)")
_NAME_AND_SLOTS = re.compile(r"(\S*:\S*:\S*|[^\s:]+)(?::(\d+))?")
# What all launchers take in a list: no `user@host`, no `^host` that is left out, no `fe80::1`.
_PLAIN_NAME = re.compile(r"[\w.-]+")
# Slurm: two hosts with three tasks each, `3(x2)`.
_TASKS_OF_HOSTS = re.compile(r"(\d+)(?:\(x(\d+)\))?")


class HostSlots(NamedTuple):
    """A host, and how many ranks it has room for."""

    name: str
    #: None where it is not said.
    slots: int | None = None


def hosts_of_job(hostfile: str | None, environ: Mapping[str, str]) -> tuple[HostSlots, ...]:
    """Returns the hosts of a job, in order.

    There are none on one host without a batch system, nor where they can't be found out.

    Parameters
    ----------
    hostfile : str, optional
        The hostfile that the user has named, which wins over a batch system.
    environ : mapping
        The variables by which a batch system says what it has given.

    Raises
    ------
    LaunchError
        The hostfile, or that of PBS, can't be read, or the first one names no host.
    """
    if hostfile is not None:
        hosts = hosts_in_file(hostfile)
        return hosts if all(_PLAIN_NAME.fullmatch(host.name) for host in hosts) else ()
    if "SLURM_JOB_ID" in environ:
        return _of_slurm(environ)
    if "PBS_NODEFILE" in environ:
        return hosts_of_pbs(environ["PBS_NODEFILE"])
    return ()


def hosts_in_file(path: str | os.PathLike[str]) -> tuple[HostSlots, ...]:
    """Returns the hosts that a hostfile names, in the format of Open MPI or of MPICH.

    Raises
    ------
    LaunchError
        It can't be read, or names none.
    """
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            hosts = hosts_in_lines(file)
    except OSError as error:
        raise LaunchError(
            f"the hostfile {os.fspath(path)!r} can't be read: {error.strerror}."
        ) from error
    if not hosts:
        raise LaunchError(f"the hostfile {os.fspath(path)!r} names no host.")
    return hosts


def hosts_in_lines(lines: Iterable[str]) -> tuple[HostSlots, ...]:
    """Returns the hosts that lines of a hostfile name; a host of several lines has their slots.

    Examples
    --------
    >>> hosts_in_lines(["n1 slots=2 max-slots=4", "n2:3  # the new one", "n3", "n4", "n4"])[:2]
    (HostSlots(name='n1', slots=2), HostSlots(name='n2', slots=3))
    >>> hosts_in_lines(["n3", "n4", "n4"])
    (HostSlots(name='n3', slots=None), HostSlots(name='n4', slots=2))
    """
    found: dict[str, list[int | None]] = {}
    for line in lines:
        text = re.split("#|//", line)[0].strip()
        if match := _NAME_AND_SLOTS.match(text):
            slots = match[2]
            if match_of_open_mpi := _SLOTS_OF_OPEN_MPI.search(text):
                slots = match_of_open_mpi[1]
            found.setdefault(match[1], []).append(None if slots is None else int(slots))
    return tuple(
        # A name that stands alone is a slot where it is repeated.
        HostSlots(name, slots[0] if len(slots) == 1 else sum(1 if n is None else n for n in slots))
        for name, slots in found.items()
    )


def slots_in_list(text: str) -> list[int]:
    """Returns the slots of each host, from a list as Slurm writes it; none from a strange one.

    Examples
    --------
    >>> slots_in_list("2(x3),1")
    [2, 2, 2, 1]
    """
    slots: list[int] = []
    for part in text.split(","):
        match = _TASKS_OF_HOSTS.fullmatch(part)
        if match is None:
            return []
        slots += repeat(int(match[1]), int(match[2] or 1))
    return slots


def _of_slurm(environ: Mapping[str, str]) -> tuple[HostSlots, ...]:
    nodes = environ.get("SLURM_JOB_NODELIST") or environ.get("SLURM_NODELIST")
    scontrol = shutil.which("scontrol", path=environ.get("PATH"))
    if not nodes or scontrol is None:
        return ()
    try:
        done = ask([scontrol, "show", "hostnames", nodes], environ)
    except (OSError, subprocess.TimeoutExpired):
        return ()
    names = done.stdout.split() if done.returncode == 0 else []
    # In a step it says how many tasks the step has, on fewer hosts it may be.
    slots: Sequence[int | None] = slots_in_list(environ.get("SLURM_TASKS_PER_NODE", ""))
    if len(slots) != len(names):
        slots = [None] * len(names)
    return tuple(map(HostSlots, names, slots))


def hosts_of_pbs(path: str) -> tuple[HostSlots, ...]:
    """Returns the hosts of a job of PBS, from the file that has a line with one for each rank.

    Raises
    ------
    LaunchError
        It can't be read.
    """
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            names = file.read().split()
    except OSError as error:
        raise LaunchError(
            f"PBS_NODEFILE={path!r} can't be read ({error.strerror}). Start the job on the host"
            " where PBS runs its script, or unset the variable to run on this host alone."
        ) from error
    return tuple(HostSlots(name, names.count(name)) for name in dict.fromkeys(names))


def slots_for(ranks: int, before: Sequence[HostSlots], left: Sequence[HostSlots]) -> int:
    """Returns how many ranks of a job fit on the hosts that are left.

    A host whose slots are not said counts as its share of the ranks, and so does each where all
    of them have fewer slots than the job has ranks: then slots did not limit it before, either.

    Parameters
    ----------
    ranks : int
        The ranks of the first start.
    before : sequence of HostSlots
        All hosts of the first start.
    left : sequence of HostSlots
        Those of them that still answer.

    Examples
    --------
    >>> a, b, c = HostSlots("a", 4), HostSlots("b", 2), HostSlots("c")
    >>> slots_for(6, [a, b], [a, b]), slots_for(6, [a, b], [b]), slots_for(6, [a, c], [c])
    (6, 2, 3)
    """
    if len(left) == len(before):
        return ranks
    share = -(-ranks // len(before))
    known = [host.slots for host in before if host.slots is not None]
    is_limited = len(known) < len(before) or sum(known) >= ranks
    slots = [share if host.slots is None or not is_limited else host.slots for host in left]
    return min(ranks, sum(slots))
