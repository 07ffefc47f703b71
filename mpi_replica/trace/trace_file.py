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
import shutil
from collections.abc import Iterator
from typing import Any

from ..ranks.watch.event_log import OF_RANK, SPAN_KINDS, EventKind, folder_of_parts
from .summary import summary
from .timeline import UNDECIDED, Timeline
from .traced_processes import TracedProcess, read_processes

# A wait that is shorter has no arrow.
_LEAST_ARROW_NS = 100_000
_VERSION = 1


def merge(path: str) -> dict[str, Any]:
    """Makes the trace `path` of what the ranks have left beside it; returns its summary.

    Raises
    ------
    OSError
        There is nothing, or it can't be written.
    """
    timeline = Timeline(read_processes(path))
    found = summary(timeline)
    new = f"{path}.new"
    with _opened(new, "wt") as file:
        other = json.dumps({"mpi_replica": {"version": _VERSION, **found}})
        file.write(f'{{"displayTimeUnit": "ms", "otherData": {other}, "traceEvents": [')
        for index, event in enumerate(_events(timeline)):
            file.write(",\n" if index else "\n")
            json.dump(event, file)
        file.write("\n]}\n")
    os.replace(new, path)
    shutil.rmtree(folder_of_parts(path))
    return found


def has_parts(path: str) -> bool:
    """Returns whether ranks have left what `merge` makes a trace of."""
    with contextlib.suppress(OSError):
        return bool(os.listdir(folder_of_parts(path)))
    return False


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
    except (ValueError, KeyError, TypeError, EOFError) as error:
        raise ValueError(f"{path} is no trace of mpi_replica: {error!r}") from None
    if version > _VERSION:
        raise ValueError(f"{path} has version {version}, and this mpi_replica knows {_VERSION}.")
    return found


def _opened(path: str, mode: str) -> Any:
    if path.removesuffix(".new").endswith(".gz"):
        return gzip.open(path, mode, 6)
    return open(path, mode)


def _events(timeline: Timeline) -> Iterator[dict[str, Any]]:
    origin = min(
        (
            float(clock.common(process.rows[:, 3]).min())
            for clock, process in zip(timeline.clocks, timeline.processes, strict=True)
            if len(process.rows)
        ),
        default=0.0,
    )
    for n, process in enumerate(timeline.processes):
        yield from _names(n, process)
        yield from _spans(timeline, n, origin)
        yield from _calls(timeline, n, origin)
        instants = process.events(EventKind.INSTANT)
        for name, at in zip(
            instants.name.tolist(), timeline.clocks[n].common(instants.begin), strict=True
        ):
            at_us = round((at - origin) / 1e3, 3)
            yield {"ph": "i", "s": "p", "pid": n, "tid": 0, "ts": at_us} | _text(process, name)


def _text(process: TracedProcess, name: int) -> dict[str, Any]:
    """Returns the first line as the name, and all of it as an argument where there is more."""
    text = process.names[name]
    first, _, more = text.partition("\n")
    return {"name": first} | ({"args": {"text": text}} if more else {})


def _names(n: int, process: TracedProcess) -> Iterator[dict[str, Any]]:
    def tell(what: str, tid: int, **args: Any) -> dict[str, Any]:
        return {"ph": "M", "pid": n, "tid": tid, "name": what, "args": args}

    yield tell("process_name", 0, name=process.label)
    yield tell("process_sort_index", 0, sort_index=n)
    yield tell("thread_name", 0, name="rank")
    tracks = set(process.events(EventKind.SPAN).track.tolist()) - {OF_RANK}
    for replica in sorted(tracks):
        yield tell("thread_name", replica + 1, name=f"replica {replica}")


def _spans(timeline: Timeline, n: int, origin: float) -> Iterator[dict[str, Any]]:
    process, clock = timeline.processes[n], timeline.clocks[n]
    events = process.events(EventKind.SPAN)
    begins, ends = clock.common(events.begin) - origin, clock.common(events.end) - origin
    for name, track, kind, begin, end in zip(
        events.name.tolist(),
        events.track.tolist(),
        events.number.tolist(),
        begins.tolist(),
        ends.tolist(),
        strict=True,
    ):
        yield _slice(process.names[name], SPAN_KINDS[kind], n, track + 1, begin, end)


def _slice(
    name: str, kind: str, n: int, tid: int, begin: float, end: float, **args: Any
) -> dict[str, Any]:
    begin, end = round(begin / 1e3, 3), round(end / 1e3, 3)
    return {
        "ph": "X",
        "name": name,
        "cat": kind,
        "pid": n,
        "tid": tid,
        "ts": begin,
        "dur": round(max(0.0, end - begin), 3),
        "args": args,
    }


def _calls(timeline: Timeline, n: int, origin: float) -> Iterator[dict[str, Any]]:
    process, calls = timeline.processes[n], timeline.calls[n]
    sent = 0
    for index, name in enumerate(calls.name.tolist()):
        what, _, line = process.names[name].rpartition(" at ")
        op = what.partition("(")[0]
        begin, end = float(calls.begin[index]) - origin, float(calls.end[index]) - origin
        size, last = int(calls.size[index]), int(calls.last[index])
        args = {"call": what, "line": line, "bytes": size}
        if last != UNDECIDED:
            args["last"] = timeline.processes[last].label
        yield _slice(op or what, "collective", n, 0, begin, end, **args)
        if calls.is_whole[index]:
            middle = begin + float(calls.wait[index])
            yield _slice("waits for others", "wait", n, 0, begin, middle)
            yield _slice("moves data", "move", n, 0, middle, end)
        sent += size
        counter = {"ph": "C", "name": "bytes sent", "pid": n, "ts": round(end / 1e3, 3)}
        yield counter | {"args": {"bytes": sent}}
        if last not in (UNDECIDED, n) and calls.wait[index] > _LEAST_ARROW_NS:
            came = round((float(calls.all_there[index]) - origin) / 1e3, 3)
            arrow = {"name": "was last", "cat": "wait", "id": f"{n}.{index}", "ts": came}
            yield arrow | {"ph": "s", "pid": last, "tid": 0}
            yield arrow | {"ph": "f", "bp": "e", "pid": n, "tid": 0}
