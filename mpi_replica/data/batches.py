"""Batches of any source: as arrays, the rows of them that a replica gets, and their kind.

The kind of a batch is the same on all ranks: structure, dtypes, numbers of axes. Lengths may
differ: of the rows, of rows that are padded to the longest of them, of texts. Input of each rank's
own is alike in structure only.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..collectives.agreement.stand import LeafDescription
from ..core import nest
from ..core.array_libraries import copy_of, dtype_of, values_of
from ..core.digests import digest_of
from ..core.dtypes import is_text, wire_name
from ..core.more_than_numbers import require_only_numbers
from ..core.pad_bytes import without_padding
from ..core.values import read_only
from .elements import ArraySpec, parts_of, rows_of, spec_of


def arrays_of(batch: Any) -> Any:
    """Returns the nest `batch` with arrays as leaves; those of any library stay theirs.

    Raises
    ------
    ValueError
        A leaf has no rows, or another number of them.
    TypeError
        A leaf has a mask or a unit, which would be lost.
    """
    leaves, structure = nest.flatten(batch)
    arrays: list[Any] = []
    for leaf, path in zip(leaves, nest.leaf_paths(structure), strict=True):
        try:
            require_only_numbers(leaf, takes_labels=True)
        except TypeError as error:
            raise TypeError(f"a batch of a distributed dataset, value{path}: {error}") from None
        array = np.asarray(leaf) if dtype_of(leaf) is None else values_of(leaf)
        arrays.append(array)
        if array.ndim == 0:
            of_texts = ", as np.array of a list of texts" if isinstance(leaf, str | bytes) else ""
            raise ValueError(
                f"a batch of a distributed dataset has a scalar for value{path}: it has no rows. "
                f"Give batches: arrays whose first dimension are the rows{of_texts}; a"
                " mr.data.Dataset of rows by its batch(n)."
            )
        if array.shape[0] != arrays[0].shape[0]:
            raise ValueError(
                f"a batch of a distributed dataset has {arrays[0].shape[0]} rows and"
                f" {array.shape[0]} for value{path}. All leaves must have the same rows, those of a"
                " list, too: it is a nest."
            )
    return nest.unflatten(structure, arrays)


def cut(
    batch: Any, wanted: Callable[[int], Sequence[slice]], *, is_kept: bool
) -> tuple[int, list[Any]]:
    """Returns the number of rows of a batch, and the parts of them that are wanted.

    A step that writes into them writes into nothing of the program. Those of arrays that its source
    keeps, and of views, refuse it. Others are copies, also of what may come in the same memory in
    the next batch: tensors can't refuse, and who keeps a fresh array is not known.

    Parameters
    ----------
    is_kept : bool
        What `keeps_batches` tells of its source.
    """
    arrays, structure = nest.flatten(arrays_of(batch))
    rows = arrays[0].shape[0] if arrays else 0
    slices = wanted(rows)
    of_leaves = []
    for array in arrays:
        is_view = isinstance(array, np.ndarray) and (is_kept or array.base is not None)
        parts = parts_of(array, slices)
        of_leaves.append([*map(read_only if is_view else copy_of, parts)])
    of_parts = zip(*of_leaves, strict=True) if of_leaves else [()] * len(slices)
    return rows, [nest.unflatten(structure, part) for part in of_parts]


def copied_batch(batch: Any) -> Any:
    """Returns a batch whose memory is its own: who made it may write the next one into that."""
    return nest.map_structure(copy_of, arrays_of(batch))


def keeps_batches(source: Any) -> bool:
    """Returns whether what `source` gives is there again when it is iterated anew, or goes on."""
    return isinstance(source, (Sequence, np.ndarray, itertools.repeat, itertools.cycle))


def digest_of_rows(rows: Any) -> int:
    """Returns 64 bits that differ where a few rows do, the same in every process.

    As `digest_of`, in a tenth of the time where the rows are numbers and texts of numpy.
    """
    leaves, _, _ = nest.flatten_plain(rows)
    digest = hashlib.blake2b(digest_size=8)
    for leaf in leaves:
        is_plain = type(leaf) is np.ndarray and not leaf.dtype.hasobject
        bits = without_padding(leaf).tobytes() if is_plain else digest_of(leaf).to_bytes(8)
        digest.update(bits)
    return int.from_bytes(digest.digest())


def empty_like(batch: Any) -> Any:
    """Returns a batch without rows."""
    return nest.map_structure(copy_of, rows_of(batch, slice(0, 0)))


def kind_of(batch: Any, is_global: bool) -> tuple[Any, ...]:
    """Returns what is equal for batches of one kind; quick, and only for this rank."""
    leaves, structure, _ = nest.flatten_plain(batch)
    return structure, [(leaf.dtype, leaf.ndim) for leaf in leaves] if is_global else []


def kind_text(batch: Any, is_global: bool) -> str:
    """Returns the kind of a batch in words that are the same in every process."""
    specs, structure = nest.flatten(spec_of(batch))
    text = nest.structure_text(structure)
    if not is_global:
        return text
    leaves = ", ".join(map(_leaf_text, specs))
    return leaves if text == "*" else " of ".join(filter(None, (text, leaves)))


def _leaf_text(spec: ArraySpec) -> str:
    dtype = spec.dtype
    name = {"U": "str", "S": "bytes"}[dtype.kind] if is_text(dtype) else wire_name(dtype)
    return str(LeafDescription(name, (None,) * len(spec.shape)))
