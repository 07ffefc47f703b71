"""Nested structures, as in tf.nest: flatten, rebuild, name the leaves.

Lists, tuples, named tuples and mappings are structure, those of subclasses too; everything else is
a leaf, ``None`` included, and ``os.stat_result``, which has more fields than items. Keys of a dict
are visited in sorted order. The work is done by optree.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import re
import sys
import threading
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import optree
from optree.utils import total_order_sorted

from .array_ways import way_of
from .containers import NAMESPACE, HasHiddenFields, is_opaque, open_class_of, plain_key
from .exceptions import StructureMismatchError
from .imported_libraries import imported_library
from .torch_tensors import tensor_types

Structure = optree.PyTreeSpec

#: What `flatten_plain` tells of leaves: some may be of any type (the only false one); all are
#: arrays of numpy, numbers, strings or None; all are arrays of numpy.
OTHERS, PLAIN, ARRAYS = range(3)

_LEAF: Structure = optree.treespec_leaf(none_is_leaf=True)

# Asking optree about a value that can't be a nest costs a microsecond; this does not.
_LEAF_TYPES = frozenset(
    {np.ndarray, float, int, bool, str, bytes, type(None), np.float32, np.float64, np.int64}
)

# The text of their structure tells all of them.
_DICTS = frozenset({dict, defaultdict, OrderedDict})

_ARRAY_TYPE = frozenset({np.ndarray})

# Of whose classes a program makes no containers of JAX.
_LIBRARIES = frozenset({"numpy", "ml_dtypes", __name__.partition(".")[0], *sys.stdlib_module_names})

# Types of leaves that are known to be no containers.
_other_types: set[type] = set(_LEAF_TYPES)

#: What the text of an object that does not name itself ends with.
ADDRESS = re.compile(" at 0x[0-9a-f]+>")

# Structures of a program are few; a program that makes new ones all the time must not grow.
_CACHE_SIZE = 4096
_MOST_LEAVES = 1 << 16
_FEW = 16  # stay, however large
_MOST_TEXTS = 256  # a call that is known needs none

# What optree need not be asked again: the structures of the commonest nests, dicts, lists and
# tuples of arrays and plain arguments. Of dicts with the same keys in the same order: the keys in
# the order of the leaves, and the structure; of others by their length.
_flat_dicts: dict[tuple[str, ...], tuple[list[str], Structure]] = {}
_flat_sequences: dict[type, dict[int, Structure]] = {list: {}, tuple: {}}
_flat_arguments: dict[int, Structure] = {}
_flat: list[dict[Any, Any]] = [_flat_dicts, *_flat_sequences.values(), _flat_arguments]
_flat_leaves = 0  # of all of them
# Keys of other types can be equal and yet be others, as 1 and True.
_STRINGS = frozenset({str})
# A number for each of them, by its id, which never comes to mean another structure.
_numbers: dict[int, int] = {id(_LEAF): 0}
_counter = itertools.count(1)
# Held by who changes any of these.
_lock = threading.Lock()


def flatten(value: Any) -> tuple[list[Any], Structure]:
    """Returns the leaves of `value`, in a fixed order, and its structure.

    Raises
    ------
    ValueError
        A container contains itself, or keys of a dict can't be sorted.
    """
    if type(value) in _LEAF_TYPES:
        return [value], _LEAF
    leaves, structure = _opened(value)
    return flatten(value) if _open_classes(leaves) else (leaves, structure)


def _opened(
    value: Any, is_leaf: Callable[[Any], bool] | None = None
) -> tuple[list[Any], Structure]:
    """Returns what optree finds in `value`, where it knows all classes of containers."""
    try:
        return optree.tree_flatten(value, is_leaf, none_is_leaf=True, namespace=NAMESPACE)
    except HasHiddenFields:
        return _opened(value, is_opaque if is_leaf is None else _is_list_or_opaque)
    except RecursionError as error:
        raise ValueError(
            "lists, tuples or dicts are nested too deep: one of them contains itself, or hundreds"
            " are inside of each other. Give the values in a list or dict of their own."
        ) from error
    except Exception as error:
        _require_ordered_keys(value, error)
        raise


def _require_ordered_keys(value: Any, error: Exception) -> None:
    """Raises where keys of a mapping in `value` can't be sorted: `error` came of that.

    Raises
    ------
    StructureMismatchError
        Names the class of such a key.
    """
    found: list[type] = []

    def is_out_of_order(node: Any) -> bool:
        if not isinstance(node, Mapping) or type(node) is OrderedDict:
            return is_opaque(node)
        if _can_be_sorted(node):
            return False
        kinds = [*dict.fromkeys(map(type, node))]
        alone = [kind for kind in kinds if not _can_be_sorted([k for k in node if type(k) is kind])]
        found.extend(alone or kinds)
        return True

    with contextlib.suppress(Exception):  # `error`, if no key is the reason
        optree.tree_flatten(value, is_out_of_order, none_is_leaf=True, namespace=NAMESPACE)
    if found:
        raise StructureMismatchError(
            f"a nest has a key of type {found[0].__qualname__}, which can't be brought in an"
            f" order with the others of its dict: comparing them raises {type(error).__name__}."
            " Use names as keys: strings, numbers or tuples of them."
        ) from error


def _can_be_sorted(keys: Iterable[Any]) -> bool:
    try:
        total_order_sorted([*keys])
    except Exception:
        return False
    return True


def flatten_tensors(value: Any) -> tuple[list[Any], Structure]:
    """Flattens a nest in which a list is a leaf, as in tf where it is made a tensor."""
    if type(value) in (tuple, dict):
        items = value if type(value) is tuple else value.values()
        if _LEAF_TYPES.issuperset(map(type, items)):  # no list among them
            leaves, structure, _ = flatten_plain(value)
            return leaves, structure
    leaves, structure = _opened(value, _is_list)
    is_opened = _open_classes([leaf for leaf in leaves if not _is_list(leaf)])
    return flatten_tensors(value) if is_opened else (leaves, structure)


def _is_list(node: Any) -> bool:
    return isinstance(node, list)


def _is_list_or_opaque(node: Any) -> bool:
    return isinstance(node, list) or is_opaque(node)


def _open_classes(leaves: Sequence[Any]) -> bool:
    """Registers the classes of containers among `leaves` with optree; returns whether any is."""
    if _other_types.issuperset(map(type, leaves)):
        return False
    met = {type(leaf): leaf for leaf in leaves}
    if any([open_class_of(leaf) for leaf in met.values()]):
        return True
    if len(_other_types) >= _CACHE_SIZE:
        _other_types.clear()
    _other_types.update(filter(_stays_leaf, met))
    return False


def _stays_leaf(kind: type) -> bool:
    """Returns whether all objects of a leaf's type are leaves, now and later.

    Where JAX is imported, a program may still register a class of its own with it.
    """
    if issubclass(kind, Mapping):  # it depends on more than its class
        return False
    if imported_library("jax") is None or way_of(kind) is not None:
        return True
    return str(kind.__module__).partition(".")[0] in _LIBRARIES


def flatten_plain(value: Any) -> tuple[list[Any], Structure, int]:
    """Flattens a nest; tells also what all leaves are: `ARRAYS`, `PLAIN` or `OTHERS`.

    Quick: some plain leaves of rarer types are not known to be. Where it returns the same object as
    the structure of two nests, their keys are in the same order, too.
    """
    kind = type(value)
    if kind is np.ndarray:
        return [value], _LEAF, ARRAYS
    if kind in _LEAF_TYPES:
        return [value], _LEAF, PLAIN
    if kind in tensor_types():
        return [value], _LEAF, OTHERS
    if kind is dict:
        known = _flat_dicts.get(tuple(value))
        if known is not None and _STRINGS.issuperset(map(type, value)):
            keys, structure = known
            leaves = [value[key] for key in keys]
            if (plain := _plainness(leaves)) is not None:
                return leaves, structure, plain
    elif kind is list or kind is tuple:
        flat = _flat_sequences[kind].get(len(value))
        if flat is not None and (plain := _plainness(value)) is not None:
            return [*value], flat, plain
    leaves, structure = _opened(value)
    if (plain := _plainness(leaves)) is not None:
        _learn(value, leaves, structure)
        return leaves, structure, plain
    return flatten_plain(value) if _open_classes(leaves) else (leaves, structure, OTHERS)


def _plainness(leaves: Sequence[Any]) -> int | None:
    """Returns what `flatten_plain` tells of these; None where some may be no leaves."""
    if _ARRAY_TYPE.issuperset(map(type, leaves)):
        return ARRAYS
    if _LEAF_TYPES.issuperset(map(type, leaves)):
        return PLAIN
    return OTHERS if tensor_types().issuperset(map(type, leaves)) else None


def flatten_arguments(
    args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[list[Any], Structure, int]:
    """Flattens as `flatten_plain` does the nest ``(tuple(args), dict(kwargs))``.

    Of arrays of numpy it may say that they are `PLAIN`.
    """
    if not kwargs:
        structure = _flat_arguments.get(len(args))
        if structure is not None and _LEAF_TYPES.issuperset(map(type, args)):
            return list(args), structure, PLAIN
    leaves, structure, plain = flatten_plain((tuple(args), dict(kwargs)))
    if not kwargs and plain and _is_flat(args):
        _keep(_flat_arguments, len(args), structure, structure)
    return leaves, structure, plain


def _learn(value: Any, leaves: Sequence[Any], structure: Structure) -> None:
    """Remembers the structure of a dict, list or tuple whose items are all leaves."""
    kind = type(value)
    if kind not in (dict, list, tuple) or len(value) != len(leaves):
        return
    if not _is_flat(value.values() if kind is dict else value):
        return
    if kind is not dict:
        _keep(_flat_sequences[kind], len(value), structure, structure)
    elif _STRINGS.issuperset(map(type, value)):
        keys = sorted(value)
        # others where the program has told optree, for a while, to keep the order of keys
        if structure.entries() == keys:
            _keep(_flat_dicts, tuple(value), (keys, structure), structure)


def _keep(known: dict[Any, Any], name: Any, entry: Any, structure: Structure) -> None:
    """Remembers `structure`, and gives it a number, as long as it is in `known`."""
    global _flat_leaves
    with _lock:
        if name in known:  # by another thread
            return
        leaves, kept = structure.num_leaves, sum(map(len, _flat))
        if kept >= _CACHE_SIZE or (kept >= _FEW and _flat_leaves + leaves > _MOST_LEAVES):
            _flat_leaves = 0
            _numbers.clear()  # first: where a structure was another one may lie
            _numbers[id(_LEAF)] = 0
            for others in _flat:
                others.clear()
        known[name] = entry
        _flat_leaves += leaves
        _numbers[id(structure)] = next(_counter)


def _is_flat(items: Iterable[Any]) -> bool:
    return all(optree.tree_is_leaf(item, none_is_leaf=True, namespace=NAMESPACE) for item in items)


def key(structure: Structure) -> Structure | int:
    """Returns what stands for `structure` in the keys of a cache: a number, where it has one.

    optree hashes and compares all of a structure each time.
    """
    return _numbers.get(id(structure), structure)


def unflatten(structure: Structure, leaves: Iterable[Any]) -> Any:
    """Returns the nest of `structure` with `leaves` in it: the inverse of `flatten`."""
    if structure is _LEAF:
        (leaf,) = leaves
        return leaf
    return optree.tree_unflatten(structure, leaves)


def map_structure(function: Callable[[Any], Any], value: Any) -> Any:
    """Returns the nest `value` with `function` applied to each leaf; containers are new."""
    leaves, structure = flatten(value)
    return unflatten(structure, [function(leaf) for leaf in leaves])


def transposed(values: Sequence[Any], join: Callable[[list[Any]], Any], caller: str) -> Any:
    """Returns one nest out of several of the same structure: `join` makes each leaf, as `merged`.

    Raises
    ------
    StructureMismatchError
        They differ in structure; the text names `caller`.
    """
    rows, structures = zip(*(flatten(value) for value in values), strict=True)
    for index, structure in enumerate(structures):
        if structure == structures[0]:
            continue
        first, text = structure_text(structures[0]), structure_text(structure)
        if text != first:
            raise StructureMismatchError(
                f"{caller} got different structures: {first} first, and"
                f" {text} as value {index}. Return the same nest each time."
            )
    leaves = [join(list(column)) for column in zip(*rows, strict=True)]
    return merged(structures, rows, leaves, join)


def merged(
    structures: Sequence[Structure],
    rows: Sequence[Sequence[Any]],
    leaves: Sequence[Any],
    join: Callable[[list[Any]], Any],
) -> Any:
    """Returns one nest out of several whose structures have the same text.

    Containers may differ in what no text tells, as static fields do of those that JAX knows: out of
    these `join` makes a leaf. Functions that defaultdicts make their values by count as one, and so
    do keys that equal nothing, as NaN.

    Parameters
    ----------
    structures : sequence
        Those of the nests.
    rows : sequence
        The leaves of each.
    leaves : sequence
        What became of those at one place, where the containers round them are alike.
    join : callable
        Makes a leaf of a list of containers.
    """
    first = structures[0]
    if all([one is first or one == first for one in structures]):
        return unflatten(first, leaves)
    levels = [_one_level(one) for one in structures]
    if first.type not in _DICTS and any([level != levels[0] for level in levels]):
        return join([unflatten(*pair) for pair in zip(structures, rows, strict=True)])
    parts = []
    start = 0
    for children in zip(*[one.children() for one in structures], strict=True):
        here = slice(start, start + children[0].num_leaves)
        parts.append(merged(children, [row[here] for row in rows], leaves[here], join))
        start = here.stop
    return unflatten(levels[0], parts)


def _one_level(structure: Structure) -> Structure:
    """Returns the structure of the outermost container, in which all others are leaves."""
    # zeros: a None in a container of JAX is no leaf
    node = unflatten(structure, [0] * structure.num_leaves)
    return optree.tree_structure(
        node, lambda part: part is not node, none_is_leaf=True, namespace=NAMESPACE
    )


@functools.lru_cache(maxsize=_MOST_TEXTS)
def structure_text(structure: Structure) -> str:
    """Returns a text that tells `structure` from every other one, the same in every process.

    Those with equal keys are equal, also to the caches that ask for it: 1, 1.0 and True are one.

    Examples
    --------
    >>> structure_text(flatten({"b": [1, 2], "a": None})[1])
    "{'a': *, 'b': [*, *]}"
    """
    text = str(structure).removeprefix("PyTreeSpec(").rpartition(", NoneIsLeaf")[0]
    text = ADDRESS.sub(">", text)  # that of a defaultdict's function, say
    for key, plain in _unplain_keys(structure):
        text = text.replace(f"{key!r}: ", f"{plain!r}: ")
    return text


@functools.lru_cache(maxsize=_MOST_TEXTS)
def leaf_paths(structure: Structure) -> tuple[str, ...]:
    """Returns where each leaf is, as Python writes it.

    Examples
    --------
    >>> leaf_paths(flatten({"b": [1, 2], "a": None})[1])
    ("['a']", "['b'][0]", "['b'][1]")
    """
    if structure.type in (list, tuple, dict) and structure.num_nodes == len(structure) + 1:
        # of thousands of leaves, without an object for each
        return tuple([f"[{plain_key(entry)!r}]" for entry in structure.entries()])
    return tuple([functools.reduce(_longer_path, entries, "") for entries in structure.accessors()])


def _longer_path(path: str, entry: optree.PyTreeEntry) -> str:
    if type(entry) is optree.MappingEntry:
        return f"{path}[{plain_key(entry.entry)!r}]"
    return entry.codify(path)


def _unplain_keys(structure: Structure) -> list[tuple[Any, Any]]:
    """Returns the keys in it that are none of Python, and those that equal them."""
    pairs = [(key, plain_key(key)) for key in structure.entries()]
    found = [pair for pair in pairs if pair[0] is not pair[1]]
    for child in structure.children():
        found += _unplain_keys(child)
    return found
