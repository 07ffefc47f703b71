"""How many messages a call takes, and of how many bytes: it does not grow with the replicas."""

import gc

import numpy as np
import pytest
from mpi4py import MPI

import mpi_replica as mr
from everywhere import cost_of, gathered
from mpi_replica.collectives.plan import Plan
from mpi_replica.ranks.transport import HEADER_BYTES

# What a rank of a large world sends to agree: a few words instead of a header.
WIDE_BYTES = 24


@pytest.fixture
def wide(monkeypatch):
    """Have strategies agree as those of large worlds do."""
    monkeypatch.setattr("mpi_replica.collectives.agreement.agreement._ALLGATHER_RANKS", 0)


def nothing(context):
    """Only the run itself."""


def all_reduce(op, make, **options):
    def call(context):
        mine = context.replica_id_in_sync_group
        context.all_reduce(op, make(mine), mr.CommunicationOptions(**options))

    return call


CALLS = {
    "run": nothing,
    "small": all_reduce("SUM", lambda i: {"w": np.full(5, i), "b": float(i)}),
    "small, in pieces": all_reduce("MEAN", lambda i: np.full(5, i), bytes_per_pack=16),
    "packs": all_reduce("MAX", lambda i: [np.full(n, i) for n in range(900, 950)]),
    "large": all_reduce("SUM", lambda i: np.full((400, 500), i, "f4")),
    "large, of several dtypes": all_reduce(
        "MEAN", lambda i: [np.full(200_000, i, dtype) for dtype in ("f4", "i4", "c8")]
    ),
    "large, least": all_reduce("MIN", lambda i: np.full(300_000, i, "f8")),
    "reproducible": all_reduce("SUM", lambda i: np.full(5, i), reproducible=True),
    "reproducible, in a message": all_reduce("SUM", lambda i: np.full(900, i), reproducible=True),
    "reproducible, large, by a window": all_reduce(
        "MEAN", lambda i: [np.full(300_000, i), np.full(9, i)], implementation="SHARED_MEMORY"
    ),
    "reproducible, large, by messages": all_reduce(
        "MEAN", lambda i: np.full(15_360, i), implementation="ALLTOALL"
    ),
}


IN_ONE_PIECE = "large", "large, of several dtypes"


def cost_of_call(strategy, call):
    """Steps and bytes of one run in which each replica makes the call."""
    return cost_of(strategy, lambda: strategy.run(lambda: call(mr.get_replica_context())))


@pytest.mark.parametrize("name", CALLS)
def test_a_call_costs_the_same_for_any_number_of_replicas_a_rank(name):
    costs = []
    for per_rank in (1, 2, 4, 8):
        with mr.MPIStrategy(replicas_per_rank=per_rank) as strategy:
            cost_of_call(strategy, CALLS[name])
            costs += [cost_of_call(strategy, CALLS[name]) for _ in range(2)]
    everywhere = gathered(costs)
    if "by messages" in name and len(everywhere) > 32:  # slices of whole cache lines are not alike
        everywhere = [[steps for steps, _ in of_rank] for of_rank in everywhere]
    assert everywhere == [everywhere[0]] * len(everywhere)
    (alone,), (more,) = set(costs[:2]), set(costs[2:])
    if name in IN_ONE_PIECE and MPI.COMM_WORLD.size > 1:  # where a rank has one replica
        assert alone[0] < more[0]
        assert alone[1] == more[1]
    else:
        assert alone == more


def sum_of(items, implementation="ALLREDUCE"):
    return all_reduce(
        "SUM",
        lambda i: np.full(items, float(i)),
        bytes_per_pack=1 << 19,
        implementation=implementation,
    )


@pytest.mark.usefixtures("small_world")
@pytest.mark.parametrize(
    ("items", "steps", "sent"), [(29, 0, 0), (30, 1, 240), (100_000, 2, 800_000)]
)
def test_agreement_sends_one_header_of_256_bytes_and_payloads_of_232_bytes_in_it(
    items, steps, sent
):
    assert HEADER_BYTES == 256
    with mr.MPIStrategy() as strategy:
        assert cost_of_call(strategy, CALLS["run"]) == (1, 256)
        has_others = strategy.size > 1
        moved = (has_others * steps, has_others * sent)
        assert cost_of_call(strategy, sum_of(items)) == (2 + moved[0], 2 * 256 + moved[1])


@pytest.mark.usefixtures("small_world")
@pytest.mark.parametrize("implementation", ["ALLREDUCE", "ALLTOALL"])
@pytest.mark.parametrize(
    ("items", "header_bytes"), [(30, 576), (128, 1088), (500, 4160), (4096, 32_832)]
)
def test_of_what_repeats_some_kilobytes_travel_in_a_header_that_is_as_large_as_it_must_be(
    items, header_bytes, implementation
):
    """Also where contributions are combined in order."""
    if header_bytes > 4160 and MPI.COMM_WORLD.size > 4:
        pytest.skip("the headers of all ranks together have 130 KiB at most")
    with mr.MPIStrategy() as strategy:
        kinds = [sum_of(items, implementation)] * 5 + [CALLS["run"]] * 2
        costs = [cost_of_call(strategy, call) for call in kinds]
    assert costs[2:5] == [(2, 256 + header_bytes)] * 3
    assert costs[5:] == [(1, header_bytes), (1, 256)]  # the first one was foreseen in vain


def prefixes():
    """Communicators of the first rank, the first two, and so on, with this rank in them."""
    world = MPI.COMM_WORLD
    for size in range(1, min(world.size, 32) + 1):
        inside = world.rank < size
        communicator = world.Split(0 if inside else MPI.UNDEFINED)
        if inside:
            yield communicator
            communicator.Free()


@pytest.mark.parametrize("name", ["run", "small"])
def test_agreement_costs_the_same_for_any_number_of_ranks(name):
    costs = set()
    for communicator in prefixes():
        with mr.MPIStrategy(communicator, replicas_per_rank=2) as strategy:
            costs.add(cost_of_call(strategy, CALLS[name]))
    assert len(set().union(*gathered(costs))) == 1


def test_agreement_costs_the_same_for_any_number_of_ranks_of_large_worlds(wide):
    costs = set()
    for communicator in prefixes():
        with mr.MPIStrategy(communicator, replicas_per_rank=2) as strategy:
            costs.add(cost_of_call(strategy, CALLS["run"]))
    assert set().union(*gathered(costs)) == {(1, WIDE_BYTES)}


SMALL = {
    "all_gather": lambda context: context.all_gather(np.ones(3), axis=0),
    "merge_call": lambda context: context.merge_call(lambda strategy, x: None, (1.5,)),
}


@pytest.mark.parametrize("name", SMALL)
def test_in_large_worlds_what_is_small_travels_in_one_message_behind_the_agreement(wide, name):
    with mr.MPIStrategy() as strategy:
        if strategy.size == 1 and name == "merge_call":
            assert cost_of_call(strategy, SMALL[name])[0] == 2  # it sends nothing
            return
        agreements, headers = 2, 1
        cost = agreements + headers, agreements * WIDE_BYTES + headers * HEADER_BYTES
        for _ in range(3):
            assert cost_of_call(strategy, SMALL[name]) == cost


def test_calls_of_ever_new_shapes_keep_what_is_known_of_so_many_leaves(strategy, monkeypatch):
    """Each would hold 300 bytes a leaf for ever, or what a program takes with 4096 calls."""
    monkeypatch.setattr("mpi_replica.core.bounded_cache._MOST_LEAVES", 1000)
    replicas = strategy.num_replicas_in_sync
    gc.collect()
    before = sum(type(one) is Plan for one in gc.get_objects())
    for length in range(1, 101):
        value = [np.ones(2)] * 99 + [np.ones(length)]
        results = strategy.run(lambda v=value: mr.get_replica_context().all_reduce("SUM", v))
        for result in strategy.experimental_local_results(results[-1]):
            np.testing.assert_array_equal(result, np.full(length, float(replicas)))
    gc.collect()
    after = sum(type(one) is Plan for one in gc.get_objects())
    # Ten calls of a hundred leaves, in each of two places, and the last few plans.
    assert max(gathered(after - before)) < 40
