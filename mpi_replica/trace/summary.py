"""Where the time of a job has gone, in numbers."""

from __future__ import annotations

import collections
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from ..ranks.watch.event_log import MOST_REPLICAS, OF_RANK, SPAN_KINDS, EventKind
from .timeline import Calls, Timeline
from .traced_processes import Events, Floats, TracedProcess

_SHOWN_SITES = 10
_SHOWN_PLACES = 2
# A rank that is last in fewer calls is one of several.
_LEAST_SHARE = 0.5
# Of the time of the job: what costs less is not worth a line.
_LEAST_COST = 0.01
# Calls in whose words a path stands.
_OF_PATHS = ("Checkpoint.save", "Checkpoint.restore")
#: What time is spent on that is neither computing nor communication, and the kinds of its spans.
KINDS = {"input": ["input"], "checkpoint": ["checkpoint"], "elastic": ["commit", "recovery"]}


def summary(timeline: Timeline, *, is_over: bool = True) -> dict[str, Any]:
    """Returns what the table of a trace says, as JSON has it. Times are seconds."""
    sites = _sites(timeline)
    return {
        "seconds": timeline.duration / 1e9,
        "clock_bound_seconds": timeline.bound / 1e9,
        "starts": len({process.restart for process in timeline.processes}),
        "missing": _missing(timeline, is_over),
        "ranks": [
            {"name": one.label, "rank": one.rank, "seconds": _seconds_by_kind(timeline, n)}
            for n, one in enumerate(timeline.processes)
        ],
        "num_sites": len(sites),
        "sites": sites[:_SHOWN_SITES],
        "late": _late(timeline, {site["text"]: site["calls"] for site in sites[:_SHOWN_SITES]}),
        "step": _step(timeline),
    }


def _missing(timeline: Timeline, is_over: bool) -> list[str]:
    """Returns in words what the trace lacks."""
    texts = []
    absent: set[int] = set()
    present: set[int] = set()
    for process in timeline.processes:
        if process.is_damaged:
            texts.append(f"the rest of {process.label}, whose part is damaged")
        elif process.end_ns is None:
            how = "was killed" if is_over or not process.may_run else "was killed or still runs"
            texts.append(f"the end of {process.label}, which {how}")
        if process.missing_ns:
            seconds = process.missing_ns / 1e9
            texts.append(f"{seconds:.3g} s of {process.label}, whose disk was slow")
        absent.update(range(process.largest_world.size))  # in others ranks have other numbers
        present.add(process.rank)
    both = zip(timeline.processes, timeline.clocks, strict=True)
    starts = {(process.restart, clock.start) for process, clock in both}
    if len(starts) > len({restart for restart, _ in starts}):
        texts.append("what the clocks of some ranks tell, which have never met the others")
    lost = sorted(absent - present)
    return texts + [f"all of rank {rank}, whose part is not here" for rank in lost]


def _seconds_by_kind(timeline: Timeline, n: int) -> dict[str, float]:
    """Returns how long a process has done what: together that is its whole time."""
    calls, spans = timeline.calls[n], timeline.events(n, EventKind.SPAN)
    # What other threads do meanwhile, such as reading ahead, is not what the rank is busy with.
    known = timeline.processes[n].memberships.values()
    that_call = {OF_RANK - one.calls_track for one in known} or {0}
    threads = np.where(spans.track < 0, OF_RANK - spans.track, spans.track // MOST_REPLICAS)
    counts = np.isin(threads, list(that_call))

    def of_spans(kind: str) -> tuple[Floats, Floats]:
        is_it = np.isin(spans.number, [SPAN_KINDS.index(name) for name in KINDS[kind]])
        return spans.begin[is_it & counts], spans.end[is_it & counts]

    # What is in several counts as the first of them: a call of a checkpoint writes to the disk.
    intervals = {
        "waits": (calls.begin, calls.begin + calls.wait),
        "checkpoint": of_spans("checkpoint"),
        "moves": (calls.begin, calls.end),
        "elastic": of_spans("elastic"),
        "input": of_spans("input"),
    }
    spent = _seconds_in_first(intervals)
    times = timeline.processes[n].rows[:, 3:5]
    total = float(np.ptp(times)) / 1e9 if times.size else 0.0
    shown = {kind: spent[kind] for kind in ("waits", "moves", *KINDS)}
    return {"compute": max(0.0, total - sum(shown.values())), **shown, "total": total}


def _seconds_in_first(intervals: dict[str, tuple[Floats, Floats]]) -> dict[str, float]:
    """Returns how long each of some kinds of intervals, in nanoseconds, lie in none before it."""
    edges = np.unique(np.concatenate([times for pair in intervals.values() for times in pair]))
    lengths, is_told = np.diff(edges), np.zeros(max(0, len(edges) - 1), bool)
    spent = {}
    for kind, (begins, ends) in intervals.items():
        steps = np.bincount(np.searchsorted(edges, begins), minlength=len(edges)) - np.bincount(
            np.searchsorted(edges, ends), minlength=len(edges)
        )
        is_in = (np.cumsum(steps)[:-1] > 0) & ~is_told
        spent[kind] = float(lengths[is_in].sum()) / 1e9
        is_told |= is_in
    return spent


def _is_within(times: Floats, begins: Floats, ends: Floats) -> npt.NDArray[np.bool_]:
    """Returns which times are in one of some intervals, of which none overlap."""
    order = np.argsort(begins)
    at = np.searchsorted(begins[order], times, "right") - 1
    return (at >= 0) & (times <= np.append(ends[order], -np.inf)[at])


def _sites(timeline: Timeline) -> list[dict[str, Any]]:
    """Returns what each call site has cost, the dearest first: times and bytes of a mean rank."""
    found: dict[str, dict[str, Any]] = {}
    ranks: collections.Counter[str] = collections.Counter()
    for n, (process, calls) in enumerate(zip(timeline.processes, timeline.calls, strict=True)):
        for text, mine in _by_site(process, calls):
            what, _, line = text.rpartition(" at ")
            nothing: dict[str, Any] = dict.fromkeys(("calls", "bytes", "waits", "moves"), 0)
            site = {"text": text, "call": what, "line": line, "last": {}, **nothing}
            site = found.setdefault(text, site)
            wait = float(calls.wait[mine].sum()) / 1e9
            ranks[text] += 1
            site["calls"] = max(site["calls"], int(mine.sum()))
            site["bytes"] += int(calls.size[mine].sum())
            site["waits"] += wait
            site["moves"] += float((calls.end - calls.begin)[mine].sum()) / 1e9 - wait
            if count := int((calls.last[mine] == n).sum()):
                site["last"][process.label] = count
    for text, site in found.items():
        for kind in ("bytes", "waits", "moves"):
            site[kind] /= ranks[text]
        site["bytes_per_second"] = site["bytes"] / site["moves"] if site["moves"] else 0.0
        most = collections.Counter(site["last"]).most_common()
        site["last"] = {label: count / site["calls"] for label, count in most}
    return sorted(found.values(), key=lambda one: -one["waits"] - one["moves"])


def _by_site(process: TracedProcess, calls: Calls) -> Iterator[tuple[str, npt.NDArray[np.bool_]]]:
    """Yields each call site of a process in words, and which of its calls are made there."""
    names: dict[str, list[int]] = {}
    for name in np.unique(calls.name).tolist():
        text = process.names[name]
        kind = text.partition("(")[0]
        if kind in _OF_PATHS:  # another one each time, as it has the step in it
            text = f"{kind} at {text.rpartition(' at ')[2]}"
        names.setdefault(text, []).append(name)
    for text, of_site in names.items():
        yield text, np.isin(calls.name, of_site)


def _late(timeline: Timeline, num_calls: dict[str, int]) -> list[dict[str, Any]]:
    """Returns for which rank others wait at some call sites, and where it is meanwhile."""
    found = []
    for n, (process, calls) in enumerate(zip(timeline.processes, timeline.calls, strict=True)):
        samples = timeline.events(n, EventKind.SAMPLE)
        for text, of_site in _by_site(process, calls):
            mine = of_site & (calls.last == n)
            is_often = mine.sum() >= _LEAST_SHARE * num_calls.get(text, np.inf)
            if is_often and calls.late_by[mine].sum() >= _LEAST_COST * timeline.duration:
                call, _, line = text.rpartition(" at ")
                late = {"rank": process.label, "call": call, "line": line}
                found.append(late | _lateness(calls, mine, samples, process.names, num_calls[text]))
    return sorted(found, key=lambda one: -one["share"] * one["calls"] * one["seconds"])


def _lateness(
    calls: Calls, mine: npt.NDArray[np.bool_], samples: Events, names: Any, num_calls: int
) -> dict[str, Any]:
    late_by, came = calls.late_by[mine], calls.begin[mine]
    meanwhile = samples.name[_is_within(samples.begin, came - late_by, came)].tolist()
    places = collections.Counter(meanwhile).most_common(_SHOWN_PLACES)
    return {
        "calls": num_calls,
        "share": int(mine.sum()) / num_calls,
        "seconds": float(late_by.mean()) / 1e9,
        "meanwhile": {names[place]: count / len(meanwhile) for place, count in places},
    }


def _step(timeline: Timeline) -> dict[str, Any] | None:
    """Returns what a run takes, and what it would take if nobody waited; None without runs."""
    rows = []
    for n, calls in enumerate(timeline.calls):
        spans = timeline.events(n, EventKind.SPAN)
        is_run = (spans.track == OF_RANK) & (spans.number == SPAN_KINDS.index("run"))
        begin, end = spans.begin[is_run], spans.end[is_run]
        if len(begin):
            waits = calls.wait[_is_within(calls.begin, begin, end)].sum()
            rows.append((len(begin), (end - begin).mean(), waits / len(begin)))
    if not rows:
        return None
    runs, took, waits = np.array(rows).T
    seconds, without = float(took.mean()) / 1e9, float((took - waits).mean()) / 1e9
    return {"runs": int(runs.max()), "seconds": seconds, "seconds_without_waits": without}
