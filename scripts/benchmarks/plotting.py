"""The times of the table `sizes` as a picture: a panel for each library, a line for each side."""

import importlib.util
import sys

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


def draw(reports, path):
    """Write the picture of some tables as a PNG.

    Parameters
    ----------
    reports : sequence of Report
        Tables of `sizes`, one for each library.
    path : str
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

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
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
