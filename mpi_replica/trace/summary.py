"""Where the time of a job has gone, in numbers."""

from __future__ import annotations

import collections
from typing import Any

import numpy as np

from ..ranks.watch.event_log import EventKind
from .clocks import Floats
from .timeline import Timeline
from .traced_processes import Integers

_SHOWN_SITES = 10
_SHOWN_PLACES = 2
# A rank that is last in fewer calls is one of several.
_LEAST_SHARE = 0.5
_KINDS = {
    "input": ("input",),
    "checkpoint": ("checkpoint",),
    "elastic": ("commit", "recovery"),
}


def summary(timeline: Timeline) -> dict[str, Any]:
    """Returns what the table of a trace says, as JSON has it. Times are seconds."""
    processes = timeline.processes
    sites = _sites(timeline)
    return {
        "seconds": _seconds(timeline),
        "clock_bound_seconds": timeline.bound / 1e9,
        "starts": len({clock.start for clock in timeline.clocks}),
        "missing": _missing(timeline),
        "ranks": [
            {
                "name": process.label,
                "rank": process.rank,
                "host": process.host,
                "pid": process.pid,
                "seconds": _kinds(timeline, n),
            }
            for n, process in enumerate(processes)
        ],
        "sites": sites[:_SHOWN_SITES],
        "num_sites": len(sites),
        "late": _late(timeline, sites[:_SHOWN_SITES]),
        "step": _step(timeline),
    }


def _seconds(timeline: Timeline) -> float:
    ends = [
        clock.common(process.rows[:, 3:5])
        for clock, process in zip(timeline.clocks, timeline.processes, strict=True)
        if len(process.rows)
    ]
    return float(max(one.max() for one in ends) - min(one.min() for one in ends)) / 1e9


def _missing(timeline: Timeline) -> list[str]:
    """Returns in words what the trace lacks."""
    texts = []
    known: dict[int, set[int]] = {}
    sizes: dict[int, int] = {}
    for process in timeline.processes:
        if process.end_ns is None:
            texts.append(f"the end of {process.label}, which was killed")
        if process.num_dropped:
            texts.append(f"{process.num_dropped} events of {process.label}, whose disk was slow")
        for one in process.memberships.values():
            if one.name is not None:
                known.setdefault(one.name, set()).add(one.rank)
                sizes[one.name] = one.size
    absent = {rank for name, ranks in known.items() for rank in set(range(sizes[name])) - ranks}
    return texts + [f"all of rank {rank}, whose part is not here" for rank in sorted(absent)]


def _kinds(timeline: Timeline, n: int) -> dict[str, float]:
    """Returns how many seconds a process has spent on what."""
    calls, rows = timeline.calls[n], timeline.processes[n].rows
    took = calls.end - calls.begin
    seconds = {
        "total": float(rows[:, 4].max(initial=0) - rows[:, 3].min(initial=2**62)) / 1e9
        if len(rows)
        else 0.0,
        "waits": float(calls.wait.sum()) / 1e9,
        "moves": float((took - calls.wait).sum()) / 1e9,
    }
    for kind, parts in _KINDS.items():
        spans = timeline.spans(n, *parts)
        begin, end = (timeline.clocks[n].common(times) for times in (spans.begin, spans.end))
        inside = _within(calls.begin, begin, end)
        seconds[kind] = float((end - begin).sum() - took[inside].sum()) / 1e9
    others = sum(seconds.values()) - seconds["total"]
    return {"compute": max(0.0, seconds["total"] - others), **seconds}


def _within(times: Floats, begins: Floats, ends: Floats) -> Integers:
    """Returns which times are in one of some intervals, of which none overlap."""
    order = np.argsort(begins)
    at = np.searchsorted(begins[order], times, "right") - 1
    is_in = at >= 0
    is_in[is_in] = times[is_in] <= ends[order][at[is_in]]
    return np.flatnonzero(is_in)


def _sites(timeline: Timeline) -> list[dict[str, Any]]:
    """Returns what each call site has cost, the dearest first; times and bytes of a mean rank."""
    by_text: dict[str, dict[str, Any]] = {}
    for n, (process, calls) in enumerate(zip(timeline.processes, timeline.calls, strict=True)):
        for name in np.unique(calls.name).tolist():
            mine = calls.name == name
            what, _, line = process.names[name].rpartition(" at ")
            site = by_text.setdefault(
                process.names[name],
                {"call": what, "line": line, "ranks": 0, "calls": 0, "bytes": 0}
                | {"waits": 0.0, "moves": 0.0, "decided": 0, "last": collections.Counter()},
            )
            took, wait = calls.end[mine] - calls.begin[mine], calls.wait[mine]
            site["ranks"] += 1
            site["calls"] = max(site["calls"], int(mine.sum()))
            site["bytes"] += int(calls.size[mine].sum())
            site["waits"] += float(wait.sum()) / 1e9
            site["moves"] += float((took - wait).sum()) / 1e9
            site["last"][n] += int((calls.last[mine] == n).sum())
    found = []
    for site in by_text.values():
        ranks, last = site.pop("ranks"), site.pop("last")
        for kind in ("bytes", "waits", "moves"):
            site[kind] /= ranks
        seconds = site["moves"]
        site["bytes_per_second"] = site["bytes"] / seconds if seconds else 0.0
        site["last"] = {
            timeline.processes[n].label: count / site["calls"]
            for n, count in last.most_common()
            if count
        }
        site["decided"] = sum(last.values()) / site["calls"]
        found.append(site)
    return sorted(found, key=lambda one: -one["waits"] - one["moves"])


def _late(timeline: Timeline, sites: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns of the call sites that cost most which rank others wait for, and where it is."""
    shown = {f"{site['call']} at {site['line']}": site for site in sites}
    found = []
    for n, (process, calls) in enumerate(zip(timeline.processes, timeline.calls, strict=True)):
        samples = process.events(EventKind.SAMPLE)
        at = timeline.clocks[n].common(samples.begin)
        for name in np.unique(calls.name).tolist():
            site = shown.get(process.names[name])
            mine = (calls.name == name) & (calls.last == n)
            if site is None or mine.sum() < _LEAST_SHARE * site["calls"]:
                continue
            late_by, came = calls.late_by[mine], calls.begin[mine]
            meanwhile = samples.name[_within(at, came - late_by, came)]
            places = collections.Counter(meanwhile.tolist()).most_common(_SHOWN_PLACES)
            found.append(
                {
                    "rank": process.label,
                    "call": site["call"],
                    "line": site["line"],
                    "calls": site["calls"],
                    "share": float(mine.sum()) / site["calls"],
                    "seconds": float(late_by.mean()) / 1e9,
                    "meanwhile": {
                        process.names[place]: count / len(meanwhile) for place, count in places
                    },
                }
            )
    return sorted(found, key=lambda one: -one["share"] * one["calls"] * one["seconds"])


def _step(timeline: Timeline) -> dict[str, Any] | None:
    """Returns what a run takes, and what it would take if nobody waited; None without runs."""
    count, took, waits = 0, [], []
    for n, calls in enumerate(timeline.calls):
        runs = timeline.spans(n, "run")
        is_whole = runs.track < 0
        if not is_whole.any():
            continue
        clock = timeline.clocks[n]
        begin, end = clock.common(runs.begin[is_whole]), clock.common(runs.end[is_whole])
        count = max(count, len(begin))
        took.append(float((end - begin).mean()) / 1e9)
        waits.append(float(calls.wait[_within(calls.begin, begin, end)].sum()) / len(begin) / 1e9)
    if not took:
        return None
    mean = float(np.mean(took))
    return {"runs": count, "seconds": mean, "seconds_without_waits": mean - float(np.mean(waits))}
