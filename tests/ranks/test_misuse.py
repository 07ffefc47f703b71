"""All mistakes that a program can catch (tests/mistakes.py), one after the other in one strategy.

Each is the same error on every rank, and leaves nothing behind (DESIGN.md sections 1 and 6).
"""

import numpy as np

import mpi_replica as mr
from everywhere import check_mistake, gathered
from mistakes import MISTAKES


def pytest_generate_tests(metafunc):
    from mpi4py import MPI  # the fence has started it

    if "mistake" in metafunc.fixturenames:
        is_alone = MPI.COMM_WORLD.size == 1
        mistakes = [one for one in MISTAKES if not (is_alone and one.outside)]
        if "at_the_call" in metafunc.function.__name__:
            mistakes = [one for one in mistakes if not one.ends_the_run]
        metafunc.parametrize("mistake", mistakes, ids=lambda one: one.name)


def test_a_mistake_is_the_same_error_on_every_rank(kept_strategy, mistake):
    """Whichever replica makes it: the first, a middle one or the last."""
    check_mistake(kept_strategy, mistake)


def test_a_mistake_can_be_caught_at_the_call_by_all_replicas(kept_strategy, mistake):
    """And the step goes on."""
    count = kept_strategy.num_replicas_in_sync
    caught = []

    def step():
        context = mr.get_replica_context()
        mine = context.replica_id_in_sync_group
        try:
            mistake.in_a_step(context, mine == count // 2)
        except mistake.error as error:
            caught.append((type(error).__name__, str(error)))
        return context.all_reduce("SUM", mine + 1)

    totals = kept_strategy.experimental_local_results(kept_strategy.run(step))
    assert set(totals) == {count * (count + 1) // 2}
    assert len(caught) == len(kept_strategy.local_replica_ids)
    assert len({one for of_rank in gathered(caught) for one in of_rank}) == 1


def test_after_all_of_them_variables_and_input_work_too(kept_strategy):
    """Each rank counts the variables and datasets that it makes: it must have gone on alike."""
    strategy = kept_strategy
    count = strategy.num_replicas_in_sync
    with strategy.scope():
        variable = mr.Variable(0.0)

    def step(x):
        context = mr.get_replica_context()
        variable.assign_add(context.all_reduce("SUM", float(x.sum())))
        return variable

    rows = np.arange(8.0 * count)
    for dataset in (
        mr.data.Dataset.from_tensor_slices(rows).batch(2 * count),
        mr.data.Dataset.from_generator(lambda: iter(rows)).batch(2 * count),
    ):
        variable.assign(0.0)
        for batch in strategy.experimental_distribute_dataset(dataset):
            assert strategy.run(step, args=(batch,)) is variable
        assert float(variable) == rows.sum()
