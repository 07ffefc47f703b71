"""What a trace says, on one screen."""

from __future__ import annotations

from typing import Any

from ..core.units import in_units

_MOST_RANKS = 12
_MOST_LATE = _MOST_MISSING = 5
_CALL_WIDTH, _LINE_WIDTH = 34, 22
_KINDS = ("compute", "waits", "moves", "input", "checkpoint", "elastic", "total")


def text(found: dict[str, Any]) -> str:
    """Returns the summary of a trace as a table."""
    lines = [
        f"{len(found['ranks'])} processes, {found['seconds']:.3f} s;"
        f" clocks agree within {_time(found['clock_bound_seconds'])}"
        + (f"; {found['starts']} starts, one after the other" if found["starts"] > 1 else "")
    ]
    lines += _first([f"missing: {one}" for one in found["missing"]], _MOST_MISSING)
    lines += ["", *_of_ranks(found["ranks"]), "", *_of_sites(found)]
    for late in found["late"][:_MOST_LATE]:
        lines += ["", _of_late(late)]
    if step := found["step"]:
        lines += [
            "",
            f"A step (strategy.run) takes {_time(step['seconds'])} in the mean of {step['runs']};"
            f" {_time(step['seconds_without_waits'])} if nobody waited.",
        ]
    return "\n".join(lines)


def _of_ranks(ranks: list[dict[str, Any]]) -> list[str]:
    kinds = [kind for kind in _KINDS if any(rank["seconds"][kind] for rank in ranks)]
    width = max(len(rank["name"]) for rank in ranks)
    lines = [f"{'seconds of':{width}}" + "".join(f"{kind:>12}" for kind in kinds)]
    for rank in ranks:
        numbers = "".join(f"{rank['seconds'][kind]:12.3f}" for kind in kinds)
        lines.append(f"{rank['name']:{width}}{numbers}")
    return _first(lines, 1 + _MOST_RANKS)


def _first(lines: list[str], most: int) -> list[str]:
    more = len(lines) - most
    return lines if more <= 0 else [*lines[:most], f"and {more} more: see --json"]


def _of_sites(found: dict[str, Any]) -> list[str]:
    lines = [
        f"{'call (a rank in the mean)':{_CALL_WIDTH}} {'at':{_LINE_WIDTH}}"
        f"{'calls':>8}{'bytes':>9}{'waits s':>10}{'moves s':>10}{'MB/s':>9}  last"
    ]
    for site in found["sites"]:
        most = list(site["last"].items())[:2]
        last = ", ".join(f"{name.partition(' (')[0]} {share:.0%}" for name, share in most)
        lines.append(
            f"{site['call']:{_CALL_WIDTH}.{_CALL_WIDTH}}"
            f" {site['line'][-_LINE_WIDTH:]:{_LINE_WIDTH}}"
            f"{site['calls']:8}{in_units(site['bytes']):>9}{site['waits']:10.3f}{site['moves']:10.3f}"
            f"{site['bytes_per_second'] / 1e6:9.1f}  {last or 'undecided'}"
        )
    if found["num_sites"] > len(found["sites"]):
        lines.append(f"and {found['num_sites'] - len(found['sites'])} more, which cost less")
    return lines


def _of_late(late: dict[str, Any]) -> str:
    where = "; ".join(f"{share:.0%} {place}" for place, share in late["meanwhile"].items())
    return (
        f"{late['rank']} is last in {late['share']:.0%} of {late['calls']} calls at {late['line']},"
        f" {_time(late['seconds'])} in the mean"
        + (f"; meanwhile it is at: {where}." if where else ".")
    )


def _time(seconds: float) -> str:
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{seconds * 1e3:.2f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.1f} µs"
