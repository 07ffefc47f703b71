"""Collectives inside of functions that JAX compiles, differentiates and maps."""

import functools

import numpy as np
import pytest

import mpi_replica as mr
from everywhere import holds_everywhere

jax = pytest.importorskip("jax", reason="jax is not installed")

jax.config.update("jax_num_cpu_devices", 8)  # the tests make strategies of several sizes

import jax.numpy as jnp  # noqa: E402

from jax_programs import (  # noqa: E402
    Collectives,
    check,
    data,
    gradient_of_all,
    of_all,
    value_and_gradient_of_all,
)

OPS = ["SUM", "MEAN", "MIN", "MAX", "PROD"]


def reduced(op):
    return lambda c, x: c.reduce(op, x * x) * x


def gathered_rows(c, x):
    rows = c.gather(x)
    return (rows * jnp.arange(1.0, len(rows) + 1)).sum() * x


def along_last_axis(c, x):
    rows = c.gather(x[None, :, None] * jnp.ones((2, 1, 2)), -1)
    return (rows**2 * jnp.arange(1.0, rows.shape[2] + 1)).sum() * x


def nest(c, x):
    found = c.reduce("MEAN", {"a": x, "count": jnp.int32(x.sum()), "b": [x[0], x[None] ** 2]})
    return found["a"] * found["count"] + found["b"][0] + found["b"][1][0]


def in_scan(c, x):
    def body(carry, item):
        carry = c.reduce("MEAN", carry) * item + x
        return carry, carry.sum()

    last, sums = jax.lax.scan(body, x, jnp.stack([x, x + 1, x - 1]))
    return last * sums.mean()


def in_remat(c, x):
    return jax.checkpoint(lambda y: jnp.sin(c.reduce("SUM", y)) * y)(x)


def in_cond(c, x):
    return jax.lax.cond(c.reduce("MAX", x).sum() > 0, lambda y: c.reduce("SUM", y) * y, jnp.sin, x)


def in_vmap(c, x):
    return jax.vmap(lambda y, z: c.reduce("SUM", {"y": y * z, "z": z})["y"], (0, None))(
        jnp.stack([x, x + 1]), x
    ).sum(0)


def in_inner_functions(c, x):
    inner = jax.jit(lambda y: c.reduce("SUM", y) + 1)
    return inner(x) * jax.jit(lambda y: inner(y * y).sum())(x)


def unused(c, x):
    c.reduce("SUM", x)  # is made all the same
    return c.reduce("SUM", x * 2) * x


PROGRAMS = {
    **{op.lower(): reduced(op) for op in OPS},
    "gather": gathered_rows,
    "gather along the last axis": along_last_axis,
    "nest": nest,
    "scan": in_scan,
    "remat": in_remat,
    "cond": in_cond,
    "vmap": in_vmap,
    "inner functions": in_inner_functions,
    "unused": unused,
}


@pytest.fixture(params=PROGRAMS.values(), ids=PROGRAMS)
def program(request):
    return request.param


@pytest.fixture
def with_64_bits():
    with jax.enable_x64(True):
        yield


@pytest.fixture
def stacked(strategy):
    return data(strategy.num_replicas_in_sync)


def test_a_compiled_function_and_its_gradient_are_those_of_one_process(strategy, program, stacked):
    def loss(x):
        result = program(Collectives, x)
        return result.sum(), result

    def step(x):
        gradient, result = jax.grad(loss, has_aux=True)(x)
        return result, gradient

    expected = value_and_gradient_of_all(program, stacked)
    check(strategy, jax.jit(step), stacked, expected, rtol=1e-4)


def in_random_order(seed):
    """Return a program of some random steps, one inside of the other or one after the other."""
    random = np.random.default_rng(seed)

    def step(depth):
        kind = random.integers(8 if depth else 5)
        op, factor = OPS[random.integers(4)], float(random.integers(1, 5)) / 4
        if kind == 0:
            return lambda c, x: jnp.sin(x) * factor
        if kind < 3:
            return lambda c, x: c.reduce(op, x * factor) / 4 + x
        if kind == 3:
            return lambda c, x: c.reduce(op, {"a": x, "b": [x.sum(), jnp.int32(2)]})["a"] * factor
        if kind == 4:
            return lambda c, x: x * jnp.cos(c.gather(jnp.stack([x, -x])).sum(0) * factor)
        inner, other = step(depth - 1), step(depth - 1)
        if kind == 5:
            return lambda c, x: jax.checkpoint(lambda y: inner(c, y))(other(c, x))
        if kind == 6:
            return lambda c, x: jax.lax.scan(
                lambda y, factor: (inner(c, y) * factor, None), x, jnp.array([0.5, 1.5])
            )[0]
        return lambda c, x: jax.vmap(lambda y: inner(c, y))(jnp.stack([x, other(c, x)])).mean(0)

    steps = [step(2) for _ in range(3)]
    return lambda c, x: functools.reduce(lambda y, one: one(c, y), steps, x)


@pytest.mark.parametrize("seed", range(4))
def test_any_graph_of_collectives_has_the_value_and_the_gradient_of_one_process(
    strategy, seed, with_64_bits
):
    program = in_random_order(seed)
    stacked = data(strategy.num_replicas_in_sync, dtype=np.float64, seed=seed)
    if seed % 2:
        step = jax.grad(lambda x: program(Collectives, x).sum())
    else:
        step = jax.jit(
            jax.grad(lambda x: jax.jit(functools.partial(program, Collectives))(x).sum())
        )
    check(
        strategy,
        lambda x: (jax.jit(functools.partial(program, Collectives))(x), step(x)),
        stacked,
        value_and_gradient_of_all(program, stacked),
        rtol=1e-9,
    )


@pytest.mark.parametrize("name", ["max", "gather", "scan"])
def test_functions_are_differentiated_also_where_they_are_not_compiled(strategy, name, stacked):
    program = PROGRAMS[name]

    def loss(x):
        return program(Collectives, x).sum()

    expected = gradient_of_all(program, stacked)
    check(
        strategy,
        lambda x: (jax.grad(loss)(x), jax.grad(jax.jit(loss))(x)),
        stacked,
        (expected, expected),
        rtol=1e-4,
    )


@pytest.mark.parametrize("name", ["prod", "gather", "scan"])
def test_second_derivatives_are_those_of_one_process(strategy, name, with_64_bits):
    program = PROGRAMS[name]
    stacked = data(strategy.num_replicas_in_sync, dtype=np.float64)

    def gradient(x):
        return jax.grad(lambda y: program(Collectives, y).sum())(x)

    def gradients(xs):
        return gradient_of_all(program, xs)

    def bent(gradients):  # for gradients of any size, as products of many replicas have them
        return jnp.log1p(gradients**2).sum()

    # the sum over all replicas of what `gradient` gives, differentiated once more
    expected = jax.jit(jax.grad(lambda xs: bent(gradients(xs))))(stacked)
    step = jax.jit(jax.grad(lambda x: bent(gradient(x))))
    check(strategy, step, stacked, expected, rtol=1e-9)


@pytest.mark.parametrize("name", ["mean", "max", "prod", "gather", "scan"])
def test_tangents_are_those_of_one_process(strategy, name, stacked):
    program = PROGRAMS[name]
    directions = data(strategy.num_replicas_in_sync, seed=1)

    def tangents_of_all(xs, ts):
        return jax.jvp(lambda xs: of_all(program, xs), (xs,), (ts,))[1]

    expected = jax.jit(tangents_of_all)(stacked, directions)

    def step(x):
        mine = jnp.asarray(directions)[mr.get_replica_context().replica_id_in_sync_group]
        plain = functools.partial(program, Collectives)
        return jax.jit(lambda y, t: jax.jvp(plain, (y,), (t,))[1])(x, mine)

    check(strategy, step, stacked, expected, rtol=1e-4)


def test_a_hessian_is_what_its_columns_are_one_by_one(strategy, stacked):
    def loss(x):
        return (Collectives.reduce("SUM", x**3) ** 2).sum()

    def column(x, direction):
        return jax.jvp(jax.grad(loss), (x,), (direction,))[1]

    def step():
        x = own(stacked)
        columns = [jax.jit(column)(x, direction) for direction in jnp.eye(len(x))]
        return jax.jit(jax.hessian(loss))(x), jnp.stack(columns, 1)

    found = strategy.run(step)

    def both_ways_agree():
        for at_once, one_by_one in strategy.experimental_local_results(found):
            np.testing.assert_allclose(at_once, one_by_one, rtol=1e-5)
            assert np.count_nonzero(at_once) == len(at_once)

    holds_everywhere(both_ways_agree)


def own(stacked):
    return jnp.asarray(stacked)[mr.get_replica_context().replica_id_in_sync_group]


def test_a_loop_ends_on_all_replicas_by_what_they_have_in_common(strategy, stacked):
    def program(c, x):
        def body(state):
            count, y = state
            return count + 1, c.reduce("MEAN", y) * 1.5

        return jax.lax.while_loop(lambda state: c_norm(state) < 100.0, body, (0, x))

    def c_norm(state):
        return jnp.where(state[0] == 0, 0.0, state[1].sum())

    step = jax.jit(functools.partial(program, Collectives))
    means = stacked.mean(0)
    count, value = 1, means * 1.5
    while value.sum() < 100:
        count, value = count + 1, value * 1.5
    everywhere = (np.full(len(stacked), count, np.int32), np.stack([value] * len(stacked)))
    check(strategy, step, stacked, everywhere)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "int8", "int32", "bool", "complex64"])
@pytest.mark.parametrize("op", ["SUM", "MEAN", "MAX"])
def test_results_have_the_dtypes_that_they_have_outside(strategy, op, dtype):
    values = (data(strategy.num_replicas_in_sync) > 2).astype(dtype)
    if (op, dtype) in [("SUM", "bool"), ("MAX", "complex64")]:
        pytest.skip("it has no meaning")

    def step():
        context = mr.get_replica_context()
        x = own(values)
        inside = jax.jit(lambda y: context.all_reduce(op, y))(x)
        return inside, context.all_reduce(op, x)

    def are_the_same():
        for inside, outside in strategy.experimental_local_results(strategy.run(step)):
            assert inside.dtype == outside.dtype
            np.testing.assert_array_equal(np.asarray(inside), np.asarray(outside))

    holds_everywhere(are_the_same)


@pytest.mark.parametrize("op", ["MIN", "MAX"])
@pytest.mark.parametrize("dtype", ["float64", "float16"])
def test_ties_share_the_gradient_with_all_bits_of_the_dtype(strategy, with_64_bits, op, dtype):
    count = strategy.num_replicas_in_sync
    factors = np.linspace(0.1, 0.9, count).astype(dtype)

    def step():
        context = mr.get_replica_context()
        mine = factors[context.replica_id_in_sync_group]
        gradient = jax.grad(lambda x: (context.all_reduce(op, x) * mine).sum())
        return gradient(jnp.ones(2, dtype)), jax.jit(gradient)(jnp.ones(2, dtype))

    def are_right():
        for found in strategy.experimental_local_results(strategy.run(step)):
            for value in found:
                assert value.dtype == dtype
                rtol = 4 * np.finfo(dtype).eps
                np.testing.assert_allclose(value, factors.mean(dtype=float), rtol=rtol)

    holds_everywhere(are_right)


@pytest.mark.parametrize("shape", [(), (0,), (2, 0, 3), (1,), (300_000,)])
def test_any_shape_goes_through_a_compiled_function(strategy, shape):
    def step():
        context = mr.get_replica_context()
        x = jnp.full(shape, 1.0 + context.replica_id_in_sync_group)
        return jax.jit(lambda y: context.all_reduce("SUM", y))(x)

    count = strategy.num_replicas_in_sync
    expected = np.full(shape, count * (count + 1) / 2, np.float32)

    def are_right():
        for found in strategy.experimental_local_results(strategy.run(step)):
            np.testing.assert_array_equal(np.asarray(found), expected)

    holds_everywhere(are_right)


@pytest.mark.parametrize("nest", [{}, [], {"a": ()}], ids=str)
def test_a_nest_without_leaves_goes_through_a_compiled_function(strategy, nest):
    def step(x):
        context = mr.get_replica_context()
        gathered = context.all_gather(nest, 0)
        return context.all_reduce("SUM", nest), gathered, context.all_reduce("SUM", x)

    def compiled(x):
        jax.grad(lambda x: step(x)[2].sum())(x)
        return jax.jit(step)(x), step(x)

    found = strategy.run(lambda: compiled(jnp.ones(2)))
    for inside, outside in strategy.experimental_local_results(found):
        assert inside[:2] == outside[:2] == (nest, nest)
        assert float(inside[2][0]) == strategy.num_replicas_in_sync


def test_a_function_is_compiled_once_and_goes_on_for_many_runs(strategy):
    traced = []

    @jax.jit
    def step(x, i):
        traced.append(None)
        return mr.get_replica_context().all_reduce("SUM", x * i)

    count = strategy.num_replicas_in_sync
    for i in range(1, 20):
        found = strategy.run(lambda i=i: float(step(jnp.ones(2), i)[0]))
        assert set(strategy.experimental_local_results(found)) == {float(count * i)}
    assert len(traced) == len(strategy.local_replica_ids)  # each has a device of its own


def test_a_function_has_the_number_of_replicas_of_the_strategy_in_whose_step_it_runs(strategy):
    @jax.jit
    def means(x):
        context = mr.get_replica_context()
        mean = context.all_reduce("SUM", x) / context.num_replicas_in_sync
        return mean, context.all_gather(x, 0).mean() * jnp.ones(1)

    def own_means():
        own = mr.get_replica_context().replica_id_in_sync_group
        return [float(mean[0]) for mean in means(jnp.full(1, float(own)))]

    with mr.MPIStrategy(replicas_per_rank=3) as other:
        for _ in range(2):
            assert own_means() == [0.0, 0.0]  # outside of any strategy there is one replica
            for one in (strategy, other):
                mean = (one.num_replicas_in_sync - 1) / 2  # of 0, 1, ...
                found = one.gather_objects(one.run(own_means))
                assert found == ([mean] * 2,) * one.num_replicas_in_sync


@pytest.mark.parametrize("is_ordered", [False, True])
def test_options_go_with_a_traced_call(strategy, is_ordered):
    values = np.array([1e8, 1.0, -1e8, 0.5, 0.25, 3.0, 7.0, 1e-3] * 4, np.float32)
    options = mr.CommunicationOptions(reproducible=is_ordered, name="sum of all")
    expected = values[: strategy.num_replicas_in_sync].astype(float).sum()

    def step():
        context = mr.get_replica_context()
        x = own(values)
        inside = jax.jit(lambda y: context.all_reduce("SUM", y, options))(x)
        return float(inside), float(context.all_reduce("SUM", x, options))

    def are_the_same():
        for inside, outside in strategy.experimental_local_results(strategy.run(step)):
            np.testing.assert_allclose(inside, expected, atol=20)
            assert inside == outside or not is_ordered

    holds_everywhere(are_the_same)


@pytest.mark.parametrize("rows", [2**30, np.int64(3_000_000_000), 2.0**40])
def test_means_over_rows_that_32_bits_can_not_count_are_right(strategy, rows):
    def mean(total):
        return mr.mean_over_global_batch(total, rows=rows)

    for function in (mean, jax.jit(mean)):
        found = strategy.run(lambda function=function: function(jnp.float32(rows)))
        for value in strategy.experimental_local_results(found):
            np.testing.assert_allclose(np.asarray(value), 1.0, rtol=1e-6)


def test_means_over_rows_that_jax_counts_are_right(strategy):
    def mean(total, rows):
        return mr.mean_over_global_batch(total, rows=rows)

    found = strategy.run(lambda: jax.jit(mean)(jnp.float32(2**30), jnp.int32(2**30)))
    for value in strategy.experimental_local_results(found):
        np.testing.assert_allclose(np.asarray(value), 1.0, rtol=1e-6)


@pytest.mark.parametrize(
    ("rows", "kind"),
    [
        (-3, ValueError),
        (np.inf, ValueError),
        (True, TypeError),
        ("a", TypeError),
        (np.array([2, 3]), TypeError),
    ],
    ids=repr,
)
def test_rows_that_are_no_number_of_rows_are_the_error_outside_of_functions(strategy, rows, kind):
    def mean(total):
        return mr.mean_over_global_batch(total, rows=rows)

    with pytest.raises(kind, match=r"^rows must be "):
        strategy.run(lambda: jax.jit(mean)(jnp.float32(1)))
