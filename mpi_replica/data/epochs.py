"""How many epochs datasets have begun: what a shuffle's order is computed from."""

from __future__ import annotations

import contextlib
import contextvars
import itertools
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import TypeVar

from ..core.context import current_state, replica_id_at_work

#: What tells a dataset from others on all ranks: the text of its plan, and its number among those
#: of equal text; a negative one, of this rank alone, where other ranks may make none.
DatasetKey = tuple[str, int]

Element = TypeVar("Element")

# A dataset that a generator iterates more than once in an epoch begins epochs so far apart; in a
# generator that another one iterates as much farther. So do rows that iterate one, and then their
# further iterations, behind so many rows.
_BITS_APART = 20
_BITS_OF_ROWS = 40


class Reading:
    """A context in which code of the program gives the rows of an epoch, or one of them.

    It is called again after an error, and by each rank, for the rows of which others need not call
    it: what it iterates belongs to the epoch, and to the row.

    Parameters
    ----------
    epoch : int
    position : int, optional
        That of the row, where it gives one.
    """

    __slots__ = ("_begun", "_epoch", "_own", "_shift", "_token")  # there is one for each row

    def __init__(self, epoch: int, position: int | None = None) -> None:
        outer = _reading.get()
        self._shift: int = _BITS_APART + (0 if outer is None else outer._shift)
        self._epoch = epoch
        if position is not None:
            self._epoch += int(position) << self._shift  # numpy's would overflow
            self._shift += _BITS_OF_ROWS
        self._begun: weakref.WeakKeyDictionary[Epochs, Counter[int | None]] | None = None
        self._own: weakref.WeakSet[Epochs] | None = None

    def has_made(self, epochs: Epochs) -> bool:
        """Returns whether a dataset was made in it, and begins with its own first epoch."""
        return self._own is not None and epochs in self._own

    def add_own(self, epochs: Epochs) -> None:
        """Notes that a dataset is made in it."""
        if self._own is None:
            self._own = weakref.WeakSet()
        self._own.add(epochs)

    def __enter__(self) -> None:
        self._token = _reading.set(self)

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        _reading.reset(self._token)

    def next_epoch(self, epochs: Epochs) -> int:
        """Counts an epoch of a dataset that was made before."""
        if self._begun is None:
            self._begun = weakref.WeakKeyDictionary()
        begun = self._begun.setdefault(epochs, Counter())
        who = replica_id_at_work()
        begun[who] += 1
        return self._epoch + (begun[who] - 1 << self._shift)


class ReadElements(Iterator[Element]):
    """The elements of an iterable, each of which is read in this context."""

    def __init__(self, source: Iterable[Element], reading: Reading) -> None:
        self._reading = reading
        with reading:
            self._elements = iter(source)

    def __next__(self) -> Element:
        with self._reading:
            return next(self._elements)


_reading: contextvars.ContextVar[Reading | None] = contextvars.ContextVar(
    "mpi_replica reading", default=None
)


class Epochs:
    """The epochs that a dataset has begun: above the replicas, and in or for each of them."""

    def __init__(self, text: str) -> None:
        #: By replica; None above the replicas.
        self.begun: Counter[int | None] = Counter()
        if (reading := _reading.get()) is not None:
            reading.add_own(self)
        _known[_key_of_next(text)] = self

    def next(self) -> int:
        """Counts an epoch: of a replica the same ones on any layout, as if it were alone."""
        reading = _reading.get()
        if reading is not None and not reading.has_made(self):
            return reading.next_epoch(self)
        who, state = replica_id_at_work(), current_state()
        if state is not None and state.replica_context is not None:
            state.replica_context.will_begin_epoch(self)
        self.begun[who] += 1
        return self.begun[who] - 1


_known: weakref.WeakValueDictionary[DatasetKey, Epochs] = weakref.WeakValueDictionary()
# By the hash of a text: how many were made, not how many there are, since they end elsewhere at
# other times.
_made: Counter[int] = Counter()
_made_apart = itertools.count(1)
_is_apart = False


@contextlib.contextmanager
def made_apart() -> Iterator[None]:
    """Returns a context that not all ranks come to: what they make in it does not count."""
    global _is_apart
    before, _is_apart = _is_apart, True
    try:
        yield
    finally:
        _is_apart = before


def epochs_begun(replica_id: int | None) -> dict[DatasetKey, int]:
    """Returns how many epochs datasets have begun in a replica, or above the replicas.

    Without those that are of this rank alone: another one has no use for them.
    """
    known = [(key, one) for key, one in list(_known.items()) if key[1] > 0]
    return {key: one.begun[replica_id] for key, one in known if replica_id in one.begun}


def put_epochs_back(begun: Mapping[int | None, Mapping[DatasetKey, int]]) -> None:
    """Has datasets go on behind the epochs that they had begun, by replica; others begin anew."""
    for key, one in list(_known.items()):
        one.begun = Counter({who: of[key] for who, of in begun.items() if key in of})


def _key_of_next(text: str) -> DatasetKey:
    state, who = current_state(), replica_id_at_work()
    if _is_apart or (state is not None and state.replica_context is not None):
        return text, -next(_made_apart)
    if who is not None:  # made for a replica, on whichever rank it is
        text = f"{text}, for replica {who}"
    _made[hash(text)] += 1
    return text, _made[hash(text)]
