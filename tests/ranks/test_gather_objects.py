"""strategy.gather_objects: the objects of all replicas, on every rank."""

import collections
import dataclasses
import decimal
import fractions
import threading

import numpy as np
import pytest

import mpi_replica as mr
from everywhere import (
    check_works,
    cost_of,
    culprits,
    error_of,
    needs_two_ranks,
    raises_everywhere,
    ranks_of,
)


def replica_id():
    return mr.get_replica_context().replica_id_in_sync_group


def of_replicas(strategy, make):
    """A PerReplica of `make(replica_id)`."""
    return strategy.experimental_distribute_values_from_function(
        lambda context: make(context.replica_id_in_sync_group)
    )


@dataclasses.dataclass
class Found:
    place: complex
    steps: list


MAKERS = {
    "numbers": lambda i: i,
    "texts": lambda i: "ü𝄞" * i,
    "None on some": lambda i: None if i % 2 else i,
    "bytes": lambda i: bytes(100 * i),
    "of other types": lambda i: (i, str(i), {i}, fractions.Fraction(i, 7), range(i))[i % 5],
    "dataclasses": lambda i: Found(i * 1j, [[str(i)]] * i),
    "classes": lambda i: (Found, mr.PerReplica, np.ndarray)[i % 3],
    "NaN": lambda i: f"{float('nan')} {np.float16(i)!r} {decimal.Decimal('NaN')}",
}


@pytest.mark.parametrize("name", MAKERS)
def test_each_rank_gets_the_objects_of_all_replicas_in_their_order(strategy, name):
    make = MAKERS[name]
    found = strategy.gather_objects(of_replicas(strategy, make))
    assert found == tuple(make(i) for i in range(strategy.num_replicas_in_sync))


def test_records_that_came_can_be_written_into(strategy):
    # numpy loses it in one that pickle makes (numpy 2.5)
    dtype = np.dtype([("a", int), ("b", object)])
    found = strategy.gather_objects(of_replicas(strategy, lambda i: [np.zeros(1, dtype)[0]]))
    for i, (record,) in enumerate(found):
        record["a"] = i
        record["b"] = "x"
    assert [record.item() for (record,) in found] == [
        (i, "x") for i in range(strategy.num_replicas_in_sync)
    ]


def test_a_nest_of_what_run_returned_gives_a_nest_for_each_replica(strategy):
    value = strategy.run(lambda: {"loss": replica_id() / 2, "of": [f"{replica_id()}", None]})
    assert strategy.gather_objects(value) == tuple(
        {"loss": i / 2, "of": [f"{i}", None]} for i in range(strategy.num_replicas_in_sync)
    )


def test_what_is_no_value_per_replica_stands_for_each_replica_of_its_rank(strategy):
    ranks = ranks_of(strategy)
    mine = collections.OrderedDict(z=strategy.rank, a=[0] * strategy.rank)
    found = strategy.gather_objects(mine)
    assert found == tuple(collections.OrderedDict(z=rank, a=[0] * rank) for rank in ranks)
    assert [list(each) for each in found] == [["z", "a"]] * len(ranks)
    value = {"id": strategy.run(replica_id), "rank": strategy.rank, "same": mr.Mirrored(5)}
    assert strategy.gather_objects(value) == tuple(
        {"id": i, "rank": rank, "same": 5} for i, rank in enumerate(ranks)
    )
    of_ranks = dict(strategy.gather_objects((strategy.rank, f"from {strategy.rank}")))
    assert of_ranks == {rank: f"from {rank}" for rank in range(strategy.size)}


def test_arrays_of_any_shape_dtype_and_order_come_as_they_are(strategy):
    def make(i):
        return [
            np.asfortranarray(np.arange(6.0).reshape(2, 3) * i),
            np.full((i, 0, 2), i, np.float16),
            np.array(i, "M8[s]"),
            np.array([f"{i}", None, {i}], object),
            np.full(300_000 * (i % 2), i, ">i4"),
            np.ma.masked_equal(np.arange(3), i),
        ]

    value = of_replicas(strategy, lambda i: tuple(make(i)))
    for i, found in enumerate(strategy.gather_objects(value)):
        for array, expected in zip(found, make(i), strict=True):
            np.testing.assert_array_equal(array, expected)
            assert (type(array), array.dtype) == (type(expected), expected.dtype)
        assert found[0].flags.f_contiguous
        found[0][:] = -1  # nobody else's


def test_what_comes_is_the_same_on_all_ranks_and_nobodys_own(strategy):
    """Also on the rank that gave it: what pickle leaves away is away everywhere."""
    mine = Forgetful()
    mine.kept, mine.secret = [strategy.rank], "told"
    found = strategy.gather_objects(mine)
    assert [each.kept for each in found] == [[rank] for rank in ranks_of(strategy)]
    assert not any(hasattr(each, "secret") for each in found)
    for each in found:
        each.kept.append("changed")
    assert mine.kept == [strategy.rank]


class Forgetful:
    """Keeps a secret to itself."""

    def __getstate__(self):
        return {"kept": self.kept}


@pytest.mark.usefixtures("small_world")
def test_it_costs_two_headers_and_a_message_for_what_does_not_fit_into_one(strategy):
    needs_two_ranks(strategy)
    for size, messages in ((1, 0), (1000, 1), (3 << 20, 2)):
        value = bytes(size)
        steps, sent = cost_of(strategy, lambda value=value: strategy.gather_objects(value))
        assert steps == 2 + messages
        assert size * len(strategy.local_replica_ids) < sent < 2000 + size * 8


def test_it_stands_in_a_merge_fn(strategy):
    seen = []

    def merge(strategy, name, rows):
        found = strategy.gather_objects({"name": name, "rank": strategy.rank, "rows": rows})
        seen.extend((each["name"], each["rank"], each["rows"].sum()) for each in found)

    def step():
        i = replica_id()
        mr.get_replica_context().merge_call(merge, (f"replica {i}", np.full(20_000, float(i))))

    strategy.run(step)
    ranks = ranks_of(strategy)
    assert seen == [(f"replica {i}", rank, 20_000.0 * i) for i, rank in enumerate(ranks)]


def test_one_process_alone_gets_its_own():
    assert mr.get_strategy().gather_objects({"a": [1]}) == ({"a": [1]},)


# What can't travel


class Unpicklable:
    """Raises when it is pickled."""

    def __reduce__(self):
        raise ValueError("no way into a pickle")


class Unloadable:
    """Can be pickled, but not loaded: on no rank, or on all but one."""

    loads_on = ()

    def __reduce__(self):
        return load_on, (self.loads_on,)


def load_on(ranks):
    from mpi4py import MPI

    if MPI.COMM_WORLD.rank not in ranks:
        raise LookupError("no way back")
    return Unloadable()


@pytest.mark.parametrize("make", [Unpicklable, threading.Lock, lambda: lambda: 1])
def test_what_can_not_be_pickled_is_told_with_the_replica_on_all_ranks(strategy, make):
    for culprit in culprits(strategy):
        value = of_replicas(strategy, lambda i, c=culprit: {"of": make() if i == c else i})
        error = raises_everywhere(TypeError, lambda value=value: strategy.gather_objects(value))
        assert f"replica {culprit} (rank {ranks_of(strategy)[culprit]})" in str(error)
        assert "pickle" in str(error)
    check_works(strategy)


@pytest.mark.parametrize("size", [0, 1000, 2 << 20])
def test_what_can_not_be_loaded_is_told_on_all_ranks(strategy, size):
    for culprit in culprits(strategy):
        value = of_replicas(
            strategy, lambda i, c=culprit: (Unloadable() if i == c else i, bytes(size))
        )
        error = raises_everywhere(TypeError, lambda value=value: strategy.gather_objects(value))
        assert f"replica {culprit} (rank {ranks_of(strategy)[culprit]})" in str(error)
        assert "LookupError: no way back" in str(error)
    check_works(strategy)


def test_what_one_rank_alone_can_not_load_is_told_on_all_ranks(strategy, monkeypatch):
    needs_two_ranks(strategy)
    for deaf in range(strategy.size):
        others = tuple(rank for rank in range(strategy.size) if rank != deaf)
        monkeypatch.setattr(Unloadable, "loads_on", others)
        error = raises_everywhere(TypeError, lambda: strategy.gather_objects(Unloadable()))
        assert f"on rank {deaf}" in str(error)
        check_works(strategy)


class Halting:
    """Ends the program where it is loaded on the last rank."""

    ends = True

    def __reduce__(self):
        return halt_on_last_rank, ()


def halt_on_last_rank():
    from mpi4py import MPI

    if Halting.ends and MPI.COMM_WORLD.rank == MPI.COMM_WORLD.size - 1:
        raise SystemExit("no way on")


def test_what_ends_the_program_of_one_rank_as_it_is_loaded_comes_up_on_all(strategy, monkeypatch):
    """And each may catch it, and make the same call again."""
    errors = []
    for ends in (True, False):
        monkeypatch.setattr(Halting, "ends", ends)
        errors.append(error_of(lambda: strategy.gather_objects(Halting())))
    assert [repr(error) for error in errors] == ["SystemExit('no way on')", "None"]
    check_works(strategy)


def test_a_value_of_another_strategy_is_an_error_everywhere(strategy):
    count = strategy.num_replicas_in_sync
    bad = mr.PerReplica(["x"] * (count + 1))
    value = bad if strategy.rank == strategy.size - 1 else "x"
    for given in (value, [value]):
        error = raises_everywhere(ValueError, lambda given=given: strategy.gather_objects(given))
        assert f"a PerReplica of {count + 1} replicas" in str(error)
    check_works(strategy)


def test_a_variable_is_an_error_that_says_to_read_it(strategy):
    with strategy.scope():
        v = mr.Variable(1.0)
    error = raises_everywhere(TypeError, lambda: strategy.gather_objects({"v": v}))
    assert "Read its value" in str(error)
    assert strategy.gather_objects({"v": v.numpy()})[-1] == {"v": 1.0}


def test_in_a_replica_it_says_merge_call(strategy):
    error = raises_everywhere(
        mr.errors.ContextError, lambda: strategy.run(lambda: strategy.gather_objects(1))
    )
    assert "merge_call" in str(error)
    check_works(strategy)


def test_ranks_at_different_calls_are_told(strategy):
    needs_two_ranks(strategy)

    def apart():
        strategy.gather_objects(1) if strategy.rank == 0 else strategy.barrier()

    error = raises_everywhere(mr.errors.CollectiveMismatchError, apart)
    assert "gather_objects" in str(error)
    check_works(strategy)


@pytest.mark.parametrize(
    "bad", [3, "x", None, {"a": 1}, object(), np.float64(2), np.array([None]), ["x"]]
)
def test_gather_of_what_is_no_array_names_it(strategy, bad):
    for value in (bad, of_replicas(strategy, lambda i: (bad,))):
        error = raises_everywhere(
            (TypeError, ValueError), lambda value=value: strategy.gather(value, axis=0)
        )
        assert "strategy.gather_objects" in str(error)
    check_works(strategy)
