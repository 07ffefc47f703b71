"""The file of a trace, in the Trace Event Format that Perfetto and chrome://tracing read.

"Trace Event Format", Google: X is a slice, s and f are the ends of an arrow, i is an instant, C a
counter, M tells a name. Times are microseconds. What others don't read, ``otherData``, holds the
summary.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

from ..core.exceptions import in_words
from ..ranks.watch.event_log import (
    MOST_REPLICAS,
    OF_RANK,
    SPAN_KINDS,
    EventKind,
    clear_parts,
    folder_of_parts,
)
from .summary import summary
from .timeline import UNDECIDED, Timeline
from .traced_processes import TracedProcess, read_processes

# A wait that is shorter has no arrow.
_LEAST_ARROW_NS = 100_000
_VERSION = 1
_DAMAGES = (ValueError, KeyError, TypeError, EOFError, RecursionError, gzip.BadGzipFile, zlib.error)
_FIRST_OF_THREADS = 1_000_000_000


def merge(path: str, *, is_over: bool = True) -> dict[str, Any]:
    """Makes the trace `path` of what the ranks have left beside it; returns its summary.

    What they have left goes then, but where some may still write: unless the job `is_over`.

    Raises
    ------
    OSError
        There is nothing, or it can't be written.
    """
    timeline = Timeline(read_processes(path))
    found = summary(timeline, is_over=is_over)
    new = f"{path}.new"
    try:
        _write(new, timeline, found)
        os.replace(new, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            os.remove(new)
        parts = folder_of_parts(path)
        text = f"{error.strerror}. What it is made of stays in {parts}: copy that to another disk"
        raise OSError(error.errno, text, path) from None
    if is_over or not any(process.may_run for process in timeline.processes):
        clear_parts(path)
    return found


def _write(path: str, timeline: Timeline, found: dict[str, Any]) -> None:
    with _opened(path, "wt") as file:
        other = json.dumps({"mpi_replica": {"version": _VERSION, **found}})
        file.write(f'{{"displayTimeUnit": "ms", "otherData": {other}, "traceEvents": [')
        # `json.dump` would take three times as long: it is no C.
        encode, before = json.JSONEncoder(separators=(",", ":")).encode, "\n"
        for event in _events(timeline):
            file.write(before + encode(event))
            before = ",\n"
        file.write("\n]}\n")


def read(path: str) -> dict[str, Any]:
    """Returns all that is in a trace.

    Raises
    ------
    OSError
        It can't be read.
    ValueError
        It is no trace, or one of a newer version.
    """
    try:
        with _opened(path, "rt") as file:
            found: dict[str, Any] = json.load(file)
        version = found["otherData"]["mpi_replica"]["version"]
        is_newer = version > _VERSION
    except _DAMAGES as error:
        raise ValueError(f"{path} is no trace of mpi_replica: {in_words(error)}") from None
    if is_newer:
        raise ValueError(f"{path} has version {version}, and this mpi_replica knows {_VERSION}.")
    return found


def _opened(path: str, mode: str) -> Any:
    if path.removesuffix(".new").endswith(".gz"):
        return gzip.open(path, mode, 6)
    return open(path, mode)


def _events(timeline: Timeline) -> Iterator[dict[str, Any]]:
    for n, process in enumerate(timeline.processes):
        spans, instants = (timeline.events(n, kind) for kind in (EventKind.SPAN, EventKind.INSTANT))
        of_calls = {one.calls_track for one in process.memberships.values()}
        yield from _names(n, process, sorted({*spans.track.tolist(), *of_calls, OF_RANK}))
        for index, name in enumerate(spans.name.tolist()):
            kind, times = SPAN_KINDS[spans.number[index]], (spans.begin[index], spans.end[index])
            yield _slice(process.names[name], kind, n, _tid(spans.track[index]), *times)
        yield from _calls(timeline, n)
        for name, at in zip(instants.name.tolist(), instants.begin, strict=True):
            first, _, more = process.names[name].partition("\n")
            event = {"ph": "i", "s": "p", "pid": n, "tid": 0, "ts": _us(at), "name": first}
            yield event | {"args": {"text": more}}


def _tid(track: int) -> int:
    """Returns the number of a track in the file: 0 for that of the rank's first thread."""
    return int(track) + 1 if track >= OF_RANK else _FIRST_OF_THREADS - int(track)


def _us(nanoseconds: float) -> float:
    return round(float(nanoseconds) / 1e3, 3)


def _names(n: int, process: TracedProcess, tracks: Sequence[int]) -> Iterator[dict[str, Any]]:
    def tell(what: str, tid: int, **args: Any) -> dict[str, Any]:
        return {"ph": "M", "pid": n, "tid": tid, "name": what, "args": args}

    yield tell("process_name", 0, name=process.label)
    yield tell("process_sort_index", 0, sort_index=n)
    for track in tracks:
        thread, replica = divmod(track, MOST_REPLICAS) if track >= 0 else (OF_RANK - track, None)
        name = "rank" if replica is None else f"replica {replica}"
        name += f" in thread {thread + 1}" if thread else ""
        yield tell("thread_name", _tid(track), name=name)


def _slice(
    name: str, kind: str, n: int, tid: int, begin: float, end: float, **args: Any
) -> dict[str, Any]:
    event = {"ph": "X", "name": name, "cat": kind, "pid": n, "tid": tid, "ts": _us(begin)}
    return event | {"dur": round(max(0.0, _us(end) - _us(begin)), 3), "args": args}


def _calls(timeline: Timeline, n: int) -> Iterator[dict[str, Any]]:
    names, calls, sent = timeline.processes[n].names, timeline.calls[n], 0
    worlds = timeline.processes[n].memberships
    tids = [
        {one.name: _tid(one.calls_track) for one in process.memberships.values()}
        for process in timeline.processes
    ]
    for index, name in enumerate(calls.name.tolist()):
        what, _, line = names[name].rpartition(" at ")
        begin, end, last = calls.begin[index], calls.end[index], int(calls.last[index])
        args = {"call": what, "line": line, "bytes": int(calls.size[index])}
        if last != UNDECIDED:
            args["last"] = timeline.processes[last].label
        world = worlds[int(calls.track[index])].name
        tid = tids[n][world]
        yield _slice(what.partition("(")[0], "collective", n, tid, begin, end, **args)
        middle = begin + calls.wait[index]
        if calls.is_whole[index]:
            yield _slice("waits for others", "wait", n, tid, begin, middle)
            yield _slice("moves data", "move", n, tid, middle, end)
        sent += args["bytes"]
        counter = {"ph": "C", "name": "bytes sent", "pid": n, "ts": _us(end)}
        yield counter | {"args": {"bytes": sent}}
        if last not in (UNDECIDED, n) and calls.wait[index] > _LEAST_ARROW_NS:
            arrow = {"name": "was last", "cat": "wait", "id": f"{n}.{index}"}
            came = {"pid": last, "tid": tids[last][world], "ts": _us(calls.all_there[index])}
            yield arrow | {"ph": "s", **came}
            # In its call: by clocks that are not quite right this may have ended before.
            yield arrow | {"ph": "f", "bp": "e", "pid": n, "tid": tid, "ts": _us(middle)}
