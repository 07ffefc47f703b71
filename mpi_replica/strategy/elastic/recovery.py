"""After a loss: who has what of the last commit, and how each rank gets what it needs."""

from __future__ import annotations

import dataclasses
import functools
import operator
import pickle
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ...core.exceptions import CollectiveMismatchError, mark_reporter
from ...core.layout import Layout, numbers_text
from ...data.distributed_dataset import KnownDataset
from ...ranks.transport import Transport
from .buddies import givers
from .replica_objects import Held, for_another_rank
from .snapshot import ReplicaPart, SharedPart


@dataclasses.dataclass
class HeldCommit:
    """What this rank has of the last commit."""

    #: How many commits there were.
    number: int
    shared: SharedPart
    #: What belongs to its own replicas.
    own: dict[int, ReplicaPart]
    #: Gives its copies of what belongs to others.
    kept: Callable[[], Mapping[int, ReplicaPart]]
    #: Replicas to which nothing belongs; None where this rank does not know.
    empty: frozenset[int] | None
    #: The step that a program would speak of.
    step: int | None


class _Inventory(NamedTuple):
    """What a rank tells of what it has."""

    #: Which call of ``run_elastic`` it is in, and how many of what it has made.
    call: int
    num_made: Counter[str]
    #: Of the commit; None where it has none.
    number: int | None = None
    #: Replicas that it hosted, and those of which it keeps a copy.
    own: tuple[int, ...] = ()
    kept: tuple[int, ...] = ()
    empty: frozenset[int] | None = None
    #: Where each distributed dataset stood, by name, and those that are in use, by number.
    datasets: Mapping[str, Mapping[str, Any]] | None = None
    known: Mapping[int, KnownDataset] = {}


class Gathered(NamedTuple):
    """What a rank has, once all have told what they have."""

    #: With what belongs to its replicas now; None where the state of some replica is lost.
    commit: HeldCommit | None
    #: The objects of replicas that it had before, or that another rank has sent.
    held: Held
    #: Replicas whose state no rank has, and why, in words; without any an empty text.
    lost: Sequence[int]
    why: str
    #: How many any rank has made.
    num_made: Counter[str]
    #: The distributed datasets of the first rank that had replicas, by number.
    known: Mapping[int, KnownDataset]


def gather_state(
    transport: Transport,
    layout: Layout,
    commit: HeldCommit | None,
    *,
    call: int,
    num_made: Counter[str],
    known: Mapping[int, KnownDataset],
) -> Gathered:
    """Gives each rank what belongs to the replicas that it hosts from now on. Collective.

    Parameters
    ----------
    transport, layout
        The new ones.
    commit : HeldCommit or None
        What this rank has of the last commit; None on a rank that has none.
    call : int
        How many calls of ``run_elastic`` this rank has made.
    num_made : Counter
        How many of what it has made.
    known : mapping
        Its distributed datasets, by number.

    Returns
    -------
    Gathered

    Raises
    ------
    CollectiveMismatchError
        On all ranks: they are in different calls.

    Notes
    -----
    Two small messages to all, and one to each rank that needs something.
    """
    inventory = _Inventory(call, num_made)
    shared: Any = None
    have: dict[int, ReplicaPart] = {}
    if commit is not None:
        shared, kept = (commit.shared, commit.step), commit.kept()
        have = {**kept, **commit.own}
        inventory = _Inventory(
            call,
            num_made,
            commit.number,
            tuple(commit.own),
            tuple(kept),
            commit.empty,
            commit.shared.datasets,
            known,
        )
    inventories: list[_Inventory] = [
        pickle.loads(data) for data in transport.all_gather_bytes(pickle.dumps(inventory, 5))
    ]
    _require_one_call([one.call for one in inventories], layout.rank)
    numbers = {one.number for one in inventories if one.number is not None}
    if len(numbers) > 1:
        raise RuntimeError(f"the ranks have different commits: {sorted(numbers)}")
    everyone = layout.all_replica_ids
    # who has not heard from the others at the begin may not know, beside others who have
    told = [one.empty for one in inventories if one.empty is not None]
    empty = frozenset(everyone if told else ()).intersection(*told)
    found_at = givers(
        everyone,
        {rank: one.own for rank, one in enumerate(inventories)},
        {rank: one.kept for rank, one in enumerate(inventories)},
    )
    lost = [i for i in everyone if not numbers or (i not in found_at and i not in empty)]
    most = functools.reduce(operator.or_, [one.num_made for one in inventories])
    with_commit = [rank for rank, one in enumerate(inventories) if one.number is not None]
    first = with_commit[0] if with_commit else 0
    of_first = inventories[first]
    held: Held = {} if commit is None else commit.shared.held
    is_first = transport.rank == first and commit is not None
    if lost:  # those that have no objects need some, for the state of a checkpoint
        sent = for_another_rank(held) if is_first and held else None
        objects = [sent if one.number is None else None for one in inventories]
        received = _exchange(transport, objects)
        why = "the ranks that hosted and that kept it were lost together"
        if 0 in numbers:  # that of the begin, which each rank makes alone
            why = (
                "a rank that hosted it was lost before it was committed, and nobody kept a copy yet"
            )
        elif not numbers:
            why = "all ranks that hosted replicas were lost, and spares keep no copies"
        objects_here = received[0] if received else held
        return Gathered(None, objects_here, lost, why, most, of_first.known)
    messages: list[Any] = []
    for rank, one in enumerate(inventories):
        parts = {
            i: have[i]
            for i in layout.replica_ids(rank)
            if i not in one.own + one.kept and found_at.get(i) == transport.rank
        }
        is_new = one.number is None and is_first
        first_shared = (shared[0].for_another_rank(), shared[1]) if is_new else None
        messages.append((first_shared, parts) if is_new or parts else None)
    for first_shared, parts in _exchange(transport, messages):
        shared = first_shared or shared
        have |= parts
    own = {i: have.get(i) or ReplicaPart({}, {}) for i in layout.local_replica_ids}
    part, step = shared
    # whether an iteration was left is seen by the life of its iterator, which may end elsewhere
    part = part._replace(datasets=of_first.datasets or {})
    # What other ranks host now is kept, too: one of them may be lost before the next commit.
    gone_back_to = HeldCommit(numbers.pop(), part, own, lambda: have, empty, step)
    return Gathered(gone_back_to, part.held, [], "", most, of_first.known)


def _require_one_call(calls: Sequence[int], rank: int) -> None:
    """Raises, on this `rank`, where one has left a call of run_elastic that others are in."""
    if len(set(calls)) > 1:
        ahead = [rank for rank, call in enumerate(calls) if call == max(calls)]
        error = CollectiveMismatchError(
            f"a rank was lost, and the others are in different calls of strategy.run_elastic:"
            f" {numbers_text('rank', ahead)} (as numbered without it) left the last one by an error"
            " that the others did not have. Let such an error end the program, or raise it on all"
            " ranks."
        )
        mark_reporter(error, rank == 0)
        raise error


def _exchange(transport: Transport, messages: list[Any]) -> list[Any]:
    """Sends an object to each rank, or None; returns what other ranks have sent here."""
    packed = {rank: pickle.dumps(one, 5) for rank, one in enumerate(messages) if one is not None}
    counts = np.array([len(packed.get(rank, b"")) for rank in range(len(messages))], np.int64)
    everyone = transport.all_gather_bytes(counts.tobytes())
    sizes = [int(np.frombuffer(row, np.int64)[transport.rank]) for row in everyone]
    coming = {rank: size for rank, size in enumerate(sizes) if size}
    return [pickle.loads(data) for data in transport.pass_on(packed, coming).values()]
