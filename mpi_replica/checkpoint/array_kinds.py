"""What an array is, beside another one: shapes and dtypes, compared and in words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from ..collectives.agreement.stand import LeafDescription
from ..core.array_libraries import dtype_of
from ..core.array_ways import Array
from ..core.dtypes import wire_name


class ArrayKind(NamedTuple):
    """What must be the same where one array takes the values of another one."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return str(self.described())

    def described(self) -> LeafDescription:
        """Returns what ranks compare."""
        # The numpy name of one with another byte order tells that, as ">i4" does; `isnative` says
        # nothing of fields that are arrays.
        dtype = self.dtype
        is_native = dtype.isnative and (not dtype.names or dtype == dtype.newbyteorder("="))
        return LeafDescription(wire_name(dtype) if is_native else str(dtype), self.shape)


def kind_of(array: Any, path: str) -> ArrayKind:
    """Returns what an array of any library is; `path` is where, for errors.

    Raises
    ------
    TypeError
        It has no values that numpy could hold, as a sparse tensor.
    """
    try:
        return ArrayKind(dtype_of(array) or array.dtype, tuple(array.shape))
    except Exception as error:  # each library has its own
        raise TypeError(f"a checkpoint can't restore {path}: {error}") from error


def order_in_memory(array: Array) -> Literal["C", "F"]:
    """Returns "F" for an array that lies in Fortran's order and not in C's, and "C" for others.

    Examples
    --------
    >>> order_in_memory(np.ones((2, 3)).T), order_in_memory(np.ones(3))
    ('F', 'C')
    """
    return "F" if array.flags.fnc else "C"


#: Of each group of parameters, the shape of each; None where it is not known yet.
Shapes = Sequence[Sequence[Sequence[int] | None]]


def difference_of_shapes(here: Shapes, there: Shapes) -> str:
    """Returns how parameters differ from those that a checkpoint has; empty where they don't.

    Examples
    --------
    >>> difference_of_shapes([[[2]], [[3], [4]]], [[[2]], [[3], [5]]])
    'has parameter 2 of shape [4] here, and of shape [5] in the checkpoint'
    """
    sizes = [list(map(len, groups)) for groups in (here, there)]
    if sizes[0] != sizes[1]:
        return f"has groups of {sizes[0]} parameters here, and of {sizes[1]} in the checkpoint"
    shapes = [[shape for group in groups for shape in group] for groups in (here, there)]
    for number, (one, other) in enumerate(zip(*shapes, strict=True)):
        if None not in (one, other) and one != other:
            return (
                f"has parameter {number} of shape {one} here, and of shape {other} in the"
                " checkpoint"
            )
    return ""


def difference_of_options(here: Sequence[Sequence[str]], there: Sequence[Sequence[str]]) -> str:
    """Returns what an optimizer needs that a checkpoint lacks; empty where it has all of that.

    What it has more is of a scheduler, or of a newer version of torch, where nothing is missing.

    Examples
    --------
    >>> difference_of_options([["lr", "momentum"]], [["lr", "betas"]])
    "needs ['momentum'] for its parameters, and the checkpoint has ['betas']: another optimizer's"
    """
    for needed, saved in zip(here, there, strict=False):  # a class may have a state of its own form
        missing = [name for name in needed if name not in saved]
        if missing:
            more = [name for name in saved if name not in (*needed, "params")]
            return (
                f"needs {missing} for its parameters, and the checkpoint has {more}: another"
                " optimizer's"
            )
    return ""
