"""What follows from where the replicas stand: a pure function, the same on every rank.

Every rank judges the same reports, so that all of them come to the same text.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from ...core.exceptions import CollectiveMismatchError, RankLostError, StructureMismatchError
from ...core.key_order import SORTED
from ...core.layout import Layout, grouped, listed
from .site import CallSite, sites_apart
from .stand import SAME_KIND, CallDescription, LeafDescription, Note, Report, Stand
from .travelling_error import TravellingError

_SAME_CALLS = "All replicas must make the same collective calls in the same order"
# Kinds of calls that take options, and so a name.
_WITH_OPTIONS = frozenset(
    "all_reduce all_gather reduce reduce_to batch_reduce_to gather gather_objects verify barrier"
    " run".split()
)
_SAME_BEFORE_THE_END = "All ranks must make the same collective calls before they end"
_SHOWN = 3


class Verdict(NamedTuple):
    """What all ranks do next."""

    #: "raise" at the calls, or "promote" them and try again
    action: str
    error: BaseException | None = None
    #: The error of a replica that is to be raised everywhere, and the rank it is from.
    traveller: TravellingError | None = None
    origin_rank: int = -1
    origin_replica: int = -1
    #: Runs from this ordinal on are over; None: they go on.
    doomed_run: int | None = None
    #: What changes; see `Promotion`.
    change: tuple[Any, ...] = ()
    remarks: tuple[str, ...] = ()


class Promotion(Exception):
    """No error: replicas differ in what can be made alike, and make the call again.

    Some passed a Python int where others passed a float: `change` are the leaves that become
    float64. Or some returned None from a run where others returned a value, or the keys of a dict
    in another order: the order of keys for all, and what each leaf is.
    """

    def __init__(self, change: Sequence[Any]) -> None:
        self.change = change


def judge(reports: Sequence[Report], layout: Layout) -> Verdict:
    """Returns what follows from the reports of all ranks, in rank order."""
    stands = [stand for report in reports for stand in report.stands]
    ordinals = {stand.run_ordinal for stand in stands}
    statuses = {stand.status for stand in stands}
    over = min(ordinals)
    failure = _failure(reports)
    if failure is not None:
        stay = statuses <= {"calls", "failed"} and len(ordinals) == 1
        return failure._replace(doomed_run=None if stay else over)
    noted = note_difference(reports, layout)
    if len(statuses) > 1:
        return Verdict("raise", noted or _one_has_returned(stands, layout), doomed_run=over)
    doomed = over if len(ordinals) > 1 else None
    calls = [(stand, stand.call) for stand in stands if stand.call is not None]
    mismatch = noted or _call_difference(calls, layout) or _structure_difference(calls, layout)
    if mismatch is not None:
        return Verdict("raise", mismatch, doomed_run=doomed)
    if calls[0][1].key_order is not None:  # what replicas have returned can be made alike
        return Verdict("promote", change=_combined_returns([call for _, call in calls]))
    promoted, mismatch = _leaf_difference(calls, layout)
    if promoted:
        return Verdict("promote", change=promoted)
    if mismatch is None:
        mismatch = CollectiveMismatchError(
            "the ranks compared different fingerprints for the same call:"
            f" {calls[0][1].what} at {calls[0][1].where}. Do all ranks run the same version of the"
            " program and of mpi_replica?"
        )
    return Verdict("raise", mismatch, doomed_run=doomed)


def _combined_returns(ends: Sequence[CallDescription]) -> tuple[str, ...]:
    """Returns the order of keys that replicas have returned, and what each leaf is."""
    orders = {end.key_order for end in ends if end.key_order is not None}
    columns = zip(*(end.leaves for end in ends), strict=True)
    kinds = [{leaf.dtype for leaf in column} for column in columns]
    return (
        orders.pop() if len(orders) == 1 else SORTED,
        *(of_leaf.pop() if len(of_leaf) == 1 else "value" for of_leaf in kinds),
    )


_Calls = Sequence[tuple[Stand, CallDescription]]


def _who(stands: Iterable[Stand], layout: Layout) -> str:
    return layout.describe({i for stand in stands for i in stand.replica_ids})


def _sides(
    calls: _Calls, side: Callable[[CallDescription], Any], layout: Layout
) -> list[tuple[str, CallDescription]]:
    """Returns who is on each side, and one call of it, where `side` tells calls apart."""
    groups: dict[Any, list[tuple[Stand, CallDescription]]] = {}
    for stand, call in calls:
        groups.setdefault(side(call), []).append((stand, call))
    return [(_who([stand for stand, _ in group], layout), group[0][1]) for group in groups.values()]


def rank_left(causes: Mapping[int, str], layout: Layout) -> RankLostError:
    """Returns the error of the ranks that stay, where the program has ended on others.

    `causes` says for each of these why it ended; "" where nothing went wrong.
    """
    ended = [i for rank in causes for i in layout.replica_ids(rank)]
    stay = [i for i in layout.all_replica_ids if i not in ended]
    failed = "; ".join(
        f"{layout.describe(layout.replica_ids(rank))} ended with {cause}"
        for rank, cause in causes.items()
        if cause
    )
    error = RankLostError(
        f"the program has ended on {layout.describe(ended)}, while {layout.describe(stay)} still"
        f" make{'s' if len(stay) == 1 else ''} collective calls. {failed or _SAME_BEFORE_THE_END}."
    )
    error._is_of_program = not failed  # what failed tells the launcher itself whether by a loss
    return error


def _failure(reports: Sequence[Report]) -> Verdict | None:
    failed = [
        (stand.run_ordinal, stand.replica_ids[0], rank, stand.error)
        for rank, report in enumerate(reports)
        for stand in report.stands
        if stand.error is not None
    ]
    if not failed:
        return None
    # Who has failed before a run, as by its input, has failed first: on one rank nobody began it.
    failed.sort(key=lambda entry: entry[:2])
    _, replica, rank, traveller = failed[0]
    remarks = tuple(
        f"also: {other.origin} raised {other.words}"
        for *_, other in failed[1:]
        if (other.type_name, other.text) != (traveller.type_name, traveller.text)
    )
    return Verdict(
        "raise",
        traveller=traveller,
        origin_rank=rank,
        origin_replica=replica,
        remarks=remarks[:_SHOWN],
    )


def _one_has_returned(stands: Sequence[Stand], layout: Layout) -> CollectiveMismatchError:
    returned = [stand for stand in stands if stand.status == "returned"]
    calls = [(s, s.call) for s in stands if s.status == "calls" and s.call is not None]
    sides = _sides(calls, lambda call: (call.what, call.where_and_why), layout)
    waiting = listed([f"{who}: {call.what} at {call.where_and_why}" for who, call in sides])
    ended = returned[0].call
    run = f" from the function given to {ended.what} at {ended.where}" if ended else ""
    have = "have" if sum(len(s.replica_ids) for s in returned) > 1 else "has"
    return CollectiveMismatchError(
        f"replicas made different numbers of calls. {_who(returned, layout)} {have} returned{run};"
        f" {waiting}. Make the same number of collective calls on every replica: a loop or an if"
        f" round a collective must have the same outcome everywhere.{_advice(calls)}"
    )


def note_difference(
    reports: Sequence[Report], layout: Layout
) -> CollectiveMismatchError | ValueError | None:
    """Returns the error of the first notes that ranks have otherwise; None where all are alike."""
    for place, entries in enumerate(itertools.zip_longest(*(report.notes for report in reports))):
        groups: dict[_Side, list[int]] = {}
        for rank, note in enumerate(entries):
            if note is not None:
                groups.setdefault(_place_of(note), []).extend(layout.replica_ids(rank))
                continue
            # A rank that came to no further note: some of its replicas may wait at that call.
            for stand in reports[rank].stands:
                groups.setdefault(_place_of_call(stand.call), []).extend(stand.replica_ids)
        notes = [note for note in entries if note is not None]
        first = notes[0]
        if None not in entries and len({note.what for note in notes}) == 1:
            whose = _whose(_batches(reports, place), layout)
            batches = [f"{batch} for {who}" for batch, who in whose.items() if batch]
            if len(batches) > 1:
                return StructureMismatchError(
                    f"the batches differ at {first.site.line}: {'; '.join(batches)} (compared with"
                    f" {first.what}). {SAME_KIND}"
                )
        if len(groups) > 1 or None in entries:
            sides = "; ".join(
                f"{layout.describe(ids)}: {text}"
                for text, ids in zip(_apart(list(groups)), groups.values(), strict=True)
            )
            return CollectiveMismatchError(
                f"replicas are at different calls. {sides}. {_SAME_CALLS}."
            )
        values = _whose([note.digest for note in notes], layout)
        if len(values) > 1:
            text = (
                f"{first.what} at {first.site.line}: the values differ between"
                f" {' and '.join(values.values())}. {first.advice}"
            )
            if first.error == "ValueError":
                return ValueError(text)
            return CollectiveMismatchError(text)
    return None


def _batches(reports: Sequence[Report], place: int) -> list[str]:
    """Returns what batches each rank had, by its note at this place, which all have; "" for none.

    Like batches have one note: where it ends at another step, the next one is unlike.
    """
    notes = [report.notes[place] for report in reports]
    what = notes[0].what
    counts = [[note for note in report.notes if note.what == what] for report in reports]
    is_same_end = len({of_rank[-1].digest for of_rank in counts}) == 1
    if not notes[0].batch or not is_same_end or len({note.digest for note in notes}) == 1:
        return [note.batch for note in notes]
    pairs = [report.notes[place : place + 2] for report in reports]
    return [" and ".join(note.batch for note in pair if note.what == what) for pair in pairs]


def _whose(values: Sequence[Any], layout: Layout) -> dict[Any, str]:
    """Returns who has which of the values of all ranks, in words."""
    return {
        value: layout.describe(i for rank in ranks for i in layout.replica_ids(rank))
        for value, ranks in grouped(values).items()
    }


class _Side(NamedTuple):
    """What some replicas are at."""

    what: str
    #: Where, as far as it is told first.
    where: str
    site: CallSite


def _place_of(note: Note) -> _Side:
    return _Side(note.what, note.site.line, note.site)


def _place_of_call(call: CallDescription | None) -> _Side:
    if call is None:
        return _Side("no such call", "", CallSite(b"", (), ()))
    return _Side(call.what, call.where_and_why, call.site)


def _apart(sides: Sequence[_Side]) -> list[str]:
    """Returns the sides in words, which also say how these came there where they need it."""
    places = [side.where for side in sides]
    if len({(side.what, side.where) for side in sides}) < len(sides):
        places = sites_apart([side.site for side in sides])
    whats = [side.what for side in sides]
    return [f"{a} at {b}" if b else a for a, b in zip(whats, places, strict=True)]


def _call_difference(calls: _Calls, layout: Layout) -> CollectiveMismatchError | None:
    sides = _sides(
        calls, lambda call: (call.kind, call.detail, call.wire, call.code, call.through), layout
    )
    mend = f"{_SAME_CALLS}."
    if len(sides) == 1:
        sides = _sides(
            calls, lambda call: (call.name, call.site.digest if call.name is None else b""), layout
        )
        if len(sides) == 1:
            return None
        if len({call.site.line for _, call in calls}) == 1 and any(call.name for _, call in calls):
            mend += " Where this line is one call, give it the same name on all replicas, or none."
        elif calls[0][1].kind in _WITH_OPTIONS:
            mend += (
                " Where two lines mean one call, give both"
                f" options=mr.CommunicationOptions(name='x') (here: {_places(calls)})."
            )
    texts = _apart([_place_of_call(call) for _, call in sides])
    if len(set(texts)) < len(texts):  # two functions on one line, or two instructions
        codes = [call.code or call.site.digest.hex() for _, call in sides]
        texts = [f"{text} (code {code})" for text, code in zip(texts, codes, strict=True)]
    shown = listed([f"{who}: {text}" for (who, _), text in zip(sides, texts, strict=True)])
    return CollectiveMismatchError(
        f"replicas are at different calls. {shown}. {mend}{_advice(calls)}"
    )


def _advice(calls: _Calls) -> str:
    """Returns what else to do about it, as a sentence behind others."""
    return next((f" {call.advice}." for _, call in calls if call.advice), "")


def _structure_difference(calls: _Calls, layout: Layout) -> StructureMismatchError | None:
    sides = _sides(calls, lambda call: (call.structure, call.paths), layout)
    if len(sides) == 1:
        return None
    (one, first), (other, second) = sides[:2]
    here, there = set(first.paths), set(second.paths)
    if here != there:
        only = [repr(path) for path in first.paths if path not in there][:_SHOWN]
        only_other = [repr(path) for path in second.paths if path not in here][:_SHOWN]
        difference = (
            f"leaves that only one side has: {one}: {', '.join(only) or 'none'}; {other}:"
            f" {', '.join(only_other) or 'none'}"
        )
    else:
        a, b = _first_difference(first.structure, second.structure)
        difference = f"{a} on {one}, {b} on {other}"
    return StructureMismatchError(
        f"{first.kind} got different structures at {_places(calls)}: {difference}. Pass the same"
        " nest, with the same keys and containers in the same order, on every replica."
    )


def _places(calls: _Calls) -> str:
    """Returns the place of a call; those of several lines that a name makes one call."""
    return listed(list(dict.fromkeys(call.where for _, call in calls)), " and ")


def _first_difference(one: str, other: str) -> tuple[str, str]:
    """Returns both texts, cuts to where they begin to differ."""
    at = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), 0)
    start = max(0, at - 20)
    return tuple(  # type: ignore[return-value]
        ("…" if start else "") + text[start : at + 60] + ("…" if len(text) > at + 60 else "")
        for text in (one, other)
    )


def _leaf_difference(
    calls: _Calls, layout: Layout
) -> tuple[tuple[int, ...], StructureMismatchError | None]:
    """Returns the leaves that must become float64, or the error of the first that can't agree."""
    promoted = []
    for index, path in enumerate(calls[0][1].paths):
        leaves = [call.leaves[index] for _, call in calls]
        if len({leaf.shape for leaf in leaves}) > 1:
            aspect = "shape"
        elif len({leaf.dtype for leaf in leaves}) > 1:
            numbers = {leaf.python_number for leaf in leaves}
            if "" not in numbers and "float" in numbers:
                promoted.append(index)
                continue
            # without a shape a word stands for the dtype, as "PerReplica" or the name of a variable
            aspect = "dtype" if leaves[0].shape is not None else "kind"
        else:
            continue
        different = _sides(calls, lambda call, i=index: call.leaves[i], layout)  # type: ignore[misc]
        sides = listed([f"{call.leaves[index]} on {who}" for who, call in different])
        first = calls[0][1]
        mend = {
            "shape": f"Make the leaf the same shape on every replica{_for_uneven(first)}.",
            "dtype": f"Convert the leaf to one dtype on every replica{_for_empty(first, leaves)}.",
            "kind": "Pass the same variable, or the same kind of value, on every replica.",
        }[aspect]
        return (), StructureMismatchError(
            f"{first.kind} got different {aspect}s for value{path} at {_places(calls)}: {sides}."
            f" {mend}"
        )
    return tuple(promoted), None


def _for_empty(call: CallDescription, leaves: Sequence[LeafDescription]) -> str:
    """Returns what is most likely meant where an array without rows has another dtype."""
    is_likely = call.kind in ("all_gather", "gather") and "float64" in {x.dtype for x in leaves}
    return ", also an empty one: np.array([]) is float64" if is_likely else ""


def _for_uneven(call: CallDescription) -> str:
    """Returns what takes shapes that this call does not, behind what to do else."""
    if call.kind in ("all_gather", "gather"):
        return ": only the length along the axis may differ"
    if call.kind == "all_reduce":
        return ", or use all_gather for uneven ones"
    if call.kind in ("reduce", "reduce_to", "batch_reduce_to") and "axis=" not in call.detail:
        axis = " or axis=0" if call.kind == "reduce" else ""
        return f", or use strategy.gather{axis} for uneven ones"
    return ""
