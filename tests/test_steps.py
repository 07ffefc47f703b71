"""What every kind of call wants of the other ranks, in one process: see world.py."""

import contextlib
import functools
import tracemalloc

import numpy as np
import pytest

import mpi_replica as mr
from contributions import Leaf
from every_call import (
    CALLS,
    OPTIONS,
    SITE,
    Thing,
    Things,
    all_gather,
    all_reduce,
    assign_first,
    broadcast,
    commit,
    equal_everywhere,
    gather_objects,
    merge_call,
    next_step,
    saved_and_restored,
    verify,
)
from everywhere import error_of
from hard_numbers import numbers
from in_order import reduced_in_order
from mpi_replica.checkpoint.any_signal import AnySignal
from mpi_replica.collectives.agreement.steps import AllToAll, Barrier, OpenWindow, Reduce
from mpi_replica.collectives.barrier import BarrierCall
from mpi_replica.collectives.blobs import LARGE_BYTES
from mpi_replica.collectives.reduce import AllReduce
from mpi_replica.core import nest
from mpi_replica.strategy.elastic.snapshot import ReplicaPart
from world import Failed, World

LAYOUTS = [(1,), (2,), (1, 1), (2, 1), (1, 1, 1)]
EMPTY = np.empty


@pytest.mark.parametrize("counts", LAYOUTS)
@pytest.mark.parametrize("name", CALLS)
def test_a_call_gives_what_numpy_gives(name, counts):
    """Also once more: what a group keeps is there then."""
    world = World(counts)
    for _ in range(2):
        CALLS[name](world)


@pytest.mark.parametrize("name", CALLS)
def test_a_call_gives_what_numpy_gives_where_headers_travel_apart(name):
    CALLS[name](World((2, 1), carries_payload=False))


ORDERED = all_reduce("SUM", Leaf("f8", (300_000,)), reproducible=True)
ORDERED_MEAN = all_reduce("MEAN", Leaf("f4", (9, 2000)), Leaf("c8", (90_000,)), reproducible=True)


@pytest.mark.parametrize("has_shared_memory", [True, False])
def test_ordered_sums_go_by_a_window_where_there_is_one(has_shared_memory):
    world = World((2, 3), has_shared_memory=has_shared_memory)
    ORDERED(world)
    assert (Barrier in world.done) == has_shared_memory
    assert (AllToAll in world.done) != has_shared_memory


@pytest.mark.parametrize("layout", [(1, 1), (4, 3)])
def test_ordered_sums_of_two_ranks_go_straight_where_each_hosts_a_whole_subtree(layout):
    """The sum of two numbers is the same in either order, but MPI's of small integers is not."""
    world = World(layout)
    ORDERED(world)
    ORDERED_MEAN(world)
    assert Reduce in world.done
    assert not {Barrier, AllToAll, OpenWindow}.intersection(world.done)
    all_reduce("SUM", Leaf("i2", (90_000,)), reproducible=True)(world)
    assert AllToAll in world.done


def test_a_window_that_was_asked_for_and_can_not_be_had_is_an_error_on_all_ranks():
    world = World((1, 1), has_shared_memory=False)
    with pytest.raises(ValueError, match="there is none here"):
        all_reduce("SUM", Leaf("f8", (9,)), implementation="SHARED_MEMORY")(world)
    CALLS["all_reduce of a pack"](world)


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (verify(lambda i: np.full(9000, i)), mr.errors.DivergenceError),
        (verify(lambda i: i), mr.errors.DivergenceError),
        (verify(lambda i: [1.0, "one"][i % 2]), mr.errors.DivergenceError),
        (next_step(lambda rank: True, taken=int), mr.errors.CollectiveMismatchError),
        (next_step(lambda rank: True, text=str), mr.errors.StructureMismatchError),
        (next_step(lambda rank: True, ends=int), mr.errors.DivergenceError),
        (
            lambda world: world.perform(lambda layout: AnySignal(SITE, OPTIONS, layout.rank, 0)),
            mr.errors.CollectiveMismatchError,
        ),
    ],
)
def test_where_ranks_must_agree_and_do_not_all_of_them_raise_the_same(call, error):
    world = World((1, 1))
    with pytest.raises(error):
        call(world)
    CALLS["all_reduce of a pack"](world)


def test_a_value_that_differs_between_ranks_is_taken_back_at_the_next_header():
    world = World((1, 1))
    storages = equal_everywhere(world, check=False, value_of=float)
    assert [storage.any_array[0] for storage in storages] == [0.0, 1.0]
    with pytest.raises(Failed, match="the notes differ"):
        world.perform(lambda _: BarrierCall(SITE, OPTIONS, "barrier"))
    assert [storage.any_array[0] for storage in storages] == [0.0, 0.0]


def check_failed(failed, error, rank):
    """Check that `error` came up on this rank, and did not end the strategy."""
    if not isinstance(failed, Failed) or failed.where == "over":
        raise failed
    assert failed.rank == rank
    found = failed.error
    assert error in (type(found), type(found.__cause__), type(found.__context__))


class NoMemory:
    """Stands for np.empty, which fails at its n-th call on one rank, and counts them."""

    def __init__(self, world, rank, fails_at=0):
        self.world, self.rank, self.fails_at = world, rank, fails_at
        self.calls = 0

    def empty(self, *args, **kwargs):
        if self.world.running == self.rank:
            self.calls += 1
            if self.calls == self.fails_at:
                raise MemoryError
        return EMPTY(*args, **kwargs)


@pytest.mark.parametrize("counts", [(1, 1), (2, 1)])
@pytest.mark.parametrize("name", CALLS)
def test_memory_that_a_rank_lacks_is_an_error_on_all_ranks_or_its_own(name, counts, monkeypatch):
    """Never one that ends the strategy; and then the call can be made again."""
    call = CALLS[name]
    for rank in range(len(counts)):
        for fails_at in range(1, 200):
            world = World(counts)
            lack = NoMemory(world, rank, fails_at)
            with monkeypatch.context() as patch:
                patch.setattr(np, "empty", lack.empty)
                failed = error_of(functools.partial(call, world))
            if failed is not None:
                check_failed(failed, MemoryError, rank)
                call(world)
            if lack.calls < fails_at:
                break
        else:
            pytest.fail("there is no end of it")


def test_a_reserve_is_given_up_for_what_is_needed_behind_a_header():
    """What is laid by is free when the memory is asked for again."""
    group = World((1, 1)).groups[0]
    held = []

    def allocate():
        held.append(tracemalloc.get_traced_memory()[0])
        if len(held) == 1:
            raise MemoryError
        return "made"

    tracemalloc.start()
    try:
        group.lay_by_reserve(1 << 20)
        assert group.with_reserve(allocate) == "made"
    finally:
        tracemalloc.stop()
    assert held[0] - held[1] > 1 << 19


@pytest.mark.parametrize("name", CALLS)
def test_between_two_steps_no_more_memory_is_taken_than_is_laid_by(name):
    world = World((2, 1))
    taken = []

    @contextlib.contextmanager
    def measured():
        before, _ = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        yield
        if world.where == "over":
            taken.append(tracemalloc.get_traced_memory()[1] - before)

    world.around = measured
    tracemalloc.start()
    try:
        CALLS[name](world)
    finally:
        tracemalloc.stop()
    assert max(taken) < LARGE_BYTES


class Broken(Exception):
    """Raised by an object of the program."""


class Fragile(Thing):
    """An object whose functions fail at their n-th call on one rank."""

    world, rank, fails_at, error = None, None, 0, None
    calls = 0

    @classmethod
    def use(cls):
        if cls.world is not None and cls.world.running == cls.rank:
            cls.calls += 1
            if cls.calls == cls.fails_at:
                raise cls.error

    def __reduce__(self):
        self.use()
        return Fragile.load, (self.number,)

    @staticmethod
    def load(number):
        Fragile.use()
        return Fragile(number)

    def __array__(self, dtype=None, copy=None):
        self.use()
        return super().__array__()

    def state_dict(self):
        self.use()
        return super().state_dict()

    def load_state_dict(self, state):
        self.use()
        super().load_state_dict(state)


FRAGILE = {
    "all_reduce": all_reduce("SUM", Things(Fragile, ()), Leaf("f8", (9000,))),
    "all_gather": all_gather(0, Things(Fragile, ()), Leaf("f8", (9000,))),
    "broadcast": broadcast(Fragile),
    "broadcast of much": broadcast(lambda i: [Fragile(i), bytes(2 << 20)]),
    "assign": assign_first("assign", np.zeros(3), Fragile),
    "merge_call": merge_call(Fragile),
    "gather_objects": gather_objects(Fragile),
    "verify": verify(lambda _: Fragile(3)),
    "next": next_step(lambda rank: rank == 0, nothing=[Fragile(1)]),
    "save and restore": functools.partial(saved_and_restored, make=Fragile),
    "commit": commit(lambda i: ReplicaPart({"x": Fragile(i)}, {})),
}


@pytest.mark.parametrize("error", [Broken, StopIteration])
@pytest.mark.parametrize("counts", [(2,), (1, 1), (2, 1)])
@pytest.mark.parametrize("name", FRAGILE)
def test_an_error_of_an_object_is_one_on_all_ranks_or_its_own(name, counts, error, monkeypatch):
    """Never one that ends the strategy; and then the call can be made again."""
    call = FRAGILE[name]
    for rank in range(len(counts)):
        for fails_at in range(1, 200):
            world = World(counts)
            about = {"world": world, "rank": rank, "fails_at": fails_at, "error": error, "calls": 0}
            for attribute, value in about.items():
                monkeypatch.setattr(Fragile, attribute, value)
            failed = error_of(functools.partial(call, world))
            if failed is not None:
                check_failed(failed, error, rank)
                assert call(world) is None  # it fails once
            if Fragile.calls < fails_at:
                break
        else:
            pytest.fail("there is no end of it")


# Their sums depend on the order, and on every rounding.
ADDED, MULTIPLIED = (6e4, 0, -6e4, 1e-4), (300, 300, 1e-4, 1.1)
NARROW = [
    (dtype, op, length)
    for dtype in ("float16", "bfloat16")
    for op in ("SUM", "MEAN", "PROD")
    for length in (1, 4, 5000, 300_000)
]


def check_same_bits(op, leaves, out=False, **options):
    """Check that the replicas, each with its leaf, get the same bits wherever they are."""
    structure, options = nest.flatten(None)[1], mr.CommunicationOptions(**options)

    def one(replica):
        into = np.empty_like(leaves[replica]) if out else None
        given = [[leaves[replica]]]
        return AllReduce(SITE, options, "all_reduce", op, given, structure, into)

    found = set()
    for counts in [(4,), (2, 2), (1, 1, 1, 1), (3, 1), (1, 2, 1)]:
        answers = World(counts).perform(lambda layout: [one(i) for i in layout.local_replica_ids])
        found |= {np.asarray(result).tobytes() for of_rank in answers for result in of_rank}
    assert found == {reduced_in_order(op, leaves).tobytes()}


@pytest.mark.parametrize("out", [False, True])
@pytest.mark.parametrize(("dtype", "op", "length"), [*NARROW, ("float16", "SUM", 3_000_000)])
def test_sums_of_narrow_floats_have_the_same_bits_in_every_layout(dtype, op, length, out):
    given = MULTIPLIED if op == "PROD" else ADDED
    check_same_bits(op, [np.resize(np.array([x], dtype), length) for x in given], out)


@pytest.mark.parametrize("options", [{"reproducible": True}, {"implementation": "ALLTOALL"}])
@pytest.mark.parametrize("length", [1, 25, 700, 9000, 200_000])
@pytest.mark.parametrize("op", ["SUM", "MEAN", "PROD"])
@pytest.mark.parametrize("dtype", ["f4", "f8", "c16", "float16"])
def test_ordered_sums_have_the_same_bits_in_every_layout(dtype, op, length, options):
    check_same_bits(op, [numbers(dtype, (length,), 0, i) for i in range(4)], **options)
