"""Values that are more than their numbers: an array alone would lose the rest without a word."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import optree

#: Of a value: what is lost, and what to do; empty where it is nothing.
_Lost = Callable[[Any], str]


def require_only_numbers(value: Any, *, takes_labels: bool = False) -> None:
    """Raises where an array would mean something else than `value`.

    Parameters
    ----------
    value : object
    takes_labels : bool
        Whether labels don't count: its rows stay together, in their order.

    Raises
    ------
    TypeError
        It has a mask, a unit, labels, or hidden fields; or it is a sparse matrix of JAX.
    """
    lost = _lost_by(type(value))
    if lost is not None and not (takes_labels and lost is _labels) and (text := lost(value)):
        raise TypeError(text)


def goes_by_label(kind: type) -> bool:
    """Returns whether ``[i]`` of objects of this class is what has the label i, or a column."""
    library = kind.__module__.partition(".")[0]
    return _lost_by(kind) is _labels and library in ("pandas", "pyarrow")


def is_sparse_of_jax(kind: type) -> bool:
    """Returns whether objects of this class are sparse matrices of JAX: nests to it, not here."""
    return _lost_by(kind) is _places


def has_hidden_fields(kind: type) -> bool:
    """Returns whether objects of this class have more fields than items, as ``os.stat_result``."""
    return _lost_by(kind) is _fields


def is_only_numbers(value: Any) -> bool:
    """Returns whether `require_only_numbers` passes."""
    lost = _lost_by(type(value))
    return lost is None or not lost(value)


def _mask(value: Any) -> str:
    return (
        "masked arrays can't be taken as their numbers alone: the mask would be lost. Pass"
        " value.filled(...), or value and mask as two leaves."
    )


def _places(value: Any) -> str:
    return (
        f"a sparse matrix of JAX ({type(value).__qualname__}) can't be taken as its numbers alone:"
        " other replicas may have theirs in other places. Pass a dense one (value.todense())."
    )


def _labels(value: Any) -> str:
    return (
        f"{_name(value)} can't be taken as its numbers alone: its labels would be lost, and those"
        " of other replicas may stand in another order. Bring the rows in an order that all"
        " replicas have, and pass value.to_numpy(). strategy.gather_objects and merge_call take it"
        " as it is."
    )


def _fields(value: Any) -> str:
    return (
        f"{_name(value)} can't be taken as its numbers alone: the fields that are no items of it"
        " would be lost. Pass the fields that are meant, or tuple(value) for its items."
        " strategy.gather_objects and merge_call take it as it is."
    )


def _unit(value: Any) -> str:
    unit = getattr(value, "unit", getattr(value, "units", None))
    if unit is None:  # a column of a table has none, or one
        return ""
    text = str(unit)
    return (
        f"{_name(value)}{' in ' * bool(text)}{text} can't be taken as its numbers alone: the unit"
        " would be lost, and other replicas may have another one. Convert it to a unit that all"
        " replicas have, and pass its numbers."
    )


def _name(value: Any) -> str:
    kind = type(value)
    return f"{kind.__module__.partition('.')[0]}.{kind.__qualname__}"


# By library and name of the class: none of them is imported for it.
_LOST: dict[tuple[str, str], _Lost] = {
    ("numpy", "MaskedArray"): _mask,
    ("astropy", "MaskedNDArray"): _mask,
    ("astropy", "Quantity"): _unit,
    ("astropy", "Column"): _unit,
    ("pint", "PlainQuantity"): _unit,
    ("quantities", "Quantity"): _unit,
    ("unyt", "unyt_array"): _unit,
    ("jax", "JAXSparse"): _places,
    ("pandas", "Series"): _labels,
    ("pandas", "DataFrame"): _labels,
    ("polars", "DataFrame"): _labels,
    ("pyarrow", "Table"): _labels,
    ("pyarrow", "RecordBatch"): _labels,
    ("xarray", "DataArray"): _labels,
}


def _found_lost(kind: Any) -> _Lost | None:
    """Returns what tells what objects of this class lose; None where that is nothing."""
    if optree.is_structseq_class(kind) and kind.n_fields != kind.n_sequence_fields:
        return _fields
    names = ((base.__module__.partition(".")[0], base.__name__) for base in kind.__mro__)
    return next((_LOST[name] for name in names if name in _LOST), None)


_lost_by: Callable[[type], _Lost | None] = functools.lru_cache(maxsize=1024)(_found_lost)
