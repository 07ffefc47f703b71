"""After a loss: who has what of the last commit, and how each rank gets what it needs."""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..errors import CollectiveMismatchError, mark_reporter
from ..layout import Layout, listed
from ..transport import Transport
from .buddies import givers
from .snapshot import ReplicaPart

__all__ = ["Found", "gather_state"]


class _Inventory(NamedTuple):
    """What a rank tells of what it has."""

    #: Which call of ``run_elastic`` it is in.
    call: int
    #: Of the commit; None where it has none.
    number: int | None
    #: Replicas that it hosted, and those of which it keeps a copy.
    own: tuple[int, ...]
    kept: tuple[int, ...]
    empty: frozenset[int]
    num_variables: int


class Found(NamedTuple):
    """What a rank has in the end."""

    number: int
    shared: Any
    #: What belongs to its replicas, and perhaps to others.
    own: dict[int, ReplicaPart]
    #: Replicas to which nothing belongs.
    empty: frozenset[int]
    #: Replicas whose state no rank has.
    lost: list[int]
    num_variables: int


def gather_state(
    transport: Transport,
    layout: Layout,
    *,
    call: int,
    number: int | None,
    shared: Any,
    own: Mapping[int, ReplicaPart],
    kept: Mapping[int, ReplicaPart],
    empty: frozenset[int],
    num_variables: int,
) -> Found:
    """Give each rank what belongs to the replicas that it hosts from now on. Collective.

    Parameters
    ----------
    transport, layout
        The new ones.
    call : int
        How many calls of ``run_elastic`` this rank has made.
    number : int or None
        Of the last commit; None on a rank that has none.
    shared : object
        What is the same on all ranks that have it; goes to the others.
    own, kept : mapping
        What this rank has of replicas that it hosted, and its copies of what belongs to others.
    empty : frozenset of int
        Replicas to which nothing belongs, as far as this rank knows.
    num_variables : int
        How many variables it has made.

    Raises
    ------
    CollectiveMismatchError
        On all ranks: they are in different calls.

    Notes
    -----
    Two small messages to all, and one to each rank that needs something.
    """
    mine = _Inventory(call, number, tuple(own), tuple(kept), empty, num_variables)
    told: list[_Inventory] = [
        pickle.loads(data) for data in transport.all_gather_bytes(pickle.dumps(mine, 5))
    ]
    _require_one_call([one.call for one in told])
    numbers = {one.number for one in told if one.number is not None}
    if len(numbers) > 1:
        raise RuntimeError(f"the ranks have different commits: {sorted(numbers)}")
    everyone = layout.all_replica_ids
    nothing = frozenset().union(*(one.empty for one in told))
    found_at = givers(
        everyone,
        {rank: one.own for rank, one in enumerate(told)},
        {rank: one.kept for rank, one in enumerate(told)},
    )
    lost = [i for i in everyone if i not in found_at and i not in nothing]
    if not numbers:
        lost = list(everyone)
    most = max(one.num_variables for one in told)
    if lost:
        return Found(0, None, {}, nothing, lost, most)
    have = {**kept, **own}
    first = next(rank for rank, one in enumerate(told) if one.number is not None)
    messages: list[Any] = []
    for rank, one in enumerate(told):
        needed = [
            i
            for i in layout.replica_ids(rank)
            if i not in one.own + one.kept and found_at.get(i) == transport.rank
        ]
        is_new = one.number is None and transport.rank == first
        parts = {i: have[i] for i in needed}
        messages.append((shared if is_new else None, parts) if is_new or parts else None)
    received = _exchange(transport, messages)
    for given, parts in received:
        shared = given or shared
        have |= parts
    for i in layout.local_replica_ids:
        have.setdefault(i, ReplicaPart({}, {}))
    return Found(numbers.pop(), shared, have, nothing, [], most)


def _require_one_call(calls: Sequence[int]) -> None:
    """Raise where a rank has left a call of run_elastic that others are still in."""
    if len(set(calls)) > 1:
        ahead = [rank for rank, call in enumerate(calls) if call == max(calls)]
        error = CollectiveMismatchError(
            f"a rank was lost, and the others are in different calls of strategy.run_elastic:"
            f" {listed('rank', ahead)} (as numbered without it) left the"
            " last one by an error that the others did not have. Let such an error end the program,"
            " or raise it on all ranks."
        )
        mark_reporter(error, 0)
        raise error


def _exchange(transport: Transport, messages: list[Any]) -> list[Any]:
    """Send an object to each rank, or None; return what other ranks have sent here."""
    packed = {rank: pickle.dumps(one, 5) for rank, one in enumerate(messages) if one is not None}
    counts = np.array([len(packed.get(rank, b"")) for rank in range(len(messages))], np.int64)
    everyone = transport.all_gather_bytes(counts.tobytes())
    sizes = [int(np.frombuffer(row, np.int64)[transport.rank]) for row in everyone]
    coming = {rank: size for rank, size in enumerate(sizes) if size}
    return [pickle.loads(data) for data in transport.pass_on(packed, coming).values()]
