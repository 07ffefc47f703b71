"""Arrays of torch, JAX and others in a checkpoint: they come back as arrays of their library."""

import numpy as np
import pytest

import mpi_replica as mr
from array_kinds import LIBRARIES, Library
from checkpoints import Stateful, replica_id
from everywhere import needs_two_ranks, raises_everywhere
from mpi_replica.errors import CheckpointError, DivergenceError


@pytest.fixture(params=LIBRARIES)
def library(request):
    return Library(request.param)


def program(strategy, library, fill):
    return mr.Checkpoint(
        strategy,
        nest={"x": [library.array([[fill, 1], [2, 3]]), 5]},
        number=library.array(fill, np.int32),
        mirrored=mr.Mirrored(library.array([fill])),
        object=Stateful(x=(library.array([fill, fill]), {"n": fill})),
        own=strategy.run(lambda: library.array([fill + replica_id()])),
    )


def test_arrays_of_a_library_come_back_as_such(strategy, path, library):
    program(strategy, library, 7).save(path)
    checkpoint = program(strategy, library, 0)
    checkpoint.object.state = {}
    checkpoint.restore(path)
    library.holds(checkpoint.nest["x"][0], [[7, 1], [2, 3]])
    library.holds(checkpoint.number, 7)
    library.holds(checkpoint.mirrored.value, [7])
    library.holds(checkpoint.object.state["x"][0], [7, 7])
    assert checkpoint.object.state["x"][1] == {"n": 7}
    for i, one in zip(checkpoint.own.replica_ids, checkpoint.own.values, strict=True):
        library.holds(one, [7 + i])


def test_bfloat16_comes_back_as_such(strategy, path, library):
    x = library.as_bfloat16(library.array([1, 2.5]))
    mr.Checkpoint(strategy, x=x).save(path)
    checkpoint = mr.Checkpoint(strategy, x=library.as_bfloat16(library.array([0, 0])))
    checkpoint.restore(path)
    assert checkpoint.x.dtype == x.dtype
    np.testing.assert_array_equal(library.as_float32(checkpoint.x), [1, 2.5])


def test_an_array_that_two_names_hold_gives_each_what_was_saved_of_it(strategy, path, library):
    mr.Checkpoint(strategy, x=library.array([1, 2]), y=[library.array([3, 4])]).save(path)
    one = library.array([strategy.rank, 0])
    checkpoint = mr.Checkpoint(strategy, x=one, y=[one])
    checkpoint.restore(path)
    library.holds(checkpoint.x, [1, 2])
    library.holds(checkpoint.y[0], [3, 4])


def test_another_shape_of_an_array_is_told(strategy, path, library):
    mr.Checkpoint(strategy, x=library.array([1, 2])).save(path)
    checkpoint = mr.Checkpoint(strategy, x=library.array([1, 2, 3]))
    error = raises_everywhere(CheckpointError, lambda: checkpoint.restore(path))
    assert "x is float32[3] here, and float32[2] in the checkpoint" in str(error)


def test_an_array_that_differs_is_named(strategy, library):
    strategy.verify({"x": library.array([1, 2])})
    needs_two_ranks(strategy)
    value = {"x": library.array([1, strategy.rank])}
    error = raises_everywhere(DivergenceError, lambda: strategy.verify(value))
    assert "value['x'] differs: 1 of 2 elements, first element [1]: " in str(error)


def test_a_sparse_matrix_of_jax_in_a_per_replica_comes_back_as_one(strategy, path):
    pytest.importorskip("jax", reason="jax is not installed")
    sparse = pytest.importorskip("jax.experimental.sparse", reason="jax is not installed")

    def step():
        mine = 1.0 + mr.get_replica_context().replica_id_in_sync_group
        return {"w": sparse.BCOO.fromdense(np.diag([mine, 0]).astype("f4")), "n": 3}

    checkpoint = mr.Checkpoint(strategy, of_replicas=strategy.run(step))
    checkpoint.save(path)
    checkpoint.restore(path)
    found = strategy.experimental_local_results(checkpoint.of_replicas)
    for i, one in zip(strategy.local_replica_ids, found, strict=True):
        assert one["w"].todense().tolist() == [[1.0 + i, 0], [0, 0]]
