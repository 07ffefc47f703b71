"""How many epochs datasets have begun: what a shuffle's order is computed from."""

from __future__ import annotations

import contextlib
import contextvars
import itertools
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping

from ..core.context import current_state, replica_id_at_work

#: What tells a dataset from others on all ranks: the text of its plan, and its number among those
#: of equal text; a negative one, of this rank alone, where other ranks may make none.
DatasetKey = tuple[str, int]


# A dataset that a generator iterates more than once in an epoch begins epochs so far apart; in a
# generator that another one iterates as much farther.
_BITS_APART = 20


class Reading:
    """A context in which a function of the program yields the rows of an epoch.

    It is called again after an error, and by each rank: what it iterates belongs to the epoch.
    """

    def __init__(self, epoch: int) -> None:
        self._epoch = epoch
        outer = _reading.get()
        self._depth: int = 1 if outer is None else outer._depth + 1
        self._begun: weakref.WeakKeyDictionary[Epochs, Counter[int | None]]
        self._begun = weakref.WeakKeyDictionary()
        #: Those that were made in it begin with their own first epoch, as often as it is read.
        self.own: weakref.WeakSet[Epochs] = weakref.WeakSet()

    def __enter__(self) -> None:
        self._token = _reading.set(self)

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        _reading.reset(self._token)

    def next_epoch(self, epochs: Epochs) -> int:
        """Counts an epoch of a dataset that was made before."""
        begun = self._begun.setdefault(epochs, Counter())
        who = replica_id_at_work()
        begun[who] += 1
        return self._epoch + (begun[who] - 1 << _BITS_APART * self._depth)


_reading: contextvars.ContextVar[Reading | None] = contextvars.ContextVar(
    "mpi_replica reading", default=None
)


class Epochs:
    """The epochs that a dataset has begun: above the replicas, and in or for each of them."""

    def __init__(self, text: str) -> None:
        #: By replica; None above the replicas.
        self.begun: Counter[int | None] = Counter()
        if (reading := _reading.get()) is not None:
            reading.own.add(self)
        _known[_key_of_next(text)] = self

    def next(self) -> int:
        """Counts an epoch: of a replica the same ones on any layout, as if it were alone."""
        reading = _reading.get()
        if reading is not None and self not in reading.own:
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
