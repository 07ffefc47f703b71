"""What the verbs of a dataset have in common: the plan, and the checks of their arguments."""

from __future__ import annotations

from typing import Any, Self

from ..core.argument_checks import integer
from .plans.dataset_plan import DatasetPlan


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


def number_or_all(name: str, value: Any) -> int | None:
    """Returns a number of elements, or None for -1: all of them, as in tf."""
    number = integer(f"{name} (-1 is all)", value, -1)
    return None if number == -1 else number


def require_callable(name: str, value: Any, example: str) -> None:
    """Raises a TypeError unless an argument can be called."""
    if not callable(value):
        raise TypeError(f"{name} must be callable, got {value!r}. Call {example}.")
