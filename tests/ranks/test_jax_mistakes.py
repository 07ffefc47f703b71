"""Mistakes in functions that JAX traces: errors on every rank, and JAX works on behind them."""

import numpy as np
import pytest

import mpi_replica as mr
from everywhere import (
    check_works,
    error_of,
    gathered,
    needs_two_replicas,
    raises_everywhere,
    shares_ranks,
)
from mpi_replica.errors import (
    CollectiveMismatchError,
    ContextError,
    ReplicaStopped,
    StructureMismatchError,
)

jax = pytest.importorskip("jax", reason="jax is not installed")

jax.config.update("jax_num_cpu_devices", 8)  # the tests make strategies of several sizes

import jax.numpy as jnp  # noqa: E402
from jax.experimental import sparse  # noqa: E402

from mpi_replica.core.jax_state import require_version  # noqa: E402

OTHERS = "outside of that function, and pass the result as an argument"


def context():
    return mr.get_replica_context()


def own_id():
    return context().replica_id_in_sync_group


@jax.jit
def summed(x):
    return context().all_reduce("SUM", x)


@jax.jit
def averaged(x):
    return context().all_reduce("MEAN", x)


def by(function, x):
    """A line more in the call site."""
    return function(x)


def check_jax_works(strategy):
    """Check that JAX, and collectives inside and outside of it, give the right numbers."""
    count = strategy.num_replicas_in_sync

    def step():
        plain = jnp.ones(2).sum() + 1
        return float(plain), float(summed(jnp.full(2, 3.0))[0]), float(jax.jit(jnp.sin)(0.0))

    found = strategy.experimental_local_results(strategy.run(step))
    assert set(found) == {(3.0, 3.0 * count, 0.0)}
    assert float(jnp.ones(2).sum()) == 2.0
    check_works(strategy)


def pulled_back(x, is_wanted):
    result, pull_back = jax.vjp(summed, x)
    return pull_back(result) if is_wanted else result


# Each is run by all replicas, of which the last one does something else. The error, and a part of
# its text.
DISAGREEMENTS = {
    "other function": (
        lambda last: averaged(jnp.ones(3)) if last else summed(jnp.ones(3)),
        CollectiveMismatchError,
        "all_reduce(MEAN, float32[3])",
    ),
    "other shape": (
        lambda last: summed(jnp.ones(4 if last else 3)),
        StructureMismatchError,
        "different shapes",
    ),
    "other dtype": (
        lambda last: summed(jnp.ones(3, jnp.int32 if last else jnp.float32)),
        StructureMismatchError,
        "int32",
    ),
    "other place": (
        lambda last: by(summed, jnp.ones(3)) if last else summed(jnp.ones(3)),
        CollectiveMismatchError,
        "replicas are at different calls",
    ),
    "another call": (
        lambda last: context().all_reduce("SUM", np.ones(3)) if last else summed(jnp.ones(3)),
        CollectiveMismatchError,
        "replicas are at different calls",
    ),
    "no call": (
        lambda last: None if last else summed(jnp.ones(3)),
        CollectiveMismatchError,
        "has returned from",
    ),
    "other rows": (
        lambda last: jax.jit(lambda x: context().all_gather(x, 0))(jnp.ones(2 if last else 1)),
        CollectiveMismatchError,
        "traced for",
    ),
    "a result that one does not use": (
        lambda last: jax.grad(
            lambda x: summed(jax.lax.stop_gradient(x) if last else x).sum() + x.sum()
        )(jnp.ones(3)),
        CollectiveMismatchError,
        "gradient of all_reduce",
    ),
    "a gradient that one does not take": (
        lambda last: pulled_back(jnp.ones(3), not last),
        CollectiveMismatchError,
        "gradient of all_reduce",
    ),
}


@pytest.mark.parametrize("name", DISAGREEMENTS)
def test_what_replicas_disagree_about_is_the_same_error_on_every_rank(strategy, name):
    needs_two_replicas(strategy)
    step, kind, words = DISAGREEMENTS[name]
    last = strategy.num_replicas_in_sync - 1
    error = raises_everywhere(kind, lambda: strategy.run(lambda: step(own_id() == last)))
    assert words in str(error)
    check_jax_works(strategy)


# What JAX traces, and would keep; or can't be done in it. The error is that of the replica.
MISTAKES = {
    "the id": (lambda x: x * own_id(), ContextError, OTHERS),
    "random numbers": (lambda x: x * context().rng.random(), ContextError, OTHERS),
    "a number": (lambda x: x * context().all_reduce("SUM", 1.0), ContextError, OTHERS),
    "merge_call": (
        lambda x: context().merge_call(lambda strategy, value: value, (x,)),
        ContextError,
        OTHERS,
    ),
    "op": (lambda x: context().all_reduce("SUMM", x), ValueError, "'SUMM' is not a reduce op"),
    "bool": (lambda x: context().all_reduce("SUM", x > 0), TypeError, "SUM of bool"),
    "slices": (
        lambda x: context().all_reduce("SUM", mr.IndexedSlices(x, [0, 1, 2], (3,))),
        TypeError,
        "IndexedSlices got rows or indices that JAX traces",
    ),
    "text": (lambda x: context().all_reduce("SUM", (x, "a")), TypeError, "value[1]"),
    "none": (
        lambda x: context().all_reduce("SUM", {"a": x, "b": None}),
        TypeError,
        "got None for value['b']: SUM needs numbers. Leave it out on all replicas",
    ),
    "none alone": (
        lambda x: context().all_reduce("SUM", {"b": None}),
        TypeError,
        "got None for value['b']: SUM needs numbers. Leave it out on all replicas",
    ),
    "out": (lambda x: context().all_reduce("SUM", x, out=np.ones(3)), TypeError, "out="),
    "scalar": (lambda x: context().all_gather(x.sum(), 0), ValueError, "got a scalar"),
    "axis": (lambda x: context().all_gather(x, 1), ValueError, "axis 1 is out of range"),
    "no axis": (lambda x: context().all_gather(x, "rows"), TypeError, "axis"),
    "keys": (
        lambda x: context().all_gather(jax.random.split(jax.random.key(x[0].astype(int)), 2), 0),
        TypeError,
        "jax.random.key_data",
    ),
    "its own": (lambda x: {}["missing"], KeyError, "missing"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_while_jax_traces_is_an_error_on_every_rank(strategy, name):
    function, kind, words = MISTAKES[name]
    last = strategy.num_replicas_in_sync - 1

    def step():
        return jax.jit(function)(jnp.ones(3)) if own_id() == last else summed(jnp.ones(3))

    error = raises_everywhere(kind, lambda: strategy.run(step))
    assert words in str(error)
    check_jax_works(strategy)


@pytest.mark.parametrize("name", ["the id", "random numbers", "a number"])
def test_differentiated_and_mapped_functions_that_are_not_compiled_may_read_all(strategy, name):
    function, _, _ = MISTAKES[name]

    def step():
        gradient = jax.grad(lambda x: function(x).sum())(jnp.ones(3))
        return gradient.shape, jax.vmap(function)(jnp.ones((2, 3))).shape

    found = strategy.experimental_local_results(strategy.run(step))
    assert set(found) == {((3,), (2, 3))}


@pytest.mark.parametrize("transform", [jax.grad, jax.vmap])
def test_a_merge_call_takes_no_values_that_jax_traces(strategy, transform):
    def step():
        take = transform(lambda x: context().merge_call(lambda strategy, value: value, (x,)))
        take(jnp.float32(1.0) if transform is jax.grad else jnp.ones(3))

    error = raises_everywhere(TypeError, lambda: strategy.run(step))
    assert "merge_call" in str(error)
    assert "traces" in str(error)
    check_jax_works(strategy)


def test_an_error_can_be_caught_where_the_compiled_function_is_called(strategy):
    needs_two_replicas(strategy)
    last = strategy.num_replicas_in_sync - 1

    def step():
        function = averaged if own_id() == last else summed
        try:
            function(jnp.ones(3))
        except CollectiveMismatchError as error:
            return str(error), float(summed(jnp.ones(3))[0])

    found = gathered(strategy.experimental_local_results(strategy.run(step)))
    texts, sums = zip(*[pair for of_rank in found for pair in of_rank], strict=True)
    assert len(set(texts)) == 1
    assert set(sums) == {float(last + 1)}
    check_jax_works(strategy)


def test_who_waits_in_a_compiled_function_stops_for_an_exception_of_another(strategy):
    needs_two_replicas(strategy)
    last = strategy.num_replicas_in_sync - 1
    stopped = []

    def step():
        if own_id() == last:
            raise KeyError("mine")
        try:
            summed(jnp.ones(3))
        except ReplicaStopped:
            stopped.append(own_id())
            raise

    raises_everywhere(KeyError, lambda: strategy.run(step))
    assert stopped == [i for i in strategy.local_replica_ids if i != last]
    check_jax_works(strategy)


def test_a_function_for_several_devices_is_refused(strategy):
    mesh = jax.make_mesh((2,), ("rows",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("rows")
    spread = jax.shard_map(summed, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    sharding = jax.sharding.NamedSharding(mesh, spec)
    for step in (
        lambda: jax.jit(spread)(jnp.ones(4)),
        lambda: jax.pmap(summed)(jnp.ones((1, 3))),
        lambda: summed(jax.device_put(jnp.ones(4), sharding)),
    ):
        error = raises_everywhere(NotImplementedError, lambda step=step: strategy.run(step))
        assert "several devices" in str(error)
    check_jax_works(strategy)


@pytest.mark.parametrize("read", ["value", "numpy", "__array__"])
def test_a_variable_that_is_read_in_a_traced_function_is_an_error(strategy, read):
    """Its value of now would be kept for all later calls."""
    with strategy.scope():
        weight = mr.Variable(np.float32(1.0), name="weight")

    @jax.jit
    def scaled(x):
        return context().all_reduce("SUM", x * jnp.asarray(getattr(weight, read)()))

    error = raises_everywhere(ContextError, lambda: strategy.run(lambda: scaled(jnp.ones(2))))
    assert "weight was read in a function that JAX traces" in str(error)
    assert OTHERS in str(error)
    value = strategy.run(lambda: summed(jnp.ones(2) * weight.value()))
    expected = float(strategy.num_replicas_in_sync)
    assert [float(x[0]) for x in strategy.experimental_local_results(value)] == [expected] * len(
        strategy.local_replica_ids
    )
    check_jax_works(strategy)


# What stands above the replicas, given a traced function to make it in, and to what it is a call.
CALLS_ABOVE = {
    "assign": ("mean.assign_add", lambda s, t: t.traced(lambda: t.mean.assign_add(1.0))),
    "assign in a scope": ("mean.assign", lambda s, t: t.in_scope(lambda: t.mean.assign(2.0))),
    "assign on read": ("sums.assign", lambda s, t: t.in_scope(lambda: t.sums.assign(2.0))),
    "assign in a replica": (
        "sums.assign_add",
        lambda s, t: s.run(lambda: t.traced(lambda: t.sums.assign_add(1.0))),
    ),
    "reduce": ("reduce", lambda s, t: t.traced(lambda: s.reduce("SUM", t.ids, axis=None))),
    "reduce in a merge_fn": (
        "reduce",
        lambda s, t: s.run(
            lambda: context().merge_call(
                lambda s, ids: t.traced(lambda: s.reduce("SUM", ids, axis=None)), (own_id(),)
            )
        ),
    ),
    "run": ("run", lambda s, t: t.traced(lambda: s.run(lambda: None))),
    "rng": ("strategy.rng", lambda s, t: t.traced(lambda: s.rng.random())),
    "next": ("next() of a distributed iterator", lambda s, t: t.traced(lambda: next(t.rows))),
    "update": (
        "mean.assign_add",
        lambda s, t: s.extended.update(
            t.mean, lambda mean: t.traced(lambda: mean.assign_add(1.0)) and None
        ),
    ),
    "default strategy": ("alone.assign", lambda s, t: t.traced(lambda: t.alone.assign(2.0))),
}


class Things:
    """What calls above the replicas are about; and a traced function, which makes them."""

    def __init__(self, strategy):
        self.strategy = strategy
        self.alone = mr.Variable(1.0, name="alone")
        with strategy.scope():
            self.mean = mr.Variable(1.0, name="mean")
            self.sums = mr.Variable(
                1.0,
                name="sums",
                synchronization=mr.VariableSynchronization.ON_READ,
                aggregation=mr.VariableAggregation.MEAN,
            )
        self.ids = strategy.run(own_id)
        rows = mr.data.Dataset.range(16).batch(8)
        self.rows = iter(strategy.experimental_distribute_dataset(rows))

    def traced(self, call):
        def function(x):
            call()
            return x

        return jax.jit(function)(1.0)

    def in_scope(self, call):
        with self.strategy.scope():
            return self.traced(call)


@pytest.mark.parametrize("name", CALLS_ABOVE)
def test_a_call_above_the_replicas_in_a_traced_function_is_an_error_and_does_nothing(
    strategy, name
):
    """It would be made once, where JAX traces, and not in later calls of the function."""
    things = Things(strategy)
    call, make = CALLS_ABOVE[name]
    error = raises_everywhere(ContextError, lambda: make(strategy, things))
    assert f"{call} was called in a function that JAX traces" in str(error)
    assert OTHERS in str(error)
    assert [v.numpy() for v in (things.alone, things.mean, things.sums)] == [1.0] * 3
    assert len(things.rows) == 2
    check_jax_works(strategy)


def test_integers_that_jax_can_not_hold_are_an_error(strategy):
    def step():
        return jax.jit(lambda x: context().all_reduce("SUM", [x, np.int64(3_000_000_000)]))(1.0)

    error = raises_everywhere(TypeError, lambda: strategy.run(step))
    assert "value[1]" in str(error)
    assert "jax_enable_x64" in str(error)
    check_jax_works(strategy)


def own_matrix():
    return sparse.BCOO.fromdense(jnp.zeros((3, 3)).at[own_id() % 3, 0].set(1 + own_id()))


# Calls of a sparse matrix, of which each replica has its elements in other places.
SPARSE_CALLS = {
    "all_reduce": lambda matrix: context().all_reduce("SUM", {"a": matrix}),
    "all_gather": lambda matrix: context().all_gather({"a": matrix}, 0),
    "compiled": lambda matrix: jax.jit(SPARSE_CALLS["all_reduce"])(matrix),
    "compiled gather": lambda matrix: jax.jit(SPARSE_CALLS["all_gather"])(matrix),
    "compiled beside others": lambda matrix: jax.jit(
        lambda a: context().all_reduce("SUM", {"a": a, "b": a.data})
    )(matrix),
    "other kind": lambda matrix: context().all_reduce(
        "SUM", {"a": sparse.BCSR.from_bcoo(matrix.sort_indices())}
    ),
}


@pytest.mark.parametrize("name", SPARSE_CALLS)
def test_a_sparse_matrix_is_an_error_that_says_what_to_convert(strategy, name):
    error = raises_everywhere(
        TypeError, lambda: strategy.run(lambda: SPARSE_CALLS[name](own_matrix()))
    )
    assert "value['a']" in str(error)
    assert "value.todense()" in str(error)
    check_jax_works(strategy)


@pytest.mark.parametrize("name", ["reduce", "gather"])
def test_sparse_matrices_of_replicas_are_not_reduced_or_gathered(strategy, name):
    matrices = strategy.run(own_matrix)
    call = {
        "reduce": lambda: strategy.reduce("SUM", matrices, axis=None),
        "gather": lambda: strategy.gather(matrices, axis=0),
    }[name]
    assert "value.todense()" in str(raises_everywhere(TypeError, call))
    check_jax_works(strategy)


def test_a_sparse_matrix_goes_through_runs_and_merge_calls_as_it_is(strategy):
    def total(strategy, matrices):
        return sum(matrix.todense() for matrix in strategy.gather_objects(matrices))

    def step(matrix):
        own = jax.jit(lambda x: context().all_reduce("SUM", x.todense()))(matrix)
        return own, context().merge_call(total, (matrix,))

    # each is on the device of the first replica of its rank
    committed = strategy.run(lambda: jax.device_put(own_matrix(), jax.local_devices()[0]))
    found = strategy.run(step, args=(committed,))
    for compiled, merged in strategy.experimental_local_results(found):
        np.testing.assert_array_equal(np.asarray(compiled), np.asarray(merged))


def test_a_version_of_jax_that_is_not_known_is_an_error_that_names_those_that_are(monkeypatch):
    require_version()
    monkeypatch.setattr(jax, "__version_info__", (0, 99, 1))
    with pytest.raises(ImportError, match=r"jax>=0\.9,<0\.12"):
        require_version()


def test_in_cross_replica_context_there_is_no_replica_that_calls(strategy):
    strategy.run(lambda: summed(jnp.ones(3)))
    with strategy.scope():
        error = error_of(lambda: summed(jnp.ones(3)))
    assert isinstance(error, (ContextError, AttributeError)), error
    check_jax_works(strategy)


def test_an_array_that_is_committed_to_the_device_of_another_replica_is_an_error(strategy):
    if max(map(len, gathered(strategy.local_replica_ids))) == 1:
        pytest.skip("a replica alone has all devices")
    first = strategy.local_replica_ids[0]
    committed = jax.device_put(jnp.ones(3), jax.local_devices()[0])

    def step(own):
        own = summed(own)  # an argument comes along
        return float((own if own_id() == first else summed(committed))[0])

    assert "is committed to" in str(error_of(lambda: strategy.run(step, args=(committed,))))


def test_a_step_that_sets_the_default_device_is_told_so(strategy):
    if max(map(len, gathered(strategy.local_replica_ids))) == 1:
        pytest.skip("a replica alone has all devices")
    last = jax.local_devices()[-1]  # of no replica

    def step():
        with jax.default_device(last):
            return summed(jnp.ones(3))

    assert "the step has set jax.default_device" in str(error_of(lambda: strategy.run(step)))


TRANSFORMED = {
    "value_and_grad": lambda f: jax.value_and_grad(f)(jnp.ones(2)),
    "vjp": lambda f: jax.vjp(f, jnp.ones(2)),
    "jvp": lambda f: jax.jvp(f, (jnp.ones(2),), (jnp.ones(2),)),
    "vmap": lambda f: jax.vmap(f)(jnp.ones((3, 2))),
    "grad of a scan": lambda f: jax.grad(
        lambda x: jax.lax.scan(lambda carry, _: (carry, 0), f(x), jnp.arange(2))[0]
    )(jnp.ones(2)),
}


@pytest.mark.parametrize("how", TRANSFORMED)
def test_a_run_in_a_function_that_is_differentiated_or_mapped_is_an_error(strategy, how):
    """What goes back would be outside of the replicas, and sum up one instead of all."""

    def loss(x):
        found = strategy.run(lambda: summed(x * x).sum())
        return strategy.experimental_local_results(found)[0]

    error = raises_everywhere(ContextError, lambda: TRANSFORMED[how](loss))
    assert "run was called in a function that JAX differentiates or maps" in str(error)
    check_jax_works(strategy)


@pytest.mark.parametrize("kind", ["all_reduce", "all_gather"])
def test_a_way_back_that_is_called_outside_of_the_replicas_is_an_error(strategy, kind):
    needs_two_replicas(strategy)

    def step():
        def loss(x):
            if kind == "all_reduce":
                return context().all_reduce("SUM", x * x).sum()
            return context().all_gather(x * x, 0).sum()

        _, back = jax.vjp(loss, jnp.ones(2))
        np.testing.assert_array_equal(
            back(jnp.float32(1))[0], 2.0 * context().num_replicas_in_sync * np.ones(2)
        )
        return back

    backs = strategy.experimental_local_results(strategy.run(step))
    error = raises_everywhere(ContextError, lambda: backs[0](jnp.float32(1)))
    assert f"was traced for {strategy.num_replicas_in_sync} replicas" in str(error)
    assert "Differentiate in the function that is given to strategy.run" in str(error)
    check_jax_works(strategy)


@pytest.mark.parametrize("kind", ["all_reduce", "all_gather"])
def test_a_call_that_was_compiled_for_other_replicas_is_an_error(world, kind):
    calls = {
        "all_reduce": lambda x: context().all_reduce("SUM", x),
        "all_gather": lambda x: context().all_gather(x, 0),
    }
    function = jax.jit(calls[kind]).lower(jnp.ones(2)).compile()
    assert function(jnp.ones(2)).tolist() == [1, 1]  # outside of strategies there is one replica
    with mr.MPIStrategy() as strategy:
        if world.size == 1:
            return
        error = raises_everywhere(ContextError, lambda: strategy.run(lambda: function(jnp.ones(2))))
        assert "was traced for 1 replicas" in str(error)
        check_jax_works(strategy)


def test_a_compiled_collective_in_a_solver_that_holds_a_lock_is_refused_beside_other_replicas(
    strategy,
):
    optimize = pytest.importorskip("scipy.optimize", reason="scipy is not installed")

    def step():
        def square(p):
            summed(jnp.ones(2))
            return float((p[0] - 0.5) ** 2)

        return optimize.minimize(square, [1.0], method="COBYQA", options={"maxfev": 20}).x[0]

    if not shares_ranks(strategy):
        found = strategy.experimental_local_results(strategy.run(step))
        np.testing.assert_allclose(found, 0.5, atol=1e-3)
        return
    error = raises_everywhere(ContextError, lambda: strategy.run(step))
    assert "holds a lock while it calls back" in str(error)
    check_works(strategy)
