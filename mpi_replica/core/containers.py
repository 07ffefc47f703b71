"""Containers of classes that optree does not know: which are nests, and how they are made anew.

A subclass of list or tuple becomes a list or tuple, as in tf; a mapping is made by its class, of a
dict; and what JAX knows, by JAX. A class is registered with optree when it is met, in a namespace
of the package's own. What a program has registered there, or for all namespaces, optree opens
itself: it is never met here.
"""

from __future__ import annotations

import numbers
import operator
import threading
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import optree
from optree.utils import total_order_sorted

from .jax_nodes import opened_by_jax
from .more_than_numbers import has_hidden_fields, is_sparse_of_jax

NAMESPACE = "mpi_replica"

#: The items of a container, what makes another one of items, and the keys of the items.
_Flat = tuple[Sequence[Any], Callable[[Iterable[Any]], Any], Sequence[Any] | None]

_lock = threading.Lock()
_opened: set[type] = set()
# Classes of mappings that make their values when they are looked at.
_views: set[type] = set()


def open_class_of(value: Any) -> bool:
    """Registers the class of `value` with optree if it is a container; returns whether it is."""
    kind = type(value)
    if is_opaque(value):
        return False
    if issubclass(kind, (list, tuple)):
        _register(kind, _flat_sequence, optree.SequenceEntry)
    elif issubclass(kind, Mapping) and not _is_view(value):
        _register(kind, _flat_mapping, optree.MappingEntry)
    elif is_sparse_of_jax(kind):
        return False  # sums of its arrays would add up row numbers
    elif (node := opened_by_jax(value)) is not None:
        entry = optree.GetAttrEntry if node.has_attributes else optree.SequenceEntry
        _register(kind, _flat_node, entry)
    else:
        return False
    return True


def _register(kind: type, flatten: Callable[[Any], _Flat], entry: type[optree.PyTreeEntry]) -> None:
    with _lock:
        if kind not in _opened:  # by another thread
            optree.register_pytree_node(
                kind, flatten, _unflat, path_entry_type=entry, namespace=NAMESPACE
            )
            _opened.add(kind)


def _unflat(make: Any, items: Iterable[Any]) -> Any:
    return make(items)


def _is_view(mapping: Mapping[Any, Any]) -> bool:
    """Returns whether it only shows what lies elsewhere: a file of h5py, ``os.environ``.

    Such a mapping makes its values when they are looked at, or can't be looked at any more. It can
    hold no values of replicas.
    """
    kind = type(mapping)
    if kind in _views or isinstance(mapping, dict):
        return kind in _views
    is_held = False
    try:
        for key in mapping:
            one, other = mapping[key], mapping[key]
            if not _is_same(one, other):
                _views.add(kind)  # looking may read a file
                return True
            is_held = is_held or one is other
        if not is_held:  # what holds mappings may make these anew
            _flat_mapping(mapping)
    except Exception:
        return True
    return False


def _flat_sequence(items: Sequence[Any]) -> _Flat:
    return [*items], list if isinstance(items, list) else tuple, None


def _flat_mapping(mapping: Mapping[Any, Any]) -> _Flat:
    make = _Remake(type(mapping), [*mapping])
    items = [mapping[key] for key in make.keys]
    make(items)  # what can't be made anew is an error now, before there are results
    return items, make, make.keys


def is_mapping_opened_here(value: Any) -> bool:
    """Returns whether it is a mapping of a class that optree does not know by itself."""
    return type(value) in _opened and isinstance(value, Mapping)


def remade(mapping: Mapping[Any, Any], keys: Sequence[Any], items: Iterable[Any]) -> Any:
    """Returns a mapping of the same class with these items for these keys, which are in order."""
    return _Remake(type(mapping), keys)(items)


def _flat_node(value: Any) -> _Flat:
    node = opened_by_jax(value)
    if node is None:
        raise TypeError(f"JAX no longer knows {type(value).__qualname__} as a container.")
    return node.children, node.make, node.make.keys


class _Remake:
    """Makes a mapping anew, with other values: what optree keeps of a mapping."""

    def __init__(self, kind: Any, keys: Sequence[Any]) -> None:
        self._kind = kind
        self._order = keys
        #: In the order of the values: that of optree for a dict.
        self.keys = tuple(total_order_sorted(keys))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Remake) and self.keys == other.keys

    def __hash__(self) -> int:
        return hash(self.keys)

    def __repr__(self) -> str:
        return repr([plain_key(key) for key in self.keys])[1:-1]

    def __call__(self, items: Iterable[Any]) -> Any:
        values = dict(zip(self.keys, items, strict=True))
        try:
            # A dict: Counter would count pairs.
            made = self._kind({key: values[key] for key in self._order})
            why = "" if self._has(made, values) else f"it gives {made!r:.200}"
        except Exception as error:
            why = f"it raises {type(error).__name__}: {error}"
        if why:
            name = self._kind.__qualname__
            raise TypeError(
                f"a nest with a {name} can't be made anew: {name}(a dict) should give a {name} of"
                f" the same keys and values, and {why}. Give dict(value) instead, or tell how:"
                f" optree.register_pytree_node({name}, ..., namespace={NAMESPACE!r})."
            )
        return made

    def _has(self, made: Any, values: Mapping[Any, Any]) -> bool:
        return (
            type(made) is self._kind
            and len(made) == len(values)
            and all(key in made and _is_same(made[key], item) for key, item in values.items())
        )


class HasHiddenFields(Exception):
    """A nest holds what `is_opaque` tells."""


def is_opaque(value: Any) -> bool:
    """Returns whether it is a leaf that optree takes for a container: it has hidden fields.

    Made anew of its items it would lack these, as ``os.stat_result`` lacks its times in ns.
    """
    return has_hidden_fields(type(value))


def _refuse_to_open(value: Any) -> _Flat:
    raise HasHiddenFields


def _register_opaque_classes() -> None:
    """Tells optree about these: so only nests that hold one pay for it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it says that it opens them itself otherwise
        for kind in filter(has_hidden_fields, tuple.__subclasses__()):
            optree.register_pytree_node(kind, _refuse_to_open, _unflat, namespace=NAMESPACE)


_register_opaque_classes()


class _InOrder(frozenset[Any]):
    """One that is written alike in every process, and however it was made."""

    def __repr__(self) -> str:
        return f"frozenset({{{', '.join(sorted(map(repr, self)))}}})"


def plain_key(key: Any) -> Any:
    """Returns the key of Python that equals one of numpy, an enum or another class of numbers.

    Structures whose keys are equal are equal: what is written about one must hold for the other.

    Examples
    --------
    >>> plain_key(np.str_("a")), plain_key(True), plain_key((np.float64(2.0), 0.5))
    ('a', 1, (2, 0.5))
    """
    kind = type(key)
    if kind is int or kind is str:
        return key
    if isinstance(key, str):
        return str.__str__(key)
    if isinstance(key, bytes):
        return bytes(key)
    if isinstance(key, (tuple, frozenset)):
        parts = [plain_key(part) for part in key]
        if kind is tuple and all(map(operator.is_, parts, key)):
            return key
        return tuple(parts) if isinstance(key, tuple) else _InOrder(parts)
    if isinstance(key, (numbers.Number, np.bool_)):
        kinds: tuple[Any, ...] = (int, float, complex)
        for plain in kinds:
            try:
                if (equal := plain(key)) == key:
                    return equal
            except (TypeError, ValueError, OverflowError):
                continue
    return key


def _is_same(one: Any, other: Any) -> bool:
    # Some mappings keep the items of mappings in them, and not these themselves.
    return one is other or (type(one) is type(other) and isinstance(one, Mapping))
