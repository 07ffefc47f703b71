"""The start of a strategy: the ranks tell what they were given, and agree on terms."""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from ..collectives.agreement.site import call_site
from ..core.argument_checks import flag, integer
from ..core.context import current_strategy, is_in_step
from ..core.exceptions import (
    ContextError,
    LaunchError,
    MPIReplicaError,
    RankLostError,
    add_note,
    text_of,
)
from ..core.jax_state import ask_for_devices
from ..core.layout import Layout, sides
from ..core.options import CommunicationOptions
from ..core.thread_owners import OWN_THREADS
from ..ranks.launch import open_survivors
from ..ranks.launcher_connection import tell
from ..ranks.numerics import Numerics, compare, numerics_here
from ..ranks.single import SingleTransport
from ..ranks.survivors import Survivors
from ..ranks.transport import Transport
from ..ranks.watch import event_log
from ..ranks.watch.new_strategies import new_strategies
from ..ranks.watch.strategy_watch import stall_seconds

_NUM_REPLICAS = "MPI_REPLICA_NUM_REPLICAS"
_SPARES = "MPI_REPLICA_SPARES"
_REPRODUCIBLE = "MPI_REPLICA_REPRODUCIBLE"
_THREADS = "MPI_REPLICA_THREADS"
#: Of a rank: a replica takes some kB in a run.
_MOST_REPLICAS = 1 << 20
_log = logging.getLogger("mpi_replica")


class _Proposal(NamedTuple):
    """What a rank wants of the strategy, as it tells the others."""

    python: tuple[int, ...]
    #: hash() of a string, which differs between processes unless PYTHONHASHSEED is set
    string_hash: int
    #: What is random where nobody gave a seed.
    entropy: int
    replicas_per_rank: int = 1
    num_replicas: int | None = None
    options: CommunicationOptions = CommunicationOptions()
    seed: int | None = None
    #: Of a reproducible strategy.
    numerics: Numerics | None = None
    is_traced: bool = False
    #: What is wrong with the arguments on this rank.
    problem: Exception | None = None


class Terms(NamedTuple):
    """What the ranks have agreed on."""

    layout: Layout
    options: CommunicationOptions
    seed: int
    #: Whether all of them are traced: then they compare clocks.
    is_traced: bool
    #: Whether replicas have threads of their own; each rank says so for its own ones.
    replica_threads: bool


class Wishes(NamedTuple):
    """The arguments of a strategy, on one rank."""

    replicas_per_rank: int | None
    num_replicas: int | None
    options: CommunicationOptions | None
    replica_threads: bool | None
    seed: int | None


_TOO_MANY = (
    "Each strategy has communicators of its own. Close those that are not used any more:"
    " strategy.close(), or `with mr.MPIStrategy() as strategy:`. One whose `with` was left by an"
    " error keeps its own: make one strategy for all attempts."
)


@contextlib.contextmanager
def _says_to_close_strategies() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        if "Too many communicators" in text_of(error):  # of MPICH, which has 2048
            add_note(error, _TOO_MANY)
        raise


def start(
    communicator: Any, spares: Any, wishes: Wishes
) -> tuple[Transport, Terms, Survivors | None]:
    """Returns transport, terms and world of a new strategy. Collective.

    Ranks that die meanwhile are left behind where the library can, and the others host their
    replicas.

    Raises
    ------
    ValueError, TypeError, LaunchError
        On every rank: arguments are wrong, or do not fit together, or the ranks do not.
    ContextError
        A replica wants it, with other ranks.
    """
    wanted = _spares(spares)
    with _says_to_close_strategies():
        survivors = open_survivors(communicator, wanted)
    if survivors is not None and survivors.size > 1:
        _require_no_replica()
    if survivors is None:
        if wanted:
            argument = f"spares={spares!r}"
            if spares is None:
                argument = f"{_SPARES}={os.environ[_SPARES]!r}"
            if wanted < 0:
                raise ValueError(f"{argument}, but it must be an int, 0 or more.")
            raise ValueError(
                f"{argument}, but there is one rank, which has to host the replicas. Start more"
                " ranks with mpirun."
            )
        alone = SingleTransport()
        terms = _agreed_terms(alone, wishes, num_lost=0)
        _prepare_libraries(terms.layout, may_grow=False)
        return alone, terms, None

    def begin(transport: Transport | None) -> tuple[Transport, Terms]:
        if transport is None:
            return _wait_for_terms(survivors, wishes)
        num_lost = survivors.first_size - wanted - transport.size
        try:
            terms = _agreed_terms(transport, wishes, num_lost)
        except (MPIReplicaError, ValueError, TypeError) as error:
            if not isinstance(error, RankLostError):
                survivors.share(error)
                if not survivors.is_fault_tolerant:  # otherwise all are woken by it, to raise it
                    transport.close()
            raise
        survivors.share(terms)
        return transport, terms

    line, ranks = call_site().line, survivors.ranks_in_world
    making = new_strategies.noted(ranks, survivors.rank_in_world, line)
    if not survivors.is_fault_tolerant:  # otherwise they go on without one that has ended
        tell(makes_with=len(ranks))
    with _says_to_close_strategies(), _reported(survivors, line), making:
        transport, terms = survivors.come_together(begin)
    _prepare_libraries(terms.layout, may_grow=survivors.is_fault_tolerant)
    tell(num_replicas=terms.layout.num_replicas)
    return transport, terms, survivors


def _require_no_replica() -> None:
    """Raises in a step: each replica would make one, and ranks with other numbers of them wait."""
    if is_in_step():
        raise ContextError(
            f"MPIStrategy was made in a replica of {current_strategy()!r}: all ranks make it"
            " together, and a rank would make one for each of its replicas. Make it outside of"
            " steps."
        )


@contextlib.contextmanager
def _reported(survivors: Survivors, line: str) -> Iterator[None]:
    """Reports a long wait: a strategy that is being made has no watch, and hears of no other rank.

    Another thread does, since this one waits within the library. Where those that are missing wait
    for this rank, see `CycleSearch`.
    """
    seconds = stall_seconds()
    report = threading.Timer(
        min(seconds, threading.TIMEOUT_MAX),
        _log.warning,
        (
            "rank %d of %d has waited %g s to make a strategy at %s: not all ranks of the"
            " communicator do. Make it on all of them, as often and in the same order as other"
            " strategies, or give it the communicator of those that do.",
            *(survivors.rank, survivors.size, seconds, line),
        ),
    )
    report.daemon, report.name = True, f"{OWN_THREADS} report"
    report.start()
    try:
        yield
    finally:
        report.cancel()


def _prepare_libraries(layout: Layout, *, may_grow: bool) -> None:
    """Has JAX have a device for each replica that this rank may ever host, where it is early."""
    count = layout.num_replicas if may_grow else len(layout.local_replica_ids)
    if count > 1:
        ask_for_devices(count)


def _spares(spares: Any) -> int:
    """Returns the number of spares; -1 where it is none, which all ranks have to hear of."""
    if spares is None:
        text = os.environ.get(_SPARES, "0")
        return int(text) if text.isdecimal() else -1
    is_number = isinstance(spares, int) and not isinstance(spares, bool)
    return spares if is_number else -1


def _wait_for_terms(survivors: Survivors, wishes: Wishes) -> tuple[Transport, Terms]:
    """Returns transport and terms of a spare: in them it hosts no replicas, and sends to nobody."""
    terms = survivors.share(None)
    if isinstance(terms, Exception):
        raise terms
    event_log.open_log_of_environment()
    if terms.is_traced and event_log.current is None:
        raise ValueError(f"{event_log.TRACE_VARIABLE} is set on other ranks. Set it on all.")
    layout = Layout.waiting(terms.layout.counts, survivors.rank)
    wished = wishes.replica_threads if isinstance(wishes.replica_threads, bool) else None
    terms = terms._replace(layout=layout, replica_threads=_threads(wished))
    return survivors.waiting_transport(), terms


def _agreed_terms(transport: Transport, wishes: Wishes, num_lost: int) -> Terms:
    """Returns layout, options and seed. Collective; raises on every rank or on none.

    `num_lost` ranks have died before they could tell: the others host their replicas.

    Raises
    ------
    ValueError, TypeError
        The arguments of a rank are wrong, or do not fit together.
    LaunchError
        The ranks run different versions of Python.
    """
    mine = _Proposal(
        tuple(sys.version_info[:3]), hash("mpi_replica"), int.from_bytes(os.urandom(16))
    )
    threads = False
    try:
        event_log.open_log_of_environment()
        threads = _threads(wishes.replica_threads)
        merged, seed = _merged(wishes.options), wishes.seed
        here, total = _checked(wishes.replicas_per_rank, wishes.num_replicas, transport.size)
        proposal = mine._replace(
            replicas_per_rank=here,
            num_replicas=total,
            options=merged,
            seed=None if seed is None else integer("seed", seed, 0),
            numerics=numerics_here() if merged.reproducible else None,
            is_traced=event_log.current is not None,
        )
        data = pickle.dumps(proposal, 5)
    except Exception as error:  # also what arguments raise that are asked for a number or a text
        kind = ValueError if isinstance(error, ValueError) else TypeError
        # A new exception with its text: the original may hold what can't be pickled.
        data = pickle.dumps(mine._replace(problem=kind(text_of(error))), 5)
    proposals: list[_Proposal] = [pickle.loads(text) for text in transport.all_gather_bytes(data)]
    layout = _layout(proposals, transport.rank, num_lost)
    numerics = [proposal.numerics for proposal in proposals]
    compare([known for known in numerics if known is not None], transport.rank)
    if transport.rank == 0 and len({proposal.string_hash for proposal in proposals}) > 1:
        _log.warning(
            "hash() of strings differs between the ranks: a loop over a set of strings has another"
            " order on each, and collectives in it would mix silently. Start the ranks with"
            " PYTHONHASHSEED=0 in the environment, without -E or -I, or sort what you loop over."
        )
    first = proposals[0]
    seed = first.seed
    if seed is None:
        # What has the same bits in every layout shall have them in every run, too.
        seed = 0 if first.options.reproducible else first.entropy
    is_traced = all(one.is_traced for one in proposals)
    return Terms(layout, first.options, seed, is_traced, threads)


def _threads(wished: bool | None) -> bool:
    """Returns whether each replica of this rank has a thread of its own."""
    if wished is None:
        return _is_on(_THREADS)
    return flag("replica_threads", wished)


def _is_on(variable: str) -> bool:
    """Returns whether a variable of the environment is 1; without it, it is 0."""
    text = os.environ.get(variable, "0")
    if text not in ("0", "1"):
        raise ValueError(f"{variable}={text!r} is neither 1 nor 0.")
    return text == "1"


def _merged(options: CommunicationOptions | None) -> CommunicationOptions:
    """Returns the options of the strategy."""
    merged = CommunicationOptions().merge(options)
    if merged.name is not None:
        raise ValueError(
            f"communication_options of a strategy have name={merged.name!r}: it would replace"
            " every call site, and no swap of two calls would be seen. Give it to the call:"
            " options=mr.CommunicationOptions(name='x')."
        )
    if merged.reproducible is None and _REPRODUCIBLE in os.environ:
        merged = merged.merge(CommunicationOptions(reproducible=_is_on(_REPRODUCIBLE)))
    return merged


def _checked(
    replicas_per_rank: int | None, num_replicas: int | None, size: int
) -> tuple[int, int | None]:
    """Returns the number of replicas of this rank, and that of all ranks, where it is given."""
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
    here = 1 if replicas_per_rank is None else integer("replicas_per_rank", replicas_per_rank, 1)
    total = None if num_replicas is None else integer(name, num_replicas, 1)
    if total is not None and total < size:
        raise ValueError(
            f"{name}={total} is less than the {size} ranks: each rank hosts one replica or more."
            f" Start {total} ranks, or ask for {size} replicas or more."
        )
    if max(here, (total or 0) // size) > _MOST_REPLICAS:
        raise ValueError(
            f"{'replicas_per_rank' if total is None else name} asks for more than"
            f" {_MOST_REPLICAS} replicas on a rank, each of which takes memory. Give a smaller"
            " number: a replica can take many rows."
        )
    return here, total


def _layout(proposals: list[_Proposal], rank: int, num_lost: int) -> Layout:
    pythons = {proposal.python: None for proposal in proposals}
    if len(pythons) > 1:
        versions = " and ".join(".".join(map(str, version)) for version in pythons)
        raise LaunchError(
            f"the ranks run different versions of Python ({versions}): functions and call sites"
            " can't be compared between them. Use the same environment on all hosts."
        )
    for sender, proposal in enumerate(proposals):
        if proposal.problem is not None:
            if len(proposals) > 1:
                add_note(proposal.problem, f"raised by rank {sender}")
            raise proposal.problem
    _require_one("num_replicas", [proposal.num_replicas for proposal in proposals])
    _require_one("seed", [proposal.seed for proposal in proposals])
    first, *others = dict.fromkeys(proposal.options for proposal in proposals)
    if others:
        raise ValueError(
            f"communication_options differ between ranks: {first} and {others[0]}. Give the same on"
            " all."
        )
    total = proposals[0].num_replicas
    if total is None and num_lost:
        counts = {proposal.replicas_per_rank for proposal in proposals}
        if len(counts) > 1:
            raise RankLostError(
                f"{num_lost} of the ranks died while the strategy was made, and how many replicas"
                " they would have hosted is not known: replicas_per_rank differs between the"
                " others. Give num_replicas instead."
            )
        total = counts.pop() * (len(proposals) + num_lost)
    if total is not None:
        return Layout.even(total, len(proposals), rank)
    return Layout(tuple(proposal.replicas_per_rank for proposal in proposals), rank)


def _require_one(name: str, values: Sequence[int | None]) -> None:
    """Raises unless all ranks gave the same."""
    if len(set(values)) > 1:
        raise ValueError(f"{name} differs between ranks: {sides(values)}. Give the same on all.")
