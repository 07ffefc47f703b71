"""A picture of a trace: what each rank does, along the time."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from .traced_processes import Floats

_NUM_BINS = 200
# The last one is what is left of the time.
_COLORS = {
    "wait": "#fc8d62",
    "move": "#66c2a5",
    "input": "#8da0cb",
    "checkpoint": "#a6d854",
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
        first, last = mine[0]["ts"], max(e["ts"] + e["dur"] for e in mine)
        left = np.diff(np.clip(edges, first, last)) / np.diff(edges)
        low = np.full(_NUM_BINS, n + 0.4)
        for kind, color in _COLORS.items():
            share = left if kind == "compute" else np.minimum(left, _share(mine, kind, edges))
            left = left - share
            axes.stairs(low - 0.8 * share, edges / 1e6, baseline=low, fill=True, color=color)
            low = low - 0.8 * share
    for kind, color in _COLORS.items():
        axes.fill([], [], color=color, label=kind)
    axes.set_yticks(range(len(ranks)), [rank["name"] for rank in ranks])
    axes.invert_yaxis()
    axes.set_xlabel("seconds")
    axes.legend(ncols=len(_COLORS), loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False)
    figure.savefig(path, dpi=100)


def _share(slices: Sequence[Mapping[str, Any]], kind: str, edges: Floats) -> Floats:
    """Returns the part of each bin in which a rank was in slices of a kind."""
    begins = np.array([0.0, *(e["ts"] for e in slices if e["cat"] == kind)])
    times = np.array([0.0, *(e["dur"] for e in slices if e["cat"] == kind)])
    at = np.stack([begins, begins + times], 1).ravel()
    until = np.stack([np.cumsum(times) - times, np.cumsum(times)], 1).ravel()
    share: Floats = np.diff(np.interp(edges, at, until)) / np.diff(edges)
    return share
