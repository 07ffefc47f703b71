"""The arrays of a variable on a rank, and what fits into them.

Arrays are never written in place: an assignment puts a new one in the place of the old one, so
that what was read before stays what it was.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

from .array_libraries import taken
from .options import VariableAggregation, VariableSynchronization

__all__ = ["Storage", "check_dtype", "member", "parts_of"]

Array = np.ndarray[Any, Any]
_Enum = TypeVar("_Enum", VariableSynchronization, VariableAggregation)

_ASSIGN: dict[str, Callable[[Array, Array], Any]] = {
    "assign": lambda old, value: value.copy(),
    "assign_add": np.add,
    "assign_sub": np.subtract,
}


class Storage:
    """The arrays of a variable on this rank: one, or one for each local replica.

    Parameters
    ----------
    identity : str
        Tells the variable from all others, the same on every rank.
    values : dict
        The array of each local replica, or one under None.
    """

    def __init__(self, identity: str, values: dict[int | None, Array]) -> None:
        self.identity = identity
        self._values: dict[int | None, Array] = {}
        for key, value in values.items():
            self._put(key, value)

    @property
    def keys(self) -> tuple[int | None, ...]:
        """Whose arrays there are."""
        return tuple(self._values)

    @property
    def any_array(self) -> Array:
        """One of the arrays: all have one dtype and shape."""
        return next(iter(self._values.values()))

    def read(self, key: int | None) -> Array:
        """Return an array, read-only."""
        return self._values[key]

    def write(self, key: int | None, how: str, value: Array) -> None:
        """Do "assign", "assign_add" or "assign_sub" with a `fitting` value."""
        old = self.read(key)
        new = np.asarray(_ASSIGN[how](old, value.astype(old.dtype, copy=False)))
        self._put(key, new.astype(old.dtype, copy=False))

    def restore(self, key: int | None, before: Array) -> None:
        """Put back what `read` gave: an assignment that not all ranks made is taken back."""
        self._values[key] = before

    def _put(self, key: int | None, value: Array) -> None:
        value.flags.writeable = False
        self._values[key] = value

    def fitting(self, name: str, how: str, value: Any) -> Array:
        """Return `value` as an array of the variable's dtype and shape.

        Raises
        ------
        TypeError, ValueError
            It has another shape, or a dtype that does not fit.
        """
        dtype, shape = self.any_array.dtype, self.any_array.shape
        array = np.asarray(taken(value))
        if type(value) in (int, float, complex):  # numbers that numpy counts as weak
            array = np.asarray(value, dtype=np.result_type(dtype, value))
        if not np.can_cast(array.dtype, dtype, "same_kind"):
            raise TypeError(
                f"{name}.{how} got dtype {array.dtype} for a variable of dtype {dtype}."
                f" Convert it: value.astype({dtype.name!r})."
            )
        if array.shape != shape:
            raise ValueError(
                f"{name}.{how} got shape {array.shape} for a variable of shape {shape}."
                " Give a value of its shape."
            )
        return np.asarray(array, dtype=dtype, order="C")


def parts_of(total: Array, count: int) -> list[Array]:
    """Return `count` arrays whose sum is `total`."""
    if total.dtype.kind in "iu":
        least = total // count
        rest = total - least * count
        return [least + (i < rest) for i in range(count)]
    return [np.asarray(total / count)] * count


def member(kind: type[_Enum], value: Any) -> _Enum:
    """Return `value`, which must be a member of the enum `kind`.

    Raises
    ------
    ValueError
        It is none.
    """
    if not isinstance(value, kind):
        known = ", ".join(entry.name for entry in kind)
        raise ValueError(f"{value!r} is no mr.{kind.__name__}. Use one of {known}.")
    return value


def check_dtype(name: str, dtype: np.dtype[Any], mode: VariableAggregation) -> None:
    """Raise unless a variable can have `dtype` under this aggregation.

    Raises
    ------
    TypeError, ValueError
        It is no dtype of numbers, or MEAN of it has no meaning.
    """
    if dtype.hasobject or dtype.kind in "SUMm":
        raise TypeError(f"{name}: a variable holds numbers, got dtype {dtype}.")
    if mode is VariableAggregation.MEAN and dtype.kind in "biu":
        raise ValueError(
            f"{name}: aggregation MEAN needs a float dtype, got {dtype}: a mean of integers is"
            " none. Use SUM, ONLY_FIRST_REPLICA, or a float dtype."
        )
