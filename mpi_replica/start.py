"""The start of a strategy: the ranks tell what they were given, and agree on one layout."""

from __future__ import annotations

import logging
import operator
import os
import pickle
import sys
from typing import Any, NamedTuple

from .errors import LaunchError
from .layout import Layout, compressed
from .numerics import Numerics, compare, numerics_here
from .options import CommunicationOptions
from .transport import Transport

__all__ = ["agreed_layout"]

_NUM_REPLICAS = "MPI_REPLICA_NUM_REPLICAS"
_log = logging.getLogger("mpi_replica")


class _Facts(NamedTuple):
    """What a rank tells the others."""

    python: tuple[int, ...]
    #: hash() of a string, which differs between processes unless PYTHONHASHSEED is set
    string_hash: int
    replicas_per_rank: int
    num_replicas: int | None
    options: CommunicationOptions
    #: Of a reproducible strategy.
    numerics: Numerics | None
    #: What is wrong with the arguments on this rank.
    problem: Exception | None


def agreed_layout(
    transport: Transport,
    replicas_per_rank: int | None,
    num_replicas: int | None,
    options: CommunicationOptions | None,
) -> tuple[Layout, CommunicationOptions]:
    """Return the layout and this rank's options. Collective; raises on every rank or on none.

    Raises
    ------
    ValueError, TypeError
        The arguments of a rank are wrong, or do not fit together.
    LaunchError
        The ranks run different versions of Python.
    """
    merged = CommunicationOptions()
    mine = _Facts(tuple(sys.version_info[:3]), hash("mpi_replica"), 1, None, merged, None, None)
    try:
        merged = merged.merge(options)
        if merged.name is not None:
            raise ValueError(
                f"communication_options of a strategy have name={merged.name!r}: it would replace"
                " every call site, and no swap of two calls would be seen. Give it to the call:"
                " options=mr.CommunicationOptions(name='x')."
            )
        here, total = _checked(replicas_per_rank, num_replicas, transport.size)
        given = mine._replace(replicas_per_rank=here, num_replicas=total, options=merged)
        if merged.reproducible:
            given = given._replace(numerics=numerics_here())
        data = pickle.dumps(given, 5)
    except Exception as error:  # also what arguments raise that are asked for a number or a text
        kind = ValueError if isinstance(error, ValueError) else TypeError
        # A new exception with its text: the original may hold what can't be pickled.
        data = pickle.dumps(mine._replace(problem=kind(str(error))), 5)
    facts: list[_Facts] = [pickle.loads(text) for text in transport.all_gather_bytes(data)]
    layout = _layout(facts, transport.rank)
    compare([fact.numerics for fact in facts if fact.numerics is not None], transport.rank)
    if transport.rank == 0 and len({fact.string_hash for fact in facts}) > 1:
        _log.warning(
            "hash() of strings differs between the ranks: a loop over a set of strings has another"
            " order on each, and collectives in it would mix silently. Start the ranks with"
            " PYTHONHASHSEED=0 in the environment, or sort what you loop over."
        )
    return layout, merged


def _checked(
    replicas_per_rank: int | None, num_replicas: int | None, size: int
) -> tuple[int, int | None]:
    """Return the number of replicas of this rank, and that of all ranks, where it is given."""
    if replicas_per_rank is not None and num_replicas is not None:
        raise ValueError(
            f"replicas_per_rank={replicas_per_rank!r} and num_replicas={num_replicas!r} are both"
            " given. Give one of them."
        )
    name = "num_replicas"
    if replicas_per_rank is None and num_replicas is None and _NUM_REPLICAS in os.environ:
        name = _NUM_REPLICAS
        try:
            num_replicas = int(os.environ[name])
        except ValueError:
            raise ValueError(f"{name}={os.environ[name]!r} is not an integer.") from None
    here = 1 if replicas_per_rank is None else _positive("replicas_per_rank", replicas_per_rank)
    total = None if num_replicas is None else _positive(name, num_replicas)
    if total is not None and total < size:
        raise ValueError(
            f"{name}={total} is less than the {size} ranks: each rank hosts one replica or more."
            f" Start {total} ranks, or ask for {size} replicas or more."
        )
    return here, total


def _positive(name: str, value: Any) -> int:
    try:
        if isinstance(value, bool):
            raise TypeError("bool")
        number = operator.index(value)  # numpy's integers are integers, too
    except TypeError:
        raise TypeError(f"{name} must be an int, got {value!r}.") from None
    if number < 1:
        raise ValueError(f"{name} must be 1 or more, got {value!r}.")
    return number


def _layout(facts: list[_Facts], rank: int) -> Layout:
    pythons = {fact.python: None for fact in facts}
    if len(pythons) > 1:
        versions = " and ".join(".".join(map(str, version)) for version in pythons)
        raise LaunchError(
            f"the ranks run different versions of Python ({versions}): functions and call sites"
            " can't be compared between them. Use the same environment on all hosts."
        )
    for sender, fact in enumerate(facts):
        if fact.problem is not None:
            if len(facts) > 1:
                fact.problem.add_note(f"raised by rank {sender}")
            raise fact.problem
    totals: dict[int | None, list[int]] = {}
    for sender, fact in enumerate(facts):
        totals.setdefault(fact.num_replicas, []).append(sender)
    if len(totals) > 1:
        sides = ", ".join(f"{n!r} on ranks {compressed(ranks)}" for n, ranks in totals.items())
        raise ValueError(f"num_replicas differs between ranks: {sides}. Give the same on all.")
    if any(fact.options != facts[0].options for fact in facts):
        other = next(fact.options for fact in facts if fact.options != facts[0].options)
        raise ValueError(
            f"communication_options differ between ranks: {facts[0].options} and {other}. Give the"
            " same on all."
        )
    total = facts[0].num_replicas
    if total is not None:
        return Layout.even(total, len(facts), rank)
    return Layout(tuple(fact.replicas_per_rank for fact in facts), rank)
