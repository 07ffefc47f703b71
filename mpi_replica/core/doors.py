"""Doors: modules from which users take names, wherever in the package those are defined."""

from __future__ import annotations

import sys
from types import FunctionType


def publish(door: str) -> None:
    """Makes the classes and functions that the module `door` exports say that they are its own.

    Tracebacks and pickles name a class by its module: they stay what they are where its file
    moves.
    """
    package = door.partition(".")[0]
    namespace = vars(sys.modules[door])
    for name in namespace["__all__"]:
        thing = namespace[name]
        if isinstance(thing, (type, FunctionType)) and thing.__module__.startswith(package):
            thing.__module__ = door
