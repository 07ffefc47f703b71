"""What follows from where the replicas stand: a pure function (DESIGN.md section 6, 12, 16)."""

import dataclasses

import hypothesis
import hypothesis.strategies as st
import pytest

import mpi_replica as mr
from mpi_replica.collectives.agreement import travelling_error
from mpi_replica.collectives.agreement.judgement import judge, rank_left
from mpi_replica.collectives.agreement.site import CallSite
from mpi_replica.collectives.agreement.stand import (
    CallDescription,
    LeafDescription,
    Note,
    Report,
    Stand,
)
from mpi_replica.core.layout import Layout

LAYOUT = Layout((2, 2), 0)
VECTOR = LeafDescription("float32", (10,))


def site(line, column=0, *callers):
    lines = (f"train.py:{line}", *(f"train.py:{caller}" for caller in callers))
    columns = (column, *[0] * len(callers))
    return CallSite(repr((lines, columns)).encode(), lines, columns)


def all_reduce(detail="SUM", *, at=None, structure="*", paths=("",), leaves=(VECTOR,), name=None):
    at = site(41) if at is None else at
    return CallDescription("all_reduce", detail, at, name, structure, paths, leaves)


def all_gather(axis=0):
    return CallDescription("all_gather", f"axis={axis}", site(44))


def run_end(*kinds, structure="*", paths=("",)):
    leaves = tuple(LeafDescription(kind) for kind in kinds)
    call = CallDescription("run", "step at train.py:3", site(90), None, structure, paths, leaves)
    return call._replace(key_order="")


def calls(replica_id, call, run_ordinal=1):
    return Stand((replica_id,), "calls", call, None, run_ordinal)


def returned(replica_id, call=None):
    return Stand((replica_id,), "returned", call or run_end("none"), None, 1)


def raised(replica_id, error, rank, status="raised"):
    packed = travelling_error.pack(error, f"replica {replica_id} (rank {rank})")
    return Stand((replica_id,), status, run_end("none"), packed, 1)


def reports(*stands, notes=None, layout=LAYOUT):
    """Return the report of each rank."""
    of_rank = [[] for _ in layout.counts]
    for stand in stands:
        of_rank[layout.rank_of(stand.replica_ids[0])].append(stand)
    notes = notes or [()] * layout.size
    return [
        Report(tuple(mine), tuple(noted), 1) for mine, noted in zip(of_rank, notes, strict=True)
    ]


def verdict_of(*stands, **settings):
    """Return the verdict, which is the same whichever rank judges."""
    layout = settings.get("layout", LAYOUT)
    texts = {
        repr(judge(reports(*stands, **settings), dataclasses.replace(layout, rank=rank)))
        for rank in range(layout.size)
    }
    assert len(texts) == 1
    return judge(reports(*stands, **settings), layout)


def error_of(*stands, **settings):
    verdict = verdict_of(*stands, **settings)
    assert verdict.action == "raise"
    return verdict.error


def test_different_calls_name_replicas_ranks_calls_lines_and_what_to_do():
    error = error_of(*(calls(i, all_reduce()) for i in range(3)), calls(3, all_gather()))
    assert type(error) is mr.errors.CollectiveMismatchError
    assert str(error).startswith(
        "replicas are at different calls. replicas 0-2 (ranks 0-1): all_reduce(SUM, float32[10])"
        " at train.py:41; replica 3 (rank 1): all_gather(axis=0) at train.py:44."
    )
    assert str(error).endswith(
        "All replicas must make the same collective calls in the same order."
    )


@pytest.mark.parametrize(
    "other",
    [all_gather(), all_reduce("MEAN"), all_reduce(at=site(50))],
    ids=["kind", "op", "call site"],
)
def test_what_the_call_is_comes_before_the_structure(other):
    """Decision 12: kind, op, axis and call site first."""
    other = other._replace(structure="[*, *]", paths=("[0]", "[1]"), leaves=(VECTOR, VECTOR))
    error = error_of(*(calls(i, all_reduce()) for i in range(3)), calls(3, other))
    assert type(error) is mr.errors.CollectiveMismatchError


def test_the_structure_comes_before_shapes_and_dtypes():
    other = all_reduce(
        structure="{'b': *}", paths=("['b']",), leaves=(LeafDescription("int8", (3,)),)
    )
    one = all_reduce(structure="{'a': *}", paths=("['a']",))
    error = error_of(calls(0, one), *(calls(i, other) for i in range(1, 4)))
    assert type(error) is mr.errors.StructureMismatchError
    assert "['a']" in str(error)
    assert "['b']" in str(error)
    assert "replica 0 (rank 0)" in str(error)
    assert "replicas 1-3 (ranks 0-1)" in str(error)


def test_containers_that_differ_with_equal_paths_are_shown():
    one = all_reduce(structure="(*,)", paths=("[0]",))
    other = all_reduce(structure="[*]", paths=("[0]",))
    error = error_of(*(calls(i, one) for i in range(3)), calls(3, other))
    assert type(error) is mr.errors.StructureMismatchError
    assert "(*,) on replicas 0-2 (ranks 0-1)" in str(error)
    assert "[*] on replica 3 (rank 1)" in str(error)


def test_a_leaf_that_only_one_side_has_names_both_sides():
    one = all_reduce(structure="[*]", paths=("[0]",))
    other = all_reduce(structure="[*, *]", paths=("[0]", "[1]"), leaves=(VECTOR, VECTOR))
    text = str(error_of(*(calls(i, one) for i in range(3)), calls(3, other)))
    assert "replicas 0-2 (ranks 0-1)" in text
    assert "replica 3 (rank 1): '[1]'" in text


@pytest.mark.parametrize(
    ("leaf", "words"),
    [
        (LeafDescription("float32", (11,)), ["shapes", "float32[10]", "float32[11]"]),
        (LeafDescription("float32", (10, 1)), ["shapes", "float32[10, 1]"]),
        (LeafDescription("float64", (10,)), ["dtypes", "float64[10]"]),
    ],
)
def test_the_first_leaf_that_differs_is_named_by_its_path(leaf, words):
    paths = ("['a']", "['b'][1]")
    one = all_reduce(structure="S", paths=paths, leaves=(VECTOR, VECTOR))
    other = all_reduce(structure="S", paths=paths, leaves=(VECTOR, leaf))
    error = error_of(*(calls(i, one) for i in range(3)), calls(3, other))
    assert type(error) is mr.errors.StructureMismatchError
    for word in ["value['b'][1]", "train.py:41", "replica 3 (rank 1)", *words]:
        assert word in str(error)


def test_of_many_sides_the_first_are_shown_and_how_many_follow():
    """A row more on each replica of a large job is one mistake, and no page for each of them."""
    layout = Layout((100,) * 10, 0)
    shapes = [all_reduce(leaves=(LeafDescription("float32", (i,)),)) for i in range(1000)]
    text = str(error_of(*(calls(i, call) for i, call in enumerate(shapes)), layout=layout))
    assert "float32[7] on replica 7 (rank 0); 992 more. Make the leaf" in text
    ways = [all_reduce(at=site(100 + i)) for i in range(1000)]
    text = str(error_of(*(calls(i, call) for i, call in enumerate(ways)), layout=layout))
    assert text.count("train.py:") < 20
    assert "; 992 more. " in text


def test_the_same_line_reached_in_two_ways_is_told_with_the_whole_chain():
    one, other = all_reduce(at=site(41, 4, 60)), all_reduce(at=site(41, 4, 61))
    text = str(error_of(calls(0, one), *(calls(i, other) for i in range(1, 4))))
    assert "train.py:41 called at train.py:60" in text
    assert "train.py:41 called at train.py:61" in text
    assert "column" not in text


def test_one_line_reached_from_two_places_of_another_is_told_by_the_columns_of_that():
    sites = [CallSite(bytes([c]), ("net.py:4", "train.py:60"), (7, c)) for c in (20, 48)]
    one, other = (all_reduce(at=at) for at in sites)
    text = str(error_of(calls(0, one), *(calls(i, other) for i in range(1, 4))))
    assert "net.py:4 called at train.py:60 (column 20)" in text
    assert "net.py:4 called at train.py:60 (column 48)" in text
    assert "code" not in text


def test_two_calls_on_one_line_are_told_by_their_columns():
    one, other = all_reduce(at=site(41, 4)), all_reduce(at=site(41, 30))
    text = str(error_of(calls(0, one), *(calls(i, other) for i in range(1, 4))))
    assert "(column 4)" in text
    assert "(column 30)" in text


def test_two_functions_on_one_line_are_told_apart():
    """Decision 18."""
    one, other = run_end("value")._replace(code="3f"), run_end("value")._replace(code="a0")
    assert one.fingerprint() != other.fingerprint()
    text = str(error_of(returned(0, one), *(returned(i, other) for i in range(1, 4))))
    assert "replica 0 (rank 0)" in text
    assert "(code 3f)" in text
    assert "(code a0)" in text


def test_equal_names_make_two_lines_one_call():
    """Decision 13: what differs then is the leaf."""
    one = all_reduce(name="x")
    other = all_reduce(name="x", at=site(50), leaves=(LeafDescription("float32", (11,)),))
    error = error_of(calls(0, one), *(calls(i, other) for i in range(1, 4)))
    assert type(error) is mr.errors.StructureMismatchError


def test_what_differs_on_two_lines_of_one_name_is_told_with_both_lines():
    """The mistake is on either of them."""
    other_leaf = all_reduce(name="x", at=site(50), leaves=(LeafDescription("float32", (11,)),))
    other_nest = all_reduce(name="x", at=site(50), structure="[*]", paths=("[0]",))
    for other in (other_leaf, other_nest):
        text = str(error_of(calls(0, all_reduce(name="x")), *(calls(i, other) for i in (1, 2, 3))))
        assert "train.py:41" in text
        assert "train.py:50" in text


def test_different_names_are_different_calls():
    one, other = all_reduce(name="x"), all_reduce(name="y")
    text = str(error_of(calls(0, one), *(calls(i, other) for i in range(1, 4))))
    assert "'x'" in text
    assert "'y'" in text


@pytest.mark.parametrize("name", [None, "x"])
def test_names_are_the_advice_for_calls_that_differ_in_their_line_alone(name):
    lines = [all_reduce(name=name), all_reduce(at=site(50), name="y" if name else None)]
    text = str(error_of(calls(0, lines[0]), *(calls(i, lines[1]) for i in range(1, 4))))
    assert "give both options=mr.CommunicationOptions(name='x') (here: train.py:41" in text
    for other in (all_reduce("MEAN", at=site(50), name=name), all_gather()):
        text = str(error_of(calls(0, lines[0]), *(calls(i, other) for i in range(1, 4))))
        assert text.endswith("the same collective calls in the same order.")


@pytest.mark.parametrize("other", ["y", None])
def test_one_line_with_several_names_is_not_told_to_be_two_lines(other):
    one, two = all_reduce(name="x"), all_reduce(name=other)
    text = str(error_of(calls(0, one), *(calls(i, two) for i in range(1, 4))))
    assert "Where this line is one call, give it the same name on all replicas" in text
    assert "two lines" not in text


def test_a_python_int_and_a_python_float_become_float64():
    """Decision 5."""
    number = LeafDescription("int64", (), "int"), LeafDescription("float64", (), "float")
    ints = all_reduce(structure="S", paths=("[0]", "[1]"), leaves=(VECTOR, number[0]))
    floats = all_reduce(structure="S", paths=("[0]", "[1]"), leaves=(VECTOR, number[1]))
    verdict = verdict_of(calls(0, floats), *(calls(i, ints) for i in range(1, 4)))
    assert verdict.action == "promote"
    assert verdict.change == (1,)


def test_python_ints_of_different_dtypes_differ_since_float64_would_lose_digits():
    small = all_reduce(leaves=(LeafDescription("int64", (), "int"),))
    large = all_reduce(leaves=(LeafDescription("uint64", (), "int"),))
    verdict = verdict_of(calls(0, large), *(calls(i, small) for i in range(1, 4)))
    assert isinstance(verdict.error, mr.errors.StructureMismatchError)


def test_a_numpy_int_and_a_python_float_differ():
    ints = all_reduce(leaves=(LeafDescription("int64", ()),))
    floats = all_reduce(leaves=(LeafDescription("float64", (), "float"),))
    error = error_of(calls(0, floats), *(calls(i, ints) for i in range(1, 4)))
    assert type(error) is mr.errors.StructureMismatchError


def test_a_replica_that_returned_while_others_call():
    error = error_of(*(calls(i, all_reduce()) for i in range(3)), returned(3))
    assert type(error) is mr.errors.CollectiveMismatchError
    assert "replica 3 (rank 1) has returned" in str(error)
    assert "step at train.py:3" in str(error)
    assert "replicas 0-2 (ranks 0-1): all_reduce(SUM, float32[10]) at train.py:41" in str(error)


def test_replicas_that_return_while_others_wait_end_the_run():
    verdict = verdict_of(*(calls(i, all_reduce()) for i in range(3)), returned(3))
    assert verdict.doomed_run == 1


def test_a_disagreement_where_all_are_at_calls_does_not_end_the_run():
    verdict = verdict_of(*(calls(i, all_reduce()) for i in range(3)), calls(3, all_gather()))
    assert verdict.doomed_run is None


def test_calls_in_different_runs_end_the_earlier_one_too():
    """Decision 15: a rank may have begun another run."""
    verdict = verdict_of(*(calls(i, all_reduce(), 5 + i // 2) for i in range(4)))
    assert verdict.doomed_run == 5


def test_of_several_errors_the_lowest_replica_wins():
    """Decision 16."""
    stands = [raised(i, ValueError(i), i // 2) for i in (3, 1, 2)]
    verdict = verdict_of(calls(0, all_reduce()), *stands)
    assert verdict.traveller.text == "1"
    assert (verdict.origin_replica, verdict.origin_rank) == (1, 0)
    assert verdict.doomed_run == 1


def test_of_several_errors_one_before_the_run_goes_first():
    """On one rank nobody would have begun the run: so it is with input that fails."""
    of_input = raised(2, OSError("bad sector"), 1)._replace(run_ordinal=0, status="failed")
    verdict = verdict_of(raised(0, ValueError("in the step"), 0), calls(1, all_reduce()), of_input)
    assert verdict.traveller.text == "bad sector"
    assert verdict.remarks == ("also: replica 0 (rank 0) raised ValueError: in the step",)


def test_an_error_without_a_text_is_told_by_its_name():
    stands = raised(2, KeyError(), 1), raised(3, MemoryError(), 1)
    verdict = verdict_of(calls(0, all_reduce()), *stands)
    assert verdict.remarks == ("also: replica 3 (rank 1) raised MemoryError",)
    assert str(travelling_error.stand_in(verdict.traveller)).startswith("KeyError. It was raised")


def test_an_error_goes_before_a_disagreement():
    verdict = verdict_of(
        calls(0, all_reduce()), calls(1, all_gather()), returned(2), raised(3, KeyError("x"), 1)
    )
    assert verdict.traveller.type_name == "KeyError"


def test_an_error_inside_a_call_can_be_caught_there():
    stands = [calls(i, all_reduce()) for i in range(3)]
    verdict = verdict_of(*stands, raised(3, TypeError("no numbers"), 1, "failed"))
    assert verdict.traveller.text == "no numbers"
    assert verdict.doomed_run is None


def test_none_here_and_a_value_there_is_no_disagreement():
    """Decision 2."""
    settings = {"structure": "(*, *)", "paths": ("[0]", "[1]")}
    nothing = run_end("none", "none", **settings)
    something = run_end("none", "value", **settings)
    verdict = verdict_of(returned(0, nothing), *(returned(i, something) for i in range(1, 4)))
    assert verdict.action == "promote"
    assert verdict.change == ("", "none", "value")


@pytest.mark.parametrize(
    ("orders", "found"), [(["[1, 0]"] * 4, "[1, 0]"), (["[1, 0]", "", "[1, 0]", ""], "")]
)
def test_keys_that_replicas_return_in_several_orders_are_sorted(orders, found):
    settings = {"structure": "{'a': *, 'b': *}", "paths": ("['a']", "['b']")}
    ends = [
        run_end("value", "none" if i == 1 else "value", **settings)._replace(key_order=order)
        for i, order in enumerate(orders)
    ]
    verdict = verdict_of(*(returned(i, end) for i, end in enumerate(ends)))
    assert (verdict.action, verdict.change) == ("promote", (found, "value", "value"))


def test_returned_nests_that_differ():
    one, other = run_end("value"), run_end("value", structure="[*]", paths=("[0]",))
    error = error_of(returned(0, one), *(returned(i, other) for i in range(1, 4)))
    assert type(error) is mr.errors.StructureMismatchError


def test_functions_given_to_run_that_differ():
    one, other = run_end("value"), run_end("value")._replace(detail="other at train.py:7")
    error = error_of(returned(0, one), *(returned(i, other) for i in range(1, 4)))
    assert type(error) is mr.errors.CollectiveMismatchError
    assert "step at train.py:3" in str(error)
    assert "other at train.py:7" in str(error)


def test_ranks_whose_program_has_ended_are_named_and_those_that_stay():
    error = rank_left({1: ""}, LAYOUT)
    assert type(error) is mr.errors.RankLostError
    assert "ended on replicas 2-3 (rank 1), while replicas 0-1 (rank 0) still" in str(error)
    assert "All ranks must make the same collective calls" in str(error)


def test_why_the_program_has_ended_on_a_rank_is_told():
    error = rank_left({1: "OSError: no space left"}, LAYOUT)
    assert "replicas 2-3 (rank 1) ended with OSError: no space left." in str(error)


def note(digest, what="v.assign", error="ValueError", line=7):
    return Note(what, site(line), digest, "Use aggregation=MEAN.", error)


@pytest.mark.parametrize(
    ("error", "kind"),
    [("ValueError", ValueError), ("CollectiveMismatchError", mr.errors.CollectiveMismatchError)],
)
def test_values_that_should_have_been_the_same_say_what_to_do(error, kind):
    """Decisions 18 and 20."""
    notes = [(note(1), note(2, error=error)), (note(1), note(3, error=error))]
    found = error_of(*(calls(i, all_reduce()) for i in range(4)), notes=notes)
    assert isinstance(found, kind)
    for word in ["v.assign", "train.py:7", "replicas 0-1 (rank 0)", "replicas 2-3 (rank 1)"]:
        assert word in str(found)
    assert str(found).endswith("Use aggregation=MEAN.")


@pytest.mark.parametrize("other", [(), (note(1, what="w.assign"),), (note(1), note(1))])
def test_ranks_that_noted_different_things_were_at_different_calls(other):
    found = error_of(*(calls(i, all_reduce()) for i in range(4)), notes=[(note(1),), other])
    assert type(found) is mr.errors.CollectiveMismatchError
    assert "v.assign at train.py:7" in str(found)


def test_fingerprints_that_differ_for_one_description_are_an_error():
    error = error_of(*(calls(i, all_reduce()) for i in range(4)))
    assert type(error) is mr.errors.CollectiveMismatchError


SOME_CALLS = [
    all_reduce(),
    all_reduce("MEAN"),
    all_gather(),
    all_gather(1),
    all_reduce(at=site(50)),
    all_reduce(name="x"),
    all_reduce(structure="[*]", paths=("[0]",)),
    all_reduce(leaves=(LeafDescription("float64", (10,)),)),
]


@st.composite
def worlds(draw):
    layout = Layout(tuple(draw(st.lists(st.integers(1, 3), min_size=1, max_size=4))), 0)
    stands = []
    for i in range(layout.num_replicas):
        status = draw(st.sampled_from(["calls", "calls", "calls", "returned", "raised"]))
        if status == "calls":
            stands.append(calls(i, draw(st.sampled_from(SOME_CALLS)), draw(st.integers(1, 2))))
        elif status == "returned":
            stands.append(returned(i))
        else:
            stands.append(raised(i, ValueError(i), layout.rank_of(i)))
    return layout, stands


@hypothesis.given(worlds())
def test_all_ranks_come_to_the_same_text_and_never_fail_to_judge(world):
    layout, stands = world
    verdict = verdict_of(*stands, layout=layout)
    failed = [stand for stand in stands if stand.status == "raised"]
    if failed:
        assert verdict.origin_replica == failed[0].replica_ids[0]
    elif any(stand.status == "calls" for stand in stands):
        assert isinstance(verdict.error, mr.errors.MPIReplicaError)
