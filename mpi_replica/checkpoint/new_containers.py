"""Containers made anew: those that can't be changed, with other items in them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any


def can_be_made_anew(live: Mapping[Any, Any]) -> bool:
    """Returns whether a read-only mapping is made of a dict, as by its own constructor."""
    make: Callable[[dict[Any, Any]], Any] = type(live)
    try:
        made = make(dict(live))
        return isinstance(made, Mapping) and set(made) == set(live)
    except Exception:  # it takes something else
        return False


def refilled(live: Any, items: list[Any]) -> Any:
    """Returns a list that has other items now, perhaps more or fewer; or a tuple like `live`."""
    if isinstance(live, list):
        live[:] = items
        return live
    make = way_to_make(live) or type(live)
    return make(items)


def way_to_make(live: tuple[Any, ...]) -> Callable[[list[Any]], Any] | None:
    """Returns how to make a tuple of items, as by the constructor of `live`; None without a way."""
    kind: Callable[..., Any] = type(live)
    if kind is tuple:
        return kind
    kept = {}  # how many items stay themselves: those that come to their places
    for way in (kind, lambda items: kind(*items), getattr(kind, "_make", kind)):
        with contextlib.suppress(Exception):  # it takes something else
            made = way([*live])
            if len(made) == len(live):
                kept[way] = sum(map(_is_kept, made, live))
    best = max(kept, key=kept.__getitem__, default=None)
    return best if best is not None and (kept[best] or not live) else None


def _is_kept(made: Any, live: Any) -> bool:
    """Returns whether it is the same one, or the same number, which C code may have made anew."""
    return made is live or (type(made) is type(live) is int and made == live)
