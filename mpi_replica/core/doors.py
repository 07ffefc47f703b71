"""Doors: modules from which users take names, wherever in the package those are defined."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from types import FunctionType


def publish(door: str, *things: object) -> None:
    """Makes classes and functions that the module `door` exports say that they are its own.

    Tracebacks and pickles name a class by its module: they stay what they are where its file
    moves. Errors of Python name a method by its class: what one class alone has of others of the
    package is its own, too. Those that have a base together, no public one, are told together.
    """
    package = door.partition(".")[0]
    ours = [
        thing
        for thing in things
        if isinstance(thing, (type, FunctionType)) and thing.__module__.startswith(package)
    ]
    for thing in ours:
        thing.__module__ = door
    parts = {owner: set(_parts_of(owner, door)) for owner in ours if isinstance(owner, type)}
    uses = Counter(itertools.chain(*parts.values()))
    for owner, bases in parts.items():
        for base in bases:
            if uses[base] == 1:
                _publish_methods(owner, base)


def _parts_of(owner: type, door: str) -> Iterator[type]:
    """Yields bases of the package that are no public classes."""
    package = door.partition(".")[0]
    for base in owner.__bases__:
        if base.__module__ != door and base.__module__.startswith(package):
            yield base
            yield from _parts_of(base, door)


def _publish_methods(owner: type, base: type) -> None:
    for name, method in vars(base).items():
        function = getattr(method, "__func__", method)  # that of a class method
        if not isinstance(function, FunctionType):
            continue
        if function.__qualname__ == f"{base.__name__}.{name}":  # made there, and not by a function
            function.__module__ = owner.__module__
            function.__qualname__ = f"{owner.__name__}.{name}"
