"""How many epochs datasets have begun: what a shuffle's order is computed from."""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping

from ..core.context import replica_id_at_work

#: What tells a dataset from others on all ranks: the text of its plan, and its number among those
#: of equal text; a negative one, of this rank alone, where other ranks may make none.
DatasetKey = tuple[str, int]


class Epochs:
    """The epochs that a dataset has begun: above the replicas, and in or for each of them."""

    def __init__(self, text: str) -> None:
        #: By replica; None above the replicas.
        self.begun: Counter[int | None] = Counter()
        _known[_key_of_next(text)] = self

    def next(self) -> int:
        """Counts an epoch: of a replica the same ones on any layout, as if it were alone."""
        who = replica_id_at_work()
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
    if _is_apart or replica_id_at_work() is not None:
        return text, -next(_made_apart)
    _made[hash(text)] += 1
    return text, _made[hash(text)]
