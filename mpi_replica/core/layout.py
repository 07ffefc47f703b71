"""Which replicas are on which rank: plain arithmetic over a plain value."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TypeVar

_Value = TypeVar("_Value", bound=Hashable)

# More entries of a text are counted only.
_MOST_LISTED = 8
# Of runs of numbers in a text.
_MOST_RUNS = 16


class Era:
    """A time in which replicas stay where they are: what belongs to them here then, is theirs.

    It ends when a rank is lost.
    """

    __slots__ = ("is_over",)

    def __init__(self) -> None:
        self.is_over = False


@dataclasses.dataclass(frozen=True)
class Layout:
    """Replicas in contiguous blocks over ranks, seen from one of them.

    Parameters
    ----------
    counts : tuple of int
        How many replicas each rank hosts, in rank order.
    rank : int
        The rank that looks.

    Attributes
    ----------
    era : Era
        The time for which this is the layout of a strategy.

    Examples
    --------
    >>> layout = Layout.even(num_replicas=5, size=3, rank=1)
    >>> layout.counts, layout.local_replica_ids
    ((2, 2, 1), (2, 3))
    """

    counts: tuple[int, ...]
    rank: int
    era: Era = dataclasses.field(default_factory=Era, init=False, repr=False, compare=False)

    @classmethod
    def even(cls, num_replicas: int, size: int, rank: int) -> Layout:
        """Spreads `num_replicas` over `size` ranks in blocks that differ by at most one."""
        least, more = divmod(num_replicas, size)
        return cls(tuple(least + (r < more) for r in range(size)), rank)

    @classmethod
    def waiting(cls, counts: tuple[int, ...], rank: int) -> Layout:
        """Returns what a rank sees behind those with `counts`: it hosts no replicas, and waits."""
        return cls(counts + (0,) * (rank + 1 - len(counts)), rank)

    @functools.cached_property
    def size(self) -> int:
        """How many ranks there are, up to this one where it waits."""
        return len(self.counts)

    @functools.cached_property
    def hosting_counts(self) -> tuple[int, ...]:
        """How many replicas each rank hosts that hosts any."""
        return tuple(filter(None, self.counts))

    @functools.cached_property
    def num_replicas(self) -> int:
        """How many replicas all ranks host together."""
        return sum(self.counts)

    @functools.cached_property
    def has_one_each(self) -> bool:
        """Whether each rank hosts one replica."""
        return all(count == 1 for count in self.counts)

    @functools.cached_property
    def local_replica_ids(self) -> tuple[int, ...]:
        """Global ids of the replicas of this rank."""
        return self.replica_ids(self.rank)

    @functools.cached_property
    def all_replica_ids(self) -> tuple[int, ...]:
        """Global ids of the replicas of all ranks."""
        return tuple(range(self.num_replicas))

    def replica_ids(self, rank: int) -> tuple[int, ...]:
        """Returns the global ids of the replicas of `rank`."""
        start = sum(self.counts[:rank])
        return tuple(range(start, start + self.counts[rank]))

    def rank_of(self, replica_id: int) -> int:
        """Returns the rank that hosts the replica."""
        for rank, count in enumerate(self.counts):
            if replica_id < count:
                return rank
            replica_id -= count
        raise IndexError(f"There are {self.num_replicas} replicas, and no such id.")

    def describe(self, replica_ids: Iterable[int]) -> str:
        """Returns the words for these replicas and their ranks.

        Examples
        --------
        >>> Layout((2, 2), 0).describe([0, 1, 2])
        'replicas 0-2 (ranks 0-1)'
        """
        ids = sorted(replica_ids)
        ranks = sorted({self.rank_of(i) for i in ids})
        return f"{numbers_text('replica', ids)} ({numbers_text('rank', ranks)})"


def compressed(numbers: Iterable[int]) -> str:
    """Returns sorted numbers as text, runs written short, and of many runs only the first ones.

    Examples
    --------
    >>> compressed([0, 1, 2, 5])
    '0-2, 5'
    >>> compressed(range(0, 100, 2))
    '0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30 and 34 more'
    """
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    text = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs[:_MOST_RUNS])
    more = sum(b - a + 1 for a, b in runs[_MOST_RUNS:])
    return f"{text} and {more} more" if more else text


def numbers_text(noun: str, numbers: Sequence[int]) -> str:
    """Returns sorted numbers behind the word for what they number, in the singular or plural.

    Examples
    --------
    >>> numbers_text("rank", [3]), numbers_text("rank", [0, 1, 2])
    ('rank 3', 'ranks 0-2')
    """
    return f"{noun}{'s' * (len(numbers) > 1)} {compressed(numbers)}"


def sides(values: Sequence[_Value], words: Callable[[_Value], str] = str) -> str:
    """Returns which ranks have which value, as text.

    Parameters
    ----------
    values : sequence
        That of each rank.
    words : callable
        What a value is called.

    Examples
    --------
    >>> sides([10, 10, 12])
    'ranks 0-1: 10; rank 2: 12'
    """
    groups = grouped(values).items()
    return "; ".join(f"{numbers_text('rank', ranks)}: {words(value)}" for value, ranks in groups)


def listed(texts: Sequence[str], between: str = "; ") -> str:
    """Returns one text of the first ones, and how many there are beside."""
    more = len(texts) - _MOST_LISTED
    return between.join([*texts[:_MOST_LISTED], *([f"{more} more"] if more > 0 else [])])


def grouped(values: Iterable[_Value]) -> dict[_Value, list[int]]:
    """Returns by value the numbers of those that have it, in the order of their first ones.

    Examples
    --------
    >>> grouped("aba")
    {'a': [0, 2], 'b': [1]}
    """
    groups: dict[_Value, list[int]] = {}
    for number, value in enumerate(values):
        groups.setdefault(value, []).append(number)
    return groups


def shares(rows: int, num_replicas: int) -> list[slice]:
    """Returns the rows of a global batch that each replica gets: chunks of ``ceil(rows / R)``.

    Trailing replicas may get none.

    Examples
    --------
    >>> [share.stop - share.start for share in shares(10, 4)]
    [3, 3, 3, 1]
    """
    chunk = -(-rows // num_replicas)
    return [slice(min(i * chunk, rows), min((i + 1) * chunk, rows)) for i in range(num_replicas)]
