"""Mistakes of one rank: outside of a step, in the input of a step or in a merge_fn."""

import numpy as np

import mpi_replica as mr
from mistake import CALL, LARGE, MEDIUM, STRUCTURE, Table
from mistakes_that_raise import Lost

TABLE = Table()

RAISED = "raised by {replicas} at mistakes_of_ranks.py:"


def hosts(strategy, culprit):
    return culprit in strategy.local_replica_ids


def ids(strategy):
    return strategy.experimental_distribute_values_from_function(
        lambda context: np.array([context.replica_id_in_sync_group])
    )


def total():
    return mr.get_replica_context().all_reduce("SUM", 1.0)


def nothing():
    return None


def as_little():
    return None


@TABLE.mistake(CALL, "reduce(SUM", "gather(axis=0", outside=True)
def gather_for_reduce(strategy, culprit):
    value = ids(strategy)
    if hosts(strategy, culprit):
        return strategy.gather(value, axis=0)  # told
    return strategy.reduce("SUM", value, axis=None)  # told


@TABLE.mistake(
    CALL, "reduce(SUM", "{replicas} ha", "nothing at mistakes_of_ranks.py:", outside=True
)
def run_for_reduce(strategy, culprit):
    value = ids(strategy)
    if hosts(strategy, culprit):
        return strategy.run(nothing)  # told
    return strategy.reduce("SUM", value, axis=None)  # told


@TABLE.mistake(CALL, "reduce(SUM", "all_reduce(SUM", outside=True)
def reduce_for_run(strategy, culprit):
    value = ids(strategy)
    if hosts(strategy, culprit):
        return strategy.reduce("SUM", value, axis=None)  # told
    return strategy.run(total)


@TABLE.mistake(CALL, "gather(axis=0", "all_reduce(SUM", outside=True)
def gather_for_run(strategy, culprit):
    value = ids(strategy)
    if hosts(strategy, culprit):
        return strategy.gather(value, axis=0)  # told
    return strategy.run(total)


@TABLE.mistake(
    CALL, "nothing at mistakes_of_ranks.py:", "as_little at mistakes_of_ranks.py:", outside=True
)
def runs_another_function(strategy, culprit):
    return strategy.run(nothing if hosts(strategy, culprit) else as_little)  # told


@TABLE.mistake(CALL, "nothing at mistakes_of_ranks.py:", outside=True)
def runs_on_another_line(strategy, culprit):
    if hosts(strategy, culprit):
        return strategy.run(nothing)  # told
    return strategy.run(nothing)  # told


@TABLE.mistake(CALL, "{replicas} ha", "reduce(SUM", outside=True)
def runs_once_more(strategy, culprit):
    value = ids(strategy)
    strategy.run(total)
    if hosts(strategy, culprit):
        strategy.run(nothing)  # told
    return strategy.reduce("SUM", value, axis=None)  # told


@TABLE.mistake(CALL, "SUM", "MEAN", outside=True)
def other_op_in_reduce(strategy, culprit):
    op = "MEAN" if hosts(strategy, culprit) else "SUM"
    return strategy.reduce(op, ids(strategy), axis=None)  # told


@TABLE.mistake(CALL, "reduce(SUM, axis=(0,)", "reduce(SUM, int64[1])", outside=True)
def other_axis_in_reduce(strategy, culprit):
    axis = 0 if hosts(strategy, culprit) else None
    return strategy.reduce("SUM", ids(strategy), axis=axis)  # told


@TABLE.mistake(
    STRUCTURE, "float64[3] on {replica}", "float64[2] on ", outside=True, names_both_sides=False
)
def other_shape_in_reduce(strategy, culprit):
    value = strategy.experimental_distribute_values_from_function(
        lambda context: np.ones(3 if context.replica_id_in_sync_group == culprit else 2)
    )
    return strategy.reduce("SUM", value, axis=None)  # told


@TABLE.mistake(CALL, "reduce_to(", "reduce(SUM", outside=True)
def reduce_to_for_reduce(strategy, culprit):
    value = ids(strategy)
    if hosts(strategy, culprit):
        return strategy.extended.reduce_to("SUM", value, None)  # told
    return strategy.reduce("SUM", value, axis=None)  # told


@TABLE.mistake(CALL, "barrier(", "gather_objects(", outside=True)
def barrier_for_gather_objects(strategy, culprit):
    if hosts(strategy, culprit):
        return strategy.barrier()  # told
    return strategy.gather_objects(strategy.rank)  # told


@TABLE.mistake(CALL, "close(", "reduce(SUM", outside=True)
def close_for_reduce(strategy, culprit):
    value = ids(strategy)
    if hosts(strategy, culprit):
        return strategy.close()  # told
    return strategy.reduce("SUM", value, axis=None)  # told


@TABLE.mistake(CALL, "Variable(", "reduce(SUM", outside=True)
def makes_a_variable_alone(strategy, culprit):
    value = ids(strategy)
    with strategy.scope():
        if hosts(strategy, culprit):
            return mr.Variable(1.0)  # told
        return strategy.reduce("SUM", value, axis=None)  # told


@TABLE.mistake(CALL, "next", "reduce(SUM", outside=True)
def takes_a_step_alone(strategy, culprit):
    value = ids(strategy)
    steps = iter(strategy.distribute_datasets_from_function(lambda context: [np.ones(2)] * 2))
    next(steps)
    if hosts(strategy, culprit):
        return next(steps)  # told
    return strategy.reduce("SUM", value, axis=None)  # told


def rows_until(fails):
    yield np.arange(2)
    if fails:
        raise Lost(5, {"part": 3})
    yield np.arange(2)


@TABLE.mistake(Lost, RAISED, outside=True)
def raises_in_the_generator_of_a_dataset(strategy, culprit):
    fails = hosts(strategy, culprit)
    dataset = mr.data.Dataset.from_generator(lambda: rows_until(fails)).batch(2)
    for batch in strategy.experimental_distribute_dataset(dataset):
        strategy.run(lambda x: x.sum(), args=(batch,))


@TABLE.mistake(Lost, RAISED, outside=True)
def raises_in_a_pipeline_of_its_own(strategy, culprit):
    fails = hosts(strategy, culprit)
    return list(strategy.distribute_datasets_from_function(lambda context: rows_until(fails)))


@TABLE.mistake(CALL, "iteration 0 of", "reduce(SUM", outside=True)
def distributes_a_dataset_alone(strategy, culprit):
    value = ids(strategy)
    if hosts(strategy, culprit):
        return list(strategy.experimental_distribute_dataset(rows_until(False)))  # told
    return strategy.reduce("SUM", value, axis=None)  # told


@TABLE.mistake(Lost, RAISED, outside=True)
def raises_in_merge_fn_on_one_rank(strategy, culprit):
    def merge_fn(strategy, x):
        if hosts(strategy, culprit):
            raise Lost(2, {"a": [1]})  # told
        return 1.0

    return strategy.run(lambda: mr.get_replica_context().merge_call(merge_fn, (1.0,)))


@TABLE.mistake(Lost, RAISED, outside=True)
def raises_in_merge_fn_before_another_call(strategy, culprit):
    def merge_fn(strategy, x):
        if hosts(strategy, culprit):
            raise Lost(2, {"a": [1]})  # told
        return strategy.reduce("SUM", x, axis=None)

    def step():
        context = mr.get_replica_context()
        return context.all_reduce("SUM", context.merge_call(merge_fn, (np.ones(LARGE),)))

    return strategy.run(step)


@TABLE.mistake(ValueError, "axis", outside=True)
def fails_in_a_collective_of_merge_fn(strategy, culprit):
    def merge_fn(strategy, x):
        return strategy.gather(x, axis=7 if hosts(strategy, culprit) else 0)

    return strategy.run(lambda: mr.get_replica_context().merge_call(merge_fn, (np.ones(2),)))


def merges_what_it_captures(strategy, captured, then):
    def step():
        context = mr.get_replica_context()
        context.merge_call(lambda strategy: captured)
        return then(context)

    return strategy.run(step)


THROUGH_ARGS = "pass what differs between replicas through args"


@TABLE.mistake(CALL, "result of merge_fn", THROUGH_ARGS, "mistakes_of_ranks.py:", outside=True)
def captures_what_differs(strategy, culprit):
    return merges_what_it_captures(strategy, hosts(strategy, culprit), lambda context: None)


@TABLE.mistake(CALL, "result of merge_fn", THROUGH_ARGS, "mistakes_of_ranks.py:", outside=True)
def captures_an_array_that_differs(strategy, culprit):
    captured = np.full(MEDIUM, hosts(strategy, culprit))
    return merges_what_it_captures(
        strategy, captured, lambda context: context.all_reduce("SUM", np.ones(LARGE))
    )


# Calls that send nothing: the others hear at their next call


def failing_on(strategy, culprit):
    def rows(context):
        if hosts(strategy, culprit):
            raise Lost(3, "no file")  # told
        return np.arange(3.0)

    return rows


def raises_in_a_function_for_values(strategy, culprit):
    make = failing_on(strategy, culprit)
    value = strategy.experimental_distribute_values_from_function(make)
    return strategy.reduce("SUM", value, axis=None)


def raises_in_a_function_for_datasets(strategy, culprit):
    make = failing_on(strategy, culprit)
    data = strategy.distribute_datasets_from_function(
        lambda context: mr.data.Dataset.from_tensor_slices(make(context)).batch(1)
    )
    return [strategy.run(nothing) for _ in data]


for make in (raises_in_a_function_for_values, raises_in_a_function_for_datasets):
    name = make.__name__.replace("_", " ")
    TABLE.add(name, Lost, (RAISED,), make, outside=True, told_in=failing_on)


def not_batched(dataset, is_culprit):
    return dataset if is_culprit else dataset.batch(4)


@TABLE.mistake(ValueError, "is not batched", "raised by {replicas}", outside=True)
def distributes_what_is_not_batched(strategy, culprit):
    dataset = not_batched(mr.data.Dataset.range(8), hosts(strategy, culprit))
    return [strategy.run(nothing) for _ in strategy.experimental_distribute_dataset(dataset)]


# Arguments that are not what they must be


def makes_values_of(strategy, is_culprit):
    strategy.experimental_distribute_values_from_function(1.0 if is_culprit else lambda c: 1.0)


def distributes_one_of(no_batches):
    def do(strategy, is_culprit):
        dataset = no_batches if is_culprit else [np.ones(2)]
        list(strategy.experimental_distribute_dataset(dataset))

    return do


def updates_with(fn, args):
    def do(strategy, is_culprit):
        with strategy.scope():
            v = mr.Variable(0.0)
        if is_culprit:
            strategy.extended.update(v, fn, args)
        else:
            strategy.extended.update(v, nothing_of)

    return do


def nothing_of(variable):
    return None


def yields(*args):
    """Stand for a step of which a call runs nothing."""
    yield total()


async def waits(*args):
    """Stand for another one."""
    total()


def runs(fn):
    def do(strategy, is_culprit):
        strategy.run(fn if is_culprit else nothing)

    return do


def reduces_pairs_of(no_pairs):
    def do(strategy, is_culprit):
        pairs = no_pairs if is_culprit else [(ids(strategy), None)]
        strategy.extended.batch_reduce_to("SUM", pairs)

    return do


for name, error, words, do in (
    ("makes values of a number", TypeError, "value_fn must be callable, got 1.0", makes_values_of),
    (
        "distributes a mirrored number",
        TypeError,
        "iterable of batches, got Mirrored:2.0",
        distributes_one_of(mr.Mirrored(2.0)),
    ),
    (
        "distributes an array without rows",
        TypeError,
        "iterable of batches, got array(2.)",
        distributes_one_of(np.array(2.0)),
    ),
    (
        "distributes a tuple of arrays",
        TypeError,
        "iterable of batches, got tuple (array([1., 1.]),",
        distributes_one_of((np.ones(2), np.ones(2))),
    ),
    ("updates with None", TypeError, "update needs a callable, got None", updates_with(None, ())),
    (
        "updates with one argument",
        ValueError,
        "args must be a tuple or a list, got 3.0",
        updates_with(nothing_of, 3.0),
    ),
    ("runs a generator function", TypeError, "which has a yield", runs(yields)),
    ("runs an async function", TypeError, "Pass a function without async", runs(waits)),
    ("updates with an async function", TypeError, "update got waits", updates_with(waits, ())),
    (
        "reduces None in pairs",
        ValueError,
        "batch_reduce_to needs (value, destinations) pairs, got None",
        reduces_pairs_of(None),
    ),
):

    def make(strategy, culprit, do=do):
        do(strategy, hosts(strategy, culprit))
        return strategy.run(nothing)

    TABLE.add(name, error, (words, "raised by {replicas}"), make, outside=True)
