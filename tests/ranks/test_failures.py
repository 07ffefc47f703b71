"""Replicas that fail (DESIGN.md section 6, decisions 15 to 17; tf_semantics.md 136 to 142).

That each failure is one on every rank is in test_misuse.py; here is what else is promised.
"""

import contextlib
import functools
import itertools
import json
import os
import re
import signal
import sys
import types

import greenlet
import numpy as np
import pytest

import mpi_replica as mr
from everywhere import (
    check_works,
    culprits,
    error_of,
    gathered,
    interrupt_instead,
    named,
    needs_two_ranks,
    needs_two_replicas,
    raises_everywhere,
    ranks_of,
)
from mpi_replica.collectives.agreement.agreement import Agreement
from mpi_replica.errors import CollectiveMismatchError, ContextError
from mpi_replica.replicas import run
from mpi_replica.replicas.run import Run
from mpi_replica.replicas.seat import Seat


class Custom(Exception):
    """An exception with more than one argument."""

    def __init__(self, code, table):
        super().__init__(code, table)
        self.code = code


class Unpicklable(Exception):
    """Is made of what can't be pickled."""

    def __init__(self, text):
        super().__init__(text, lambda: None)


class Altered(Exception):
    """Comes back from pickle as something else."""

    def __reduce__(self):
        return ValueError, ("altered",)


class OtherArguments(Exception):
    """Is made of others than it keeps, as many exceptions of programs are."""

    def __init__(self, code, *, where):
        super().__init__(f"code {code} at {where}")
        self.code = code


class OwnExit(SystemExit):
    """Ends the program with a status that it makes of its arguments."""

    def __init__(self, *, replica):
        super().__init__(10 + replica)


class OwnOSError(OSError):
    """Makes what Python's own takes of its arguments."""

    def __init__(self, *, path):
        super().__init__(2, "No such file", path)


class WithHandle(Exception):
    """Has an attribute that can't be pickled."""

    def __init__(self, text):
        super().__init__(text)
        self.text, self.handle = text, open(os.devnull)
        self.handle.close()


def note_of(error):
    return "\n".join(getattr(error, "__notes__", ()))


def my_id():
    return mr.get_replica_context().replica_id_in_sync_group


def contains_itself():
    found = []
    found.append(found)
    return found


def raising(culprit, make, *, before=0, after=0):
    """Return a step in which one replica raises, between collectives of all."""

    def step():
        context = mr.get_replica_context()
        for _ in range(before):
            context.all_reduce("SUM", 1.0)
        if context.replica_id_in_sync_group == culprit:
            raise make(culprit)
        for _ in range(after):
            context.all_reduce("SUM", 1.0)

    return step


def test_what_a_replica_raises_is_raised_on_every_rank(strategy):
    """Decision 16: same type, same arguments; the note names replica, rank, file and line."""
    ranks = ranks_of(strategy)
    for culprit in culprits(strategy):
        step = raising(culprit, lambda i: Custom(i, {"a": [i]}), before=1, after=1)
        error = raises_everywhere(Custom, lambda step=step: strategy.run(step))
        assert type(error) is Custom
        assert error.args == (culprit, {"a": [culprit]})
        assert error.code == culprit
        line = raising.__code__.co_firstlineno + 8
        assert f"{named(culprit, ranks[culprit])} at test_failures.py:{line}" in note_of(error)
        if strategy.rank != ranks[culprit]:
            assert "Traceback (most recent call last)" in note_of(error)
            assert "raise make(culprit)" in note_of(error)
        check_works(strategy)


def merges_by_a_library():
    return mr.get_replica_context().merge_call(json.loads)  # it takes the strategy for a text


@pytest.mark.parametrize("function", [functools.partial(json.loads, 1), merges_by_a_library])
def test_where_a_function_of_a_library_is_the_program_its_line_is_told(strategy, function):
    error = raises_everywhere(TypeError, lambda: strategy.run(function))
    assert re.search(r"^raised by .* at __init__\.py:\d+", note_of(error))


def test_the_rank_of_origin_raises_the_original_object(strategy):
    """Decision 16."""
    for culprit in culprits(strategy):
        original = Custom(culprit, None)
        step = raising(culprit, lambda i, original=original: original, after=1)
        error = raises_everywhere(Custom, lambda step=step: strategy.run(step))
        assert (error is original) == (culprit in strategy.local_replica_ids)


@pytest.mark.parametrize(
    "make",
    [
        lambda i: SystemExit(3),
        lambda i: KeyboardInterrupt(f"replica {i}"),
        lambda i: StopIteration(i),
        lambda i: GeneratorExit(i),
        lambda i: AssertionError(),
        lambda i: OSError(2, "No such file", f"part-{i}"),
        lambda i: UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid"),
        lambda i: ExceptionGroup("both", [ValueError(i), KeyError(i)]),
        lambda i: ValueError(np.arange(3) + i),
        lambda i: mr.errors.ContextError("wrong place"),
    ],
    ids=lambda make: type(make(0)).__name__,
)
def test_exceptions_of_every_kind_travel(strategy, make):
    """Decision 16: SystemExit and KeyboardInterrupt too."""
    for culprit in culprits(strategy):
        expected = make(culprit)
        step = raising(culprit, make, after=1)
        error = raises_everywhere(type(expected), lambda step=step: strategy.run(step))
        assert type(error) is type(expected)
        assert str(error) == str(expected)
        assert repr(error.args) == repr(expected.args)
        check_works(strategy)


def caused(error, *causes):
    """Return an error that was raised from another one, and that from a third."""
    for one, cause in itertools.pairwise([error, *causes]):
        one.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("make", "kinds"),
    [
        (lambda i: caused(ValueError(i), KeyError(i), OSError(2, "none", f"part-{i}")), 3 * [""]),
        (lambda i: caused(Altered("text"), OtherArguments(i, where="a place")), 2 * [""]),
        (lambda i: caused(ValueError(i), Unpicklable(lambda: i)), ["", "RemoteReplicaError"]),
        (lambda i: caused(Unpicklable(lambda: i), KeyError(i)), ["RemoteReplicaError", ""]),
    ],
)
def test_what_an_error_was_raised_from_travels_with_it(strategy, make, kinds):
    """A program that looks at it goes the same way on all ranks."""
    ranks = ranks_of(strategy)
    for culprit in culprits(strategy):
        step = raising(culprit, make, after=1)
        error, expected = error_of(lambda step=step: strategy.run(step)), make(culprit)
        for kind in kinds:
            elsewhere = kind if strategy.rank != ranks[culprit] else ""
            assert type(error).__name__ == (elsewhere or type(expected).__name__)
            if not elsewhere:
                assert str(error) == str(expected) or kind
            error, expected = error.__cause__, expected.__cause__
        assert (error, expected) == (None, None)
        check_works(strategy)


@pytest.mark.parametrize(
    "make",
    [
        lambda i: Altered(f"text {i}"),
        lambda i: OtherArguments(i, where="a place"),
        lambda i: OwnExit(replica=i),
        lambda i: OwnOSError(path=f"part-{i}"),
        lambda i: WithHandle(f"text {i}"),
    ],
    ids=lambda make: type(make(0)).__name__,
)
def test_what_pickle_can_not_make_again_is_made_without_it(strategy, make):
    ranks = ranks_of(strategy)
    for culprit in culprits(strategy):
        expected = make(culprit)
        step = raising(culprit, make, before=1, after=1)
        error = raises_everywhere(type(expected), lambda step=step: strategy.run(step))
        assert type(error) is type(expected)
        assert error.args == expected.args
        sent = {name: value for name, value in vars(expected).items() if name != "handle"}
        assert sent.items() <= vars(error).items()
        for name in ("code", "errno", "filename"):
            assert getattr(error, name, None) == getattr(expected, name, None)
        if strategy.rank != ranks[culprit]:
            assert ("is not here: handle" in note_of(error)) == (type(error) is WithHandle)
        check_works(strategy)


def in_groups(i):
    """Return a group with members of all kinds that pickle can't make, some in another group."""
    inner = [Altered(f"text {i}"), OwnExit(replica=i), WithHandle("a handle")]
    inner[0].add_note("of a member")
    inner[0].code = 3
    group = BaseExceptionGroup("inner", inner)
    group.add_note("of a group")
    return BaseExceptionGroup("outer", (ValueError(i), OtherArguments(i, where="here"), group))


def members_of(group):
    """Return each exception in a group, and in the groups in it: type, arguments and notes."""
    members = getattr(group, "exceptions", ())
    args = group.args[:1] if members else group.args
    notes = [note for note in getattr(group, "__notes__", []) if not note.startswith("raised by")]
    return [(type(group), repr(args), notes), *itertools.chain(*map(members_of, members))]


def test_what_pickle_can_not_make_again_travels_in_a_group_too(strategy):
    """A program that catches it with `except` goes the same way on all ranks."""
    ranks = ranks_of(strategy)
    for culprit in culprits(strategy):
        step = raising(culprit, in_groups, after=1)
        error = raises_everywhere(BaseExceptionGroup, lambda step=step: strategy.run(step))
        assert type(error.args[1]) is tuple
        expected = members_of(in_groups(culprit))
        if strategy.rank != ranks[culprit]:
            expected[-1][2].append("(what can't be pickled is not here: handle)")
        assert members_of(error) == expected
        assert error.exceptions[2].exceptions[0].code == 3
        check_works(strategy)


def test_a_group_in_which_one_can_not_be_pickled_is_told_by_a_stand_in(strategy):
    ranks = ranks_of(strategy)
    for culprit in culprits(strategy):

        def make(i):
            group = ExceptionGroup("inner", [Altered("altered"), Unpicklable(f"text {i}")])
            return ExceptionGroup("text", [ValueError(i), group])

        check_stand_in(strategy, culprit, ranks[culprit], make, ExceptionGroup)


def test_what_can_not_be_pickled_is_told_by_a_stand_in(strategy):
    """Decision 16: the others get its type name, text and traceback."""
    ranks = ranks_of(strategy)
    for culprit in culprits(strategy):

        def make(i):
            return Unpicklable(f"text {i}")

        check_stand_in(strategy, culprit, ranks[culprit], make, Unpicklable)


def test_a_class_that_only_some_ranks_have_is_told_by_a_stand_in(strategy, monkeypatch):
    """Decision 16: where loading fails on any rank, all others raise the stand-in."""
    needs_two_ranks(strategy)
    ranks = ranks_of(strategy)
    for culprit in culprits(strategy):
        without = (ranks[culprit] + 1) % strategy.size
        module = types.ModuleType("plugin_of_some_ranks")
        exec("class PluginError(Exception): pass", vars(module))
        if strategy.rank == without:
            monkeypatch.delitem(sys.modules, module.__name__, raising=False)
        else:
            monkeypatch.setitem(sys.modules, module.__name__, module)
        kind = module.PluginError
        check_stand_in(strategy, culprit, ranks[culprit], lambda i, k=kind: k(f"text {i}"), kind)


def check_stand_in(strategy, culprit, rank, make, kind):
    error = error_of(lambda: strategy.run(raising(culprit, make, after=1)))
    if strategy.rank == rank:
        assert type(error) is kind
    else:
        assert type(error) is mr.errors.RemoteReplicaError
        for word in [kind.__name__, "text", named(culprit, rank), "Traceback", "raise make("]:
            assert word in str(error)
    texts = gathered((type(error).__name__, str(error)))
    texts.pop(rank)
    assert len(set(texts)) <= 1
    check_works(strategy)


@pytest.mark.parametrize("before", [0, 1])
def test_of_several_exceptions_the_lowest_replica_wins(strategy, before):
    """Decision 16. Replicas of a rank after the first that raises at its start never start."""

    def step(first):
        context = mr.get_replica_context()
        mine = context.replica_id_in_sync_group
        for _ in range(before):
            context.all_reduce("SUM", 1.0)
        if mine >= first:
            raise [ValueError, KeyError, IndexError][mine % 3](mine)
        context.all_reduce("SUM", 1.0)

    for first in culprits(strategy):
        kind = [ValueError, KeyError, IndexError][first % 3]
        error = raises_everywhere(kind, lambda first=first: strategy.run(step, (first,)))
        assert error.args == (first,)
        check_works(strategy)


@pytest.mark.parametrize(
    "wrong", [lambda: mr.PerReplica([1]), contains_itself], ids=["foreign", "cycle"]
)
def test_what_can_not_be_returned_is_the_mistake_of_its_replica(strategy, wrong):
    needs_two_replicas(strategy)
    last = strategy.num_replicas_in_sync - 1

    def step(raises):
        i = mr.get_replica_context().all_reduce("SUM", 0.0) + my_id()
        if i == 0 and raises:
            raise KeyError("of the first one")
        return wrong() if i == last else i

    assert "of the first one" in str(
        raises_everywhere(KeyError, lambda: strategy.run(step, args=(True,)))
    )
    error = raises_everywhere(ValueError, lambda: strategy.run(step, args=(False,)))
    assert named(last, ranks_of(strategy)[last]) in note_of(error)
    check_works(strategy)


@pytest.mark.parametrize("kind", [greenlet.GreenletExit, KeyboardInterrupt])
def test_what_ends_a_greenlet_elsewhere_is_an_exception_like_others(strategy, kind):
    for culprit in culprits(strategy):
        step = raising(culprit, lambda i: kind(f"of {i}"), before=1, after=1)
        error = raises_everywhere(kind, lambda step=step: strategy.run(step))
        assert str(error) == f"of {culprit}"
        check_works(strategy)


def test_a_replica_that_waits_gets_replica_stopped_at_its_call(strategy):
    """Decision 17, in every layout: finally blocks run, the cause is in __cause__."""
    needs_two_replicas(strategy)
    for culprit in culprits(strategy):
        stopped, cleaned = [], []

        def step(culprit=culprit, stopped=stopped, cleaned=cleaned):
            context = mr.get_replica_context()
            mine = context.replica_id_in_sync_group
            context.all_reduce("SUM", 1.0)
            if mine == culprit:
                raise ValueError(mine)
            try:
                context.all_reduce("SUM", 1.0)
            except Exception:
                pytest.fail("ReplicaStopped is no Exception")
            except mr.errors.ReplicaStopped as one:
                stopped.append(one.__cause__)
                raise
            finally:
                cleaned.append(mine)

        error = raises_everywhere(ValueError, lambda step=step: strategy.run(step))
        others = [i for i in strategy.local_replica_ids if i != culprit]
        assert cleaned == others
        assert stopped == [error] * len(others)
        check_works(strategy)


def test_replica_stopped_comes_again_at_every_further_collective(strategy):
    """Decision 17; swallowing it changes nothing (tf_semantics.md 49)."""
    needs_two_replicas(strategy)
    for culprit in culprits(strategy):
        seen = []

        def step(culprit=culprit, seen=seen):
            context = mr.get_replica_context()
            if context.replica_id_in_sync_group == culprit:
                raise ValueError("the cause")
            calls = [
                lambda: context.all_reduce("SUM", 1.0),
                lambda: context.all_gather(np.ones(1), 0),
                lambda: context.merge_call(lambda strategy: 1),
                lambda: context.all_reduce("SUM", object()),
            ]
            for call in calls:
                with pytest.raises(mr.errors.ReplicaStopped):
                    call()
                seen.append(context.replica_id_in_sync_group)
            return "as if nothing had happened"

        raises_everywhere(ValueError, lambda step=step: strategy.run(step))
        local = strategy.local_replica_ids
        started = [i for i in local if culprit not in local or i < culprit]
        assert sorted(seen) == sorted(started * 4)
        check_works(strategy)


def test_what_a_stopped_replica_raises_instead_is_not_the_cause(strategy):
    """Decision 17: run raises the cause."""
    needs_two_replicas(strategy)

    def step():
        context = mr.get_replica_context()
        context.all_reduce("SUM", 1.0)
        if context.replica_id_in_sync_group == context.num_replicas_in_sync - 1:
            raise ValueError("the cause")
        try:
            context.all_reduce("SUM", 1.0)
        except mr.errors.ReplicaStopped:
            raise KeyError("of cleaning up") from None

    raises_everywhere(ValueError, lambda: strategy.run(step))
    check_works(strategy)


def test_a_replica_that_swallows_it_100_times_is_abandoned_with_a_warning(strategy):
    """Decision 17."""
    needs_two_replicas(strategy)
    ranks = ranks_of(strategy)
    last = strategy.num_replicas_in_sync - 1
    swallowed = []

    def step():
        context = mr.get_replica_context()
        context.all_reduce("SUM", 1.0)
        if context.replica_id_in_sync_group == last:
            raise ValueError("the cause")
        while True:
            try:
                context.all_reduce("SUM", 1.0)
            except mr.errors.ReplicaStopped:
                swallowed.append(context.replica_id_in_sync_group)

    others = [i for i in strategy.local_replica_ids if i != last]
    if others:
        with pytest.warns(RuntimeWarning, match="abandoned") as warned:
            error = raises_everywhere(ValueError, lambda: strategy.run(step))
        text = " ".join(str(warning.message) for warning in warned)
        assert f"(rank {strategy.rank})" in text
        assert f"replica{'s' * (len(others) > 1)} {others[0]}" in text
    else:
        error = raises_everywhere(ValueError, lambda: strategy.run(step))
    assert error.args == ("the cause",)
    assert {i: swallowed.count(i) for i in others} == dict.fromkeys(others, 100)
    assert ranks[last] == strategy.size - 1
    check_works(strategy)


def test_a_replica_that_has_not_started_is_not_started(strategy):
    """Decision 17: those of the same rank; other ranks may have begun theirs."""
    for culprit in culprits(strategy):
        started = []

        def step(culprit=culprit, started=started):
            context = mr.get_replica_context()
            mine = context.replica_id_in_sync_group
            started.append(mine)
            if mine == culprit:
                raise ValueError(mine)
            context.all_reduce("SUM", 1.0)

        raises_everywhere(ValueError, lambda step=step: strategy.run(step))
        local = strategy.local_replica_ids
        expected = [i for i in local if i <= culprit] if culprit in local else list(local)
        assert started == expected
        check_works(strategy)


@pytest.mark.parametrize("kind", [ValueError, SystemExit, KeyboardInterrupt, Custom])
def test_what_merge_fn_raises_is_raised_by_run_on_every_rank(strategy, kind):
    """Decision 16, and replicas can't catch it (tf_semantics.md finding 12)."""
    seen = []

    def merge_fn(strategy, value):
        raise kind(3, 4)

    def step():
        context = mr.get_replica_context()
        try:
            context.merge_call(merge_fn, (1,))
        except BaseException as error:
            seen.append(type(error))
        return 1

    error = raises_everywhere(kind, lambda: strategy.run(step))
    assert error.args == (3, 4)
    assert seen == [mr.errors.ReplicaStopped] * len(strategy.local_replica_ids)
    assert f"test_failures.py:{merge_fn.__code__.co_firstlineno + 1}" in note_of(error)
    check_works(strategy)


@pytest.mark.parametrize(
    ("place", "name"), [(Agreement, "failed_stand"), (Run, "_deal_with"), (Run, "_tell")]
)
def test_ctrl_c_before_an_error_of_merge_fn_is_told_is_told_instead(
    strategy, monkeypatch, place, name
):
    """The others wait for this rank, in a call that it does not make."""
    for culprit in sorted({0, strategy.size - 1}):

        def merge_fn(strategy, culprit=culprit):
            if strategy.rank == culprit:
                interrupt_instead(monkeypatch, place, name)
                raise ValueError("here")
            strategy.barrier()

        def step(merge_fn=merge_fn):
            mr.get_replica_context().merge_call(merge_fn)

        raises_everywhere(KeyboardInterrupt, lambda step=step: strategy.run(step))
        check_works(strategy)


def test_ctrl_c_before_the_only_replica_of_a_rank_has_an_error_is_told(strategy, monkeypatch):
    """The others have caught theirs, and go on."""
    needs_two_ranks(strategy)
    alone = [rank for rank, ids in enumerate(gathered(strategy.local_replica_ids)) if len(ids) == 1]
    if not alone:
        pytest.skip("all ranks have several replicas")

    def step():
        context = mr.get_replica_context()
        if strategy.rank == alone[0]:
            interrupt_instead(monkeypatch, Seat, "_wait")
        with contextlib.suppress(mr.errors.StructureMismatchError):
            context.all_reduce("SUM", np.ones(1 + (my_id() == 0)))
        context.all_reduce("SUM", 1.0)

    raises_everywhere(KeyboardInterrupt, lambda: strategy.run(step))
    check_works(strategy)


def test_ctrl_c_behind_the_end_of_a_run_comes_up_there_alone_and_all_are_in_step(
    strategy, monkeypatch
):
    """As behind the call itself: the others have gone on, and nobody waits to be told."""
    for culprit in sorted({0, strategy.size - 1}):
        if strategy.rank == culprit:
            interrupt_instead(monkeypatch, run, "joined")
        error = error_of(lambda: strategy.run(my_id))
        assert type(error) is (KeyboardInterrupt if strategy.rank == culprit else type(None))
        check_works(strategy)


def run_that_fails(strategy, value):
    return strategy.run(raising(0, ValueError, after=1))


@pytest.mark.parametrize(
    "merge_fn",
    [
        lambda strategy, value: strategy.reduce("SUM", value, axis=None),
        lambda strategy, value: strategy.reduce("TOTAL", value, axis=None),
        lambda strategy, value: strategy.gather(value, axis=1),
        run_that_fails,
    ],
    ids=["unlike values", "wrong op", "wrong axis", "run"],
)
@pytest.mark.parametrize("length", [3, 40_000])
def test_what_a_collective_of_merge_fn_raises_is_raised_by_run_too(strategy, merge_fn, length):
    """Also where it has told all ranks: that it does depends on the layout, and on the size."""
    needs_two_replicas(strategy)
    seen = []

    def step():
        value = np.ones(length, np.int64 if my_id() else np.float32)
        try:
            mr.get_replica_context().merge_call(merge_fn, (value,))
        except BaseException as error:
            seen.append(type(error))

    raises_everywhere((TypeError, ValueError), lambda: strategy.run(step))
    assert seen == [mr.errors.ReplicaStopped] * len(strategy.local_replica_ids)
    check_works(strategy)


@pytest.mark.parametrize(
    ("kind", "call"),
    [
        (TypeError, lambda context: context.all_reduce("SUM", "text")),
        (TypeError, lambda context: context.all_reduce("SUM", True)),
        (TypeError, lambda context: context.all_reduce("SUM", None)),
        (ValueError, lambda context: context.all_reduce("TOTAL", 1.0)),
        (ValueError, lambda context: context.all_gather(1.0, axis=0)),
        (ValueError, lambda context: context.all_gather(np.ones(2), axis=1)),
        (TypeError, lambda context: context.all_gather(np.ones(2), axis=0.5)),
        (NotImplementedError, lambda context: context.all_gather(mr.IndexedSlices([1], [0]), 0)),
        (TypeError, lambda context: context.merge_call(None)),
        (ValueError, lambda context: context.merge_call(print, args=3)),
    ],
)
def test_a_call_that_fails_on_one_replica_fails_on_all_and_can_be_caught_there(
    strategy, kind, call
):
    """Section 6: what can fail does so before the header, and is told."""
    count = strategy.num_replicas_in_sync
    for culprit in culprits(strategy):
        caught = []

        def step(culprit=culprit, caught=caught):
            context = mr.get_replica_context()
            try:
                if context.replica_id_in_sync_group == culprit:
                    call(context)
                else:
                    context.all_reduce("SUM", 1.0)
            except kind as error:
                caught.append((type(error).__name__, str(error)))
            return context.all_reduce("SUM", 1)

        totals = strategy.experimental_local_results(strategy.run(step))
        assert set(totals) == {count}
        assert len(caught) == len(strategy.local_replica_ids)
        assert len({found for of_rank in gathered(caught) for found in of_rank}) == 1
        check_works(strategy)


@pytest.mark.parametrize("end", ["returns", "raises"])
def test_a_call_that_fails_is_raised_everywhere_where_another_replica_has_come_to_its_end(
    strategy, end
):
    """Also where that one shares its rank, which then has two things to tell."""
    needs_two_replicas(strategy)
    last = strategy.num_replicas_in_sync - 1
    for culprit, ends in [(0, last), (0, 1), (last, last - 1), (last, 0)]:
        if end == "raises" and ends < culprit:
            continue  # then it is what that one raises

        def step(culprit=culprit, ends=ends):
            if my_id() == ends:
                if end == "raises":
                    raise KeyError(ends)
                return None
            return mr.get_replica_context().all_reduce("TOTAL" if my_id() == culprit else "SUM", 1)

        error = raises_everywhere(ValueError, lambda step=step: strategy.run(step))
        assert "TOTAL" in str(error)
        assert named(culprit, ranks_of(strategy)[culprit]) in note_of(error)
        check_works(strategy)


@pytest.mark.parametrize(
    ("kind", "call"),
    [
        (ValueError, lambda s, ids: s.reduce("SUM", 1.0, axis=None)),
        (ValueError, lambda s, ids: s.reduce("TOTAL", ids, axis=None)),
        (ValueError, lambda s, ids: s.reduce("SUM", ids, axis=3)),
        (TypeError, lambda s, ids: s.reduce("SUM", ids, axis="rows")),
        (ValueError, lambda s, ids: s.gather(np.ones(2), axis=0)),
        (ValueError, lambda s, ids: s.gather(ids, axis=1)),
        (ValueError, lambda s, ids: s.run(print, args=None)),
        (ValueError, lambda s, ids: s.run(print, kwargs=[1])),
        (TypeError, lambda s, ids: s.run("no function")),
        (ValueError, lambda s, ids: s.run(print, (mr.PerReplica([1] * 20),))),
        (ValueError, lambda s, ids: s.extended.reduce_to("SUM", ids, destinations=99)),
        (TypeError, lambda s, ids: s.extended.reduce_to("SUM", ids, destinations="all")),
        (ValueError, lambda s, ids: s.extended.batch_reduce_to("SUM", [ids])),
        (ValueError, lambda s, ids: mr.Variable(1.0, synchronization="NONE")),
    ],
)
def test_a_call_of_the_strategy_that_fails_on_one_rank_fails_on_all(strategy, kind, call):
    """Decision 15: run, reduce, gather, reduce_to and making a variable are collective."""
    ids = strategy.run(lambda: np.array([mr.get_replica_context().replica_id_in_sync_group]))

    def attempt(culprit):
        with strategy.scope():
            if strategy.rank == culprit:
                return call(strategy, ids)
            return strategy.reduce("SUM", ids, axis=None)

    for culprit in sorted({0, strategy.size // 2, strategy.size - 1}):
        raises_everywhere(kind, lambda culprit=culprit: attempt(culprit))
        check_works(strategy)


def test_an_interrupt_while_a_header_is_in_flight_travels_in_the_next(strategy, monkeypatch):
    """Decision 16: the call in flight ends well on every rank."""
    transport = strategy.engine.transport
    count = strategy.num_replicas_in_sync
    agree = "exchange" if strategy.size <= 32 else "maximum"
    for culprit in sorted({0, strategy.size // 2, strategy.size - 1}):
        totals = []
        begin = getattr(transport, agree)

        def interrupted(*args, begin=begin):
            signal.raise_signal(signal.SIGINT)
            monkeypatch.undo()
            return begin(*args)

        def step(culprit=culprit, totals=totals, interrupted=interrupted):
            context = mr.get_replica_context()
            if strategy.rank == culprit:
                monkeypatch.setattr(transport, agree, interrupted)
            totals.append(context.all_reduce("SUM", 1.0))
            totals.append(context.all_reduce("SUM", 1.0))

        raises_everywhere(KeyboardInterrupt, lambda step=step: strategy.run(step))
        assert totals == [count] * len(strategy.local_replica_ids)
        check_works(strategy)


def test_what_interrupts_a_call_of_a_step_can_make_none(strategy, monkeypatch):
    """As a `__del__` in the middle of it, which would get what the call gets."""
    transport, errors = strategy.engine.transport, []
    exchange = transport.exchange

    def interrupted(context):
        def do(*args):
            monkeypatch.setattr(transport, "exchange", exchange)
            for call in (lambda: context.all_reduce("SUM", 1.0), strategy.barrier):
                errors.append(error_of(call))
            return exchange(*args)

        return do

    def step():
        context = mr.get_replica_context()
        mine = context.replica_id_in_sync_group
        monkeypatch.setattr(transport, "exchange", interrupted(context))
        return context.all_reduce("SUM", float(mine))

    totals = strategy.experimental_local_results(strategy.run(step))
    count = strategy.num_replicas_in_sync
    assert set(totals) == {count * (count - 1) / 2}
    assert [type(error).__name__ for error in errors] == ["ContextError"] * 2
    if len(strategy.local_replica_ids) == 1:
        assert "in the middle of all_reduce(SUM, float64[]) at test_failures.py:" in str(errors[0])
    check_works(strategy)


def test_an_error_that_a_step_raises_again_later_is_told_anew(strategy):
    """The same object, in another run, on one rank only."""
    needs_two_replicas(strategy)
    kept = []

    def first():
        context = mr.get_replica_context()
        try:
            context.all_reduce("SUM", np.ones(2 + context.replica_id_in_sync_group))
        except ValueError as error:
            kept.append(error)

    strategy.run(first)
    check_works(strategy)

    def second():
        context = mr.get_replica_context()
        if context.replica_id_in_sync_group == context.num_replicas_in_sync - 1:
            raise kept[0]
        context.all_reduce("SUM", 1.0)

    raises_everywhere(mr.errors.StructureMismatchError, lambda: strategy.run(second))
    check_works(strategy)


def test_an_error_of_a_call_that_was_made_for_another_one_is_told_once(strategy):
    """Told a second time it would be taken for the next call of the others."""
    needs_two_ranks(strategy)
    with strategy.scope():
        on_read = mr.VariableSynchronization.ON_READ
        v = mr.Variable(1.0, synchronization=on_read, aggregation=mr.VariableAggregation.SUM)

    class Total:
        def __getstate__(self):
            return float(v.value())  # on one rank alone

    def gives_an_object():
        strategy.extended.broadcast_to(Total())

    def makes_dataset():
        def dataset_fn(context):
            if context.input_pipeline_id == 0:
                strategy.barrier()
            return mr.data.Dataset.range(4).batch(1)

        strategy.distribute_datasets_from_function(dataset_fn)
        strategy.run(lambda: None)

    for call, kind in (
        (gives_an_object, ContextError),  # in the middle of the other one
        (makes_dataset, CollectiveMismatchError),
    ):
        raises_everywhere(kind, call)
        check_works(strategy)
        assert list(strategy.gather_objects(strategy.rank)) == ranks_of(strategy)


def test_an_error_of_a_call_that_a_step_makes_for_another_one_is_told_once(strategy):
    needs_two_replicas(strategy)

    def step():
        ctx = mr.get_replica_context()
        with pytest.raises(mr.errors.CollectiveMismatchError):
            mr.Variable(lambda: ctx.all_reduce("SUM", 1.0))  # called in one replica alone
        mine = ctx.replica_id_in_sync_group
        return [ctx.all_gather([np.array([10 * k + mine])], axis=0)[0].tolist() for k in range(3)]

    count = strategy.num_replicas_in_sync
    for found in strategy.experimental_local_results(strategy.run(step)):
        assert found == [[10 * k + i for i in range(count)] for k in range(3)]


class Failed:
    """Raises one and the same exception each time, as a Future does."""

    def __init__(self):
        self.error = OSError("disk")

    def __array__(self, *args, **kwargs):
        raise self.error


def test_an_exception_that_comes_again_at_another_call_is_told_again(strategy):
    last = strategy.num_replicas_in_sync - 1

    def step():
        ctx = mr.get_replica_context()
        bad, mine = Failed(), ctx.replica_id_in_sync_group
        values = {0: [1.0, 2.0, bad, bad], last: [bad, bad, 1.0, 2.0]}.get(mine, [1.0] * 4)
        found = []
        for value in values:
            try:
                found.append(float(ctx.all_reduce("SUM", value)))
            except OSError:
                found.append(-1.0)
        return found

    expected = [-1.0, -1.0, -1.0, -1.0] if last else [-1.0, -1.0, 1.0, 2.0]  # where it is both
    for _ in range(2):
        for found in strategy.experimental_local_results(strategy.run(step)):
            assert found == expected
    failed = Failed()

    def variable():
        with strategy.scope():
            mr.Variable(failed if strategy.rank == strategy.size - 1 else 1.0)

    for _ in range(3):
        raises_everywhere(OSError, variable)
    check_works(strategy)


class Problems(ValueError):
    """An exception that is false where it has no arguments."""

    def __len__(self):
        return len(self.args)


class Unreadable:
    def __array__(self, *args, **kwargs):
        raise Problems


def test_an_exception_that_is_false_is_told_as_others_are(strategy):
    for culprit in culprits(strategy):

        def step(culprit=culprit):
            ctx = mr.get_replica_context()
            is_it = ctx.replica_id_in_sync_group == culprit
            ctx.all_reduce("SUM", Unreadable() if is_it else 1.0)

        raises_everywhere(Problems, lambda step=step: strategy.run(step))
        check_works(strategy)


def test_a_run_inside_a_merge_fn_that_fails_ends_both_runs(strategy):
    def merge_fn(strategy, value):
        return strategy.run(raising(strategy.num_replicas_in_sync - 1, KeyError, after=1))

    def step():
        return mr.get_replica_context().merge_call(merge_fn, (1,))

    raises_everywhere(KeyError, lambda: strategy.run(step))
    check_works(strategy)


def test_a_failed_run_inside_a_merge_fn_can_be_caught_there(strategy):
    def merge_fn(strategy, value):
        try:
            strategy.run(raising(strategy.num_replicas_in_sync - 1, KeyError, after=1))
        except KeyError:
            return strategy.reduce("SUM", value, axis=None)

    def step():
        return mr.get_replica_context().merge_call(merge_fn, (1,))

    totals = strategy.experimental_local_results(strategy.run(step))
    assert set(totals) == {strategy.num_replicas_in_sync}
    check_works(strategy)


class WrongNotes(Exception):
    """Notes can't be added to what is no list."""

    __notes__ = 5


class NoNotes(Exception):
    def add_note(self, note):
        raise RuntimeError("no notes")


class NoAttributes(Exception):
    def __setattr__(self, name, value):
        raise AttributeError(name)


class NoText(Exception):
    def __str__(self):
        raise RuntimeError("no text")


class NoTextAtAll(NoText):
    def __repr__(self):
        raise SystemExit("no text at all")


class OwnNotes(NoText, WrongNotes):
    def __getattr__(self, name):
        raise RuntimeError(name)


class NoTraceback(Exception):
    def with_traceback(self, trace):
        raise RuntimeError("no traceback")


class NoDictionary(Exception):
    __dict__ = property(lambda self: 1 / 0)


@pytest.mark.parametrize("kind", [NoTraceback, NoDictionary])
def test_an_exception_of_a_merge_fn_may_refuse_what_others_allow(strategy, kind):
    class AtCall:
        def __array__(self, dtype=None, copy=None):
            raise kind("at a call")

    def fails(strategy):
        raise kind("in merge_fn")

    def step():
        context = mr.get_replica_context()
        with contextlib.suppress(Exception):  # on other ranks than its own it may be a stand-in
            context.all_reduce("SUM", AtCall() if my_id() == 0 else 1.0)
        context.merge_call(fails)

    assert type(error_of(lambda: strategy.run(step))) is kind
    check_works(strategy)


@pytest.mark.parametrize("replicas_per_rank", [1, 2])
@pytest.mark.parametrize(
    "kind",
    [WrongNotes, NoNotes, NoAttributes, NoText, NoTextAtAll, OwnNotes, NoTraceback, NoDictionary],
)
def test_an_exception_that_refuses_what_others_allow_is_an_error_on_every_rank(
    kind, replicas_per_rank
):
    """Whether it takes notes, or has a text: where it can't say where it is from, another does."""
    with mr.MPIStrategy(replicas_per_rank=replicas_per_rank) as strategy:
        ranks = ranks_of(strategy)
        line = raising.__code__.co_firstlineno + 8
        for culprit in culprits(strategy):
            step = raising(culprit, kind, before=1, after=1)
            error = error_of(lambda step=step: strategy.run(step))
            place = f"{named(culprit, ranks[culprit])} at test_failures.py:{line}"
            if strategy.rank == ranks[culprit]:
                assert type(error) is kind
            elif type(error) is kind:
                assert place in note_of(error)
            else:
                assert isinstance(error, mr.errors.RemoteReplicaError)
                assert f"{__name__}.{kind.__qualname__}: " in str(error)
                assert place in str(error)
            check_works(strategy)
