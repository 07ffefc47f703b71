"""Which rank keeps a copy of another one's replicas, and which one has what is needed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence


def buddy_of(rank: int, hosts: Sequence[str]) -> int:
    """Returns the rank that keeps a copy of what belongs to the replicas of `rank`.

    One on another host where there is one, since hosts are lost as a whole; itself where it is
    alone.

    Parameters
    ----------
    rank : int
    hosts : sequence of str
        That of each rank.

    Examples
    --------
    >>> [buddy_of(rank, ["a", "a", "b", "b"]) for rank in range(4)]
    [2, 3, 0, 1]
    >>> [buddy_of(rank, ["a", "a", "a"]) for rank in range(3)]
    [1, 2, 0]
    """
    size, here = len(hosts), hosts[rank]
    near = sum(host == here for host in hosts)
    if near == size:
        return (rank + 1) % size
    # So many further on, that the ranks of a host have different ones.
    buddy = rank + near
    while hosts[buddy % size] == here:
        buddy += 1
    return buddy % size


def givers(
    needed: Iterable[int], own: Mapping[int, Iterable[int]], kept: Mapping[int, Iterable[int]]
) -> dict[int, int]:
    """Returns for each replica a rank that has what belongs to it; nothing for those that are lost.

    Parameters
    ----------
    needed : iterable of int
        Replicas.
    own, kept : mapping
        Of each rank, the replicas that it hosted, and those of which it keeps a copy.

    Examples
    --------
    >>> givers(range(4), own={0: [0], 1: [2, 3]}, kept={0: [2, 3], 1: [1]})
    {0: 0, 1: 1, 2: 1, 3: 1}
    """
    rank_of_replica: dict[int, int] = {}
    for held in (kept, own):  # what a rank hosted itself counts more
        rank_of_replica |= {i: rank for rank, replica_ids in held.items() for i in replica_ids}
    return {i: rank_of_replica[i] for i in needed if i in rank_of_replica}
