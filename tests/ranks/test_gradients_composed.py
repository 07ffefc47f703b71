"""Gradients of random programs of collectives and functions, as torch finds them in one process.

And of each op beside finite differences, which know no rule of any way back.
"""

import functools

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

import mpi_replica as mr
from contributions import at_once
from everywhere import holds_everywhere
from gradient_programs import (
    OPS,
    Gathered,
    Reduced,
    as_numpy,
    by_calls,
    check_gradients,
    differentiated,
    replica_id,
    results,
)

torch = pytest.importorskip("torch", reason="torch is not installed")

# By name: functions of values of any shape, which stay small.
OF_ONE = {
    "sin": lambda x, i: torch.sin(x),
    "tanh": lambda x, i: torch.tanh(2 * x),
    "square": lambda x, i: x * x / (1 + x.detach().abs()),
    "own factor": lambda x, i: x * (0.5 + 0.25 * i),
    "total": lambda x, i: torch.tanh(x.sum()),
    "transposed": lambda x, i: x.mT if x.ndim > 1 else x,
    "flat": lambda x, i: x.reshape(-1),
    "first row": lambda x, i: x[:1] if x.ndim else x,
    "in place": lambda x, i: x.clone().mul_(0.5),
    "detached": lambda x, i: x.detach() + 0 * x,
}
OF_TWO = {
    "sum": lambda x, y: x + 0.5 * y.mean(),
    "product": lambda x, y: x * torch.tanh(y.sum()),
    "quotient": lambda x, y: x / (2 + torch.sin(y.sum())),
    "larger": lambda x, y: torch.maximum(x, y.mean()),
}


@st.composite
def steps(draw):
    """What is done to a list of values: each step adds one or two."""
    number = st.integers(0, 100)  # of a value, from the end
    return draw(
        st.lists(
            st.one_of(
                st.tuples(st.just("one"), st.sampled_from(sorted(OF_ONE)), number),
                st.tuples(st.just("two"), st.sampled_from(sorted(OF_TWO)), number, number),
                st.tuples(st.just("reduce"), st.sampled_from(sorted(OPS)), number),
                st.tuples(st.just("reduce"), st.sampled_from(["SUM", "MEAN"]), number),
                st.tuples(st.just("nest"), st.sampled_from(["SUM", "MEAN", "MAX"]), number, number),
                st.tuples(st.just("gather"), st.integers(-2, 1), number),
                st.tuples(st.just("uneven"), number),
            ),
            min_size=2,
            max_size=10,
        )
    )


def parts(steps, i, *leaves):
    """Run the steps; return the values that no other step has taken."""
    found = list(leaves)
    unused = set(range(len(found)))

    def taken(number):
        place = len(found) - 1 - number % len(found)
        unused.discard(place)
        return found[place]

    def add(value):
        unused.add(len(found))
        found.append(value)

    for kind, *about in steps:
        if kind == "one":
            add(OF_ONE[about[0]](taken(about[1]), i))
        elif kind == "two":
            add(OF_TWO[about[0]](taken(about[1]), taken(about[2])))
        elif kind == "reduce":
            y = yield Reduced(about[0], taken(about[1]))
            add(y)
        elif kind == "nest":
            x, y = taken(about[1]), taken(about[2])
            nest = yield Reduced(about[0], {"x": x, "y": [y, 2 * x]})
            add(nest["x"])
            add(nest["y"][0] * nest["y"][1].sum() / 9)
        elif kind == "gather":
            x = taken(about[1])
            rows = yield Gathered(torch.atleast_2d(x), about[0])
            add(rows.mean(about[0]))
        else:
            rows = torch.atleast_1d(taken(about[0]))
            rows = yield Gathered(rows.repeat(3, *[1] * (rows.ndim - 1))[: 2 * i])
            add(rows.sum(0) / 4)
    return [found[place] for place in sorted(unused)]


def program(steps, i, *leaves):
    """A loss into which all values go that no step has taken, with factors of this replica.

    Each is used by all: who leaves one out makes no way back of its call, which is an error.
    """
    ends = yield from parts(steps, i, *leaves)
    return sum(
        (torch.cos(torch.arange(end.numel()) + i + 1.0).reshape(end.shape) * end).sum()
        for end in ends
    )


def leaves_of(seed, i):
    random = np.random.default_rng([seed, i])
    shapes = ((2, 3), (3,), ())
    return [torch.tensor(random.standard_normal(shape)).requires_grad_() for shape in shapes]


many = hypothesis.settings(at_once, max_examples=40)


@many
@given(drawn=steps(), seed=st.integers(0, 1000))
def test_gradients_of_a_program_are_those_of_one_process_with_all_data(strategy, drawn, seed):
    check_gradients(
        strategy,
        functools.partial(program, drawn),
        functools.partial(leaves_of, seed),
        rtol=1e-8,
        atol=1e-10,
    )


@at_once
@given(drawn=steps(), seed=st.integers(0, 1000))
def test_gradients_of_gradients_are_those_of_one_process_with_all_data(strategy, drawn, seed):
    check_gradients(
        strategy,
        functools.partial(program, drawn),
        functools.partial(leaves_of, seed),
        twice=True,
        rtol=1e-7,
        atol=1e-9,
    )


# Finite differences

CALLS = {op: functools.partial(Reduced, op) for op in OPS}
CALLS |= {f"gather along {axis}": functools.partial(Gathered, axis=axis) for axis in (0, 1, -1)}


@pytest.mark.parametrize("name", CALLS)
def test_gradients_are_what_finite_differences_say(strategy, name):
    count = strategy.num_replicas_in_sync
    width = 1e-5

    def values_of(i):
        values = np.random.default_rng([i, 11]).standard_normal((2, 2))
        if name == "PROD":
            values[0, 0] *= i != 0  # one factor of 0
        return torch.tensor(values)

    def loss(i, x):
        y = yield CALLS[name](torch.sin(x) if name != "PROD" else x)
        return (torch.cos(torch.arange(y.numel()) + i + 1.0).reshape(y.shape) * y * y).sum()

    def step():
        context, mine = mr.get_replica_context(), replica_id()
        x = values_of(mine).requires_grad_()
        (gradient,) = differentiated(by_calls(loss(mine, x)), [x])
        differences = torch.zeros(2, 2, dtype=torch.float64)
        for i in range(count):
            for place in np.ndindex(2, 2):
                totals = []
                for change in (width, -width):
                    moved = values_of(mine)
                    moved[place] += change * (i == mine)
                    with torch.no_grad():
                        totals.append(context.all_reduce("SUM", by_calls(loss(mine, moved))))
                if i == mine:
                    differences[place] = (totals[0] - totals[1]) / (2 * width)
        return gradient, differences

    found = results(strategy, step)

    def check():
        for gradient, differences in found.values():
            np.testing.assert_allclose(
                as_numpy(gradient), as_numpy(differences), rtol=1e-5, atol=1e-7
            )

    holds_everywhere(check)
