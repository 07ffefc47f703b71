"""What the batches of a dataset are on all ranks alike: their structure, dtypes, numbers of axes.

Lengths may differ: of the rows, of rows that are padded to the longest of them, of texts. Input of
each rank's own is alike in structure only.
"""

from __future__ import annotations

from typing import Any

from .. import nest
from ..collectives.standing import LeafDescription
from ..dtypes import is_text, wire_name
from .elements import ArraySpec, spec_of

__all__ = ["kind_of", "kind_text"]


def kind_of(batch: Any, is_global: bool) -> tuple[Any, ...]:
    """Return what is equal for batches of one kind; quick, and only for this rank."""
    leaves, structure, _ = nest.flatten_plain(batch)
    return structure, [(leaf.dtype, leaf.ndim) for leaf in leaves] if is_global else []


def kind_text(batch: Any, is_global: bool) -> str:
    """Return the kind of a batch in words that are the same in every process."""
    specs, structure = nest.flatten(spec_of(batch))
    text = nest.structure_text(structure)
    if not is_global:
        return text
    leaves = ", ".join(map(_leaf_text, specs))
    return leaves if text == "*" else f"{text} of {leaves}"


def _leaf_text(spec: ArraySpec) -> str:
    dtype = spec.dtype
    name = {"U": "str", "S": "bytes"}[dtype.kind] if is_text(dtype) else wire_name(dtype)
    return str(LeafDescription(name, (None,) * len(spec.shape)))
