"""Values that must be equal on all replicas, and don't travel: their hash does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ..core.digests import digest_of
from ..core.options import CommunicationOptions
from .agreement.call import Call
from .agreement.group import Group
from .agreement.site import CallSite
from .agreement.stand import Note


class EqualEverywhere(Call):
    """A value that all replicas must pass alike: it does not travel, its hash does.

    The local replicas meet; the ranks compare the hash with their next header. They send one here
    where what would take back this and earlier values holds much memory.

    Parameters
    ----------
    write : callable
        What is done with the value, once on each rank, before the others are known to agree; it
        returns what takes it back if they don't.
    held_bytes : int
        Memory that is held by what takes it back.
    at_once : bool
        Whether the ranks send a header here in any case.
    """

    def __init__(
        self,
        site: CallSite,
        options: CommunicationOptions,
        kind: str,
        detail: str,
        value: Any,
        advice: str,
        write: Callable[[Any], Callable[[], None]],
        held_bytes: int,
        at_once: bool = False,
    ) -> None:
        super().__init__(site, options)
        self.kind = kind
        self.detail = detail
        self.value = value
        self.write = write
        self.held_bytes = held_bytes
        self.at_once = at_once
        what = f"{kind}({', '.join(filter(None, [detail, options.wire]))})"  # as of any call
        self.note = Note(what, site, digest_of(value), advice, "ValueError", is_value=True)
        self.identify(detail)

    @property
    def lent(self) -> Sequence[Any]:
        return (self.value,)

    def prepare(self, group: Group, calls: Sequence[EqualEverywhere]) -> tuple[bytes, None] | None:
        for call in calls[1:]:
            if call.note.digest != self.note.digest:
                here = group.layout.describe([*self.replica_ids, *call.replica_ids])
                raise ValueError(
                    f"{self.note.what} at {self.site.line}: the values differ between {here}."
                    f" {self.note.advice}"
                )
        undo = self.write(self.value)
        if group.layout.size > 1:
            group.notes.add(self.note, undo, self.held_bytes)
        return (b"", None) if self.at_once or group.notes.are_due else None
