"""What must have been the same on all ranks since the last header, without travelling itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import Any

import numpy as np

from ...core.randomness import put_state, state_of
from .stand import Note

_OfRanks = Sequence[Sequence[Note]]

# A header costs nothing beside writing so much, or so often.
_MOST_HELD_BYTES = 16 << 20
_MOST_NOTES = 64
# Draws with a state to go back to.
_MOST_DRAWS = 64


class Notes:
    """The notes of a rank since the last header, in their order."""

    def __init__(self) -> None:
        self._notes: list[Note] = []
        #: What takes back what each of them stands for; it gets the notes of all ranks.
        self._undos: list[Callable[[_OfRanks], None] | None] = []
        #: By name of a count: who counts by it, in the order in which they began to.
        self._owners: dict[str, list[int]] = {}
        self._held_bytes = 0
        #: 64 bits that stand for all of them; 0 for none.
        self.chain = 0
        self._chain_before = 0
        #: How often the generator of all ranks was drawn from, above the replicas. It is compared
        #: where another rank has failed, and not with each header.
        self.num_draws = 0
        self._before_draws: list[tuple[np.random.Generator, dict[str, Any]]] = []
        #: Whether there is anything.
        self.are_any = False

    @property
    def all(self) -> tuple[Note, ...]:
        """The notes, the oldest first."""
        return tuple(self._notes)

    @property
    def values(self) -> tuple[Note, ...]:
        """Those of values that were assigned, which outlast a call; the oldest first."""
        return tuple([note for note in self._notes if note.is_value])

    @property
    def are_due(self) -> bool:
        """Whether they hold so much that the ranks should compare now: the same on all of them."""
        return self._held_bytes > _MOST_HELD_BYTES or len(self._notes) >= _MOST_NOTES

    def add(self, note: Note, undo: Callable[[], None] | None = None, held_bytes: int = 0) -> None:
        """Adds a note, which the ranks compare with the next header.

        Where that header ends in an error, and not all ranks have the note, `undo` is called: what
        was done before the others agreed would leave the ranks apart. Until then it holds
        `held_bytes` of memory, the same on all ranks.
        """
        self._append(note, undo and (lambda _: undo()))
        self._held_bytes += held_bytes

    def count(
        self, note: Note, before: int, go_back: Callable[[int], None], owner: int = 0
    ) -> None:
        """Adds a note whose digest is a running count; `before` is what it was until now.

        `owner` says on this rank whose it is: two iterators may stand in the same epoch. The second
        one of a name since the last header gets another name.

        It takes the place of the last count of its owner, if that is still the newest note, and of
        a batch of as many rows of the same kind. Where the next header ends in an error, and not
        all ranks have this count with this batch, `go_back` is called with the last count up to
        which all have the same batches.
        """
        owners = self._owners.setdefault(note.what, [])
        if owner not in owners:
            owners.append(owner)
        if owner != owners[0]:
            note = note._replace(what=f"{note.what}, iterator {owners.index(owner) + 1}")
        last = self._notes[-1] if self._notes else None
        if last is not None and (last.what, last.batch) == (note.what, note.batch):
            self._notes.pop()
            undo = self._undos.pop()
            self.chain = self._chain_before
        else:

            def undo(of_ranks: _OfRanks) -> None:
                go_back(_agreed_count(note.what, of_ranks, before))

        self._append(note, undo)

    def add_draw(self, generator: np.random.Generator) -> None:
        """Notes that the generator of all ranks is about to be drawn from."""
        if self.num_draws < _MOST_DRAWS:
            self._before_draws.append((generator, state_of(generator)))
        self.num_draws += 1
        self.are_any = True

    def _append(self, note: Note, undo: Callable[[_OfRanks], None] | None) -> None:
        self.are_any = True
        self._notes.append(note)
        self._undos.append(undo)
        self._chain_before = self.chain
        self.chain = note.chained(self.chain)

    def drop(self) -> None:
        """Forgets all: they were compared."""
        self._notes.clear()
        self._undos.clear()
        self._owners.clear()
        self._before_draws.clear()
        self.chain = self._held_bytes = self.num_draws = 0
        self.are_any = False

    def take_back(self, of_ranks: _OfRanks = ((),), num_draws: Sequence[int] = (0,)) -> None:
        """Takes back what not all ranks have noted, and forgets all; by default all of this one.

        `num_draws` has that of each rank. Where they differ all go back to behind the last draw
        that all have made; or to the last one with a state, where that is one before it.
        """
        self.undo(of_ranks)
        common = min(*num_draws, _MOST_DRAWS - 1)
        if len(set(num_draws)) > 1 and common < len(self._before_draws):
            put_state(*self._before_draws[common])
        self.drop()

    def undo(self, of_ranks: _OfRanks) -> None:
        """Takes back what this rank noted beyond what all ranks have noted."""
        columns = zip(*of_ranks, strict=False)
        agreed = sum(1 for _ in takewhile(lambda column: len(set(column)) == 1, columns))
        for undo in reversed(self._undos[agreed:]):
            if undo is not None:
                undo(of_ranks)


def _agreed_count(what: str, of_ranks: _OfRanks, before: int) -> int:
    """Returns the last count of `what`, from `before` on, up to which all have the same batches."""
    counts = [[note for note in notes if note.what == what] for notes in of_ranks]
    least = min(notes[-1].digest if notes else before for notes in counts)
    # A note stands for all counts since the one before it.
    for count in sorted({before, *(note.digest for notes in counts for note in notes)}):
        if before <= count < least:
            next_ones = (next(note for note in notes if note.digest > count) for notes in counts)
            if len({note.batch for note in next_ones}) > 1:
                return count
    return least
