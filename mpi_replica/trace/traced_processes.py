"""What traced processes have left, as it was written: each by its own clock."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..ranks.watch.event_log import (
    BLOCK_HEAD,
    NAME_OF_PART,
    NUM_FIELDS,
    OF_RANK,
    folder_of_parts,
)

Integers = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


class Membership(NamedTuple):
    """A process in a world of ranks that call together."""

    #: The same on all ranks; None where they have never come to a call.
    name: int | None = None
    rank: int = -1
    size: int = 0
    #: That of the thread which calls.
    calls_track: int = OF_RANK


class Events:
    """Events of one kind, a column for each field.

    Parameters
    ----------
    rows : array of int64
        A row for each event, with the fields of an `Event`.
    begin, end : array
        By which clock ever.
    """

    def __init__(self, rows: Integers, begin: Floats, end: Floats) -> None:
        self.rows, self.begin, self.end = rows, begin, end
        _, self.name, self.track, _, _, self.number, self.size = rows.T

    def __len__(self) -> int:
        return len(self.rows)


@dataclass
class TracedProcess:
    """What one process has written."""

    host: str = ""
    pid: int = 0
    #: How often its job was started before.
    restart: int = 0
    #: A moment by the clock of its host, and by its own; both in nanoseconds.
    epoch_ns: int = 0
    clock_ns: int = 0
    #: When it has come to its end, by its own clock; None where it was killed, or still runs.
    end_ns: int | None = None
    #: Of so long it has no events.
    missing_ns: int = 0
    #: Whether what follows on some place of its file can't be read.
    is_damaged: bool = False
    last_seconds: float | None = None
    memberships: dict[int, Membership] = field(default_factory=dict)
    names: Sequence[str] = ()
    rows: Integers = field(default_factory=lambda: np.empty((0, NUM_FIELDS), np.int64))

    @property
    def largest_world(self) -> Membership:
        """Its place in the largest of its worlds; that of nobody where it has none."""
        return max(self.memberships.values(), key=lambda one: one.size, default=Membership())

    @property
    def rank(self) -> int:
        """Its rank there; -1 where it has none."""
        return self.largest_world.rank

    @property
    def may_run(self) -> bool:
        """Whether it may still write: it has told of no end, and is not known to be gone."""
        is_elsewhere = self.host != socket.gethostname()
        return self.end_ns is None and (is_elsewhere or os.path.exists(f"/proc/{self.pid}"))

    @property
    def label(self) -> str:
        """Its name in a trace."""
        restart = f", start {self.restart + 1}" if self.restart else ""
        return f"rank {self.rank} ({self.host}, pid {self.pid}{restart})"


def read_processes(path: str) -> list[TracedProcess]:
    """Returns what processes have left beside the trace `path`: those of one job, by rank.

    Raises
    ------
    FileNotFoundError
        There is nothing.
    """
    folder = folder_of_parts(path)
    parts: dict[str, dict[int, str]] = {}
    for name in os.listdir(folder):
        if found := NAME_OF_PART.fullmatch(name):
            parts.setdefault(found[1], {})[int(found[2])] = os.path.join(folder, name)
    processes = [_read([files[n] for n in sorted(files)]) for files in parts.values()]
    processes = [one for one in processes if one.pid]  # it tells who it is before all else
    if not processes:
        raise FileNotFoundError(
            f"no rank has written a part of a trace in {folder}: it begins with the first strategy"
            " of a program."
        )
    processes.sort(key=lambda one: (one.restart, one.rank, one.host, one.pid))
    return processes


def _read(files: Sequence[str]) -> TracedProcess:
    """Returns what one process has written, to files one after the other."""
    process = TracedProcess()
    names: list[str] = []
    rows = []
    for file in files:
        of_file: list[str] = []
        with open(file, "rb") as opened:
            data = opened.read()
        for text, events in _blocks(data):
            try:
                told = json.loads(text)
                new_names, facts = told["names"], told["facts"]
                rows.append(np.frombuffer(events, np.int64).reshape(-1, NUM_FIELDS))
            except (ValueError, KeyError, TypeError):
                process.is_damaged = True
                break
            of_file += new_names
            for fact in facts:
                _learn(process, fact)
        names = of_file or names  # each file has all of them, if it has a whole block
    process.names = names
    if rows:
        process.rows = np.concatenate(rows)
    if process.last_seconds and len(process.rows):
        ends = process.rows[:, 4]
        process.rows = process.rows[ends >= ends.max() - process.last_seconds * 1e9]
    return process


def _blocks(data: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Gives the two parts of each whole block; what was killed may have left half of one."""
    place = 0
    while place + BLOCK_HEAD.size <= len(data):
        text_bytes, events_bytes = BLOCK_HEAD.unpack_from(data, place)
        middle = place + BLOCK_HEAD.size + text_bytes
        place, text = middle + events_bytes, data[middle - text_bytes : middle]
        if place <= len(data):
            yield text, data[middle:place]


def _learn(process: TracedProcess, fact: dict[str, Any]) -> None:
    world = fact.pop("world", None)
    if world is None:
        for name, value in fact.items():
            setattr(process, name, value)
    else:
        known = process.memberships.get(world, Membership())
        process.memberships[world] = known._replace(**fact)
