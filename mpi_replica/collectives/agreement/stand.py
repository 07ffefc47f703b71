"""Where a replica stands: the plain data that ranks exchange when they do not agree."""

from __future__ import annotations

import functools
import hashlib
import struct
from collections.abc import Sequence
from typing import NamedTuple

from ...core.units import in_units
from .site import CallSite, bytes_of
from .travelling_error import TravellingError


class LeafDescription(NamedTuple):
    """What must be the same on all replicas about a leaf."""

    #: Name of the dtype, or what stands for it.
    dtype: str
    #: None where an extent may differ.
    shape: tuple[int | None, ...] | None = None
    #: "int" or "float" for a Python number, whose dtype can still change.
    python_number: str = ""

    def __str__(self) -> str:
        if self.shape is None:
            return self.dtype
        return f"{self.dtype}[{', '.join('any' if n is None else str(n) for n in self.shape)}]"


class CallDescription(NamedTuple):
    """A collective call, in words that every rank understands."""

    #: "all_reduce"
    kind: str
    #: What of its arguments must be the same: "SUM", "axis=0".
    detail: str
    site: CallSite
    #: ``options.name``, which replaces the site.
    name: str | None = None
    structure: str = "*"
    paths: tuple[str, ...] = ("",)
    leaves: tuple[LeafDescription, ...] = ()
    #: Options that change the messages.
    wire: str = ""
    #: Bytes of all leaves of a replica.
    size_bytes: int | None = None
    #: What tells the function in `detail` from another one on its line; empty without a function.
    code: str = ""
    #: The exception under way where the call stands in a ``finally``, an ``except`` or at the end
    #: of a ``with``, as "ValueError: no rows".
    handled: str = ""
    #: The call that it goes back through, where it is on the way of gradients.
    through: str = ""
    #: What to do where other replicas do not make this call.
    advice: str = ""
    #: Of mappings in what a replica has returned (see `core.key_order`); None for other calls.
    key_order: str | None = None

    @property
    def what(self) -> str:
        """The call with its arguments, as "all_reduce(SUM, float32[10])"."""
        words = [self.detail] if self.detail else []
        if len(self.leaves) == 1 and self.structure == "*":
            words.append(str(self.leaves[0]))
        elif self.leaves:
            words.append(f"{len(self.leaves)} leaves")
            if self.size_bytes is not None:
                words.append(in_units(self.size_bytes))
        if self.wire:
            words.append(self.wire)
        if self.through:
            words.append(f"of {self.through}")
        return f"{self.kind}({', '.join(words)})"

    @property
    def where_and_why(self) -> str:
        """The place of the call, and the exception that may be why the replica is there."""
        return self.where + (f" while {self.handled} is handled" if self.handled else "")

    @property
    def where(self) -> str:
        """The place of the call."""
        return self.site.line + (f" (named {self.name!r})" if self.name is not None else "")

    def fingerprint(self) -> int:
        """Returns 64 bits that differ where the calls differ, the same in every process."""
        place = self.site.digest if self.name is None else bytes_of(self.name)
        digest = hashlib.blake2b(digest_size=8)
        parts = (self.kind, self.detail, self.wire, self.code, self.structure, str(self.key_order))
        for part in (*parts, str(self.name is None)):
            digest.update(bytes_of(part))
            digest.update(b"\0")
        digest.update(place)
        digest.update(bytes_of("\0".join(self.paths)))
        for leaf in self.leaves:
            digest.update(f"\0{leaf.dtype}{leaf.shape}".encode())
        return int.from_bytes(digest.digest(), "little")


#: What to do about batches of several kinds.
SAME_KIND = (
    "Make batches of one structure, order of keys and number of rows, and of one dtype and number"
    " of axes for each leaf, on all ranks and of all rows; other lengths may differ. Does a map"
    " depend on the rank?"
)


class Note(NamedTuple):
    """Something that must have been the same on all ranks, compared with the next header."""

    #: "weights.assign" or "merge_fn f at train.py:3"
    what: str
    site: CallSite
    digest: int
    #: What to do about a difference.
    advice: str
    #: Name of the exception that a difference raises: "ValueError" or "CollectiveMismatchError".
    error: str
    #: The rows and the kind of the batch that a step of input gave; otherwise empty.
    batch: str = ""
    #: Whether it stands for a value that was assigned.
    is_value: bool = False

    def chained(self, before: int) -> int:
        """Returns 64 bits that stand for all notes up to this one."""
        return _chained(before, self.digest, self.site.digest, self.what, self.batch)


@functools.lru_cache(maxsize=1024)  # the notes of a loop are the same each time
def _chained(before: int, digest: int, site: bytes, what: str, batch: str) -> int:
    data = struct.pack("<QQ", before, digest) + site + bytes_of(f"{what}\0{batch}")
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


def chain_of(notes: Sequence[Note]) -> int:
    """Returns 64 bits that stand for all of these; 0 for none."""
    return functools.reduce(lambda before, note: note.chained(before), notes, 0)


class Stand(NamedTuple):
    """Where a replica stands, or a rank in cross-replica context (with all its replica ids)."""

    replica_ids: tuple[int, ...]
    #: "calls", "failed" (inside a call), "raised" or "returned"
    status: str
    call: CallDescription | None = None
    error: TravellingError | None = None
    #: Ordinal of the innermost ``strategy.run`` that it is in; 0 outside.
    run_ordinal: int = 0


class Report(NamedTuple):
    """All that a rank tells the others."""

    stands: tuple[Stand, ...]
    notes: tuple[Note, ...]
    #: Ordinal of the last ``strategy.run``.
    run_ordinal: int
    #: How often the generator of all ranks was drawn from since the last header.
    num_draws: int = 0
