"""What a process writes while it is traced: events of its own time, in blocks, to a file.

A block is a head with two lengths, then JSON of that length, and then events. The JSON has new
facts, and new names, whose numbers follow on those of the block before. Events are integers of 8
bytes. Whoever is killed leaves whole blocks behind, and perhaps one that is cut off.
"""

from __future__ import annotations

import atexit
import contextlib
import enum
import errno
import itertools
import json
import logging
import math
import os
import re
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable
from os import getpid
from time import monotonic, perf_counter_ns, time_ns
from typing import Any

import numpy as np

from ...core.argument_checks import is_switched_on
from ...core.context import State
from ...core.thread_owners import owner_of_this_thread
from ..launcher_connection import RESTART_VARIABLE

#: What is traced, where nothing else says so: the path of the trace, how many seconds of it are
#: kept (all, where it is not set), and 0 where the stacks of the program are not looked at.
TRACE_VARIABLE = "MPI_REPLICA_TRACE"
LAST_VARIABLE = "MPI_REPLICA_TRACE_LAST"
SAMPLES_VARIABLE = "MPI_REPLICA_TRACE_SAMPLES"

BLOCK_HEAD = struct.Struct("<II")
#: The name of a file: of which process it is, and which of its files.
NAME_OF_PART = re.compile(r"(.*)\.(\d+)\.events")
#: The track of what no replica does; other threads than the first one have those below.
OF_RANK = -1
#: The tracks of replicas are their ids; those of further threads of the program lie so far on.
MOST_REPLICAS = 1_000_000

_log = logging.getLogger("mpi_replica")

_SECONDS_BETWEEN_BLOCKS = 0.2
# 6 MB: as many as wait for a file system that does not answer; the last ones.
_MOST_WAITING = 1 << 16
_MOST_NAMES = 1 << 16


class EventKind(enum.IntEnum):
    """What an event is."""

    #: A collective call. Track: the world; number: how many exchanges had begun by its end; size:
    #: the bytes that this rank gave to it.
    CALL = 1
    #: A part of the program or of the package. Track: a replica, or `OF_RANK`; number: that of
    #: its kind.
    SPAN = 2
    #: Where the rank's thread is.
    SAMPLE = 3
    #: An exchange to compare clocks. Track: the world; number: that of the comparison; size: which
    #: of its exchanges.
    CLOCK = 4
    #: Something that happens, in words.
    INSTANT = 5


#: What a span counts as; its number says which.
KINDS_OF_PROGRAMS = ("program", "input", "checkpoint")
SPAN_KINDS = (*KINDS_OF_PROGRAMS, "run", "commit", "recovery")
_NUMBER_OF_KIND = {kind: number for number, kind in enumerate(SPAN_KINDS)}
_SPAN = int(EventKind.SPAN)  # without a look at the class

#: Kind, name, track, begin and end in nanoseconds of the process's clock, number and size.
NUM_FIELDS = 7
_EVENT = struct.Struct(f"{NUM_FIELDS}q")
pack_event = _EVENT.pack


def _end_of(event: bytes) -> int:
    ended: int = _EVENT.unpack(event)[4]
    return ended


class _Names(dict[str, int]):
    """A number for each text."""

    _lock = threading.Lock()

    def __missing__(self, text: str) -> int:
        with self._lock:
            return self.setdefault(text, len(self)) if len(self) < _MOST_NAMES else 0


class EventLog:
    """The events of this process, on their way to a file.

    Parameters
    ----------
    path : str
        That of the trace; the file stands in a folder beside it.
    last_seconds : float, optional
        How much is kept at least, of the end; by default all.
    has_samples : bool
        Whether the watcher is to look at the stack.

    Raises
    ------
    OSError
        The file can't be written.
    TypeError, ValueError
        `last_seconds` is not a positive number.
    """

    def __init__(
        self, path: str, last_seconds: float | None = None, *, has_samples: bool = True
    ) -> None:
        if last_seconds is not None:
            if not isinstance(last_seconds, int | float | np.integer | np.floating):
                raise TypeError(f"last_seconds={last_seconds!r} is not a number.")
            if not 0 < last_seconds < math.inf:
                raise ValueError(f"last_seconds={last_seconds!r} is not a positive number.")
            last_seconds = float(last_seconds)  # JSON takes no number of numpy
        self.has_samples = has_samples
        #: The number of each text that events name.
        self.names = _Names({f"(one of more than {_MOST_NAMES} names)": 0})
        self._last_seconds = last_seconds
        self._folder = folder_of_parts(path)
        restart = int(os.environ.get(RESTART_VARIABLE, "0"))
        # In containers the processes of each start may have the same ids.
        self._stem = f"{socket.gethostname()}-{getpid()}-{restart}"
        self._events: deque[bytes] = deque(maxlen=_MOST_WAITING)
        #: Takes an event that is packed. No function of Python: this runs at every call.
        self.add: Callable[[bytes], None] = self._events.append
        self._num_worlds = itertools.count()
        self._threads = {owner_of_this_thread(): 0}
        self._facts: list[dict[str, Any]] = []
        self._lock = threading.Lock()
        self._due = 0.0
        self._parts: list[str] = []
        make_folder_of_parts(path)
        # When the last event ended that was written, and in how much time the missing ones did.
        self._written_ns, self._missing_ns = perf_counter_ns(), 0
        self.tell(
            host=socket.gethostname(),
            pid=getpid(),
            restart=restart,
            epoch_ns=time_ns(),
            clock_ns=self._written_ns,
            last_seconds=last_seconds,
        )
        self._begin_part()

    def track(self, state: State | None = None) -> int:
        """Returns the track of the code that runs in this state, and in this thread."""
        thread = self._threads.setdefault(owner_of_this_thread(), len(self._threads))
        if state is None or state.replica_context is None:
            return OF_RANK - thread
        try:
            return thread * MOST_REPLICAS + state.replica_context.replica_id
        except ValueError:  # made by hand, it has no id
            return OF_RANK - thread

    def add_span(self, text: str, kind: str, begun: int, state: State | None) -> None:
        """Takes a part of the program that ends now, in this state, and has begun at `begun`."""
        ended, name, number = perf_counter_ns(), self.names[text], _NUMBER_OF_KIND[kind]
        self.add(pack_event(_SPAN, name, self.track(state), begun, ended, number, 0))

    def note(self, text: str) -> None:
        """Takes something that happens now."""
        now = perf_counter_ns()
        self.add(pack_event(EventKind.INSTANT, self.names[text], OF_RANK, now, now, 0, 0))

    def tell(self, **fact: Any) -> None:
        """Takes a fact that whoever reads the trace must know."""
        self._facts.append(fact)

    def new_world(self, **fact: Any) -> int:
        """Returns a number for ranks that call together, of which this is a fact."""
        world = next(self._num_worlds)
        self.tell(world=world, **fact)
        return world

    def write_if_due(self) -> None:
        """Writes what has come, several times a second; called by the watcher."""
        if monotonic() >= self._due:
            self.write()

    def write(self, seconds: float = -1) -> None:
        """Writes what has come; where that fails the trace ends, and the job goes on.

        Nothing where another write has not ended in so many `seconds`.
        """
        if not self._lock.acquire(timeout=seconds):
            return
        try:
            if self._file.closed:
                return
            self._due = monotonic() + _SECONDS_BETWEEN_BLOCKS
            try:
                self._write_blocks()
                if self._last_seconds and monotonic() > self._part_ends:
                    self._file.close()
                    self._begin_part()
            except OSError as error:
                self._take_no_more()
                with contextlib.suppress(OSError):
                    self._file.close()
                _log.warning("the trace ends here, since it can't be written: %s", error)
        finally:
            self._lock.release()

    def close(self) -> None:
        """Writes the rest, and that it is all."""
        self.tell(end_ns=perf_counter_ns())
        self.write()
        self._take_no_more()
        with self._lock, contextlib.suppress(OSError):
            self._file.close()

    def _take_no_more(self) -> None:
        self.add = deque[bytes](maxlen=0).append
        self._events.clear()

    def _begin_part(self) -> None:
        """Opens the next file, and removes the one before the last: each says all names anew."""
        number = len(self._parts)
        self._parts.append(os.path.join(self._folder, f"{self._stem}.{number}.events"))
        if number >= 2:
            os.remove(self._parts[number - 2])
        self._part_ends = monotonic() + (self._last_seconds or 0.0)
        self._num_written_facts = self._num_written_names = 0
        self._file = open(self._parts[-1], "wb", buffering=0)
        try:
            self._write_blocks()
        except OSError:
            self._file.close()
            raise

    def _write_blocks(self) -> None:
        # Other threads go on: events first, since all their names are there then.
        count = len(self._events)
        taken = list(itertools.islice(iter(self._events.popleft, None), count))
        if count == _MOST_WAITING:  # there may have been more
            self._missing_ns += max(0, _end_of(taken[0]) - self._written_ns)
            self.tell(missing_ns=self._missing_ns)
        if taken:
            self._written_ns = _end_of(taken[-1])
        events = b"".join(taken)
        facts = self._facts[self._num_written_facts :]
        names = list(self.names)[self._num_written_names :]
        text = json.dumps({"facts": facts, "names": names}).encode()
        lengths = BLOCK_HEAD.pack(len(text), len(events))
        data = memoryview(lengths + text + events)
        while data:
            data = data[self._file.write(data) :]
        self._num_written_facts += len(facts)
        self._num_written_names += len(names)


def folder_of_parts(path: str) -> str:
    """Returns the folder for what the ranks write, beside the trace."""
    return f"{path}.parts"


def clear_parts(path: str) -> None:
    """Removes what processes have left for a trace; what else is in the folder stays."""
    folder = folder_of_parts(path)
    for name in names_of_parts(path):
        with contextlib.suppress(OSError):
            os.remove(os.path.join(folder, name))
    with contextlib.suppress(OSError):
        os.rmdir(folder)


def names_of_parts(path: str) -> list[str]:
    """Returns the names of the files that processes have left for a trace."""
    with contextlib.suppress(OSError):
        return [name for name in os.listdir(folder_of_parts(path)) if NAME_OF_PART.fullmatch(name)]
    return []


def make_folder_of_parts(path: str) -> None:
    """Makes that folder, where there is none yet.

    Raises
    ------
    OSError
        Nothing can be written there.
    """
    if os.path.isdir(path):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
    os.makedirs(folder_of_parts(path), exist_ok=True)


#: That of this process, while it is traced.
current: EventLog | None = None


def open_log(path: str, last_seconds: float | None = None, *, has_samples: bool = True) -> EventLog:
    """Traces this process from now on.

    Raises
    ------
    OSError
        The file can't be written.
    """
    global current
    current = EventLog(os.path.abspath(path), last_seconds, has_samples=has_samples)
    atexit.register(close_log, current)
    return current


def open_log_of_environment() -> None:
    """Traces this process from now on, where its environment says so.

    Raises
    ------
    ValueError
        The file can't be written, or a variable has no meaning.
    """
    path = os.environ.get(TRACE_VARIABLE, "")
    if current is not None or not path:
        return
    seconds = os.environ.get(LAST_VARIABLE)
    try:
        last_seconds = float(seconds) if seconds else None
        open_log(path, last_seconds, has_samples=is_switched_on(SAMPLES_VARIABLE, "1"))
    except (OSError, ValueError) as error:
        last = f", {LAST_VARIABLE}={seconds!r}" if seconds else ""
        raise ValueError(
            f"the trace can't begin ({TRACE_VARIABLE}={path!r}{last}, as run --trace sets it):"
            f" {error}. Give it another path, or start without one."
        ) from None


def close_log(log: EventLog) -> None:
    """Ends what `open_log` has begun."""
    global current
    if current is log:
        current = None
        atexit.unregister(close_log)
        log.close()


def _forget_log() -> None:
    """Traces no more, in a forked child: the file is the parent's."""
    global current
    current = None


os.register_at_fork(after_in_child=_forget_log)
