"""What a file of a trace must be like: the Trace Event Format, and what ours promises beyond it.

Times are compared as whole nanoseconds, which is what the file tells them in.
"""

import collections
import gzip
import itertools
import json
import math
from typing import NamedTuple

import numpy as np

# What an event of each kind must have beside `ph` and `pid`: "Trace Event Format", Google.
FIELDS = {
    "X": {"name": str, "cat": str, "tid": int, "ts": float, "dur": float, "args": dict},
    "s": {"name": str, "cat": str, "tid": int, "ts": float, "id": str},
    "f": {"name": str, "cat": str, "tid": int, "ts": float, "id": str},
    "i": {"name": str, "tid": int, "ts": float, "s": str},
    "C": {"name": str, "ts": float, "args": dict},
    "M": {"name": str, "args": dict},
}
NEEDED_OF_A_PROCESS = {"process_name", "process_sort_index", "thread_name"}


class Slice(NamedTuple):
    """A slice of a track; its times are nanoseconds."""

    begin: int
    end: int
    name: str
    kind: str
    pid: int
    tid: int
    args: dict


def read(path):
    """Return what is in a file, read by nothing of the package."""
    opened = gzip.open if str(path).endswith(".gz") else open
    with opened(path, "rt") as file:
        return json.load(file)


def summary(trace):
    return trace["otherData"]["mpi_replica"]


def bound_ns(trace):
    """Return by how much the clocks of two processes may be wrong to each other."""
    return math.ceil(summary(trace)["clock_bound_seconds"] * 1e9)


def events(trace, ph):
    return [event for event in trace["traceEvents"] if event["ph"] == ph]


def slices(trace, kind=None):
    """Return the slices, by track and time; of two that begin together the longer one first."""
    found = []
    for event in events(trace, "X"):
        if kind in (None, event["cat"]):
            begin = nanoseconds(event["ts"])
            end = begin + nanoseconds(event["dur"])
            place = event["pid"], event["tid"]
            found.append(Slice(begin, end, event["name"], event["cat"], *place, event["args"]))
    return sorted(found, key=lambda one: (one.pid, one.tid, one.begin, -one.end))


def tracks(trace):
    """Return the slices of each track, which a process and a thread make."""
    found = collections.defaultdict(list)
    for one in slices(trace):
        found[one.pid, one.tid].append(one)
    return found


def nanoseconds(microseconds):
    return round(microseconds * 1000)


def check(trace):
    """Fail where a trace is not what its file must be."""
    for event in trace["traceEvents"]:
        check_fields(event)
    check_processes(trace)
    for track in tracks(trace).values():
        check_nested(track)
    check_flows(trace)
    check_counters(trace)
    check_parts_of_calls(trace)


def check_fields(event):
    assert isinstance(event["pid"], int), event
    for name, kind in FIELDS[event["ph"]].items():
        value = event[name]
        assert isinstance(value, (int, float) if kind is float else kind), (name, event)
        assert kind is not float or (math.isfinite(value) and value >= 0), (name, event)
    if event["ph"] == "i":
        assert event["s"] in ("g", "p", "t"), event


def check_processes(trace):
    """Whoever has events has a name, and so has each of its tracks."""
    names = collections.defaultdict(set)
    for event in events(trace, "M"):
        names[event["pid"]].add(event["name"])
    pids = {event["pid"] for event in trace["traceEvents"]}
    assert pids == set(range(len(summary(trace)["ranks"])))
    for pid in pids:
        assert names[pid] >= NEEDED_OF_A_PROCESS
    threads = {(event["pid"], event["tid"]) for event in named(trace, "thread_name")}
    assert tracks(trace).keys() <= threads


def named(trace, name):
    return [event for event in events(trace, "M") if event["name"] == name]


def check_nested(track):
    """Two slices of a track are apart, or one of them is inside of the other."""
    around = []
    for one in track:
        while around and around[-1].end <= one.begin:
            around.pop()
        assert not around or one.end <= around[-1].end, (around[-1], one)
        around.append(one)


def check_flows(trace):
    """An arrow goes from one slice to another, and not back in time beyond what clocks allow."""
    begins = {event["id"]: event for event in events(trace, "s")}
    ends = {event["id"]: event for event in events(trace, "f")}
    assert len(begins) == len(events(trace, "s"))
    assert len(ends) == len(events(trace, "f"))
    assert begins.keys() == ends.keys()
    of_tracks = tracks(trace)
    for name, begin in begins.items():
        end = ends[name]
        assert begin["pid"] != end["pid"]
        assert nanoseconds(begin["ts"]) <= nanoseconds(end["ts"]) + bound_ns(trace)
        for side in (begin, end):
            at = nanoseconds(side["ts"])
            track = of_tracks[side["pid"], side["tid"]]
            assert any(one.begin <= at <= one.end for one in track), side


def check_counters(trace):
    counters = collections.defaultdict(list)
    for event in events(trace, "C"):
        for name, value in event["args"].items():
            counters[event["pid"], event["name"], name].append((event["ts"], value))
    for values in counters.values():
        ordered = [value for _, value in sorted(values)]
        assert ordered == sorted(ordered)


def check_parts_of_calls(trace):
    """A call is there once, with no parts or with waits and moves that fill it."""
    calls = slices(trace, "collective")
    assert len({(call.pid, call.tid, call.begin) for call in calls}) == len(calls)
    parts = collections.defaultdict(set)
    for one in slices(trace):
        if one.kind in ("wait", "move"):
            parts[one.pid, one.tid].add((one.begin, one.end, one.kind))
    num_whole = 0
    for call in calls:
        of_track = parts[call.pid, call.tid]
        middles = {end for begin, end, kind in of_track if (begin, kind) == (call.begin, "wait")}
        filling = [middle for middle in middles if (middle, call.end, "move") in of_track]
        assert len(filling) == len(middles), call
        num_whole += len(filling)
    assert 2 * num_whole == sum(map(len, parts.values()))


def whole_calls(trace):
    """Return the slices of calls of which all ranks have told."""
    waits = {(one.pid, one.tid, one.begin) for one in slices(trace, "wait")}
    calls = slices(trace, "collective")
    return [call for call in calls if (call.pid, call.tid, call.begin) in waits]


def meetings(trace):
    """Return the calls of all processes that were one, as (begin, end) of each.

    Only for a trace of one start, of which all processes have told all.
    """
    of_process = collections.defaultdict(list)
    for call in whole_calls(trace):
        of_process[call.pid].append(call)
    together = list(zip(*of_process.values(), strict=True))
    for calls in together:
        assert len({call.args["call"] for call in calls}) == 1, calls
    return together


def check_clocks(trace, marks):
    """Check a trace of tests/traced/late.py: times are those of one clock, within its bound.

    Each mark, by rank and step, begins between two moments of the true clock. The bound is one of
    two processes: the times of each may be wrong by a part of it, also to each other.
    """
    begins = [
        [one.begin for one in slices(trace, "program") if one.pid == pid]
        for pid in range(len(marks))
    ]
    least, most = (np.array(begins) - marks[..., side] for side in (1, 0))
    for some, other in itertools.permutations(range(len(marks)), 2):
        assert least[some].max() - most[other].min() <= bound_ns(trace)
