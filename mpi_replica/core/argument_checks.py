"""Checks of arguments that need nothing but the argument and its name."""

from __future__ import annotations

import functools
import logging
import operator
import os
from collections.abc import Mapping
from typing import Any

import numpy as np

_log = logging.getLogger("mpi_replica")


def integer(name: str, value: Any, least: int | None = None, most: int | None = None) -> int:
    """Returns an argument as an int.

    Raises
    ------
    TypeError
        It is a bool or no integer.
    ValueError
        It is less than `least`, or more than `most`, which stands beside a `least`.

    Examples
    --------
    >>> integer("axis", np.int8(3), 0)
    3
    >>> integer("axis", -1, 0)
    Traceback (most recent call last):
    ValueError: axis must be at least 0, got -1.
    """
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    if number is None or isinstance(value, bool):
        raise TypeError(f"{name} must be an integer, got {value!r}. Convert it with int().")
    if (least is not None and number < least) or (most is not None and number > most):
        limits = f"at least {least}" if most is None else f"from {least} to {most}"
        # Python writes no more than some thousand digits.
        bits = number.bit_length()
        got = repr(value) if bits < 1000 else f"a number of {bits} bits"
        raise ValueError(f"{name} must be {limits}, got {got}.")
    return number


def absolute_path(name: str, value: Any) -> str:
    """Returns a path of files as a text, from the root on.

    Raises
    ------
    TypeError
        It is none.
    ValueError
        The system has none with these characters.
    """
    path = os.fspath(value) if isinstance(value, (str, os.PathLike)) else None
    if not isinstance(path, str):
        raise TypeError(f"{name} must be a path, got {value!r}. Give a text or a pathlib.Path.")
    try:
        what = "a NUL" if b"\0" in os.fsencode(path) else ""
    except UnicodeEncodeError:
        what = "a character that no name can have"
    if what:
        raise ValueError(f"{name} must be a path of files, and {path!r} has {what}. Leave it out.")
    return os.path.abspath(path)


def check_call(args: Any, kwargs: Any) -> None:
    """Raises unless these are what a function can be called with.

    Raises
    ------
    ValueError
        `args` is no tuple or list, or `kwargs` no mapping.
    """
    if not isinstance(args, (tuple, list)):
        raise ValueError(
            f"args must be a tuple or a list, got {args!r}. For one argument write args=(x,)."
        )
    if type(kwargs) is not dict and not isinstance(kwargs, Mapping):  # asking an ABC costs 0.3 us
        raise ValueError(f"kwargs must be a mapping, got {kwargs!r}.")


def flag(name: str, value: Any) -> bool:
    """Returns an argument as a bool.

    Raises
    ------
    TypeError
        It is something else.
    """
    if not isinstance(value, bool | np.bool_):
        raise TypeError(f"{name} must be True or False, got {value!r}. Pass it by name.")
    return bool(value)


def is_switched_on(variable: str, default: str) -> bool:
    """Returns whether a variable of the environment is 1, by default "0" or "1".

    Anything else is told, and taken as 1.
    """
    return _is_on(variable, os.environ.get(variable) or default)


@functools.cache  # some are read time and again: what is wrong with one is told once
def _is_on(variable: str, text: str) -> bool:
    if text not in ("0", "1"):
        _log.warning("%s=%r is neither 0 nor 1: 1 is used.", variable, text)
    return text != "0"
