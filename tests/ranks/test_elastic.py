"""run_elastic where no rank is lost: with any MPI library, and ranks that wait."""

import logging

import numpy as np
import pytest

import mpi_replica as mr
from everywhere import (
    check_works,
    error_of,
    gathered,
    needs_two_ranks,
    raises_everywhere,
    steps_of,
)
from mistakes_of_ranks import yields
from mpi_replica.errors import CollectiveMismatchError, ContextError, RankLostError
from mpi_replica.strategy.elastic.recovery import HeldCommit, gather_state
from mpi_replica.strategy.elastic.snapshot import take

ON_READ = mr.VariableSynchronization.ON_READ
SUM = mr.VariableAggregation.SUM


def total():
    return mr.get_replica_context().all_reduce("SUM", 1.0)


def make_state(strategy):
    with strategy.scope():
        weights = mr.Variable(np.zeros(3))
        seen = mr.Variable(0.0, synchronization=ON_READ, aggregation=SUM)
    own = strategy.experimental_distribute_values_from_function(
        lambda context: np.full(context.replica_id_in_sync_group, 1.0)
    )
    return mr.ElasticState(strategy, step=0, weights=weights, seen=seen, own=own)


def step(weights, seen):
    context = mr.get_replica_context()
    seen.assign_add(context.replica_id_in_sync_group + 1.0)
    weights.assign_add(np.full(3, context.all_reduce("SUM", context.replica_id_in_sync_group)))


def trainer(strategy, state, steps=3):
    def train():
        while state.step < steps:
            strategy.run(step, args=(state.weights, state.seen))
            state.step += 1
            state.commit()
        return {"steps": state.step}

    return train


def check_trained(strategy, state, steps=3):
    R = strategy.num_replicas_in_sync
    np.testing.assert_array_equal(state.weights, [steps * R * (R - 1) / 2] * 3)
    assert float(state.seen) == steps * R * (R + 1) / 2


# Without fault tolerance


def test_train_is_called_once_and_its_result_returned(strategy, caplog):
    state, calls = make_state(strategy), []
    train = trainer(strategy, state)

    def counted():
        calls.append(None)
        return train()

    assert strategy.run_elastic(counted, state) == {"steps": 3}
    assert len(calls) == 1
    check_trained(strategy, state)
    assert strategy.losses == ()
    check_works(strategy)


def test_rank_0_warns_once_that_a_lost_rank_ends_the_job(strategy, caplog):
    with caplog.at_level(logging.WARNING, "mpi_replica"):
        strategy.run_elastic(lambda: None, mr.ElasticState(strategy))
    told = gathered([record.getMessage() for record in caplog.records])
    if strategy.size == 1 or strategy.engine.transport.is_fault_tolerant:
        assert told == [[]] * strategy.size
        return
    assert [len(texts) for texts in told] == [1] + [0] * (strategy.size - 1)
    assert "a lost rank ends this job" in told[0][0]
    assert "python -m mpi_replica run --elastic" in told[0][0]


def test_a_commit_takes_one_exchange_of_headers_and_only_that_where_a_loss_ends_the_job(strategy):
    transport = strategy.engine.transport
    is_guarded = transport.is_fault_tolerant  # then copies are passed on, and it is agreed
    state = make_state(strategy)

    def train():
        before = transport.steps
        state.commit()
        return transport.steps - before

    assert strategy.run_elastic(train, state) == (3 if is_guarded else 1)


@pytest.mark.parametrize("step", [np.zeros(2), np.full((), np.nan), [1, 2], "third", None])
def test_a_step_that_is_no_number_is_one_object_as_the_others(strategy, step):
    with strategy.scope():
        same = mr.Variable(step) if isinstance(step, np.ndarray) else step
    for of_state in (step, same):
        state = mr.ElasticState(strategy, step=of_state)
        assert strategy.run_elastic(state.commit, state) is None


def test_no_call_is_made_for_the_number_of_a_step(strategy):
    """It would be one between the commit of this rank and those of others."""
    transport = strategy.engine.transport
    counts = []
    for name in ("other", "step"):
        state = mr.ElasticState(strategy, **{name: make_state(strategy).seen})
        before = transport.steps
        strategy.run_elastic(state.commit, state)
        counts.append(transport.steps - before)
    assert counts[0] == counts[1]


class Unindexed(dict):
    def __index__(self):
        raise RuntimeError("no number")


def test_a_step_whose_number_is_an_error_is_one_object_as_the_others(strategy):
    state = mr.ElasticState(strategy, step=Unindexed(a=1))
    assert strategy.run_elastic(state.commit, state) is None


@pytest.mark.parametrize("knows", [True, False])
def test_a_replica_is_known_to_have_had_nothing_where_one_rank_has_heard_so(strategy, knows):
    """Nobody hosted the last one: its rank is lost."""
    engine = strategy.engine
    number = engine.layout.num_replicas
    snapshot = take(strategy, {})
    own = {i: part for i, part in snapshot.own.items() if i < number - 1}
    empty = frozenset({number - 1}) if knows and strategy.rank == 0 else None
    commit = HeldCommit(0, snapshot.shared, own, dict, empty, 0)
    made, known = engine.num_made, {}
    found = gather_state(
        engine.transport, engine.layout, commit, call=1, num_made=made, known=known
    )
    assert list(found.lost) == ([] if knows else [number - 1])


# Mistakes


def test_a_commit_outside_of_run_elastic_is_a_context_error(strategy):
    state = make_state(strategy)
    for _ in range(2):
        error = raises_everywhere(ContextError, state.commit)
        assert "run_elastic(train, state)" in str(error)
        strategy.run_elastic(trainer(strategy, state), state)
    check_works(strategy)


def test_a_commit_in_a_replica_is_a_context_error(strategy):
    state = make_state(strategy)

    def train():
        strategy.run(state.commit)

    error = raises_everywhere(ContextError, lambda: strategy.run_elastic(train, state))
    assert "ElasticState.commit" in str(error)
    check_works(strategy)


def test_run_elastic_in_a_replica_is_a_context_error(strategy):
    state = make_state(strategy)

    def inside():
        strategy.run_elastic(lambda: None, state)

    error = raises_everywhere(ContextError, lambda: strategy.run(inside))
    assert "run_elastic" in str(error)
    check_works(strategy)


@pytest.mark.parametrize("other", [False, True], ids=["the same state", "another state"])
def test_run_elastic_inside_of_itself_is_a_context_error(strategy, other):
    state = make_state(strategy)
    inner = make_state(strategy) if other else state

    def train():
        state.commit()
        strategy.run_elastic(trainer(strategy, inner), inner)

    error = raises_everywhere(ContextError, lambda: strategy.run_elastic(train, state))
    assert "inside of itself" in str(error)
    strategy.run_elastic(trainer(strategy, state), state)
    check_works(strategy)


@pytest.mark.parametrize("everywhere", [True, False], ids=["all ranks", "one rank"])
def test_wrong_arguments_are_a_type_error_on_every_rank(strategy, everywhere):
    state = make_state(strategy)
    is_wrong = everywhere or strategy.rank == strategy.size - 1
    for wrong, words in (
        ((None, state), "needs a callable, got None"),
        ((lambda: None, mr.Checkpoint(step=1)), "needs a mr.ElasticState, got <mr.Checkpoint"),
        ((yields, state), "run_elastic got yields at mistakes_of_ranks.py:"),
        ((lambda: None, {}), "needs a mr.ElasticState, got {}"),
    ):
        given = wrong if is_wrong else (lambda: None, state)
        error = raises_everywhere(TypeError, lambda given=given: strategy.run_elastic(*given))
        assert words in str(error)
    strategy.run_elastic(trainer(strategy, state), state)
    check_works(strategy)


def test_what_cannot_be_committed_is_an_error_on_every_rank(strategy):
    for culprit in {0, strategy.size - 1}:
        bad = object() if strategy.rank == culprit else 1
        state = mr.ElasticState(strategy, nest={"a": [bad]})
        call = lambda state=state: strategy.run_elastic(lambda: None, state)  # noqa: E731
        if strategy.engine.transport.is_fault_tolerant:
            error = raises_everywhere(TypeError, call)
            assert "state.nest['a'][0]" in str(error)
        check_works(strategy)


# Ranks that disagree


def test_another_call_than_a_commit_is_a_mismatch_on_every_rank(strategy):
    needs_two_ranks(strategy)
    state = make_state(strategy)

    def train():
        if strategy.rank == 0:
            state.commit()
        else:
            strategy.run(total)

    error = raises_everywhere(CollectiveMismatchError, lambda: strategy.run_elastic(train, state))
    assert "ElasticState.commit(step, weights, seen, own)" in str(error)
    assert "all_reduce(SUM" in str(error)
    check_works(strategy)


def test_states_of_other_names_are_a_mismatch(strategy):
    needs_two_ranks(strategy)
    state = mr.ElasticState(strategy, **{"a" if strategy.rank else "b": 1})
    raises_everywhere(CollectiveMismatchError, lambda: strategy.run_elastic(lambda: None, state))
    check_works(strategy)


def test_different_train_functions_are_a_mismatch_on_every_rank(strategy):
    needs_two_ranks(strategy)
    state = make_state(strategy)

    def one():
        pytest.fail("called")

    def another():
        pytest.fail("called")

    train = one if strategy.rank == 0 else another
    error = raises_everywhere(CollectiveMismatchError, lambda: strategy.run_elastic(train, state))
    assert ".one" in str(error)
    assert ".another" in str(error)
    check_works(strategy)


@pytest.mark.parametrize("first", [0, -1], ids=["the first rank", "the last rank"])
def test_a_rank_that_returns_early_is_a_mismatch_on_every_rank(strategy, first):
    needs_two_ranks(strategy)
    state = make_state(strategy)

    def train():
        strategy.run(total)
        if strategy.rank == first % strategy.size:
            return
        strategy.run(total)
        state.commit()

    error = raises_everywhere(CollectiveMismatchError, lambda: strategy.run_elastic(train, state))
    assert "run_elastic(end of " in str(error)
    assert strategy.run_elastic(trainer(strategy, state), state) == {"steps": 3}
    check_works(strategy)


@pytest.mark.parametrize("kind", [ValueError, KeyError, RankLostError])
def test_what_train_raises_is_raised(strategy, kind):
    """Also a RankLostError, where no rank was lost."""
    state = make_state(strategy)
    calls = []

    def train():
        calls.append(None)
        strategy.run(total)
        raise kind("of the program")

    raises_everywhere(kind, lambda: strategy.run_elastic(train, state))
    assert len(calls) == 1
    check_works(strategy)


def test_what_one_replica_raises_is_raised_on_every_rank(strategy):
    state = make_state(strategy)

    def step():
        context = mr.get_replica_context()
        if context.replica_id_in_sync_group == context.num_replicas_in_sync - 1:
            raise OSError("no rows")
        return context.all_reduce("SUM", 1.0)

    def train():
        strategy.run(step)

    error = raises_everywhere(OSError, lambda: strategy.run_elastic(train, state))
    assert "no rows" in str(error)
    check_works(strategy)


# Ranks that wait


@pytest.fixture
def with_spare(passed_everywhere):
    """A strategy of which the last rank is a spare."""
    from mpi4py import MPI

    size = MPI.COMM_WORLD.size
    if size == 1:
        pytest.skip("one rank has to host the replicas")
    strategy = mr.MPIStrategy(num_replicas=size + 1, spares=1, seed=3)
    yield strategy
    if passed_everywhere():
        strategy.close()


def is_spare(strategy):
    return not strategy.local_replica_ids


def test_the_last_rank_is_the_spare(with_spare):
    local = gathered(with_spare.local_replica_ids)
    assert local[-1] == ()
    assert [i for ids in local for i in ids] == list(range(len(local) + 1))
    assert set(gathered(with_spare.num_replicas_in_sync)) == {len(local) + 1}


def test_any_other_call_of_a_spare_is_a_context_error_that_says_so(with_spare):
    strategy = with_spare
    state = make_state(strategy)
    value = mr.PerReplica(range(strategy.num_replicas_in_sync))
    folder = "/nonexistent"
    batches = mr.data.Dataset.range(8).batch(4)
    calls = {
        "run": lambda: strategy.run(total),
        "reduce": lambda: strategy.reduce("SUM", value, axis=None),
        "gather": lambda: strategy.gather(value, axis=0),
        "verify": lambda: strategy.verify(1),
        "barrier": strategy.barrier,
        "gather_objects": lambda: strategy.gather_objects(1),
        "reduce_to": lambda: strategy.extended.reduce_to("SUM", value, None),
        "broadcast_to": lambda: strategy.extended.broadcast_to(1.0),
        "assign": lambda: state.weights.assign(np.ones(3)),
        "read": lambda: state.seen.value(),
        "update": lambda: strategy.extended.update(state.weights, lambda v: v.numpy()),
        "update of components": lambda: strategy.extended.update(state.seen, lambda v: v.numpy()),
        "save": lambda: state.save(f"{folder}/saved"),
        "next": lambda: next(iter(strategy.distribute_datasets_from_function(lambda _: []))),
        "next of batches": lambda: next(iter(strategy.experimental_distribute_dataset(batches))),
    }
    if is_spare(strategy):
        for name, call in calls.items():
            error = error_of(call)
            assert isinstance(error, ContextError), (name, error)
            assert error.__context__ is None, (name, error.__context__)
            assert f"rank {strategy.rank}, which is a spare" in str(error), (name, error)
            assert "run_elastic" in str(error)
    else:
        (found, *_) = strategy.experimental_local_results(strategy.run(total))
        assert found == strategy.num_replicas_in_sync


def test_variables_values_and_datasets_can_be_made_on_a_spare(with_spare):
    strategy = with_spare
    state = make_state(strategy)
    rows = mr.data.Dataset.range(20).batch(6)
    datasets = [
        strategy.experimental_distribute_dataset(rows),
        strategy.distribute_datasets_from_function(lambda context: rows),
        strategy.distribute_datasets_from_function(
            lambda context: rows,
            mr.InputOptions(
                experimental_replication_mode=mr.InputReplicationMode.PER_REPLICA,
            ),
        ),
    ]
    state.datasets = datasets
    assert state.weights.shape == (3,)
    assert state.own.replica_ids == strategy.local_replica_ids
    assert state.own.num_replicas == strategy.num_replicas_in_sync

    def train():
        return [sum(1 for _ in dataset) for dataset in datasets]

    found = strategy.run_elastic(train, state)
    assert found is None if is_spare(strategy) else found[0] == 4


def test_a_spare_returns_none_when_the_others_are_done_again_and_again(with_spare):
    strategy = with_spare
    state = make_state(strategy)
    for steps in (2, 5, 5, 6):
        found = strategy.run_elastic(trainer(strategy, state, steps), state)
        if is_spare(strategy):
            assert found is None
        else:
            assert found == {"steps": steps}
            check_trained(strategy, state, steps)
    assert strategy.losses == ()


def test_wrong_arguments_of_run_elastic_are_a_type_error_on_a_spare_too(with_spare):
    state = make_state(with_spare)
    for wrong in ((None, state), (lambda: None, 3)):
        raises_everywhere(TypeError, lambda wrong=wrong: with_spare.run_elastic(*wrong))
    check_a_spare_still_waits_for_its_call(with_spare, state)


@pytest.mark.parametrize("culprit", [0, -2], ids=["the first rank", "the last one with replicas"])
def test_a_spare_hears_of_an_error_at_the_begin_on_the_others(with_spare, culprit):
    strategy = with_spare
    state = make_state(strategy)
    is_wrong = strategy.rank == culprit % (strategy.size + 1)
    for _ in range(2):
        error = error_of(lambda: strategy.run_elastic(None if is_wrong else int, state))
        assert "run_elastic needs a callable, got None" in str(error)
        assert isinstance(error, RankLostError if is_spare(strategy) else TypeError)
    check_a_spare_still_waits_for_its_call(strategy, state)


def check_a_spare_still_waits_for_its_call(strategy, state):
    """Check that it is in the call in which the others are, and not in one that is over."""
    calls = strategy._num_elastic_calls
    found = strategy.run_elastic(trainer(strategy, state), state)
    assert found == (None if is_spare(strategy) else {"steps": 3})
    assert set(gathered(strategy._num_elastic_calls)) == {calls + 1}


def test_an_error_of_the_arguments_on_a_spare_alone_leaves_it_in_step(with_spare):
    strategy = with_spare
    state = make_state(strategy)
    if is_spare(strategy):
        assert isinstance(error_of(lambda: strategy.run_elastic(None, state)), TypeError)
    else:
        assert strategy.run_elastic(trainer(strategy, state, 1), state) == {"steps": 1}
    check_a_spare_still_waits_for_its_call(strategy, state)


def test_a_spare_hears_that_train_has_failed_on_the_others(with_spare):
    strategy = with_spare
    state = make_state(strategy)

    def train():
        strategy.run(total)
        raise ValueError("no rows")

    for _ in range(2):
        error = error_of(lambda: strategy.run_elastic(train, state))
        if is_spare(strategy):
            assert isinstance(error, RankLostError)
            assert "ValueError: no rows" in str(error)
        else:
            assert isinstance(error, ValueError)
    found = strategy.run_elastic(trainer(strategy, state), state)
    assert found == (None if is_spare(strategy) else {"steps": 3})


@pytest.mark.parametrize(
    ("spares", "kind", "words"),
    [
        (lambda rank, size: size, ValueError, "leaves none of the"),
        (lambda rank, size: size + 3, ValueError, "leaves none of the"),
        (lambda rank, size: -1, ValueError, "spares"),
        (lambda rank, size: 0.5, ValueError, "spares"),
        (lambda rank, size: "1", ValueError, "spares"),
        (lambda rank, size: True, ValueError, "spares"),
        (lambda rank, size: -1 if rank == size - 1 else 0, ValueError, "spares"),
        (lambda rank, size: int(rank == 0), ValueError, "spares"),
    ],
)
def test_wrong_spares_are_an_error_on_every_rank(strategy, spares, kind, words):
    given = spares(strategy.rank, strategy.size)
    error = raises_everywhere(kind, lambda: mr.MPIStrategy(spares=given, num_replicas=7))
    assert words in str(error)
    check_works(strategy)


def test_spares_and_too_few_replicas_for_the_other_ranks(strategy):
    if strategy.size < 3:
        pytest.skip("one rank can host one replica")
    error = raises_everywhere(ValueError, lambda: mr.MPIStrategy(spares=1, num_replicas=1))
    assert f"less than the {strategy.size - 1} ranks" in str(error)


# Pipelines


@pytest.mark.parametrize("mode", list(mr.InputReplicationMode))
def test_pipelines_are_those_of_the_ranks_or_replicas_that_host(strategy, mode):
    contexts = []

    def rows(context):
        contexts.append(context)
        return [np.full(2, 10 * context.input_pipeline_id + n) for n in range(6)]

    options = mr.InputOptions(experimental_replication_mode=mode)
    dataset = strategy.distribute_datasets_from_function(rows, options)
    steps = steps_of(strategy, dataset)
    local = gathered(strategy.local_replica_ids)
    found = {}
    for parts in steps:
        for i, part in enumerate(parts):
            found.setdefault(i, []).extend(part[:1].tolist())
    R = strategy.num_replicas_in_sync
    if mode is mr.InputReplicationMode.PER_REPLICA:
        assert [context.input_pipeline_id for context in contexts] == list(
            strategy.local_replica_ids
        )
        assert found == {i: [10 * i + n for n in range(6)] for i in range(R)}
    else:
        assert [context.num_input_pipelines for context in contexts] == [strategy.size]
        for rank, ids in enumerate(local):
            for position, i in enumerate(ids):
                assert found[i] == [10 * rank + n for n in range(position, 6, len(ids))]
