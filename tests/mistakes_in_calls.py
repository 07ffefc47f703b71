"""Mistakes of one replica in a step: its calls are not those of the others."""

import functools
from collections import namedtuple

import numpy as np

import mpi_replica as mr
from mistake import CALL, INLINE, LARGE, MEDIUM, STRUCTURE, Table

TABLE = Table()


# Other structure, shape or dtype


def ones(*shape, dtype="f8"):
    return np.ones(shape, dtype)


Pair = namedtuple("Pair", "left right")


def reduce_one_of(culprits, others):
    def do(context, is_culprit):
        return context.all_reduce("SUM", culprits if is_culprit else others)  # told

    return do


def gather_one_of(culprits, others):
    def do(context, is_culprit):
        return context.all_gather(culprits if is_culprit else others, axis=0)  # told

    return do


def merge_one_of(culprits, others):
    def do(context, is_culprit):
        return context.merge_call(first_of, kwargs=culprits if is_culprit else others)  # told

    return do


def first_of(strategy, **values):
    return 1


# What the one replica passes, what the others pass; words for both.
UNLIKE_IN_ALL_REDUCE = {
    "other shape": (ones(5), ones(4), "value at", "[5]", "[4]"),
    "other shape, medium": (ones(MEDIUM + 1), ones(MEDIUM), "[1001]", "[1000]"),
    "other shape, large": (ones(LARGE), ones(LARGE + 1), "[300000]", "[300001]"),
    "other number of dimensions": (ones(4, 1), ones(4), "[4, 1]", "[4]"),
    "(2, 4) against (4, 2)": (ones(2, 4), ones(4, 2), "[2, 4]", "[4, 2]"),
    "other dtype of as many bytes": (ones(4, dtype="i8"), ones(4), "int64[4]", "float64[4]"),
    "other dtype, large": (ones(LARGE, dtype="i8"), ones(LARGE), "int64", "float64"),
    "other byte length": (ones(4, dtype="f4"), ones(4), "float32[4]", "float64[4]"),
    "as many bytes": (ones(8, dtype="f4"), ones(4), "float32[8]", "float64[4]"),
    "a scalar for an array": (np.float64(1), ones(1), "float64[]", "float64[1]"),
    "an integer for a float": (np.int64(1), np.float64(1), "int64[]", "float64[]"),
    "other shape in a nest": (
        {"a": ones(2), "b": [ones(3), ones(5)]},
        {"a": ones(2), "b": [ones(3), ones(4)]},
        "value['b'][1] at",
        "[5]",
        "[4]",
    ),
    "other dtype in a nest": (
        ({"w": ones(3, dtype="f4")}, 1.0),
        ({"w": ones(3)}, 1.0),
        "value[0]['w'] at",
        "float32[3]",
        "float64[3]",
    ),
    "other dict key": ({"odd": ones(2)}, {"even": ones(2)}, "['odd']", "['even']"),
    "dict key of another type": ({1: ones(2)}, {"1": ones(2)}, "[1]", "['1']"),
    "one dict key more": ({"a": 1.0, "b": 2.0}, {"a": 1.0}, "['b']"),
    "other nest": ([1.0, [2.0, 3.0]], [[1.0, 2.0], 3.0], "[0]", "[0][0]", "[1]", "[1][0]"),
    "a nest for a leaf": ([1.0], 1.0, "[0]"),
    "other number of leaves": ([1.0] * 3, [1.0] * 2, "[2]"),
    "list against tuple": ([1.0, 2.0], (1.0, 2.0), "[*, *]", "(*, *)"),
    "a named tuple for a tuple": (Pair(1.0, 2.0), (1.0, 2.0), ".left", "[0]"),
}
UNLIKE_IN_ALL_GATHER = {
    "other columns in all_gather": (ones(2, 3), ones(2, 4), "3]", "4]"),
    "other columns in all_gather, large": (ones(LARGE, 1), ones(LARGE, 2), "1]", "2]"),
    "other number of dimensions in all_gather": (ones(2), ones(2, 1), "[any]", "[any, 1]"),
    "other dtype in all_gather": (ones(2, dtype="i4"), ones(2, dtype="i8"), "int32", "int64"),
    "bytes for text in all_gather": (np.array([b"a"]), np.array(["a"]), "bytes[any]", "str[any]"),
    "other dict key in all_gather": ({"odd": ones(2)}, {"even": ones(2)}, "['odd']", "['even']"),
}
UNLIKE_IN_MERGE_CALL = {
    "other keyword in merge_call": ({"odd": 1}, {"even": 1}, "odd", "even"),
    "other nest in merge_call": ({"x": [1]}, {"x": 1}, "['x'][0]", "['x']"),
    "list against tuple in merge_call": ({"x": [1]}, {"x": (1,)}, "[*]", "(*,)"),
}
for make, table in (
    (reduce_one_of, UNLIKE_IN_ALL_REDUCE),
    (gather_one_of, UNLIKE_IN_ALL_GATHER),
    (merge_one_of, UNLIKE_IN_MERGE_CALL),
):
    for name, (culprits, others, *words) in table.items():
        TABLE.add(name, STRUCTURE, tuple(words), make(culprits, others))


@TABLE.mistake(STRUCTURE, "['odd']", "['even']", ends_the_run=True)
def run_returns_another_nest(context, is_culprit):
    return {"odd": 1} if is_culprit else {"even": 1}


# Another call


@TABLE.mistake(CALL, "MEAN", "SUM")
def sum_against_mean(context, is_culprit):
    return context.all_reduce("MEAN" if is_culprit else "SUM", ones(INLINE))  # told


@TABLE.mistake(CALL, "MAX", "SUM")
def sum_against_max(context, is_culprit):
    return context.all_reduce("MAX" if is_culprit else "SUM", ones(LARGE))  # told


@TABLE.mistake(CALL, "MEAN", "SUM")
def sum_against_mean_on_two_lines(context, is_culprit):
    if is_culprit:
        return context.all_reduce("MEAN", ones(MEDIUM))  # told
    return context.all_reduce("SUM", ones(MEDIUM))  # told


@TABLE.mistake(CALL, "axis=1", "axis=0")
def other_axis(context, is_culprit):
    return context.all_gather(ones(2, 2), axis=int(is_culprit))  # told


@TABLE.mistake(CALL, "axis=-2", "axis=0")
def the_same_axis_from_the_end(context, is_culprit):
    return context.all_gather(ones(2, 2), axis=-2 if is_culprit else 0)  # told


def second_of(strategy, **values):
    return 1


@TABLE.mistake(CALL, "second_of", "first_of")
def other_merge_fn(context, is_culprit):
    return context.merge_call(second_of if is_culprit else first_of)  # told


def yields(strategy):
    """Stand for a merge_fn of which a call runs nothing."""
    yield 1


async def waits(strategy, value):
    """Stand for another one."""


@TABLE.mistake(TypeError, "merge_call got yields at mistakes_in_calls.py:", "has a yield")
def merge_fn_that_is_a_generator_function(context, is_culprit):
    return context.merge_call(yields if is_culprit else first_of)  # told


@TABLE.mistake(TypeError, "merge_call got waits at mistakes_in_calls.py:", "which is async")
def merge_fn_that_is_async(context, is_culprit):
    merge_fn = functools.partial(waits, value=1) if is_culprit else first_of
    return context.merge_call(merge_fn)  # told


@TABLE.mistake(CALL, "<lambda> at mistakes_in_calls.py:", "(code ")
def other_merge_fn_on_the_same_line(context, is_culprit):
    return context.merge_call((lambda s: 1) if is_culprit else (lambda s: 2))  # told


@TABLE.mistake(CALL, "all_gather(", "all_reduce(SUM")
def all_gather_for_all_reduce(context, is_culprit):
    if is_culprit:
        return context.all_gather(ones(MEDIUM), axis=0)  # told
    return context.all_reduce("SUM", ones(MEDIUM))  # told


@TABLE.mistake(CALL, "merge_call(", "all_reduce(SUM")
def merge_call_for_all_reduce(context, is_culprit):
    if is_culprit:
        return context.merge_call(first_of, kwargs={"x": ones(LARGE)})  # told
    return context.all_reduce("SUM", ones(LARGE))  # told


@TABLE.mistake(CALL, "merge_call(", "all_gather(")
def merge_call_for_all_gather(context, is_culprit):
    return context.merge_call(first_of) if is_culprit else context.all_gather(ones(2), 0)  # told


@TABLE.mistake(CALL, "named 'odd'", "named 'even'")
def other_names(context, is_culprit):
    options = mr.CommunicationOptions(name="odd" if is_culprit else "even")
    return context.all_reduce("SUM", 1.0, options=options)  # told


@TABLE.mistake(CALL, "(named '')")
def an_empty_name(context, is_culprit):
    options = mr.CommunicationOptions(name="") if is_culprit else None
    return context.all_reduce("SUM", 1.0, options=options)  # told


@TABLE.mistake(CALL, "bytes_per_pack=4096")
def other_bytes_per_pack(context, is_culprit):
    options = mr.CommunicationOptions(bytes_per_pack=4096) if is_culprit else None
    return context.all_reduce("SUM", ones(LARGE), options=options)  # told


# The same calls in another order


@TABLE.mistake_at_each_size(CALL)
def swapped_on_two_lines(size):
    def do(context, is_culprit):
        one, other = np.ones(size), np.full(size, 10.0)
        if is_culprit:
            other = context.all_reduce("SUM", other)  # told
            one = context.all_reduce("SUM", one)
        else:
            one = context.all_reduce("SUM", one)  # told
            other = context.all_reduce("SUM", other)
        return one, other

    return do


@TABLE.mistake_at_each_size(CALL, " called at ")
def swapped_through_a_helper(size):
    def total(context, value):
        return context.all_reduce("SUM", np.full(size, value))  # told

    def do(context, is_culprit):
        if is_culprit:
            return total(context, 10.0), total(context, 1.0)  # told
        return total(context, 1.0), total(context, 10.0)  # told

    return do


@TABLE.mistake_at_each_size(CALL, " called at ")
def swapped_through_a_lambda(size):
    def do(context, is_culprit):
        total = lambda value: context.all_reduce("SUM", np.full(size, value))  # told  # noqa: E731
        if is_culprit:
            return total(10.0), total(1.0)  # told
        return total(1.0), total(10.0)  # told

    return do


@TABLE.mistake_at_each_size(CALL)
def two_lambdas_swapped_in_a_loop(size):
    def do(context, is_culprit):
        calls = [
            lambda: context.all_reduce("SUM", np.ones(size)),  # told
            lambda: context.all_reduce("SUM", np.full(size, 10.0)),  # told
        ]
        return [call() for call in (calls[::-1] if is_culprit else calls)]

    return do


@TABLE.mistake_at_each_size(CALL, "(column ")
def swapped_on_one_line(size):
    def do(context, is_culprit):
        total = functools.partial(context.all_reduce, "SUM")
        x, y = np.ones(size), np.full(size, 10.0)
        return [total(y), total(x)] if is_culprit else [total(x), total(y)]  # told

    return do


@TABLE.mistake(CALL, "all_gather(", "all_reduce(")
def two_kinds_of_call_swapped(context, is_culprit):
    if is_culprit:
        context.all_gather(ones(MEDIUM), axis=0)  # told
    total = context.all_reduce("SUM", 1.0)  # told
    if not is_culprit:
        context.all_gather(ones(MEDIUM), axis=0)
    return total


# Another number of calls


@TABLE.mistake(CALL, "all_reduce(SUM", "returned", ends_the_run=True)
def one_call_more(context, is_culprit):
    for _ in range(3 if is_culprit else 2):
        context.all_reduce("SUM", 1.0)  # told


@TABLE.mistake(CALL, "merge_call(first_of", "returned", ends_the_run=True)
def a_call_where_the_others_return(context, is_culprit):
    if is_culprit:
        context.merge_call(first_of)  # told


@TABLE.mistake(CALL, "{replica} has returned", ends_the_run=True)
def one_call_fewer(context, is_culprit):
    context.all_reduce("SUM", 1.0)
    if not is_culprit:
        context.all_gather(ones(MEDIUM), axis=0)  # told


@TABLE.mistake(CALL, "{replica} has returned", ends_the_run=True)
def one_merge_call_fewer(context, is_culprit):
    if not is_culprit:
        context.merge_call(first_of, kwargs={"x": ones(LARGE)})  # told


@TABLE.mistake(CALL, "{replica} has returned", ends_the_run=True)
def returns_early(context, is_culprit):
    context.all_reduce("SUM", ones(LARGE))
    if is_culprit:
        return 0.0
    return context.all_reduce("SUM", ones(LARGE))  # told


@TABLE.mistake(CALL, "{replica} has returned", ends_the_run=True)
def a_shorter_loop(context, is_culprit):
    for _ in range(3 if is_culprit else 5):
        context.all_reduce("SUM", ones(INLINE))  # told


@TABLE.mistake(CALL, "all_gather(axis=0", "returned", ends_the_run=True)
def a_longer_loop(context, is_culprit):
    turn = 0
    while turn < (5 if is_culprit else 3):
        context.all_gather(ones(1 + turn), axis=0)  # told
        turn += 1


@TABLE.mistake(CALL, "all_gather(axis=0", "all_reduce(SUM")
def a_longer_loop_before_another_call(context, is_culprit):
    for _ in range(2 + is_culprit):
        context.all_gather(ones(MEDIUM), axis=0)  # told
    context.all_reduce("SUM", 1.0)  # told
