"""Functions of JAX with collectives in them, and what JAX alone finds for the data of all replicas.

A program is a function of ``(collectives, x)``. Replicas run it with their own collectives; the
reference maps it over the stacked data of all replicas, with the collectives of that map. What is
differentiated there is the sum over all replicas.
"""

import jax
import jax.numpy as jnp
import numpy as np

import mpi_replica as mr
from everywhere import holds_everywhere

AXIS = "replicas"


class Collectives:
    """Those of the replica that calls."""

    @staticmethod
    def reduce(op, value):
        return mr.get_replica_context().all_reduce(op, value)

    @staticmethod
    def gather(value, axis=0):
        return mr.get_replica_context().all_gather(value, axis)


class CollectivesOfMap:
    """Those of ``jax.vmap`` over all replicas."""

    @staticmethod
    def reduce(op, value):
        return jax.tree.map(lambda leaf: _REDUCTIONS[op](jnp.asarray(leaf)), value)

    @staticmethod
    def gather(value, axis=0):
        def of_leaf(leaf):
            return jax.lax.all_gather(leaf, AXIS, axis=axis % leaf.ndim, tiled=True)

        return jax.tree.map(of_leaf, value)


def _mean(leaf):
    is_exact = not jnp.issubdtype(leaf.dtype, jnp.inexact)
    return jax.lax.pmean(leaf.astype(float) if is_exact else leaf, AXIS)


_REDUCTIONS = {
    "SUM": lambda leaf: jax.lax.psum(leaf, AXIS),
    "MEAN": _mean,
    "MIN": lambda leaf: jax.lax.all_gather(leaf, AXIS).min(0),
    "MAX": lambda leaf: jax.lax.all_gather(leaf, AXIS).max(0),
    "PROD": lambda leaf: jax.lax.all_gather(leaf, AXIS).prod(0),
}


def of_all(program, stacked):
    """Return what a program gives each replica, one on top of the other."""
    return jax.vmap(lambda x: program(CollectivesOfMap, x), axis_name=AXIS)(stacked)


def gradient_of_all(program, stacked):
    """Return the gradients of the sum of what a program gives all replicas."""
    return value_and_gradient_of_all(program, stacked)[1]


def value_and_gradient_of_all(program, stacked):
    """Return both, compiled as one function: the gradient has to find the value, too."""

    def loss(xs):
        values = of_all(program, xs)
        return values.sum(), values

    gradient, values = jax.jit(jax.grad(loss, has_aux=True))(stacked)
    return values, gradient


def data(count, shape=(3,), dtype=np.float32, seed=0):
    """Return values of all replicas, no two alike."""
    random = np.random.default_rng(seed)
    return (
        random.permutation(count * int(np.prod(shape))).reshape(count, *shape) / 4 + 0.5
    ).astype(dtype)


def check(strategy, step, stacked, expected, rtol=1e-5):
    """Check that `step`, of its replica's data, gives each replica its part of `expected`."""

    def run():
        mine = jnp.asarray(stacked)[mr.get_replica_context().replica_id_in_sync_group]
        return jax.tree.map(np.asarray, step(mine))

    found = strategy.experimental_local_results(strategy.run(run))

    def all_are_right():
        for i, part in zip(strategy.local_replica_ids, found, strict=True):
            wanted = jax.tree.map(lambda leaf, i=i: np.asarray(leaf)[i], expected)
            jax.tree.map(
                lambda got, want: np.testing.assert_allclose(got, want, rtol=rtol, atol=1e-6),
                part,
                wanted,
            )
            dtypes = [jax.tree.map(lambda leaf: leaf.dtype, nest) for nest in (part, wanted)]
            assert dtypes[0] == dtypes[1], dtypes

    holds_everywhere(all_are_right)
