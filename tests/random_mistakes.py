"""Mistakes of one replica at a random place of a program (see random_programs.py).

A mistake is a function that is given what draws, and the statements of a program, and changes
these. It returns the error of all ranks, where that does not follow from the order of calls.
"""

import dataclasses

import hypothesis.strategies as st

from random_programs import CALLS, NESTS, OPS, VALUES, Block, Lines, Row, blocks_in, calls_in


def another(draw, among, one):
    return draw(among.filter(lambda other: other != one))


def one_of_the_calls(draw, body):
    if not list(calls_in(body)):
        body.append(Row([draw(CALLS)]))
    return draw(st.sampled_from(list(calls_in(body))))


def other_arguments(draw, body):
    """Another op, axis, function, shape, dtype, key or value, at the same line."""
    call = one_of_the_calls(draw, body)
    one, *rest = call.arguments
    if rest == ["0"]:
        call.instead = draw(
            st.sampled_from(
                [(one, "1"), ("filled(mine, (2, 9), 'f4')", "0"), ("filled(mine, (4,), 'f8')", "0")]
            )
        )
    elif call.function == "context.merge_call":
        call.instead = draw(
            st.sampled_from([("other_of", *rest), (one, "()"), (one, f"({{'c': {rest[0]}}},)")])
        )
    elif call.function == "context.all_reduce":
        others = [(another(draw, OPS, one), *rest), (one, another(draw, NESTS, rest[0]))]
        call.instead = draw(st.sampled_from([*others, (one, f"{{'c': {rest[0]}}}")]))
    elif call.function == "same.assign":
        call.instead = (f"-{one}",)
    elif call.function == "total.assign_add":
        call.instead = f"total.assign_sub({one})"
    else:
        call.instead = (another(draw, VALUES, one),)


def another_call(draw, body):
    """In the place of a call."""
    call = one_of_the_calls(draw, body)
    (call.instead,) = dataclasses.replace(draw(CALLS), is_spread=False).lines()


def a_turn_more_or_less(draw, body):
    """In a loop; another call, where there is none."""
    loops = [block for block in blocks_in(body) if block.variable]
    if loops:
        loop = draw(st.sampled_from(loops))
        loop.head = loop.head.replace("):", f" {draw(st.sampled_from('+-'))} wrong):")
    else:
        another_call(draw, body)


def at_a_statement(change):
    """A mistake at any statement, in some turn of a loop or in all of them."""

    def mistake(draw, body):
        places = [(body, "wrong")]
        for block in blocks_in(body):
            places.append((block.body, "wrong"))
            if block.variable:
                places.append((block.body, f"wrong and {block.variable} == 0"))
        body, condition = draw(st.sampled_from(places))
        change(draw, body, draw(st.integers(0, len(body) - 1)), condition)

    return mistake


@at_a_statement
def calls_left_out(draw, body, at, condition):
    makers = [i for i, statement in enumerate(body) if any(calls_in([statement]))]
    if not makers:  # this one only calls what was made above it
        makers = [at]
    at = draw(st.sampled_from(makers))
    body[at:] = [Block(f"if not ({condition}):", body[at:])]


@at_a_statement
def one_call_more(draw, body, at, condition):
    body.insert(at, Block(f"if {condition}:", [Row([draw(CALLS)])]))


@at_a_statement
def swapped(draw, body, at, condition):
    body.append(Row(draw(st.lists(CALLS, min_size=2, max_size=2))))
    rows = [one for one in body if isinstance(one, Row) and len(one.calls) == 2]
    draw(st.sampled_from(rows)).is_swapped = True


@at_a_statement
def raises(draw, body, at, condition):
    body.insert(at, Lines((f"if {condition}:", "    raise Lost(2, {'a': [1]})")))


@at_a_statement
def returns(draw, body, at, condition):
    body.insert(at, Lines((f"if {condition}:", "    return")))


DISAGREEMENTS = {
    "other arguments": other_arguments,
    "another call": another_call,
    "a turn more or less": a_turn_more_or_less,
    "calls left out": calls_left_out,
    "one call more": one_call_more,
    "swapped": swapped,
    "raises": raises,
    "returns": returns,
}


# What is wrong in itself, and the error.
WRONG_ARGUMENTS = {
    "an unknown op": ("context.all_reduce('SUMM', 1.0)", ValueError),
    "strings": ("context.all_reduce('SUM', np.array(['a']))", TypeError),
    "objects": ("context.all_reduce('SUM', np.array([None]))", TypeError),
    "bools": ("context.all_reduce('SUM', True)", TypeError),
    "out that is no array": ("context.all_reduce('SUM', 1.0, out=1.0)", TypeError),
    "options that are none": ("context.all_reduce('SUM', 1.0, 'fast')", TypeError),
    "an axis out of range": ("context.all_gather(np.ones(2), 1)", ValueError),
    "a scalar to gather": ("context.all_gather(1.0, 0)", ValueError),
    "a merge_fn that is none": ("context.merge_call(3)", TypeError),
    "args that are no tuple": ("context.merge_call(first_of, 3)", ValueError),
    "args that can't be pickled": ("context.merge_call(first_of, (lambda: 1,))", Exception),
    "another shape to assign": ("same.assign(np.ones(4))", ValueError),
    "another shape to add": ("total.assign_add(np.ones(4))", ValueError),
    "another dtype to assign": ("same.assign(np.full(3, 1j))", TypeError),
}


def wrong_argument(name):
    """A call with such an argument in the place of another call."""
    text, error = WRONG_ARGUMENTS[name]

    def mistake(draw, body):
        one_of_the_calls(draw, body).instead = text
        return error

    return mistake
