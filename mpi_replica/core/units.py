"""Numbers with units, as people read them."""

from __future__ import annotations


def in_units(size_bytes: float) -> str:
    """Returns a number of bytes in words, as "4.1 MB"."""
    units = ["B", "kB", "MB", "GB"]
    while size_bytes >= 999.5 and len(units) > 1:
        size_bytes /= 1000
        del units[0]
    return f"{size_bytes:.{3 if size_bytes >= 99.5 else 2}g} {units[0]}"
