"""ctx.rng and strategy.rng on several ranks: the same in every layout (see test_randomness.py)."""

import numpy as np
import pytest

import mpi_replica as mr
from everywhere import check_works, gathered, needs_two_ranks, raises_everywhere, steps_of

CONTEXT = mr.errors.ContextError


def make(strategy, **about):
    """Return a strategy of the same layout."""
    return mr.MPIStrategy(replicas_per_rank=len(strategy.local_replica_ids), **about)


def draw():
    rng = mr.get_replica_context().rng
    return [*rng.integers(1 << 62, size=2).tolist(), float(rng.standard_normal())]


def draws(strategy):
    """What the replicas of all ranks draw next, by id."""
    found = []
    strategy.run(lambda: found.append(draw()))
    return [numbers for of_rank in gathered(found) for numbers in of_rank]


def at_hand(seed, count, times=1):
    """What so many replicas draw on one rank, without the others."""
    from mpi4py import MPI

    with mr.MPIStrategy(MPI.COMM_SELF, num_replicas=count, seed=seed) as strategy:
        found = []
        for _ in range(times):
            found.clear()
            strategy.run(lambda: found.append(draw()))
    return found


def test_a_replica_draws_the_same_wherever_it_is(strategy):
    count = strategy.num_replicas_in_sync
    with make(strategy, seed=7) as seeded:
        for times in (1, 2, 3):
            found = draws(seeded)
            assert found == at_hand(7, count, times)
            assert len({str(numbers) for numbers in found}) == count


def test_a_replica_that_draws_more_than_the_others_draws_for_itself_alone(strategy):
    count = strategy.num_replicas_in_sync
    with make(strategy, seed=7) as seeded:

        def step():
            ctx = mr.get_replica_context()
            for _ in range(3 * ctx.replica_id_in_sync_group):
                ctx.rng.random()
            return ctx.all_reduce("SUM", 1)

        seeded.run(step)
        first = at_hand(7, count)
        found = draws(seeded)
        assert found[0] == at_hand(7, count, 1)[0]
        assert all(one != other for one, other in zip(found[1:], first[1:], strict=True))


@pytest.mark.parametrize("first", [True, False], ids=["first", "last"])
def test_a_run_that_fails_draws_nothing_whoever_shares_a_rank(strategy, first):
    """Some replicas of a rank have not begun when another one of it fails."""
    count = strategy.num_replicas_in_sync
    fails = 0 if first else count - 1
    with make(strategy, seed=5) as mine:

        def step():
            draw()
            if mr.get_replica_context().replica_id_in_sync_group == fails:
                raise KeyError("once")
            draw()

        draws(mine)
        for _ in range(2):
            error = raises_everywhere(KeyError, lambda: mine.run(step))
        assert "once" in str(error)
        assert draws(mine) == at_hand(5, count, times=2)


def test_a_run_that_fails_spawns_nothing_either(strategy):
    count = strategy.num_replicas_in_sync

    def spawn(fails=False):
        context = mr.get_replica_context()
        (child,) = context.rng.spawn(1)
        (above,) = context.merge_call(lambda strategy: strategy.rng.spawn(1))
        if fails and context.replica_id_in_sync_group == count - 1:
            raise KeyError("once")
        return child.random(), above.random()

    with make(strategy, seed=5) as mine, make(strategy, seed=5) as other:
        raises_everywhere(KeyError, lambda: mine.run(spawn, args=(True,)))
        found, wanted = (one.experimental_local_results(one.run(spawn)) for one in (mine, other))
        assert found == wanted


def test_all_ranks_draw_the_same_above_the_replicas(strategy):
    with make(strategy, seed=7) as seeded, make(strategy) as unseeded:
        for one in (seeded, unseeded):
            found = gathered(one.rng.integers(1 << 62, size=3).tolist())
            assert found == [found[0]] * one.size
        assert len({seeded.rng.random(), unseeded.rng.random()}) == 2


def test_without_a_seed_the_ranks_have_one_all_the_same_and_each_strategy_another(strategy):
    seen = []
    for _ in range(2):
        with make(strategy) as unseeded:
            seen += draws(unseeded)
            above = gathered(unseeded.rng.random())
            assert above == [above[0]] * unseeded.size
    assert len({str(numbers) for numbers in seen}) == 2 * strategy.num_replicas_in_sync


def test_a_reproducible_strategy_has_seed_0(reproducible):
    assert draws(reproducible) == at_hand(0, reproducible.num_replicas_in_sync)


def test_in_a_replica_the_generator_above_is_an_error_everywhere(strategy):
    last = strategy.num_replicas_in_sync - 1

    def step():
        ctx = mr.get_replica_context()
        return strategy.rng if ctx.replica_id_in_sync_group == last else ctx.all_reduce("SUM", 1)

    raises_everywhere(CONTEXT, lambda: strategy.run(step))
    check_works(strategy)


def test_the_generator_of_a_step_is_an_error_in_its_merge_fn(strategy):
    """That is called for the first replica of each rank."""

    def step():
        context = mr.get_replica_context()
        context.merge_call(lambda strategy: context.rng.random())

    with make(strategy, seed=7) as seeded:
        error = raises_everywhere(CONTEXT, lambda: seeded.run(step))
        assert "Use strategy.rng there" in str(error)
        assert draws(seeded) == at_hand(7, strategy.num_replicas_in_sync)


def test_functions_that_are_called_for_each_replica_of_a_rank_draw_nothing_above(strategy):
    with strategy.scope():
        v = mr.Variable(0.0, name="v", synchronization=mr.VariableSynchronization.ON_READ)
    above = strategy.rng  # also where it was asked for before
    for call, words in (
        (lambda: strategy.extended.update(v, lambda x: x.assign(above.random())), "updates v, "),
        (
            lambda: strategy.experimental_distribute_values_from_function(
                lambda context: strategy.rng.random()
            ),
            "the value_fn of ",
        ),
    ):
        error = raises_everywhere(CONTEXT, call)
        assert words in str(error)
        assert "draws from strategy.rng" in str(error)
        assert len(set(gathered(above.random()))) == 1

    def spawn(context):
        above.spawn(1)
        return 0

    raises_everywhere(CONTEXT, lambda: strategy.experimental_distribute_values_from_function(spawn))
    assert len(set(gathered(above.spawn(1)[0].random()))) == 1

    def draw_and_raise(context):
        if context.replica_id_in_sync_group == 0:
            above.random()
            raise KeyError("no such row")

    def call():
        strategy.experimental_distribute_values_from_function(draw_and_raise)
        strategy.barrier()  # where the others hear of it

    raises_everywhere(CONTEXT, call)
    assert len(set(gathered(above.random()))) == 1
    check_works(strategy)


def test_a_generator_from_above_that_a_step_holds_is_an_error_at_its_draw(strategy):
    """It would draw once for each replica of a rank."""
    above = strategy.rng
    last = strategy.num_replicas_in_sync - 1

    def step(draw):
        if mr.get_replica_context().replica_id_in_sync_group == last:
            draw()

    for draw in (above.normal, lambda: above.choice(3), lambda: above.spawn(1)):
        error = raises_everywhere(CONTEXT, lambda draw=draw: strategy.run(step, args=(draw,)))
        assert "strategy.rng was drawn from in a replica" in str(error)
        assert len(set(gathered(above.random()))) == 1
    check_works(strategy)


def test_a_merge_fn_that_holds_the_generator_draws_for_all_and_again_after_a_failure(strategy):
    count = strategy.num_replicas_in_sync
    with make(strategy, seed=5) as mine, make(strategy, seed=5) as other:
        above = mine.rng

        def step(fails):
            drawn = mr.get_replica_context().merge_call(lambda strategy: above.random())
            if fails and mr.get_replica_context().replica_id_in_sync_group == count - 1:
                raise KeyError("once")
            return drawn

        raises_everywhere(KeyError, lambda: mine.run(step, args=(True,)))
        found = mine.experimental_local_results(mine.run(step, args=(False,)))
        assert {float(drawn) for drawn in found} == {other.rng.random()}


ROW_MAKERS = {
    "map": lambda rows, f: rows.map(lambda x: x + f()).batch(8),
    "in threads": lambda rows, f: rows.map(lambda x: x + f(), num_parallel_calls=2).batch(8),
    "ahead": lambda rows, f: rows.map(lambda x: x + f()).batch(8).prefetch(2),
    "a batch": lambda rows, f: rows.batch(8).map(lambda x: x + f()),
    "unbatched": lambda rows, f: rows.batch(4).map(lambda x: x + f()).unbatch().batch(8),
    "stream": lambda rows, f: (
        rows.filter(lambda x: x > 1).map(lambda x: x + f()).batch(8).prefetch(2)
    ),
    "generator": lambda rows, f: mr.data.Dataset.from_generator(
        lambda: (x + f() for x in rows)
    ).batch(8),
}


@pytest.mark.parametrize("made", ROW_MAKERS)
def test_what_makes_rows_draws_the_same_on_all_ranks_or_is_an_error_on_all(strategy, made):
    """Ranks make the rows of their own replicas only, where they are reached by position."""
    rows = mr.data.Dataset.from_tensor_slices(np.arange(24.0))
    with make(strategy, seed=5) as mine, make(strategy, seed=5) as other:
        above = mine.rng
        dataset = ROW_MAKERS[made](rows, above.random)
        distributed = mine.experimental_distribute_dataset(dataset)
        if made in ("map", "in threads", "ahead"):
            error = raises_everywhere(CONTEXT, lambda: [mine.barrier() for _ in distributed])
            assert "strategy.rng was drawn from where rows are made" in str(error)
            assert above.random() == other.rng.random()
        else:
            found = [np.concatenate(parts) for parts in steps_of(mine, distributed)]
            wanted = list(ROW_MAKERS[made](rows, other.rng.random))  # as one process reads it
            np.testing.assert_array_equal(np.concatenate(found), np.concatenate(wanted))
        assert len(set(gathered(above.random()))) == 1


def test_the_pipeline_of_a_replica_draws_nothing_above(strategy):
    above = strategy.rng
    per_replica = mr.InputOptions(experimental_replication_mode=mr.InputReplicationMode.PER_REPLICA)

    def rows(context):
        return ([above.random(2)] for _ in range(3))

    distributed = strategy.distribute_datasets_from_function(rows, per_replica)
    error = raises_everywhere(CONTEXT, lambda: [strategy.barrier() for _ in distributed])
    assert "strategy.rng was drawn from where rows are made" in str(error)
    assert len(set(gathered(above.random()))) == 1


def test_what_numpy_raises_while_it_draws_is_raised_at_the_line_that_draws(strategy):
    """The innermost frame is of numpy's compiled module."""

    def step():
        return mr.get_replica_context().rng.choice(0, 3)

    line = step.__code__.co_firstlineno + 1
    error = raises_everywhere(ValueError, lambda: strategy.run(step))
    assert f"at test_random_numbers.py:{line}" in error.__notes__[-1].splitlines()[0]


@pytest.mark.parametrize(
    ("seed", "error", "words"),
    [
        (-1, ValueError, "seed must be at least 0, got -1"),
        (True, TypeError, "seed must be an integer, got True"),
        (2.0, TypeError, "seed must be an integer, got 2.0"),
        ("2", TypeError, "seed must be an integer, got '2'"),
    ],
)
def test_what_is_no_seed_on_one_rank_is_an_error_on_every_rank(strategy, seed, error, words):
    last = strategy.size - 1
    given = seed if strategy.rank == last else 2
    assert words in str(raises_everywhere(error, lambda: mr.MPIStrategy(seed=given)))
    check_works(strategy)


def test_seeds_that_differ_between_ranks_are_named_on_every_rank(strategy):
    needs_two_ranks(strategy)
    last = strategy.size - 1
    for one, other in ((1, 2), (1, None), (None, 0)):
        given = other if strategy.rank == last else one
        error = raises_everywhere(ValueError, lambda given=given: mr.MPIStrategy(seed=given))
        assert "seed differs between ranks" in str(error)
        assert f"rank {last}: {other!r}" in str(error)


# MPI_REPLICA_REPRODUCIBLE

VARIABLE = "MPI_REPLICA_REPRODUCIBLE"


@pytest.mark.parametrize("variable", [VARIABLE, "MPI_REPLICA_THREADS"])
def test_what_is_wrong_in_the_environment_of_one_rank_is_an_error_on_every_rank(
    strategy, variable, monkeypatch
):
    if strategy.rank == strategy.size - 1:
        monkeypatch.setenv(variable, "yes")
    error = raises_everywhere(ValueError, mr.MPIStrategy)
    assert f"{variable}='yes' is neither 1 nor 0" in str(error)
    check_works(strategy)


def test_ranks_whose_environments_differ_get_no_strategy(strategy, monkeypatch):
    needs_two_ranks(strategy)
    if strategy.rank == strategy.size - 1:
        monkeypatch.setenv(VARIABLE, "1")
    error = raises_everywhere(ValueError, mr.MPIStrategy)
    assert "communication_options differ between ranks" in str(error)
    options = mr.CommunicationOptions(reproducible=False)  # it wins
    mr.MPIStrategy(communication_options=options).close()
