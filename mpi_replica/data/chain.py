"""What the verbs of a dataset have in common: the plan, and the checks of their arguments."""

from __future__ import annotations

import operator
from typing import Any, Self

import numpy as np

from .plans import DatasetPlan

__all__ = ["Chain", "flag", "integer", "number_or_all", "require_callable"]


class Chain:
    """Hold a plan; each verb returns a new object of the same class, with a longer plan."""

    def __init__(self, plan: DatasetPlan) -> None:
        if not isinstance(plan, DatasetPlan):
            raise TypeError(
                f"Dataset can't be made of {plan!r} directly. Call Dataset.from_tensor_slices, "
                "Dataset.range, Dataset.from_source or Dataset.from_generator."
            )
        self._plan = plan

    def _with(self, plan: DatasetPlan) -> Self:
        return type(self)(plan)

    def __repr__(self) -> str:
        """Return the chain of verbs."""
        return f"<Dataset.{self._plan.text}>"


def integer(name: str, value: Any, least: int, most: int | None = None) -> int:
    """Return an argument as an int.

    Raises
    ------
    TypeError, ValueError
        It is none, or out of the limits.
    """
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    if number is None or isinstance(value, bool):
        raise TypeError(f"{name} must be an integer, got {value!r}. Convert it with int().")
    if number < least or (most is not None and number > most):
        limits = f"at least {least}" if most is None else f"from {least} to {most}"
        raise ValueError(f"{name} must be {limits}, got {value!r}.")
    return number


def number_or_all(name: str, value: Any) -> int | None:
    """Return a number of elements, or None for -1: all of them, as in tf."""
    number = integer(f"{name} (-1 is all)", value, -1)
    return None if number == -1 else number


def flag(name: str, value: Any) -> bool:
    """Return an argument as a bool.

    Raises
    ------
    TypeError
        It is none.
    """
    if not isinstance(value, bool | np.bool_):
        raise TypeError(f"{name} must be True or False, got {value!r}. Pass it by name.")
    return bool(value)


def require_callable(name: str, value: Any, example: str) -> None:
    """Raise a TypeError unless an argument can be called."""
    if not callable(value):
        raise TypeError(f"{name} must be callable, got {value!r}. Call {example}.")
