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
from typing import Any

import numpy as np

from ..core import object_state
from ..core.array_libraries import address_of, library_of
from ..core.array_ways import Array
from ..core.dtypes import as_array
from ..core.jax_nodes import JaxNode, is_function_in_node, opened_by_jax
from ..core.more_than_numbers import has_hidden_fields
from ..core.values import DistributedValues, Mirrored
from .dtype_texts import dtype_text
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
            self.variables[identity] = self._value(value, path, f"{VARIABLE} {identity}")
        return {VARIABLE: [identity, self.variables[identity]]}

    def _value(self, value: Any, path: str, name: str = "") -> Any:
        """Returns what stands for a value, whichever variable has it; components get this name."""
        components = None if self._own is None else self._own(value)
        if components is not None:
            if object_state.are_alike(components.values()):
                return {ALIKE: self._without_replicas(next(iter(components.values())), path)}
            # without one, by the path and a number, since two paths may read alike
            name = name or f"{path} {len(self.of_replicas)}"
            return {REPLICAS: self._replicas(components, path, name)}
        if self._own is None and isinstance(value, Mirrored):
            # Nothing in the program will stand beside it and say what it was.
            return {MIRRORED: self.encode(value.value, path)}
        try:
            value = self._plain(value)
        except ValueError as error:
            raise ValueError(f"a checkpoint can't hold {path}: {error}") from error
        if value is None or isinstance(value, (bool, str)):
            # not `str(value)`: an Enum of texts has a name for that
            return str.__str__(value) if isinstance(value, str) else value
        library = library_of(value)
        if library is not None:
            return {TENSOR: [library, self._array_of_library(value, path)]}
        if isinstance(value, (np.ndarray, np.generic)):
            try:
                array = as_array(value)
            except TypeError as error:
                raise self._refused(value, path, error) from error
            try:
                dtype_text(array.dtype)
            except TypeError as error:
                about = f" of dtype {array.dtype}"
                raise self._refused(value, path, about=about) from error
            return {SCALAR if isinstance(value, np.generic) else ARRAY: self._kept(array)}
        if isinstance(value, int):
            return self._number(int(value), path)
        if isinstance(value, float):
            return float(value)
        if isinstance(value, complex):
            return {COMPLEX: [value.real, value.imag]}
        if isinstance(value, (bytes, bytearray)):
            return {BYTES: base64.b64encode(value).decode()}
        if isinstance(value, Mapping):
            return self._mapping(value, path)
        if isinstance(value, (list, tuple)):
            if has_hidden_fields(type(value)):
                raise self._refused(value, path, _HAS_MORE)
            items = [self.encode(item, f"{path}[{i}]") for i, item in enumerate(value)]
            return items if isinstance(value, list) else {TUPLE: items}
        if (node := opened_by_jax(value)) is not None:
            return {TUPLE: [*self._children(node, path)]}
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
            return {MODULE: [encoded, self._without_replicas(versions, f"{inside}._metadata")]}
        if object_state.is_optimizer(value):
            return {OPTIMIZER: [encoded, object_state.parameter_shapes(value)]}
        return {STATE: encoded}

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
        kind = COUNTER if isinstance(value, collections.Counter) else DICT
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
                return {TUPLE: [self._key(item, path) for item in key]}
        plain = key.item() if isinstance(key, (np.bool_, np.number)) else key
        if isinstance(key, np.character):  # its `item` ends before the last NULs
            plain = bytes(key) if isinstance(key, bytes) else str.__str__(key)
        is_object = object_state.has_state(key) or library_of(key) is not None
        # Python has nothing like these.
        if is_object or isinstance(plain, (np.generic, DistributedValues)):
            raise self._refused(key, path)
        # Who loads the state of an object does not look for the keys that it has.
        if self._own is not None and isinstance(plain, (float, complex)) and plain != plain:
            raise ValueError(
                f"a checkpoint can't hold {plain} ({path}): it equals no key, so that what is"
                " under it is not found again. Take another key for it, such as None."
            )
        return self.encode(plain, path)

    def _refused(
        self, value: Any, path: str, why: object = _NO_STATE, about: str = ""
    ) -> TypeError:
        what = f"{type(value).__qualname__}{about} ({path})"
        return TypeError(f"a checkpoint can't hold {what}: {why}")
