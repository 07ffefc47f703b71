"""A picture of a trace: what each rank does, along the time."""

from __future__ import annotations

import importlib.util
import sys
from typing import Any

_COLORS = {
    "compute": "#d9d9d9",
    "input": "#8da0cb",
    "checkpoint": "#a6d854",
    "move": "#66c2a5",
    "wait": "#fc8d62",
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
    bars: dict[tuple[int, str], list[tuple[float, float]]] = {}
    for event in trace["traceEvents"]:
        if event["ph"] == "X" and event["tid"] == 0:
            kind = event["cat"] if event["cat"] in _COLORS else "compute"
            if event["cat"] != "collective":
                interval = event["ts"] / 1e6, event["dur"] / 1e6
                bars.setdefault((event["pid"], kind), []).append(interval)
    figure = Figure(figsize=(12, 1.5 + 0.5 * len(ranks)), layout="constrained")
    axes = figure.add_subplot()
    for kind, color in _COLORS.items():
        for n in range(len(ranks)):
            intervals = bars.get((n, kind), [])
            axes.broken_barh(intervals, (n - 0.4, 0.8), color=color)
        axes.broken_barh([], (0, 0), color=color, label=kind)
    axes.set_yticks(range(len(ranks)), [rank["name"] for rank in ranks])
    axes.invert_yaxis()
    axes.set_xlabel("seconds")
    axes.legend(ncols=len(_COLORS), loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False)
    figure.savefig(path, dpi=150)
