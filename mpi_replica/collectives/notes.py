"""What must have been the same on all ranks since the last header, without travelling itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import takewhile

from .standing import Note

__all__ = ["Notes"]


class Notes:
    """The notes of a rank since the last header, in their order."""

    def __init__(self) -> None:
        self._notes: list[Note] = []
        #: What takes back what each of them stands for.
        self._undos: list[Callable[[], None] | None] = []
        #: 64 bits that stand for all of them; 0 for none.
        self.chain = 0
        self._chain_before = 0

    @property
    def all(self) -> tuple[Note, ...]:
        """The notes, the oldest first."""
        return tuple(self._notes)

    def add(
        self,
        note: Note,
        undo: Callable[[], None] | None = None,
        *,
        replaces: Note | None = None,
    ) -> None:
        """Have `note` compared between the ranks, with the next header.

        Where that header ends in an error, and not all ranks have the note, `undo` is called: what
        was done before the others agreed would leave the ranks apart. A note that counts on takes
        the place of its last one, if that one is still the newest.
        """
        if self._notes and self._notes[-1] is replaces:
            self._notes.pop()
            self._undos.pop()
            self.chain = self._chain_before
        self._notes.append(note)
        self._undos.append(undo)
        self._chain_before = self.chain
        self.chain = note.chained(self.chain)

    def drop(self) -> None:
        """Forget all: they were compared."""
        if self._notes:
            self._notes.clear()
            self._undos.clear()
            self.chain = 0

    def undo(self, of_ranks: Sequence[Sequence[Note]]) -> None:
        """Take back what this rank noted beyond what all ranks have noted."""
        columns = zip(*of_ranks, strict=False)
        agreed = sum(1 for _ in takewhile(lambda column: len(set(column)) == 1, columns))
        for undo in reversed(self._undos[agreed:]):
            if undo is not None:
                undo()
