"""Mistakes of one replica in a step: what it gives for ``out=`` can't take the results."""

import itertools

import numpy as np

from mistake import CALL, INLINE, LARGE, MEDIUM, STRUCTURE, Table

TABLE = Table()


def make_value(size):
    """The nest that is reduced: views of one buffer, so that others may lie beside them."""
    memory = np.ones(3 * size)
    return {"w": [memory[:size], memory[size : 2 * size]]}


def beside(value):
    """The array that the leaves of `value` are views of."""
    return value["w"][0].base


def fresh(value):
    # Not np.empty: whatever lies in memory may overflow where it becomes another dtype.
    return np.zeros(value["w"][0].shape)


def read_only(array):
    array.flags.writeable = False
    return array


def unaligned(array):
    return np.empty(array.nbytes + 1, np.uint8)[1:].view(array.dtype)


def overlapping(array):
    memory = np.empty(2 * array.size)
    return [memory[: array.size], memory[array.size - 1 : -1]]


def behind(value):
    """An array that begins one item after a leaf of `value` does."""
    size = value["w"][0].size
    return beside(value)[size + 1 : 2 * size + 1]


# What the one replica gives: made of the second leaf's array, or of the whole value. The words
# tell the leaf.
WRONG_LEAVES = {
    "a number for an array of out": (TypeError, lambda array: 3.0, "must be an array", "it is 3.0"),
    "None for an array of out": (TypeError, lambda array: None, "it is None"),
    "out of another dtype": (TypeError, lambda array: array.astype("f4"), "float64", "float32"),
    "out of another byte order": (TypeError, lambda array: array.astype(">f8"), "float64", ">f8"),
    "a masked array for out": (TypeError, np.ma.masked_array, "mask"),
    "out of another shape": (ValueError, lambda array: array[1:].copy(), "must have shape"),
    "out of other rows": (ValueError, lambda array: array.reshape(2, -1).copy(), "must have shape"),
    "a read-only out": (ValueError, read_only, "not writable"),
    "a strided out": (ValueError, lambda array: np.repeat(array, 2)[::2], "not C-contiguous"),
    "an unaligned out": (ValueError, unaligned, "aligned"),
}
WRONG_NESTS = {
    "another nest for out": (STRUCTURE, lambda value: value["w"], "[*, *]", "{'w': [*, *]}"),
    "an array of out too few": (STRUCTURE, lambda value: {"w": [fresh(value)]}, "{'w': [*]}"),
    "a tuple for a list in out": (STRUCTURE, lambda value: {"w": (*value["w"],)}, "(*, *)"),
    "one array twice in out": (
        ValueError,
        lambda value: {"w": [fresh(value)] * 2},
        "out['w'][0] and out['w'][1] share memory",
    ),
    "overlapping arrays in out": (
        ValueError,
        lambda value: {"w": overlapping(fresh(value))},
        "out['w'][0] and out['w'][1] share memory",
    ),
    "out that overlaps its value": (
        ValueError,
        lambda value: {"w": [fresh(value), behind(value)]},
        "out['w'][1] shares memory with value['w'][1]",
    ),
    "the value of another leaf for out": (
        ValueError,
        lambda value: {"w": value["w"][::-1]},
        " shares memory with value['w'][",
    ),
}


def reduce_into(make, size):
    def do(context, is_culprit):
        value = make_value(size)
        out = make(value) if is_culprit else {"w": [fresh(value), fresh(value)]}
        return context.all_reduce("SUM", value, out=out)

    return do


def with_leaf(make):
    return lambda value: {"w": [fresh(value), make(fresh(value))]}


SIZES = itertools.cycle((INLINE, MEDIUM, LARGE))

for name, (error, make, *words) in WRONG_LEAVES.items():
    wanted = ("out['w'][1]", *words, "raised by {replica}")
    function = reduce_into(with_leaf(make), next(SIZES))
    TABLE.add(name, error, wanted, function, ends_the_run=False)
for name, (error, make, *words) in WRONG_NESTS.items():
    wanted = (*words, "raised by {replica}")
    function = reduce_into(make, next(SIZES))
    TABLE.add(name, error, wanted, function, ends_the_run=False, names_both_sides=False)


@TABLE.mistake_at_each_size(CALL, "all_reduce(SUM, out,", "all_reduce(SUM, float64")
def out_is_given_by_others(size):
    def do(context, is_culprit):
        out = None if is_culprit else np.empty(size)
        return context.all_reduce("SUM", np.ones(size), out=out)  # told

    return do


@TABLE.mistake_at_each_size(CALL, "all_reduce(SUM, out=value,", "all_reduce(SUM, out,")
def in_place_where_others_are_not(size):
    def do(context, is_culprit):
        value = np.ones(size)
        return context.all_reduce("SUM", value, out=value if is_culprit else np.empty(size))  # told

    return do
