"""Random step functions, as source text, in which one replica may make a mistake.

Collectives in loops, branches, comprehensions, lambdas and nested functions, on one line and on
several. What must come of a program, its traces tell (see traces.py).
"""

import dataclasses
import itertools
import linecache

import hypothesis.strategies as st
import numpy as np
import optree

import mpi_replica as mr
from mistake import CALL, STRUCTURE, Mistake
from traces import FILE, Lost, Trace, parting_of

# `same` is a variable that all replicas give one value, `total` one that each gives a part of.
HEAD = """\
def first_of(strategy, *args):
    return np.float64(strategy.num_replicas_in_sync)

def other_of(strategy, *args):
    return np.float64(strategy.num_replicas_in_sync)

def sum_of(strategy, *args):
    of_all = strategy.experimental_local_results(args)
    return np.float64(sum(np.sum(leaf) for leaf in optree.tree_leaves(of_all)))

def step(context, same, total, mine, wrong):
    found = []
"""

SHAPES = ["()", "(3,)", "(2, 4)", "(9, 20)", "(40, 30)", "(150, 150)"]  # of each way
DTYPES = ["'i4'", "'f4'", "'f8'"]


# The text


def indented(lines):
    return ["    " + line for line in lines]


def joined(head, lines, tail):
    """The lines of an expression behind `head` and before `tail`."""
    *first, last = [head + lines[0], *lines[1:]]
    return [*first, last + tail]


def chosen(condition, one, other):
    """The lines of an expression: `one` where the condition holds."""
    if len(one) == len(other) == 1:
        return [f"({one[0]} if {condition} else {other[0]})"]
    return ["(", *indented(one), f"    if {condition}", *indented(joined("else ", other, "")), ")"]


@dataclasses.dataclass(eq=False)
class Call:
    """A call of a collective."""

    function: str
    arguments: tuple[str, ...]
    is_spread: bool = False
    #: What takes its place in the one replica: another call, or other arguments on the same line.
    instead: str | tuple[str, ...] | None = None

    def lines(self):
        arguments = self.arguments
        if isinstance(self.instead, tuple):
            arguments = [
                mine if mine == other else f"{other} if wrong else {mine}"
                for mine, other in zip(arguments, self.instead, strict=True)
            ]
        text = [f"{self.function}({', '.join(arguments)})"]
        if self.is_spread:
            text = [f"{self.function}(", *indented(f"{one}," for one in arguments), ")"]
        return chosen("wrong", [self.instead], text) if isinstance(self.instead, str) else text


@dataclasses.dataclass(eq=False)
class Lines:
    """Lines as they are."""

    text: tuple[str, ...]

    def lines(self):
        return self.text


@dataclasses.dataclass(eq=False)
class Block:
    """Statements below a line, and lines round them. In a loop they know its variable."""

    head: str
    body: list
    variable: str = ""
    before: tuple[str, ...] = ()
    after: tuple[str, ...] = ()

    def lines(self):
        return [*self.before, self.head, *indented(lines_of(self.body)), *self.after]


@dataclasses.dataclass(eq=False)
class Row:
    """Calls in one expression."""

    calls: list[Call]
    is_swapped: bool = False

    def lines(self):
        if len(self.calls) == 1:
            return joined("found.append(", self.calls[0].lines(), ")")
        rows = [self.calls[::-1], self.calls] if self.is_swapped else [self.calls]
        lists = [
            ["[", *indented(line for call in row for line in joined("", call.lines(), ",")), "]"]
            if any(call.is_spread for call in row)
            else [f"[{', '.join(call.lines()[0] for call in row)}]"]
            for row in rows
        ]
        return joined(
            "found.extend(", chosen("wrong", *lists) if self.is_swapped else lists[0], ")"
        )


@dataclasses.dataclass(eq=False)
class Repeated:
    """A call that is made more than once: in a comprehension, or by a lambda."""

    call: Call
    head: str
    tail: str

    def lines(self):
        return joined(self.head, self.call.lines(), self.tail)


def lines_of(body):
    return [line for statement in body for line in statement.lines()]


def calls_in(body):
    """All calls that are made in `body`."""
    for statement in body:
        if isinstance(statement, Row):
            yield from statement.calls
        elif isinstance(statement, Repeated):
            yield statement.call
        elif isinstance(statement, Block):
            yield from calls_in(statement.body)


def blocks_in(body):
    """All blocks in `body`."""
    for statement in body:
        if isinstance(statement, Block):
            yield statement
            yield from blocks_in(statement.body)


# What is drawn

VALUES = st.builds("filled(mine, {}, {})".format, st.sampled_from(SHAPES), st.sampled_from(DTYPES))
ROWS = st.builds(
    "filled(mine, ({}, {}), {})".format,
    st.sampled_from(["1 + mine", "7 * mine", "900 * mine"]),
    st.sampled_from([2, 5]),
    st.sampled_from(DTYPES),
)
NESTS = VALUES | st.builds("{{'a': {}, 'b': [{}]}}".format, VALUES, VALUES)
OPS = st.sampled_from(["'SUM'", "'MEAN'", "'MAX'"])
MERGE_FNS = st.sampled_from(["first_of", "sum_of"])
NUMBERS = st.sampled_from([1, 2, 3])
CALLS = st.one_of(
    st.builds(Call, st.just("context.all_reduce"), st.tuples(OPS, NESTS), st.booleans()),
    st.builds(Call, st.just("context.all_gather"), st.tuples(ROWS, st.just("0")), st.booleans()),
    st.builds(
        Call,
        st.just("context.merge_call"),
        st.tuples(MERGE_FNS, st.builds("({},)".format, NESTS)),
        st.booleans(),
    ),
    st.builds(
        Call, st.just("same.assign"), st.tuples(st.builds("np.full(3, {}.0)".format, NUMBERS))
    ),
    st.builds(Call, st.just("total.assign_add"), st.just(("filled(mine, (3,), 'f8')",))),
)


@st.composite
def bodies(draw, names, depth=0):
    """Draw statements; `names` gives each function and variable a number."""
    body = []
    for _ in range(draw(st.integers(1, 3))):
        kinds = ["row", "row", "comprehension", "lambda", "reducer", "two lines"]
        kind = draw(st.sampled_from([*kinds, "loop", "branch", "function"] if depth < 2 else kinds))
        number = next(names)
        if kind == "row":
            body.append(Row(draw(st.lists(CALLS, min_size=1, max_size=3))))
        elif kind == "comprehension":
            body.append(Repeated(draw(CALLS), "found.extend([", " for _ in range(2)])"))
        elif kind == "lambda":
            body.append(Repeated(draw(CALLS), f"call_{number} = lambda: ", ""))
            body.append(Lines((f"found.extend([call_{number}(), call_{number}()])",)))
        elif kind == "reducer":
            text = f"    return context.all_reduce({draw(OPS)}, value)"
            body.append(Lines((f"def reduce_{number}(value):", text)))
            values = draw(st.lists(VALUES, min_size=2, max_size=2))
            body.append(Row([Call(f"reduce_{number}", (value,)) for value in values]))
        elif kind == "two lines":
            name = f"mr.CommunicationOptions(name='call {number}')"
            call = f"    found.append(context.all_reduce({draw(OPS)}, {draw(VALUES)}, {name}))"
            body.append(Lines(("if mine % 2:", call, "else:", call)))
        elif kind == "loop":
            turns = draw(st.integers(1, 3))
            head = f"for turn_{number} in range({turns}):"
            body.append(Block(head, draw(bodies(names, depth + 1)), f"turn_{number}"))
        elif kind == "branch":
            condition = "if context.num_replicas_in_sync > 0:"
            other = tuple(indented(lines_of(draw(bodies(names, depth + 1)))))
            body.append(Block(condition, draw(bodies(names, depth + 1)), after=("else:", *other)))
            if draw(st.booleans()):
                body[-1] = Block(
                    "else:", body[-1].body, before=(condition.replace(">", "<"), *other)
                )
        else:
            body.append(Block(f"def part_{number}():", draw(bodies(names, depth + 1))))
            body[-1].after = (f"part_{number}()",) * draw(st.integers(1, 2))
    return body


@st.composite
def programs(draw, mistake=None):
    """Draw a program; `mistake` has one replica do something else at a place of the body."""
    body = draw(bodies(itertools.count()))
    error = None if mistake is None else mistake(draw, body)
    return Program(HEAD + "\n".join([*indented(lines_of(body)), "    return found"]), error)


# What is done


class Program:
    """A step function, as text and as what it does.

    Parameters
    ----------
    error : type, optional
        Of a mistake that is none of the order of calls.
    """

    def __init__(self, text, error):
        self.text = text
        self.error = error
        lines = text.splitlines(keepends=True)
        linecache.cache[FILE] = (len(text), None, lines, FILE)  # for tracebacks
        names = {"mr": mr, "np": np, "optree": optree, "filled": filled, "Lost": Lost}
        exec(compile(text, FILE, "exec"), names)
        self.step = names["step"]

    def __repr__(self):
        lines = self.text.splitlines()
        return "\n".join(["", *(f"{number:3} {line}" for number, line in enumerate(lines, 1))])

    def parting(self, culprit, count):
        """How one of so many replicas parts from the others."""
        right = Trace(self, int(culprit == 0), count, False)
        parting = parting_of(right, Trace(self, culprit, count, True))
        return parting if self.error is None else parting._replace(error=self.error)

    def mistake(self, variables, parting):
        """What the replica does wrong, for `check_mistake`."""

        def in_a_step(context, is_culprit):
            mine = context.replica_id_in_sync_group
            return self.step(context, *variables, mine, is_culprit)

        others = parting.others_call
        are_on_one_line = others is None or not isinstance(others.site, str)
        both = parting.error in (CALL, STRUCTURE) and are_on_one_line
        place = f"{FILE}:{parting.line}"
        return Mistake("", parting.error, (), (place,), in_a_step, names_both_sides=both)


def filled(mine, shape, dtype):
    """Whole numbers that are others on each replica."""
    return (np.arange(np.prod(shape)) % 7 + mine).reshape(shape).astype(dtype)
