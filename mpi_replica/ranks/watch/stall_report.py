"""The stall report: who waits where, who is missing, and where the missing ones are."""

from __future__ import annotations

import textwrap
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from ...core.layout import Layout, numbers_text
from .recorder import RecordedCall
from .stacks import Whereabouts

# Calls that the report shows of each missing rank.
_SHOWN_CALLS = 3


class Answer(NamedTuple):
    """Where a rank is, as its watcher says."""

    #: How many exchanges of the strategy it has begun.
    step: int
    is_waiting: bool
    #: Its replicas that have not come to the call at which its others wait.
    missing_replicas: tuple[int, ...]
    #: Seconds since the epoch, on its clock.
    now: float
    recent: tuple[RecordedCall, ...]
    place: Whereabouts
    #: Errors of its replicas, in words, of which it waits to tell.
    errors: Sequence[str] = ()


class Processes(NamedTuple):
    """Host name and process id of each rank."""

    hosts: Sequence[str]
    pids: Sequence[int]
    #: Whether the others can go on without one of them.
    can_be_lost: bool = False
    #: Ranks that have died, as the library says.
    lost: Collection[int] = ()

    def describe(self, rank: int) -> str:
        """Returns the words for the process of a rank."""
        return f"rank {rank}, host {self.hosts[rank]}, pid {self.pids[rank]}"

    def advice(self, rank: int) -> list[str]:
        """Returns the line that says how to go on without a rank; none where nobody can."""
        if not self.can_be_lost:
            return []
        return [f"    to go on without it: kill -9 {self.pids[rank]} on {self.hosts[rank]}"]


def stall_report(
    call: str,
    waited_seconds: float,
    step: int,
    answers: Mapping[int, Answer],
    layout: Layout,
    processes: Processes,
) -> str:
    """Returns the report of a rank that has waited at `step` for `waited_seconds`.

    `answers` are those of the ranks that gave one, by rank, its own among them.
    """
    waiting: list[int] = []
    lost: list[str] = []
    texts: list[str] = []
    for rank in range(layout.size):
        ids = layout.replica_ids(rank)
        answer = answers.get(rank)
        if rank in processes.lost:
            lost.append(f"lost: {_named(ids, processes.describe(rank))}: its process has died")
            continue
        if answer is None:
            lines = [missing_text(_named(ids, processes.describe(rank)), None)]
        elif answer.step >= step:
            waiting.extend(ids)
            continue
        else:
            missing = answer.missing_replicas or ids
            waiting.extend(i for i in ids if i not in missing)
            lines = [_missing(missing, ids, answer, processes.describe(rank))]
        texts.append("\n".join(lines + processes.advice(rank)))
    lines = [
        f"{call} has waited {_seconds(waited_seconds)}.",
        f"waiting: {layout.describe(waiting)}",
        *(_raised(error) for rank in sorted(answers) for error in answers[rank].errors),
        *lost,
    ]
    if not texts:
        texts = ["no rank: all are in this call, and MPI does not go on"]
    return "\n  ".join([*lines, *(f"missing: {text}" for text in texts)])


def local_stall_report(
    call: str, waited_seconds: float, answer: Answer, layout: Layout, processes: Processes
) -> str:
    """Returns the report of a rank some of whose replicas wait for another one of it."""
    ids = layout.local_replica_ids
    waiting = [i for i in ids if i not in answer.missing_replicas]
    missing = _missing(answer.missing_replicas, ids, answer, processes.describe(layout.rank))
    return (
        f"{call} has waited {_seconds(waited_seconds)}.\n  waiting: {layout.describe(waiting)}"
        f"\n  missing: {missing}"
    )


def rank_report(answer: Answer) -> str:
    """Returns where this rank is, and its last calls."""
    lines = ["it waits in the last of these calls" if answer.is_waiting else "it is at"]
    if not answer.is_waiting:
        lines.append(_indented(answer.place.stack))
    return "\n".join([*lines, *_listed(answer.recent)])


def missing_text(name: str, answer: Answer | None) -> str:
    """Returns where the rank or its replicas called `name` are; no answer says something, too."""
    if answer is None:
        return (
            f"{name} does not answer: the process is stopped, its host can't be reached, or C code"
            " in it holds the GIL"
        )
    last = "no call so far"
    if answer.recent:
        call = answer.recent[-1]
        ago = answer.now - (call.begun if call.ended is None else call.ended)
        last = f"last call {call.text}, {ago:.1f} s ago"
    place = f"{name}, {last}; it is now at\n{_indented(answer.place.stack)}"
    return "\n".join([place, *_listed(answer.recent[-_SHOWN_CALLS:])])


def _seconds(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"


def _named(ids: Sequence[int], process: str) -> str:
    return f"{numbers_text('replica', ids)} ({process})"


def _raised(error: str) -> str:
    return f"raised: {error}".replace("\n", "\n    ")


def _missing(missing: Sequence[int], ids: Sequence[int], answer: Answer, process: str) -> str:
    lines = [missing_text(_named(missing, process), answer)]
    if answer.place.waits_for_lock:
        lines.append("    It waits for a lock.")
        others = [i for i in ids if i not in missing]
        if others:
            lines[-1] = (
                f"    It waits for a lock, while {numbers_text('replica', others)} of the same"
                f" rank wait{'s' * (len(others) == 1)} in a collective: whoever of them holds the"
                " lock never gives it back. Hold no lock over a collective."
            )
    return "\n".join(lines)


def _listed(calls: Sequence[RecordedCall]) -> list[str]:
    return ["    its last calls:", *(f"      {call}" for call in calls)] if calls else []


def _indented(stack: str) -> str:
    return textwrap.indent(stack.rstrip("\n"), "  ")
