"""State as plain data: nests of arrays, numbers and texts, as JSON and a list of arrays.

No pickle: reading can't run code of whoever wrote the file.
"""

from __future__ import annotations

import base64
import collections
import contextlib
import enum
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from ..core import object_state
from ..core.array_libraries import address_of, library_of
from ..core.array_ways import Array
from ..core.dtypes import as_array
from ..core.jax_nodes import JaxNode, is_function_in_node, opened_by_jax
from ..core.more_than_numbers import has_hidden_fields
from ..core.values import DistributedValues, Mirrored
from .array_kinds import difference_of_options, difference_of_shapes
from .dtype_texts import dtype_text

# A JSON object with one of these keys stands for something that JSON does not have.
_REPLICAS, _ALIKE, _MIRRORED = "$replicas", "$alike", "$mirrored"
_VARIABLE = "$variable"  # never in a file
_STATE, _MODULE, _OPTIMIZER = "$state", "$module", "$optimizer"
_ARRAY, _SCALAR, _TENSOR, _BYTES, _COMPLEX = "$array", "$scalar", "$tensor", "$bytes", "$complex"
_TUPLE, _DICT, _COUNTER = "$tuple", "$dict", "$counter"

_AS_IT_IS = frozenset({bool, float, str, type(None)})

# Python and its JSON go no deeper than some hundred levels, where they are restored.
_MOST_LEVELS = 100

# Why an object is refused of which nothing else is known.
_NO_STATE = (
    "it takes arrays of fixed item size, numbers, texts, bytes, None, and dicts, lists and tuples"
    " of them. Give the object state_dict() and load_state_dict(), or leave it out."
)

_NO_VALUE = (
    "of enums it takes members that are texts or numbers, as those of IntEnum and StrEnum. Keep"
    " member.name, from which EnumClass[name] makes the member."
)

_HAS_MORE = (
    "the fields that are no items of it would be lost. Give those that are meant, or tuple(value)"
    " for its items."
)

#: Returns an array by its name, and that of the library whose it is; numpy's without one.
ArrayOf = Callable[..., Any]


class Encoder:
    """Turns values into what JSON can hold, and keeps their arrays.

    Parameters
    ----------
    plain : callable
        Returns the plain value that stands for an object, or the object; raises a ValueError that
        says why there is none.
    own : callable, optional
        Returns the components of this rank's replicas of a value, by their ids; None where it has
        none. Without it no value has.
    prefix : str
        What the names of arrays begin with.
    identity_of : callable, optional
        Returns what tells a variable from all others; None for other values. Without it a variable
        is known by its place alone.

    Attributes
    ----------
    arrays : dict of array
        What the result refers to by name.
    of_replicas : dict
        What stands for each `PerReplica` that the result refers to by name: for each replica of
        this rank by its id.
    own_arrays : dict of array
        What that refers to, by names that end in the replica's id and a number.
    variables : dict
        What stands for the value of each variable, by its identity.
    """

    def __init__(
        self,
        plain: Callable[[Any], Any],
        own: Callable[[Any], Mapping[int, Any] | None] | None = None,
        prefix: str = "",
        identity_of: Callable[[Any], str | None] = lambda value: None,
    ) -> None:
        self._plain = plain
        self._own = own
        self._prefix = prefix
        self._identity_of = identity_of
        self.arrays: dict[str, Array] = {}
        self.of_replicas: dict[str, dict[str, Any]] = {}
        self.own_arrays: dict[str, Array] = {}
        self.variables: dict[str, Any] = {}
        self._is_in_state = False
        self._depth = 0
        # By where they are in memory: tied parameters of a module are one array.
        self._named: dict[tuple[Any, ...], tuple[str, Any]] = {}

    def encode(self, value: Any, path: str) -> Any:
        """Returns what stands for `value`; `path` is where it is, for errors.

        Raises
        ------
        TypeError
            It is no nest of arrays, numbers, texts, bytes and None.
        ValueError
            An int has more digits than Python writes, or it is nested too deep.
        """
        if type(value) in _AS_IT_IS:  # of a long list each
            return value
        if type(value) is int:
            return self._number(value, path)
        with self._level(path):
            return self._encoded(value, path)

    @contextlib.contextmanager
    def _level(self, path: str) -> Iterator[None]:
        """Returns a context for what is one level deeper in a nest."""
        if self._depth > _MOST_LEVELS:
            raise ValueError(
                f"a checkpoint can't hold what is nested more than {_MOST_LEVELS} levels deep"
                f" ({path:.60}…). Make it flat; a list that contains itself has no end."
            )
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1

    def _encoded(self, value: Any, path: str) -> Any:
        """Returns what `encode` does, of anything but the commonest leaves."""
        if object_state.has_state(value):
            return self._object(value, path)
        # who loads the state of an object takes values alone
        identity = None if self._own is None else self._identity_of(value)
        if identity is None:
            return self._value(value, path)
        if identity not in self.variables:
            # by whatever garbage ranks differ, components have the same name on all
            self.variables[identity] = self._value(value, path, f"{_VARIABLE} {identity}")
        return {_VARIABLE: [identity, self.variables[identity]]}

    def _value(self, value: Any, path: str, name: str = "") -> Any:
        """Returns what stands for a value, whichever variable has it; components get this name."""
        components = None if self._own is None else self._own(value)
        if components is not None:
            if object_state.are_alike(components.values()):
                return {_ALIKE: self._without_replicas(next(iter(components.values())), path)}
            # without one, by the path and a number, since two paths may read alike
            name = name or f"{path} {len(self.of_replicas)}"
            return {_REPLICAS: self._replicas(components, path, name)}
        if self._own is None and isinstance(value, Mirrored):
            # Nothing in the program will stand beside it and say what it was.
            return {_MIRRORED: self.encode(value.value, path)}
        try:
            value = self._plain(value)
        except ValueError as error:
            raise ValueError(f"a checkpoint can't hold {path}: {error}") from error
        if value is None or isinstance(value, (bool, str)):
            # not `str(value)`: an Enum of texts has a name for that
            return str.__str__(value) if isinstance(value, str) else value
        library = library_of(value)
        if library is not None:
            return {_TENSOR: [library, self._array_of_library(value, path)]}
        if isinstance(value, (np.ndarray, np.generic)):
            try:
                array = as_array(value)
            except TypeError as error:
                raise self._refused(value, path, error) from error
            try:
                dtype_text(array.dtype)
            except TypeError as error:
                raise self._refused(value, path) from error
            return {_SCALAR if isinstance(value, np.generic) else _ARRAY: self._kept(array)}
        if isinstance(value, int):
            return self._number(int(value), path)
        if isinstance(value, float):
            return float(value)
        if isinstance(value, complex):
            return {_COMPLEX: [value.real, value.imag]}
        if isinstance(value, (bytes, bytearray)):
            return {_BYTES: base64.b64encode(value).decode()}
        if isinstance(value, Mapping):
            return self._mapping(value, path)
        if isinstance(value, (list, tuple)):
            if has_hidden_fields(type(value)):
                raise self._refused(value, path, _HAS_MORE)
            items = [self.encode(item, f"{path}[{i}]") for i, item in enumerate(value)]
            return items if isinstance(value, list) else {_TUPLE: items}
        if (node := opened_by_jax(value)) is not None:
            return {_TUPLE: [*self._children(node, path)]}
        raise self._refused(value, path, _NO_VALUE if isinstance(value, enum.Enum) else _NO_STATE)

    def _children(self, node: JaxNode, path: str) -> Iterator[Any]:
        for key, child in zip(node.make.keys, node.children, strict=True):
            # functions stay those of the program
            is_function = is_function_in_node(child)
            yield None if is_function else self.encode(child, f"{path}.{key}")

    def _kept(self, array: Array) -> str:
        """Keeps an array; returns its name."""
        name = f"{self._prefix}{len(self.arrays)}"
        self.arrays[name] = array
        return name

    def _array_of_library(self, value: Any, path: str) -> str:
        """Keeps what is in an array of another library; returns its name."""
        try:
            array = as_array(value)
            dtype_text(array.dtype)
        except Exception as error:  # each library has its own for what has no values
            raise self._refused(value, path, error) from error
        place = (address_of(value, array), array.dtype, array.shape, array.strides)
        if place not in self._named:
            self._named[place] = self._kept(array), value  # which keeps its memory
        return self._named[place][0]

    def _object(self, value: Any, path: str) -> Any:
        """Returns what stands for the state of an object."""
        if self._is_in_state:  # who loads it would get what stands for a state
            raise TypeError(
                f"a checkpoint can't hold {type(value).__qualname__} ({path}) in the state of"
                " another object. Put its own state there, by state_dict() say, and give it back in"
                " load_state_dict()."
            )
        state = object_state.state_in(value)
        inside = path if object_state.is_generator(value) else f"{path}.state_dict()"
        self._is_in_state = True
        try:
            encoded = self._without_replicas(state, inside)
        finally:
            self._is_in_state = False
        if object_state.is_module(value):  # it tells what was written by older classes by these
            versions = dict(getattr(state, "_metadata", {}))
            return {_MODULE: [encoded, self._without_replicas(versions, f"{inside}._metadata")]}
        if object_state.is_optimizer(value):
            return {_OPTIMIZER: [encoded, object_state.parameter_shapes(value)]}
        return {_STATE: encoded}

    def _without_replicas(self, value: Any, path: str) -> Any:
        """Returns what stands for a value in which there are no replicas."""
        own, self._own = self._own, None
        try:
            return self.encode(value, path)
        finally:
            self._own = own

    def _replicas(self, components: Mapping[int, Any], path: str, name: str) -> str:
        """Keeps what stands for the components; returns their name."""
        encoded = self.of_replicas[name] = {}
        for i, component in components.items():
            encoder = Encoder(self._plain, prefix=f"{name}.{i}.")
            encoded[str(i)] = encoder.encode(component, f"{path} of replica {i}")
            self.own_arrays |= encoder.arrays
        return name

    def _mapping(self, value: Mapping[Any, Any], path: str) -> Any:
        is_plain = all(type(key) is str and not key.startswith("$") for key in value)
        if is_plain and not isinstance(value, collections.Counter):
            return {key: self.encode(item, f"{path}[{key!r}]") for key, item in value.items()}
        keys = [self._key(key, f"the keys of {path}") for key in value]
        items = [self.encode(item, f"{path}[{key!r}]") for key, item in value.items()]
        kind = _COUNTER if isinstance(value, collections.Counter) else _DICT
        return {kind: [list(pair) for pair in zip(keys, items, strict=True)]}

    @staticmethod
    def _number(value: int, path: str) -> int:
        try:
            repr(value)  # as JSON will have it
        except ValueError as error:
            raise ValueError(
                f"a checkpoint can't hold an int of {value.bit_length()} bits ({path}): Python"
                f" writes no more than {sys.get_int_max_str_digits()} digits. Give it as bytes"
                " (value.to_bytes), or raise sys.set_int_max_str_digits."
            ) from error
        return value

    def _key(self, key: Any, path: str) -> Any:
        """Returns what stands for a key: numpy's scalars are equal to Python's."""
        if isinstance(key, tuple):
            with self._level(path):
                return {_TUPLE: [self._key(item, path) for item in key]}
        plain = key.item() if isinstance(key, (np.bool_, np.number)) else key
        if isinstance(key, np.character):  # its `item` ends before the last NULs
            plain = bytes(key) if isinstance(key, bytes) else str.__str__(key)
        is_object = object_state.has_state(key) or library_of(key) is not None
        # Python has nothing like these.
        if is_object or isinstance(plain, (np.generic, DistributedValues)):
            raise self._refused(key, path)
        return self.encode(plain, path)

    def _refused(self, value: Any, path: str, why: object = _NO_STATE) -> TypeError:
        return TypeError(f"a checkpoint can't hold {type(value).__qualname__} ({path}): {why}")


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
    if (pairs := _inside(value, _DICT, _COUNTER)) is not None:
        return {next(iter(value)): [[key, structure_of(item)] for key, item in pairs]}
    return {key: structure_of(item) for key, item in value.items()}


def array_name(value: Any) -> str | None:
    """Returns the name of the array that `value` stands for; None where it stands for none.

    A numpy scalar is an array without dimensions.
    """
    name = _inside(value, _ARRAY, _SCALAR)
    if name is None and (pair := _inside(value, _TENSOR)) is not None:
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
            return (
                "" if here == there else f"draws by {here} here, and by {there} in the checkpoint"
            )
        if not object_state.is_optimizer(live) or self.shapes is None:
            return ""
        groups = tuple_items(items.get("param_groups")) or []
        options = [[*(mapping_items(group) or ())] for group in groups]
        return difference_of_shapes(
            object_state.parameter_shapes(live), self.shapes
        ) or difference_of_options(object_state.needed_options(live), options)


def state_of(value: Any) -> SavedState | None:
    """Returns what stands for the state of an object; None where it is no object's."""
    if (pair := _inside(value, _MODULE)) is not None:
        return SavedState(pair[0], versions=pair[1])
    if (pair := _inside(value, _OPTIMIZER)) is not None:
        return SavedState(pair[0], shapes=pair[1])
    state = _inside(value, _STATE)
    return None if state is None else SavedState(state)


def alike_of(value: Any) -> Any:
    """Returns what stands for each component of a `PerReplica` of objects; None for other things.

    All of them are the same.
    """
    return _inside(value, _ALIKE)


def replicas_name(value: Any) -> str | None:
    """Returns the name of the `PerReplica` that `value` stands for; None for another thing."""
    name = _inside(value, _REPLICAS)
    return name if isinstance(name, str) else None


def variable_of(value: Any) -> tuple[str, Any] | None:
    """Returns the identity of a variable, and what stands for its value; None for other things."""
    pair = _inside(value, _VARIABLE)
    return None if pair is None else tuple(pair)


def mapping_items(value: Any) -> dict[Any, Any] | None:
    """Returns what stands for the items of a mapping; None where it is none."""
    if not isinstance(value, dict):
        return None
    if len(value) == 1 and next(iter(value)).startswith("$"):
        pairs = _inside(value, _DICT, _COUNTER)
        return None if pairs is None else {decoded(key, _no_array): item for key, item in pairs}
    return value


def _no_array(name: str, library: str = "") -> Array:
    raise ValueError(f"array {name} is the key of a mapping")


def is_bytes(value: Any) -> bool:
    """Returns whether `value` stands for bytes."""
    return _inside(value, _BYTES) is not None


def tuple_items(value: Any) -> list[Any] | None:
    """Returns what stands for the items of a list or tuple; None where it is none."""
    items = _inside(value, _TUPLE) if isinstance(value, dict) else value
    return items if isinstance(items, list) else None


def decoded(
    value: Any,
    array: ArrayOf,
    replicas: Callable[[str], Any] = lambda name: {_REPLICAS: name},
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
        if key == _REPLICAS:
            return replicas(inner)
        if key == _VARIABLE:
            identity, of_value = inner
            return variables[identity] if identity in variables else again(of_value)
        if key == _ARRAY:
            return array(inner)
        if key == _SCALAR:
            scalar = array(inner)
            is_text = scalar.dtype.kind == "S" and scalar.itemsize > 1  # b"" has a byte, too
            return np.bytes_(scalar.tobytes()) if is_text else scalar[()]  # not to the first NUL
        if key == _TENSOR:
            library, name = inner
            if not isinstance(library, str):
                raise TypeError(f"{library!r} is no library of arrays")
            return array(name, library)
        if key in (_MODULE, _OPTIMIZER):
            state, about = inner
            return [again(state), again(about)]
        if key == _MIRRORED:
            return Mirrored(again(inner))
        if key == _TUPLE:
            return tuple(again(item) for item in inner)
        if key in (_DICT, _COUNTER):
            made = {decoded(name, _no_array): again(item) for name, item in inner}
            return collections.Counter(made) if key == _COUNTER else made
        if key == _BYTES:
            return base64.b64decode(inner, validate=True)
        if key == _COMPLEX:
            return complex(*inner)
    # who knows the object takes its state from there
    if unknown := [key for key in value if key.startswith("$") and key not in (_STATE, _ALIKE)]:
        raise ValueError(f"{unknown[0]!r} stands for nothing in a checkpoint")
    return {key: again(item) for key, item in value.items()}
