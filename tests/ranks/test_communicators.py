"""Making strategies on ranks: communicators and numbers of replicas (decision 21, section 3)."""

import functools
import gc
import threading

import greenlet
import numpy as np
import pytest

import mpi_replica as mr
from everywhere import check_works, gathered, raises_everywhere
from mpi_replica.core.layout import Layout
from mpi_replica.replicas.worker import Worker


class Awkward:
    """No number, and its error can't be pickled."""

    def __index__(self):
        raise Unpicklable("no number")


class Unpicklable(ValueError):
    def __init__(self, text):
        super().__init__(text, lambda: None)


class Seconds(float):
    """Can't be pickled."""

    __reduce_ex__ = None


def skip_alone(world):
    if world.size == 1:
        pytest.skip("one rank can't form two groups")


def check_new_strategy_works():
    with mr.MPIStrategy() as strategy:
        check_works(strategy)


def check_on(strategy):
    """Check numbers on the ranks of one strategy; others may be elsewhere."""
    count = strategy.num_replicas_in_sync
    total = strategy.run(
        lambda: mr.get_replica_context().all_reduce(
            "SUM", np.full(3, mr.get_replica_context().replica_id_in_sync_group)
        )
    )
    for found in strategy.experimental_local_results(total):
        np.testing.assert_array_equal(found, np.full(3, count * (count - 1) // 2))


def test_comm_null_says_to_make_the_strategy_on_the_ranks_inside(world):
    from mpi4py import MPI

    is_inside = world.rank == 0
    part = world.Split(0 if is_inside else MPI.UNDEFINED)
    if is_inside:
        with mr.MPIStrategy(part) as strategy:
            check_on(strategy)
        part.Free()
    else:
        with pytest.raises(ValueError, match="COMM_NULL"):
            mr.MPIStrategy(part)
    with pytest.raises(ValueError, match="COMM_NULL"):
        mr.MPIStrategy(MPI.COMM_NULL)
    check_new_strategy_works()


def test_an_intercommunicator_says_to_merge_it(world):
    skip_alone(world)
    is_low = world.rank < (world.size + 1) // 2
    half = world.Split(is_low)
    between = half.Create_intercomm(0, world, (world.size + 1) // 2 if is_low else 0)
    with pytest.raises(ValueError, match=r"intercommunicator.*Merge"):
        mr.MPIStrategy(between)
    merged = between.Merge()
    with mr.MPIStrategy(merged) as strategy:
        check_works(strategy)
    for communicator in (merged, between, half):
        communicator.Free()


@pytest.mark.parametrize("communicator", [0, "world", object()])
def test_what_is_no_communicator_is_a_type_error(communicator):
    with pytest.raises(TypeError, match="communicator"):
        mr.MPIStrategy(communicator)
    check_new_strategy_works()


def test_fewer_replicas_than_ranks(world):
    error = raises_everywhere(ValueError, lambda: mr.MPIStrategy(num_replicas=world.size - 1))
    assert str(world.size - 1) in str(error)
    check_new_strategy_works()


@pytest.mark.parametrize(
    ("settings", "kind"),
    [
        ({"num_replicas": 0}, ValueError),
        ({"num_replicas": "many"}, TypeError),
        ({"num_replicas": 4.0}, TypeError),
        ({"replicas_per_rank": 0}, ValueError),
        ({"replicas_per_rank": True}, TypeError),
        ({"replicas_per_rank": 1 << 31}, ValueError),
        ({"num_replicas": 1 << 31}, ValueError),
        ({"replicas_per_rank": 1, "num_replicas": 8}, ValueError),
        ({"communication_options": {"name": "x"}}, TypeError),
        ({"replicas_per_rank": lambda: 1}, TypeError),
        ({"num_replicas": lambda: 8}, TypeError),
        ({"replicas_per_rank": np.True_}, TypeError),
        ({"replicas_per_rank": Awkward()}, ValueError),
        ({"replica_threads": np.ones(3)}, TypeError),
        ({"replica_threads": "no"}, TypeError),
    ],
)
def test_wrong_arguments_on_one_rank_are_an_error_on_all(world, settings, kind):
    for culprit in sorted({0, world.size // 2, world.size - 1}):
        given = settings if world.rank == culprit else {}
        error = raises_everywhere(kind, lambda given=given: mr.MPIStrategy(**given))
        if world.size > 1:
            assert f"rank {culprit}" in "\n".join(error.__notes__)
        check_new_strategy_works()


def test_a_limit_of_the_programs_own_class_is_compared_as_its_number(world):
    for seconds in (Seconds(1), 1 if world.rank else Seconds(1)):
        options = mr.CommunicationOptions(timeout_seconds=seconds)
        with mr.MPIStrategy(communication_options=options):
            check_new_strategy_works()
    if world.size > 1:
        options = mr.CommunicationOptions(timeout_seconds=Seconds(1 + world.rank % 2))
        make = functools.partial(mr.MPIStrategy, communication_options=options)
        error = raises_everywhere(ValueError, make)
        assert "communication_options differ between ranks" in str(error)
        check_new_strategy_works()


def test_integers_of_numpy_are_numbers_of_replicas(world):
    for given, number in (
        ({"replicas_per_rank": np.int64(1 + world.rank % 2)}, world.size + world.size // 2),
        (
            {"num_replicas": np.uint8(world.size + 3) if world.rank else 3 + world.size},
            world.size + 3,
        ),
    ):
        with mr.MPIStrategy(**given) as strategy:
            assert strategy.num_replicas_in_sync == number
            assert {type(i) for i in strategy.local_replica_ids} == {int}
            check_works(strategy)


def test_a_name_for_all_calls_is_refused():
    """Decision 13: it would replace every call site, and no swap of two calls would be seen."""
    options = mr.CommunicationOptions(name="x")
    error = raises_everywhere(ValueError, lambda: mr.MPIStrategy(communication_options=options))
    assert "to the call" in str(error)
    check_new_strategy_works()


def test_different_numbers_of_replicas_name_both_sides(world):
    skip_alone(world)
    for culprit in sorted({0, world.size // 2, world.size - 1}):
        number = 10 * world.size + (world.rank == culprit)
        error = raises_everywhere(
            ValueError, lambda number=number: mr.MPIStrategy(num_replicas=number)
        )
        for word in (
            f": {10 * world.size}",
            f"rank {culprit}: {10 * world.size + 1}",
            "num_replicas",
        ):
            assert word in str(error)
        check_new_strategy_works()


def test_a_number_on_some_ranks_only_is_told(world):
    skip_alone(world)
    given = {"num_replicas": 10} if world.rank == 0 else {"replicas_per_rank": 2}
    raises_everywhere(ValueError, lambda: mr.MPIStrategy(**given))
    check_new_strategy_works()


def test_different_python_versions_are_a_launch_error(world, monkeypatch):
    """Decision 21."""
    skip_alone(world)
    with monkeypatch.context() as patch:
        if world.rank == world.size - 1:
            patch.setattr("sys.version_info", (3, 99, 1, "final", 0))
        error = raises_everywhere(mr.errors.LaunchError, mr.MPIStrategy)
    assert "3.99.1" in str(error)
    check_new_strategy_works()


def test_the_number_of_replicas_is_computed_from_the_communicator(strategy):
    counts = [len(ids) for ids in gathered(strategy.local_replica_ids)]
    ids = [i for of_rank in gathered(strategy.local_replica_ids) for i in of_rank]
    assert ids == list(range(strategy.num_replicas_in_sync))
    assert len(counts) == strategy.size
    assert gathered(strategy.rank) == list(range(strategy.size))


def test_num_replicas_gives_blocks_that_differ_by_at_most_one(world):
    for number in (world.size, world.size + 1, 2 * world.size + 1):
        with mr.MPIStrategy(num_replicas=number) as strategy:
            counts = [len(ids) for ids in gathered(strategy.local_replica_ids)]
            assert sum(counts) == number
            assert max(counts) - min(counts) <= 1


def test_a_variable_gives_the_number_of_replicas(world, monkeypatch):
    monkeypatch.setenv("MPI_REPLICA_NUM_REPLICAS", str(2 * world.size + 1))
    with mr.MPIStrategy() as strategy:
        assert strategy.num_replicas_in_sync == 2 * world.size + 1
        check_works(strategy)


def test_strategies_on_overlapping_communicators_work_side_by_side(world):
    """Decision 21: each rank runs its strategies in the order that all of its partners do."""
    first = world.Split(world.rank // 2)
    second = world.Split((world.rank + 1) // 2)
    whole, pairs, shifted = mr.MPIStrategy(), mr.MPIStrategy(first), mr.MPIStrategy(second)
    for turn in range(4):
        check_on(whole)
        for one in (pairs, shifted) if turn % 2 else (shifted, pairs):
            check_on(one)
    for one in (pairs, whole, shifted):
        one.close()
    for communicator in (first, second):
        communicator.Free()


def test_an_error_in_one_strategy_is_none_in_another(world):
    skip_alone(world)
    part = world.Split(world.rank % 2)
    with mr.MPIStrategy() as whole, mr.MPIStrategy(part, replicas_per_rank=2) as halves:

        def fail():
            raise ValueError(mr.get_replica_context().replica_id_in_sync_group)

        if world.rank % 2:
            with pytest.raises(ValueError, match="0"):
                halves.run(fail)
        check_on(halves)
        check_works(whole)
    part.Free()


def test_two_strategies_on_one_communicator_do_not_meet(world):
    """Same calls, on one another's ranks in the same order."""
    with mr.MPIStrategy(world) as one, mr.MPIStrategy(world, replicas_per_rank=2) as other:
        for strategy in (one, other, other, one):
            check_on(strategy)
        assert one.communicator != other.communicator


def test_the_communicator_is_duplicated_and_never_used_itself(world):
    """Section 3: a receive that takes any message sees only the program's own."""
    from mpi4py import MPI

    own = world.Dup()
    buffer = np.zeros(1)
    pending = own.Irecv(buffer, MPI.ANY_SOURCE, MPI.ANY_TAG)
    with mr.MPIStrategy(own) as strategy:
        check_works(strategy)
        assert strategy.communicator != own
        assert not pending.Test()
    assert not pending.Test()
    world.Barrier()  # nobody sends before all have looked
    own.Send(np.full(1, 5.0), (world.rank + 1) % world.size)
    pending.Wait()
    assert buffer[0] == 5.0
    own.Free()


def test_close_is_collective_idempotent_and_final(strategy):
    strategy.close()
    strategy.close()
    for call in (lambda: strategy.run(lambda: 1), lambda: strategy.extended.broadcast_to(1.0)):
        raises_everywhere(mr.errors.ContextError, call)
    check_new_strategy_works()


def test_calls_that_send_nothing_are_refused_by_a_closed_strategy_as_others_are(strategy):
    """Which ones do so depends on the layout."""
    with strategy.scope():
        weight = mr.Variable(1.0)
        own = mr.Variable(
            2.0,
            synchronization=mr.VariableSynchronization.ON_READ,
            aggregation=mr.VariableAggregation.SUM,
        )
    values = strategy.run(lambda: np.ones(1))
    at_hand = mr.PerReplica([1.0] * strategy.num_replicas_in_sync)

    def read():
        with strategy.scope():  # outside one replica sees its own
            own.value()

    strategy.close()
    for call in (
        lambda: strategy.reduce("SUM", values, axis=None),
        lambda: strategy.reduce("SUM", at_hand, axis=None),
        lambda: strategy.reduce("MEAN", 3.0, axis=None),
        lambda: strategy.gather(values, axis=0),
        lambda: strategy.extended.reduce_to("SUM", values),
        read,
        lambda: strategy.extended.update(weight, lambda v: v.assign(3.0)),
        lambda: strategy.extended.update(own, lambda v: v.assign(3.0)),
    ):
        assert "closed" in str(raises_everywhere(mr.errors.ContextError, call))
    assert float(weight) == 1.0
    for part in strategy.experimental_local_results(own):
        assert part == 2.0
    check_new_strategy_works()


def test_a_with_block_closes_the_strategy():
    with mr.MPIStrategy() as strategy:
        check_works(strategy)
    raises_everywhere(mr.errors.ContextError, lambda: strategy.run(lambda: 1))


@pytest.mark.parametrize("threads", [False, True])
def test_strategies_that_are_closed_leave_nothing_behind(threads):
    """A program or a pytest session may make thousands."""

    def use_one():
        with mr.MPIStrategy(replicas_per_rank=2, replica_threads=threads) as strategy:
            check_works(strategy)
            with pytest.raises(ZeroDivisionError):
                strategy.run(lambda: 1 / 0)

    others = set(threading.enumerate())

    def count_objects():
        for _ in range(2):
            while gc.collect():  # what is found to be garbage lets go of what is found next
                pass
            for thread in set(threading.enumerate()) - others:
                thread.join(timeout=60)  # it was told to end
        kinds = (greenlet.greenlet, mr.MPIStrategy, Worker, Layout)
        return sum(isinstance(one, kinds) for one in gc.get_objects()) + threading.active_count()

    use_one()
    before, uses = count_objects(), 8
    for _ in range(uses):
        use_one()
    # What other tests or threads hold may come and go; what is left behind is one of each use.
    assert count_objects() - before < uses


def test_leaving_a_with_block_by_an_exception_is_local(world):
    """Section 8: the other ranks may be anywhere."""
    strategy = mr.MPIStrategy()
    check_works(strategy)
    with pytest.raises(KeyError), strategy:
        raise KeyError("on every rank, but that is not known")
    with pytest.raises(mr.errors.ContextError):
        strategy.run(lambda: 1)
    check_new_strategy_works()


def test_a_strategy_that_is_dropped_waits_for_nobody(world):
    """Section 8: from the garbage collector, closing is local."""
    strategies = [mr.MPIStrategy(), mr.MPIStrategy(replicas_per_rank=2)]
    if world.rank % 2:
        strategies.reverse()
    while strategies:
        strategies.pop()
        gc.collect()
    check_new_strategy_works()


def test_a_step_makes_no_strategy_with_other_ranks(strategy, world):
    """How often it would be made on a rank, depends on how many replicas that hosts."""
    skip_alone(world)
    error = raises_everywhere(mr.errors.ContextError, lambda: strategy.run(mr.MPIStrategy))
    assert "MPIStrategy was made in a replica of" in str(error)
    check_works(strategy)
    check_new_strategy_works()
