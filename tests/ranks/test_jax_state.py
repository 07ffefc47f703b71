"""What holds the weights of JAX: in checkpoints, ElasticState and verify, as it is."""

import contextlib
from typing import Any

import numpy as np
import pytest

import mpi_replica as mr
from everywhere import raises_everywhere
from mpi_replica.strategy.elastic.snapshot import put_back, take

jax = pytest.importorskip("jax", reason="jax is not installed")
optax = pytest.importorskip("optax", reason="optax is not installed")
equinox = pytest.importorskip("equinox", reason="equinox is not installed")
linen = pytest.importorskip("flax.linen", reason="flax is not installed")
struct = pytest.importorskip("flax.struct", reason="flax is not installed")
train_state = pytest.importorskip("flax.training.train_state", reason="flax is not installed")

jax.config.update("jax_num_cpu_devices", 8)  # the tests make strategies of several sizes

import jax.numpy as jnp  # noqa: E402


class Network(linen.Module):
    @linen.compact
    def __call__(self, x):
        return linen.Dense(2)(linen.relu(linen.Dense(4)(x)))


def of_flax(seed):
    return Network().init(jax.random.key(seed), jnp.ones((1, 3)))


def of_equinox(seed):
    return equinox.nn.MLP(3, 2, 4, 1, key=jax.random.key(seed))


def of_optax(seed):
    weights = of_flax(seed)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3))
    state = optimizer.init(weights)
    _, state = optimizer.update(jax.tree.map(lambda leaf: leaf * seed, weights), state)
    return state


def with_a_part_without_fields(seed):
    linear = equinox.nn.Linear(3, 2, key=jax.random.key(seed))
    return equinox.nn.Sequential([linear, equinox.nn.Identity()])


STATES = {"flax": of_flax, "equinox": of_equinox, "optax": of_optax}
STATES["a part without fields"] = with_a_part_without_fields


def arrays_of(tree):
    return [leaf for leaf in jax.tree.leaves(tree) if isinstance(leaf, jax.Array)]


def in_hundredths(leaf):
    return jnp.round(100 * leaf).astype(leaf.dtype)


def are_equal(one, other):
    assert jax.tree.structure(one) == jax.tree.structure(other)
    pairs = list(zip(arrays_of(one), arrays_of(other), strict=True))
    assert pairs
    for here, there in pairs:
        assert here.dtype == there.dtype
        np.testing.assert_array_equal(np.asarray(here), np.asarray(there))


@pytest.fixture(params=STATES.values(), ids=STATES)
def make(request):
    return request.param


def test_a_checkpoint_takes_weights_as_they_are_and_gives_them_back(strategy, make, path):
    saved = make(1)
    checkpoint = mr.Checkpoint(strategy, state=saved, step=3)
    file = checkpoint.save(path)
    other = mr.Checkpoint(strategy, state=make(2), step=0)
    other.restore(file)
    are_equal(other.state, saved)
    assert type(other.state) is type(saved)
    assert other.step == 3


def test_an_elastic_state_commits_weights_as_they_are(strategy, make):
    state = mr.ElasticState(strategy, state=make(1), step=1)
    strategy.run_elastic(state.commit, state)
    are_equal(state.state, make(1))


def test_a_nest_of_weights_goes_through_collectives_as_it_is(strategy, make):
    count = strategy.num_replicas_in_sync
    # whole numbers, of which a sum has the same bits in any order; None in place of functions
    state = jax.tree.map(in_hundredths, equinox.filter(make(1), equinox.is_array))

    def step():
        context = mr.get_replica_context()
        inside = jax.jit(lambda tree: context.all_reduce("SUM", tree))(state)
        return inside, context.all_reduce("SUM", state)

    found = strategy.run(lambda: [jax.tree.leaves(tree) for tree in step()])
    for inside, outside in strategy.experimental_local_results(found):
        are_equal(inside, outside)
        are_equal(inside, jax.tree.leaves(jax.tree.map(lambda leaf: leaf * count, state)))
    inside, outside = strategy.experimental_local_results(strategy.run(step))[0]
    assert jax.tree.structure(inside) == jax.tree.structure(outside) == jax.tree.structure(state)


def test_verify_finds_the_leaf_in_which_ranks_differ(strategy, make):
    strategy.verify(make(1))
    if strategy.size > 1:
        mine = make(1 if strategy.rank else 2)
        error = raises_everywhere(mr.errors.MPIReplicaError, lambda: strategy.verify(mine))
        assert "test_jax_state.py" in str(error)


def test_what_a_compiled_step_gives_is_on_no_device_for_good(strategy):
    """Where an array is committed to a device, what it is computed with is drawn there."""

    def step(x):
        return jax.jit(lambda y: mr.get_replica_context().all_reduce("SUM", y))(x)

    committed = jax.device_put(jnp.ones(3), jax.local_devices()[0])
    results = strategy.experimental_local_results(strategy.run(step, args=(jnp.ones(3),)))
    assert not any(array.committed for array in results)
    sum(results[1:], results[0])  # of several devices
    results = strategy.experimental_local_results(strategy.run(step, args=(committed,)))
    assert [float(array[0]) for array in results] == [strategy.num_replicas_in_sync] * len(results)


@pytest.mark.parametrize("shape", [(), (2,)])
@pytest.mark.parametrize("device", [0, -1])
def test_a_committed_weak_array_gives_way_to_other_dtypes_on_every_layout(strategy, shape, device):
    """As the number of Python, which it was made of."""
    committed = jax.device_put(jnp.full(shape, 0.1), jax.local_devices()[device])
    found = strategy.run(lambda x: str((x * jnp.ones(2, jnp.bfloat16)).dtype), args=(committed,))
    assert set(strategy.experimental_local_results(found)) == {"bfloat16"}


WEAK = {"number": lambda x: jnp.sin(x), "array": lambda x: jnp.full(2, x)}


@pytest.mark.parametrize("kind", WEAK)
def test_a_checkpoint_gives_weak_arrays_back_as_weak_ones(strategy, kind, path):
    saved = WEAK[kind](0.3)
    file = mr.Checkpoint(strategy, x=[saved], optimizer={"rate": saved}).save(path)
    other = WEAK[kind](0.7)
    checkpoint = mr.Checkpoint(strategy, x=[other], optimizer={"rate": other})
    checkpoint.restore(file)
    for found in (checkpoint.x[0], checkpoint.optimizer["rate"]):
        np.testing.assert_array_equal(found, saved)
        assert (found * jnp.ones(2, jnp.bfloat16)).dtype == jnp.bfloat16


@pytest.mark.parametrize("kind", WEAK)
def test_weak_arrays_go_back_to_a_commit_as_weak_ones(strategy, kind):
    committed = WEAK[kind](0.3)
    snapshot = take(strategy, {"nest": [committed]})
    here = {"nest": [WEAK[kind](0.7)]}
    (found,) = put_back(strategy, here, snapshot.shared, snapshot.own)["nest"]
    np.testing.assert_array_equal(found, committed)
    assert (found * jnp.ones(2, jnp.bfloat16)).dtype == jnp.bfloat16


def test_a_merge_fn_has_the_options_of_the_step(strategy):
    def merge_fn(strategy):
        return jnp.asarray(0.1) * 3

    def step():
        with jax.enable_x64(True):
            result = mr.get_replica_context().merge_call(merge_fn)
        return str(result.dtype), float(result)

    assert set(strategy.gather_objects(strategy.run(step))) == {("float64", 0.1 * 3)}
    outside = [jnp.ones(1).dtype, *strategy.gather_objects(strategy.run(lambda: jnp.ones(1).dtype))]
    assert set(outside) == {np.dtype("f4")}


def test_a_user_context_of_jax_goes_with_the_caller(strategy):
    """Into steps, a merge_fn, and what is read ahead."""
    strategy.run(lambda: None)
    scale = jax.make_user_context(1.0)
    scaled = jax.jit(lambda x: x * scale.value)

    def step():
        context = mr.get_replica_context()
        found = [float(scaled(1.0)), context.merge_call(lambda _: scale.value)]
        with scale(4.0):
            context.all_reduce("SUM", 1.0)
            found += [float(scaled(1.0)), context.merge_call(lambda _: scale.value)]
        return str(found)

    def rows():
        for _ in range(3):
            yield np.float32(scale.value)

    for value in (1.0, 3.0):
        with scale(value) if value != 1 else contextlib.nullcontext():
            found = strategy.gather_objects(strategy.run(step))
            data = mr.data.Dataset.from_generator(rows).batch(1).prefetch(2)
            batches = [batch.item() for batch in data]
            after = scale.value
        assert set(found) == {str([value, value, 4.0, 4.0])}
        assert batches == [value] * 3
        assert after == value


def test_large_compiled_functions_have_the_64_bits_of_the_step(strategy):
    """XLA computes them in threads of its own, in which no replica has switched anything."""

    @jax.jit
    def before(x):
        return x @ x @ x

    @jax.jit
    def function(x):
        y = x @ x
        return mr.get_replica_context().all_reduce("SUM", y @ x)

    def step():
        with jax.enable_x64(True):
            x = jnp.full((200, 200), 1 / 200)
            return [str(function(before(x)).dtype) for _ in range(5)]

    assert strategy.gather_objects(strategy.run(step)) == (
        (["float64"] * 5,) * strategy.num_replicas_in_sync
    )


@struct.dataclass
class Part:
    """Weights of a replica, with a field that is static: no leaf."""

    weights: Any
    name: str = struct.field(pytree_node=False)


def part(replica_id):
    return Part(jnp.full(2, float(replica_id)), f"part {replica_id}")


def told(value):
    """Returns what a replica's part is, and the other leaves beside it."""
    one, other = value
    return one.name, one.weights.tolist(), other


def made_in_a_step(strategy):
    def step():
        i = mr.get_replica_context().replica_id_in_sync_group
        return part(i), i

    return strategy.run(step)


def made_for_each(strategy):
    def of_replica(context):
        i = context.replica_id_in_sync_group
        return part(i), i

    return strategy.experimental_distribute_values_from_function(of_replica)


@pytest.mark.parametrize("made", [made_in_a_step, made_for_each])
def test_static_fields_that_differ_between_replicas_stay_with_each(strategy, made):
    def wanted(rounds):
        ids = range(strategy.num_replicas_in_sync)
        return tuple((f"part {i}", [float(i)] * 2, i + rounds) for i in ids)

    def on(value):
        one, other = value
        return one, other + 1

    value = made(strategy)
    for rounds in range(3):
        assert strategy.gather_objects(strategy.run(told, args=(value,))) == wanted(rounds)
        assert tuple(map(told, strategy.experimental_local_results(value))) == tuple(
            wanted(rounds)[i] for i in strategy.local_replica_ids
        )
        value = strategy.run(on, args=(value,))


def test_static_fields_that_are_alike_are_joined_leaf_by_leaf(strategy):
    def step():
        i = mr.get_replica_context().replica_id_in_sync_group
        return Part(part(i).weights, "all")

    joined = strategy.run(step)
    assert joined.name == "all"
    assert isinstance(joined.weights, mr.PerReplica)


def test_a_train_state_with_an_optimizer_of_its_own_trains_on_each_replica(strategy):
    def of_replica(context):
        i = context.replica_id_in_sync_group
        return train_state.TrainState.create(
            apply_fn=None, params={"w": jnp.full(2, float(i))}, tx=optax.sgd(1.0 + i)
        )

    def step(state):
        return state.apply_gradients(grads={"w": jnp.ones(2)})

    state = strategy.experimental_distribute_values_from_function(of_replica)
    for _ in range(2):
        state = strategy.run(step, args=(state,))
    for i, own in zip(
        strategy.local_replica_ids, strategy.experimental_local_results(state), strict=True
    ):
        assert own.params["w"].tolist() == [i - 2 * (1.0 + i)] * 2


def test_a_class_that_is_registered_after_it_was_a_leaf_is_a_container_from_then_on(strategy):
    class Pair:
        def __init__(self, one, other):
            self.one, self.other = one, other

    def total():
        ctx = mr.get_replica_context()
        mine = 1.0 + ctx.replica_id_in_sync_group
        found = ctx.all_reduce("SUM", Pair(np.full(2, mine), {"x": jnp.full(1, 10 * mine, "f4")}))
        return [*found.one, *found.other["x"]]

    raises_everywhere(TypeError, lambda: strategy.run(total))
    jax.tree_util.register_pytree_node(
        Pair, lambda pair: ((pair.one, pair.other), None), lambda _, parts: Pair(*parts)
    )
    count = strategy.num_replicas_in_sync
    total_of_all = count * (count + 1) / 2
    for found in strategy.experimental_local_results(strategy.run(total)):
        assert found == [total_of_all, total_of_all, 10 * total_of_all]
