"""Doors: modules from which users take names, wherever in the package those are defined."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from types import FunctionType


def publish(door: str) -> None:
    """Makes the classes and functions that the module `door` exports say that they are its own.

    Tracebacks and pickles name a class by its module: they stay what they are where its file
    moves. Errors of Python name a method by its class: what the class has of others of the package
    is its own, too.
    """
    package = door.partition(".")[0]
    namespace = vars(sys.modules[door])
    for name in namespace["__all__"]:
        thing = namespace[name]
        if isinstance(thing, (type, FunctionType)) and thing.__module__.startswith(package):
            thing.__module__ = door
            if isinstance(thing, type):
                _publish_methods(thing, thing.__bases__, namespace)


def _publish_methods(owner: type, bases: tuple[type, ...], namespace: Mapping[str, object]) -> None:
    for base in bases:
        if base.__module__.startswith(__package__.partition(".")[0]):
            if namespace.get(base.__name__) is base:  # a public one itself
                continue
            for method in vars(base).values():
                function = getattr(method, "__func__", method)  # that of a class method
                if isinstance(function, FunctionType):
                    function.__module__ = owner.__module__
                    function.__qualname__ = f"{owner.__name__}.{function.__name__}"
            _publish_methods(owner, base.__bases__, namespace)
