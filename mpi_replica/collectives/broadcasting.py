"""One replica's value for all, and values that must be equal everywhere without travelling."""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from .. import nest
from ..array_libraries import dtype_of
from ..dtypes import as_plain_array, wire_name
from ..indexed_slices import IndexedSlices
from ..options import CommunicationOptions
from .blobs import agree_on_blobs
from .call import Call
from .callsite import CallSite
from .digests import BLAKE_BYTES, digest_of_bytes
from .engine import Engine
from .standing import CallDescription, LeafDescription, Note

__all__ = ["Broadcast", "EqualEverywhere", "digest_of"]

_PLAIN_TYPES = (int, float, complex, bool, str, bytes, type(None))


class Broadcast(Call):
    """A value of replica 0, given to all replicas.

    Parameters
    ----------
    compared : bool
        Whether the dtype and shape of the value must be the same on all ranks, although only
        those of replica 0 count.
    then : callable, optional
        What is done with the value, once on each rank; its result is the result of the call.
    """

    def __init__(
        self,
        kind: str,
        detail: str,
        value: Any,
        site: CallSite,
        options: CommunicationOptions,
        *,
        compared: bool,
        then: Callable[[Any], Any] | None = None,
    ) -> None:
        super().__init__(site, options)
        self.kind = kind
        self.detail = detail
        self.value = value
        self.then = then
        self.leaf = LeafDescription("any value")
        if compared:
            array = np.asarray(value)
            self.leaf = LeafDescription(wire_name(array.dtype), array.shape)
        self.identify((detail, self.leaf))

    def words(self, position: int = 0) -> CallDescription:
        return CallDescription(
            self.kind, self.detail, self.site, self.options.name, leaves=(self.leaf,)
        )

    def perform(self, engine: Engine, calls: Sequence[Broadcast]) -> list[Any]:
        agreement, layout = engine.agreement, engine.layout
        root = layout.rank_of(0)
        with agreement.preparing(calls):
            is_root = layout.rank == root
            runs_code = is_root and not _is_plain(self.value)
            sends = is_root and layout.size > 1
            data = pickle.dumps(self.value, protocol=5) if sends else b""
            if sends and runs_code:
                pickle.loads(data)  # what can't be loaded fails here, before it is sent
        if layout.size == 1:
            agreement.agree(calls)
            blobs = []
        else:
            blobs = agree_on_blobs(engine, calls, data)
        with engine.irrevocable():
            value = self.value if layout.rank == root else pickle.loads(blobs[root])
            result = value if self.then is None else self.then(value)
        return [result for _ in calls]


class EqualEverywhere(Call):
    """A value that all replicas must pass alike: it does not travel, its hash does.

    The local replicas meet; the ranks compare the hash with their next header. They send one here
    where what would take back this and earlier values holds much memory.

    Parameters
    ----------
    then : callable
        What is done with the value, once on each rank, before the others are known to agree; it
        returns what takes it back if they don't.
    held_bytes : int
        Memory that is held by what takes it back.
    """

    def __init__(
        self,
        kind: str,
        detail: str,
        value: Any,
        advice: str,
        then: Callable[[Any], Callable[[], None]],
        held_bytes: int,
        site: CallSite,
        options: CommunicationOptions,
    ) -> None:
        super().__init__(site, options)
        self.kind = kind
        self.detail = detail
        self.value = value
        self.then = then
        self.held_bytes = held_bytes
        self.note = Note(f"{kind}({detail})", site, digest_of(value), advice, "ValueError")
        self.identify(detail)

    def words(self, position: int = 0) -> CallDescription:
        return CallDescription(self.kind, self.detail, self.site, self.options.name)

    def perform(self, engine: Engine, calls: Sequence[EqualEverywhere]) -> list[Any]:
        agreement = engine.agreement
        if agreement.final is not None:
            raise agreement.final
        for call in calls[1:]:
            if call.note.digest != self.note.digest:
                here = engine.layout.describe([*self.replica_ids, *call.replica_ids])
                agreement.fail(
                    calls,
                    ValueError(
                        f"{self.note.what} at {self.site.line}: the values differ between {here}."
                        f" {self.note.advice}"
                    ),
                )
        undo = self.then(self.value)
        if engine.layout.size > 1:
            agreement.notes.add(self.note, undo, self.held_bytes)
            if agreement.notes.are_due:
                agreement.agree(calls)
        return [None for _ in calls]


def digest_of(value: Any) -> int:
    """Return 64 bits that differ where values differ, the same in every process.

    Arrays of any library and numbers by their bits, strings by their text, nests leaf by leaf,
    `IndexedSlices` by their rows and indices. Of any other object only the type counts, since
    nothing else about it is the same everywhere.
    """
    leaves, structure = nest.flatten(value)
    digest = hashlib.blake2b(nest.structure_text(structure).encode(), digest_size=8)
    for leaf in leaves:
        if isinstance(leaf, (str, bytes, type(None))):
            digest.update(repr(leaf).encode())
            continue
        if isinstance(leaf, IndexedSlices):
            rows = digest_of([leaf.values, leaf.indices])
            digest.update(rows.to_bytes(8, "little"))
            continue
        if not _has_bits(leaf):
            digest.update(type(leaf).__qualname__.encode())
            continue
        array = as_plain_array(leaf)
        digest.update(f"{array.dtype.name}{array.shape}".encode())
        data = array.reshape(-1).view(np.uint8)
        if data.size <= BLAKE_BYTES:
            digest.update(data.tobytes())
        else:
            digest.update(digest_of_bytes(data))
    return int.from_bytes(digest.digest(), "little")


def _has_bits(leaf: Any) -> bool:
    """Return whether it is a number, or an array of numbers or texts, of any library."""
    if isinstance(leaf, (np.ndarray, np.generic, int, float, complex)):
        return not isinstance(leaf, np.ma.MaskedArray) and not np.asarray(leaf).dtype.hasobject
    try:
        return dtype_of(leaf) is not None
    except TypeError:  # numpy has no such dtype
        return False


def _is_plain(value: Any) -> bool:
    """Return whether nothing in the leaves of `value` runs code of its own when it is loaded."""
    return all(
        not leaf.dtype.hasobject
        if type(leaf) is np.ndarray or isinstance(leaf, np.generic)
        else type(leaf) in _PLAIN_TYPES
        for leaf in nest.flatten(value)[0]
    )
