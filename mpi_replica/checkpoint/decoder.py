"""State that was written as plain data: what stands for what, and the way back."""

from __future__ import annotations

import base64
import collections
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from ..core import object_state
from ..core.array_ways import Array
from ..core.values import Mirrored
from .array_kinds import difference_of_options, difference_of_shapes
from .json_keys import (
    ALIKE,
    ARRAY,
    BYTES,
    COMPLEX,
    COUNTER,
    DICT,
    MIRRORED,
    MODULE,
    OPTIMIZER,
    REPLICAS,
    SCALAR,
    STATE,
    TENSOR,
    TUPLE,
    VARIABLE,
)

#: Returns an array by its name, and that of the library whose it is; numpy's without one.
ArrayOf = Callable[..., Any]


def _inside(value: Any, *keys: str) -> Any:
    """Returns what a JSON object has under its only key, if that is one of these; else None."""
    if not isinstance(value, dict) or len(value) != 1:
        return None
    ((key, inner),) = value.items()
    return inner if key in keys else None


def structure_of(value: Any) -> Any:
    """Returns what stands for a value without its numbers and texts; the keys of mappings stay."""
    if isinstance(value, list):
        return [structure_of(item) for item in value]
    if not isinstance(value, dict):
        return type(value).__name__
    if (pairs := _inside(value, DICT, COUNTER)) is not None:
        return {next(iter(value)): [[key, structure_of(item)] for key, item in pairs]}
    return {key: structure_of(item) for key, item in value.items()}


def array_name(value: Any) -> str | None:
    """Returns the name of the array that `value` stands for; None where it stands for none.

    A numpy scalar is an array without dimensions.
    """
    name = _inside(value, ARRAY, SCALAR)
    if name is None and (pair := _inside(value, TENSOR)) is not None:
        _, name = pair
    return name if isinstance(name, str) else None


class SavedState(NamedTuple):
    """What stands for the state of an object, and for what else is known of it."""

    state: Any
    #: By submodules of a module of torch: the versions of their classes.
    versions: Any = None
    #: Of an optimizer of torch: the shapes of its parameters.
    shapes: Any = None

    def difference_from(self, live: Any) -> str:
        """Returns how it differs from what an optimizer or generator needs; empty if not."""
        items = mapping_items(self.state) or {}
        if isinstance(live, np.random.Generator):
            here = type(live.bit_generator).__name__
            there = items.get("bit_generator", "no generator")
            apart = f"draws by {here} here, and by {there} in the checkpoint"
            return apart if here != there else ""
        if not object_state.is_optimizer(live) or self.shapes is None:
            return ""
        groups = tuple_items(items.get("param_groups")) or []
        options = [[*(mapping_items(group) or ())] for group in groups]
        return difference_of_shapes(
            object_state.parameter_shapes(live), self.shapes
        ) or difference_of_options(object_state.needed_options(live), options)


def state_of(value: Any) -> SavedState | None:
    """Returns what stands for the state of an object; None where it is no object's."""
    if (pair := _inside(value, MODULE)) is not None:
        return SavedState(pair[0], versions=pair[1])
    if (pair := _inside(value, OPTIMIZER)) is not None:
        return SavedState(pair[0], shapes=pair[1])
    state = _inside(value, STATE)
    return None if state is None else SavedState(state)


def alike_of(value: Any) -> Any:
    """Returns what stands for each component of a `PerReplica` of objects; None for other things.

    All of them are the same.
    """
    return _inside(value, ALIKE)


def replicas_name(value: Any) -> str | None:
    """Returns the name of the `PerReplica` that `value` stands for; None for another thing."""
    name = _inside(value, REPLICAS)
    return name if isinstance(name, str) else None


def variable_of(value: Any) -> tuple[str, Any] | None:
    """Returns the identity of a variable, and what stands for its value; None for other things."""
    pair = _inside(value, VARIABLE)
    return None if pair is None else tuple(pair)


def mapping_items(value: Any) -> dict[Any, Any] | None:
    """Returns what stands for the items of a mapping; None where it is none."""
    if not isinstance(value, dict):
        return None
    if len(value) == 1 and next(iter(value)).startswith("$"):
        pairs = _inside(value, DICT, COUNTER)
        return None if pairs is None else {decoded(key, _no_array): item for key, item in pairs}
    return value


def _no_array(name: str, library: str = "") -> Array:
    raise ValueError(f"array {name} is the key of a mapping")


def is_bytes(value: Any) -> bool:
    """Returns whether `value` stands for bytes."""
    return _inside(value, BYTES) is not None


def tuple_items(value: Any) -> list[Any] | None:
    """Returns what stands for the items of a list or tuple; None where it is none."""
    items = _inside(value, TUPLE) if isinstance(value, dict) else value
    return items if isinstance(items, list) else None


def decoded(
    value: Any,
    array: ArrayOf,
    replicas: Callable[[str], Any] = lambda name: {REPLICAS: name},
    variables: Mapping[str, Any] = {},
) -> Any:
    """Undoes `Encoder.encode`.

    `array` returns an array by its name and its library's, `replicas` a `PerReplica` by its name.
    `variables` are those that there are, by their identity; others are their values.

    Raises
    ------
    ValueError, TypeError, KeyError
        It is nothing that `encode` gives.
    """
    if not isinstance(value, (dict, list)):
        return value

    def again(item: Any) -> Any:
        return decoded(item, array, replicas, variables)

    if isinstance(value, list):
        return [again(item) for item in value]
    if len(value) == 1:
        ((key, inner),) = value.items()
        if key == REPLICAS:
            return replicas(inner)
        if key == VARIABLE:
            identity, of_value = inner
            return variables[identity] if identity in variables else again(of_value)
        if key == ARRAY:
            return array(inner)
        if key == SCALAR:
            scalar = array(inner)
            is_text = scalar.dtype.kind == "S" and scalar.itemsize > 1  # b"" has a byte, too
            return np.bytes_(scalar.tobytes()) if is_text else scalar[()]  # not to the first NUL
        if key == TENSOR:
            library, name = inner
            if not isinstance(library, str):
                raise TypeError(f"{library!r} is no library of arrays")
            return array(name, library)
        if key in (MODULE, OPTIMIZER):
            state, about = inner
            return [again(state), again(about)]
        if key == MIRRORED:
            return Mirrored(again(inner))
        if key == TUPLE:
            return tuple(again(item) for item in inner)
        if key in (DICT, COUNTER):
            made = {decoded(name, _no_array): again(item) for name, item in inner}
            return collections.Counter(made) if key == COUNTER else made
        if key == BYTES:
            return base64.b64decode(inner, validate=True)
        if key == COMPLEX:
            return complex(*inner)
    # who knows the object takes its state from there
    if unknown := [key for key in value if key.startswith("$") and key not in (STATE, ALIKE)]:
        raise ValueError(f"{unknown[0]!r} stands for nothing in a checkpoint")
    return {key: again(item) for key, item in value.items()}
