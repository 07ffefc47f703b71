"""Reading the steps of a rank: when they are asked for or ahead, and again after an error."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from os import getpid
from typing import Any, NamedTuple

from .read_ahead import read_ahead

_HAS_ENDED = (
    "the input is an iterator, which an earlier iteration has read to its end: every epoch from now"
    " on would be empty. Distribute what can be iterated anew: a list, a class with __iter__, or"
    " mr.data.Dataset.from_generator(function)."
)


class Step(NamedTuple):
    """A step of this rank."""

    #: One for each local replica: `END` where its own pipeline has no more.
    values: list[Any]
    #: Those of the whole global batch; 0 for input of each rank's own.
    rows: int = 0
    #: Digest of its first and its last row; 0 where not every rank reads all of it.
    ends: int = 0


#: Gets an epoch and the number of its first step that is wanted; returns the steps from there on.
MakeSteps = Callable[[int, int], Iterator[Step]]


class SourceKind(NamedTuple):
    """What must be known of the sources that are read."""

    #: Whether a step can be read a second time, and is the same then.
    is_repeatable: bool
    #: Shared by readers of the same iterators.
    once: ReadOnce | None


class StepReader:
    """Reads the steps of one iteration, each of which stays the next one until it is taken.

    Parameters
    ----------
    make : callable
        See `MakeSteps`.
    kind : callable
        Tells of what is read when the first step is asked for: see `SourceKind`.
    ahead : int
        How many steps a thread reads before they are asked for.
    """

    def __init__(self, make: MakeSteps, *, kind: Callable[[], SourceKind], ahead: int) -> None:
        self._make = make
        self._kind = kind
        self._ahead = ahead
        self._is_repeatable = False
        self._once: ReadOnce | None = None
        # Epoch and number of the step that is next.
        self._at: tuple[int, int] | None = None
        self._steps: Iterator[Step] = iter(())
        # That step, if it was read; None at the end.
        self._next: list[Step | None] = []
        self._failure: BaseException | None = None
        self._process = 0

    def read(self, epoch: int, number: int) -> Step | None:
        """Returns a step, or None at the end.

        Raises
        ------
        RuntimeError
            An error came up before, and the input can't be read again from there.
        """
        if self._at is None:
            self._is_repeatable, self._once = self._kind()
        self._require_whole()
        # The thread that reads ahead stays behind in a fork.
        is_forked = self._ahead > 0 and self._is_repeatable and self._process != getpid()
        if self._at != (epoch, number) or is_forked:
            self._begin(epoch, number)
        if not self._next:
            try:
                self._next.append(next(self._steps, None))
            except BaseException as error:
                self._stop(error)
                raise
            if self._once is not None:
                has_step = self._next[0] is not None
                if not has_step and not number and self._once.has_ended:
                    self._next.clear()
                    raise RuntimeError(_HAS_ENDED)
                self._once.has_ended |= not has_step
                self._once.holder = self if has_step else None
                if has_step or number:
                    self._once.epoch = epoch
        return self._next[0]

    def take(self) -> None:
        """Goes on to the next step."""
        if self._at is not None:
            self._at = self._at[0], self._at[1] + 1
        self._next.clear()
        if self._once is not None:
            self._once.holder = None

    def _begin(self, epoch: int, number: int) -> None:
        # Another iteration goes on where the last one has left the iterator.
        last = None if self._once is None else self._once.epoch
        if last is not None and (number > 0 or epoch <= last):
            raise RuntimeError(
                f"the input can't go on with step {number} of a saved state: it is an iterator that"
                " was read from before. Load the state before the first step, or distribute what"
                " can be iterated anew."
            )
        self._next.clear()
        make = functools.partial(self._make, epoch, number)
        self._steps = read_ahead(make, self._ahead) if self._ahead else make()
        self._at = epoch, number
        self._process = getpid()

    def _stop(self, error: BaseException) -> None:
        """Begins anew the next time if that is possible: what has raised an error has ended."""
        if self._is_repeatable:
            self._at = None
        else:
            self._failure = error
            if self._once is not None:
                self._once.holder = self

    def _require_whole(self) -> None:
        holder = (self._once and self._once.holder) or self
        if holder is self and self._failure is None:
            return
        step = f"step {holder._at[1]}" if holder._at else "a step"
        why = f"{step} was read on a rank, and not all ranks have taken it"
        if holder._failure is not None:
            why = f"reading {step} raised {holder._failure!r}"
        raise RuntimeError(
            f"the input can't go on: {why}. Only a mr.data.Dataset is read again after an error."
            " Iterate anew, or distribute anew what is an iterator."
        ) from holder._failure


class ReadOnce:
    """What the readers of the same iterators must know of each other."""

    def __init__(self) -> None:
        #: The last iteration of which a step was read, or left out.
        self.epoch: int | None = None
        #: Whether they have no more steps.
        self.has_ended = False
        #: Those that stand where all do.
        self.iterators: list[Iterator[Any]] = []
        #: The one that holds a step which is not taken, or whose step could not be read: the
        #: others would miss that step.
        self.holder: StepReader | None = None

    def require_no_other(self, iterators: list[Iterator[Any]]) -> None:
        """Raises where there is one beside those that were read: it begins with their first rows.

        Raises
        ------
        RuntimeError
            There is: this rank has made it in the place of one of a rank that is lost.
        """
        if self.epoch is None:
            self.iterators = iterators
        elif any(all(one is not known for known in self.iterators) for one in iterators):
            raise RuntimeError(
                "the input can't go on: it is an iterator that a lost rank has read from, and the"
                " one that takes its place begins with the first rows. Distribute what can be"
                " iterated anew, such as mr.data.Dataset.from_generator(function)."
            )

    def missed(self, epoch: int | None) -> None:
        """Notes what other ranks have read, and this one has not."""
        if epoch is not None:
            self.epoch, self.iterators = epoch, []
