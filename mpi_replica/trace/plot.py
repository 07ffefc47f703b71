"""A picture of a trace: what each rank does, along the time."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from .summary import KINDS
from .traced_processes import Floats

_NUM_BINS = 200
# What is in several counts as the first of them, as in the table; the last one is what is left.
_COLORS = {
    "wait": "#fc8d62",
    "checkpoint": "#a6d854",
    "move": "#66c2a5",
    "elastic": "#ffd92f",
    "input": "#8da0cb",
    "compute": "#d9d9d9",
}


def draw(trace: dict[str, Any], path: str) -> None:
    """Draws a trace into a file, of the kind that its name says.

    Raises
    ------
    ModuleNotFoundError
        Without matplotlib.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise ModuleNotFoundError(
            f"a picture needs matplotlib, which {sys.executable} lacks: pip install matplotlib"
        )
    from matplotlib.figure import Figure  # draws with Agg, which needs no screen

    ranks = trace["otherData"]["mpi_replica"]["ranks"]
    slices = [e for e in trace["traceEvents"] if e["ph"] == "X" and e["tid"] == 0]
    end = max((e["ts"] + e["dur"] for e in slices), default=1.0)
    edges = np.linspace(0, end, _NUM_BINS + 1)
    figure = Figure(figsize=(12, 1.5 + 0.6 * len(ranks)), layout="constrained")
    axes = figure.add_subplot()
    for n in range(len(ranks)):
        mine = [e for e in slices if e["pid"] == n]
        if not mine:  # a spare, say
            continue
        low = np.full(_NUM_BINS, n + 0.4)
        for kind, share in shares(mine, edges).items():
            high = low - 0.8 * share
            axes.stairs(high, edges / 1e6, baseline=low, fill=True, color=_COLORS[kind])
            low = high
    for kind, color in _COLORS.items():
        axes.fill([], [], color=color, label=kind)
    axes.set_yticks(range(len(ranks)), [rank["name"] for rank in ranks])
    axes.invert_yaxis()
    axes.set_xlabel("seconds")
    axes.legend(ncols=len(_COLORS), loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False)
    figure.savefig(path, dpi=100)


def shares(slices: Sequence[Mapping[str, Any]], edges: Floats) -> dict[str, Floats]:
    """Returns by kind which part of each bin of time a rank spent so, given all of its slices.

    Examples
    --------
    >>> slices = [{"cat": "move", "ts": 1, "dur": 1}, {"cat": "run", "ts": 0, "dur": 3}]
    >>> found = shares(slices, np.array([0.0, 2.0, 4.0]))
    >>> found["move"], found["compute"]
    (array([0.5, 0. ]), array([0.5, 0.5]))
    """
    found: dict[str, Floats] = {}
    inside: list[tuple[float, float]] = []
    before: Floats = np.zeros(len(edges) - 1)
    for kind in _COLORS:
        names = KINDS.get(kind, [kind])
        inside += [(e["ts"], e["ts"] + e["dur"]) for e in slices if e["cat"] in names]
        if kind == "compute":
            inside = [(min(e["ts"] for e in slices), max(e["ts"] + e["dur"] for e in slices))]
        until = _part_of_bins(inside, edges)
        found[kind] = until - before
        before = until
    return found


def _part_of_bins(intervals: Sequence[tuple[float, float]], edges: Floats) -> Floats:
    """Returns the part of each bin that lies in some intervals, which may overlap."""
    begins, ends = np.array([(0.0, 0.0), *sorted(intervals)]).T
    ends = np.maximum.accumulate(ends)
    begins[1:] = np.maximum(begins[1:], ends[:-1])  # what is in none before it
    at = np.stack([begins, ends], 1).ravel()
    sums = np.cumsum(ends - begins)
    until = np.stack([np.append(0.0, sums[:-1]), sums], 1).ravel()
    part: Floats = np.diff(np.interp(edges, at, until)) / np.diff(edges)
    return part
