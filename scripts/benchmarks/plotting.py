"""Tables as pictures.

`sizes`: times against sizes, a panel for each library, a line for each side. `scale`: what its
model says, against ranks, a panel for each network, a line for each call.
"""

import importlib.util
import sys

from . import scale

_OURS = "this runtime"


def require():
    """End the program unless matplotlib is installed."""
    if importlib.util.find_spec("matplotlib") is None:
        sys.exit(f"--plot needs matplotlib, which {sys.executable} lacks: pip install matplotlib")


def series(rows):
    """Return (bytes, median seconds, spread) of each size, by the name of the side.

    What is best by hand changes with the size: names are cut where they tell how it is done.
    """
    found = {}
    for row in rows:
        named = [(_OURS, row), *((side.name, side) for side in row.besides)]
        for name, side in named:
            name = name.partition(":")[0].partition(",")[0]
            found.setdefault(name, []).append((row.size_bytes, side.value, side.spread))
    return found


def draw(name, reports, path):
    """Write the picture of a table as a PNG.

    Parameters
    ----------
    name : {'sizes', 'scale'}
    reports : sequence of Report
        Its tables, one for each library.
    path : str
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure = {"sizes": _sizes, "scale": _scale}[name](pyplot, reports)
    figure.tight_layout()
    figure.savefig(path, dpi=100)
    pyplot.close(figure)


def overheads(rows):
    """Return, for each network and call of the table `scale`, ranks and how often MPI's time."""
    found = {}
    for row in rows:
        for side in row.besides:
            if side.name == scale.ALONE:
                call, network = row.what.rsplit(", ", 1)
                points = found.setdefault(network, {}).setdefault(call, [])
                points.append((int(row.ranks), row.value / side.value))
    return found


def _scale(pyplot, reports):
    networks = overheads(reports[0].rows)  # it does not depend on the library
    figure, panels = pyplot.subplots(
        1, len(networks), figsize=(4 * len(networks), 5), sharey=True, squeeze=False
    )
    for panel, (network, calls) in zip(panels[0], networks.items(), strict=True):
        for call, points in calls.items():
            panel.loglog(*zip(*points, strict=True), marker="o", label=call)
        panel.set(title=network, xlabel="ranks")
        panel.grid(visible=True, alpha=0.3)
    panels[0][0].set_ylabel("time of a call, of that of MPI alone (model)")
    panels[0][-1].legend(fontsize="small")
    return figure


def _sizes(pyplot, reports):
    shown = [
        (f"{report.library}, {ranks} ranks", [row for row in report.rows if row.ranks == ranks])
        for report in reports
        for ranks in dict.fromkeys(row.ranks for row in report.rows)
    ]
    figure, panels = pyplot.subplots(
        1, len(shown), figsize=(6 * len(shown), 5), sharey=True, squeeze=False
    )
    for panel, (title, rows) in zip(panels[0], shown, strict=True):
        for name, points in series(rows).items():
            sizes, medians, spreads = zip(*sorted(points), strict=True)
            (line,) = panel.loglog(sizes, medians, marker="o", label=name)
            low, high = zip(*spreads, strict=True)
            panel.fill_between(sizes, low, high, color=line.get_color(), alpha=0.2, linewidth=0)
        panel.set(title=title, xlabel="bytes of a replica's array")
        panel.grid(visible=True, alpha=0.3)
    panels[0][0].set_ylabel("seconds of an all_reduce: median, and 10 to 90 %")
    panels[0][0].legend()
    return figure
