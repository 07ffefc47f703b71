"""What the replicas of a random program do, from running it with stand-ins that send nothing.

From the traces of two replicas follow the error of all ranks and the line that it must name, from
those of all replicas what each of them must find.
"""

import itertools
import sys
from typing import Any, NamedTuple

import numpy as np
import optree

from contributions import gathered, reduced
from mistake import CALL, STRUCTURE

FILE = "program.py"


class Lost(Exception):
    """What a replica raises. It has more than one argument."""

    def __init__(self, code, table):
        super().__init__(code, table)


class TracedCall(NamedTuple):
    """A call, and what must be the same on all replicas."""

    line: int
    #: Its name, or line and column of each call from the step to this one, the innermost first.
    site: str | tuple[tuple[int, int], ...]
    kind: str
    detail: Any
    compared: Any
    value: Any


class Trace:
    """What one of so many replicas does in a program; it is context and variables in one.

    Attributes
    ----------
    calls : list of TracedCall
    raised_at : int
        The line that raised, or 0.
    """

    def __init__(self, program, mine, count, wrong):
        self.num_replicas_in_sync = count
        self.calls = []
        self.raised_at = 0
        try:
            program.step(self, self, self, mine, wrong)
        except Lost as error:
            step = error.__traceback__
            while step is not None:
                self.raised_at, step = step.tb_lineno, step.tb_next

    def all_reduce(self, reduce_op, value, options=None, *, out=None):
        name = getattr(options, "name", None)
        self._add("all_reduce", reduce_op, value, lambda leaf: (leaf.dtype, leaf.shape), name)

    def all_gather(self, value, axis):
        def fixed(leaf):
            return leaf.dtype, leaf.shape[:axis], leaf.shape[axis + 1 :]

        self._add("all_gather", axis, value, fixed)

    def merge_call(self, merge_fn, args=()):
        self._add("merge_call", getattr(merge_fn, "__name__", merge_fn), args, lambda leaf: None)

    def assign(self, value):
        self._add("assign", None, value, lambda leaf: leaf.tolist())

    def assign_add(self, value):
        self._add("assign_add", None, value, lambda leaf: None)

    def assign_sub(self, value):
        self._add("assign_sub", None, value, lambda leaf: None)

    def _add(self, kind, detail, value, compared, name=None):
        leaves, structure = optree.tree_flatten(value)
        alike = (structure, [compared(np.asarray(leaf)) for leaf in leaves])
        site = []
        frame = sys._getframe(2)
        while frame.f_code.co_filename == FILE:
            positions = itertools.islice(frame.f_code.co_positions(), frame.f_lasti // 2, None)
            line, _, column, _ = next(positions)
            site.append((line, column))
            frame = frame.f_back
        self.calls.append(TracedCall(site[0][0], name or tuple(site), kind, detail, alike, value))


class Parting(NamedTuple):
    """Where one replica does not do what the others do."""

    #: What all ranks raise.
    error: type[BaseException]
    #: The line of the one replica; that of the others where it has returned.
    line: int
    #: The call of the others, if they have one left.
    others_call: TracedCall | None


def parting_of(right, wrong):
    """The first difference between what two replicas do."""
    for mine, other in itertools.zip_longest(wrong.calls, right.calls):
        if mine is None:
            if wrong.raised_at:
                return Parting(Lost, wrong.raised_at, other)
            return Parting(CALL, other.line, other)
        if other is None or mine[1:4] != other[1:4]:
            return Parting(CALL, mine.line, other)
        if mine.compared != other.compared:
            error = ValueError if mine.kind == "assign" else STRUCTURE
            return Parting(error, mine.line, other)
    if not wrong.raised_at:
        raise ValueError("the replica did what the others do")
    return Parting(Lost, wrong.raised_at, None)


def results(traces):
    """What each replica finds in a program that is right, and what the variables are in the end."""
    found, same, total = [], np.zeros(3), np.zeros(3)
    for calls in zip(*(trace.calls for trace in traces), strict=True):
        kind, detail, values = calls[0].kind, calls[0].detail, [call.value for call in calls]
        if kind == "all_reduce":
            found.append(optree.tree_map(lambda *leaves, op=detail: reduced(op, leaves), *values))
        elif kind == "all_gather":
            found.append(gathered(values, detail))
        elif kind == "merge_call":
            whole = sum(np.sum(leaf) for leaf in optree.tree_leaves(values))
            found.append(np.float64(whole if detail == "sum_of" else len(traces)))
        elif kind == "assign":
            same = values[0]
        else:
            total = total + sum(values)
    return found, same, total
